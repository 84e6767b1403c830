"""Rows that are not formed, compared with the rows themselves."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gradherd.flat import FlatSpec
from gradherd.rows import outer_rows
from gradherd.rows.capture import Capture
from gradherd.rows.factored_rows import FactoredRows
from gradherd.rows.outer_rows import OuterRows, formed, whole_rows
from gradherd.rows.settings import ExactRows
from tests.rows.reference import batch_gradient, close, loop_over_examples
from tests.rows.test_capture import BATCH, MODELS, per_example

few = st.integers(1, 4)


@given(few, few, few, few, st.booleans(), st.sampled_from([1, 1 << 22]))
def test_products_are_those_of_formed_rows(
    count: int, positions: int, height: int, width: int, looks_up: bool, temporary: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(count, positions, height, generator=generator, dtype=torch.float64)
    if looks_up:
        left = torch.randint(height, (count, positions), generator=generator)
    right = torch.randn(count, positions, width, generator=generator, dtype=torch.float64)
    outer = OuterRows(left, right, (height, width) if looks_up else None)
    one_hot = nn.functional.one_hot(left, height).double() if looks_up else left
    dense = torch.einsum("bto,bti->boi", one_hot, right).flatten(1)
    weights, vector, out = dense.T[0], dense.sum(0), dense.new_zeros(height * width)
    close(outer.dense(), dense)
    close(outer.dot(vector), dense @ vector)
    outer.combine(weights, out)
    close(out, weights @ dense)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outer_rows, "_MAX_TEMPORARY", temporary)
        close(outer.gram({}), dense @ dense.T)
        close(outer._gram_by_pairs(), dense @ dense.T)
    close(outer.norm(1), dense.norm(dim=1))
    close(outer.sum(0), dense.sum(0))
    close(outer.columns(torch.arange(height * width)), dense)
    for added in (outer + outer, outer + dense, dense + outer):
        close(added.dense() if isinstance(added, OuterRows) else added, 2 * dense)


def test_rows_that_are_smaller_than_their_factors_are_formed() -> None:
    left, right = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    assert isinstance(whole_rows(left, right, keeps=True), Tensor)  # 24 elements against 16
    assert isinstance(whole_rows(left[:, :1], right[:, :1], keeps=True), OuterRows)  # 8
    assert torch.equal(whole_rows(left, right, keeps=False), formed(left, right, None))


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("backwards", [1, 2])
def test_rows_of_whole_models(kind: str, backwards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OuterRows, "is_smaller", lambda self: True)  # the models are tiny
    torch.manual_seed(0)
    make, x = MODELS[kind]
    model = make().double()
    dense = loop_over_examples(model, lambda part: per_example(model(x[part])), BATCH)
    capture = Capture(model, ExactRows(), keeps_factors=True)
    loss = per_example(model(x)).mean()
    for at in range(backwards):
        (loss / backwards).backward(retain_graph=at + 1 < backwards)
    rows = capture.pop(BATCH, loss_scale=0.5)
    assert isinstance(rows, FactoredRows) and not capture.left_out
    wide = rows.dense()
    close(wide, 2 * dense)
    close(rows.gram, wide @ wide.T)
    close(rows.dot(wide[:2]), wide[:2] @ wide.T)
    close(rows.combine(wide[:, :2].T), wide[:, :2].T @ wide)
    index = torch.arange(0, wide.shape[1], 3)
    close(rows.columns(index), wide[:, index])
    close(rows.means(2).dense(), wide.view(2, 2, -1).mean(1))
    close(rows.means(2).gram, rows.means(2).dense() @ rows.means(2).dense().T)
    assert rows.to(torch.float32).gram.dtype == torch.float32
    close(wide.mean(0), 2 * batch_gradient(model))


class LargestTensor(TorchDispatchMode):
    """Notes how many elements the largest tensor has that an operation returns."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for one in found if isinstance(found, tuple | list) else [found]:
            if isinstance(one, Tensor):
                storage = one.untyped_storage().nbytes() // one.element_size()
                self.most = max(self.most, storage)
        return found


def test_nothing_has_the_size_of_all_rows() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(50, 32), nn.Flatten(), nn.Linear(128, 96), nn.ReLU(), nn.Linear(96, 10)
    )
    tokens, size = torch.randint(50, (32, 4)), FlatSpec.of(model).size
    capture = Capture(model, keeps_factors=True)
    for _ in range(4):  # of which the first are checked
        with LargestTensor() as seen:
            model(tokens).square().sum(1).mean().backward()
            rows = capture.pop(32)
            assert isinstance(rows, FactoredRows)
            rows.dot(rows.combine(torch.eye(32)[:1] + rows.gram[:1]))
        # Besides vectors of the model's size: 32 rows of biases, and their factors.
        assert size <= seen.most < 2 * size < 32 * size // 10
    assert not capture.left_out
    assert math.isclose(float(rows.gram.trace()), float(rows.dense().square().sum()), rel_tol=1e-5)


def test_a_buffer_of_the_user_may_be_reused() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    x = torch.randn(4, 8)
    capture, plain = Capture(model, keeps_factors=True), None
    for reused in (False, True):
        model(x).square().sum(1).mean().backward()
        if reused:
            x.zero_()
        rows = capture.pop_rows(4)
        plain = rows if plain is None else plain
        assert torch.equal(rows, plain)


def test_a_hidden_tensor_that_is_changed_is_refused() -> None:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    capture = Capture(
        nn.Sequential(first, second), keeps_factors=True, settings=ExactRows(batch_dim=0)
    )
    hidden = first(torch.randn(4, 8))
    second(hidden).square().sum(1).mean().backward()
    with torch.no_grad():
        hidden.zero_()
    with pytest.raises(RuntimeError, match="changed in place after its backward"):
        capture.pop(4)
    first.zero_grad()
    second(first(torch.randn(4, 8))).square().sum(1).mean().backward()
    assert len(capture.pop(4)) == 4
