"""Which backwards and which batches have rows by sinks, with and without checkpointing."""

import weakref
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradherd.rows import sink
from gradherd.rows.capture import Capture
from gradherd.rows.row_check import FIRST_CHECKS
from gradherd.rows.settings import ExactRows, SketchRows, TwoSidedRows
from tests.rows.reference import loop_over_examples, mapped
from tests.rows.test_sink import SIZE, Shared, check, check_sizes, is_close, small
from tests.rows.zoo import BATCH, Case

# Which backwards count, and how.


def test_several_uses_and_backwards_add_up() -> None:
    model, x = small(), torch.randn(BATCH, 3, 6)
    capture = Capture(model, TwoSidedRows(size=SIZE, strict=True))
    (model(x).square().mean() + model(2 * x).square().mean()).backward()
    together = capture.pop_rows(BATCH)
    model(x).square().mean().backward()
    model(2 * x).square().mean().backward()
    torch.testing.assert_close(capture.pop_rows(BATCH), together)
    model(x).square().mean().backward()
    alone = capture.pop_rows(BATCH)
    assert not torch.allclose(alone, together)


def test_gradients_of_inputs_alone_do_not_count() -> None:
    model, x = small(), torch.randn(BATCH, 3, 6, requires_grad=True)
    capture = Capture(model, TwoSidedRows(size=SIZE, strict=True))
    model(x).square().mean().backward()
    expected = capture.pop_rows(BATCH)
    torch.autograd.grad(model(x).square().mean(), x)
    assert not capture.waiting
    model(x).square().mean().backward()
    torch.testing.assert_close(capture.pop_rows(BATCH), expected)


def test_gradients_handed_to_the_caller_have_no_rows_and_are_refused() -> None:
    model, x = small(), torch.randn(BATCH, 3, 6)
    capture = Capture(model, TwoSidedRows(size=SIZE))
    torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    with pytest.raises(RuntimeError, match="4 of 4 parameters"):
        capture.pop_rows(BATCH)


def test_a_second_backward_through_one_graph_counts_as_well() -> None:
    model, x = small(), torch.randn(BATCH, 3, 6)
    capture = Capture(model, TwoSidedRows(size=SIZE, strict=True))
    model(x).square().mean().backward()
    once = capture.pop_rows(BATCH)
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    torch.testing.assert_close(capture.pop_rows(BATCH), 2 * once)
    loss.backward()
    torch.testing.assert_close(capture.pop_rows(BATCH), once)


@pytest.mark.parametrize("batches", [0, FIRST_CHECKS])
def test_a_gradient_penalty_is_refused(batches: int) -> None:
    """Also after the first batches, whose rows are checked in any case."""
    model, x = small(), torch.randn(BATCH, 3, 6, requires_grad=True)
    capture = Capture(model, TwoSidedRows(size=SIZE))
    for _ in range(batches):
        model(x).sin().mean().backward()
        capture.pop_rows(BATCH)
    loss = model(x).sin().mean()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + grad.square().sum()).backward()
    with pytest.raises(RuntimeError, match="order whole batches"):
        capture.pop_rows(BATCH)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_backward_that_can_be_differentiated_has_the_same_rows() -> None:
    model, x = small(), torch.randn(BATCH, 3, 6)
    capture = Capture(model, TwoSidedRows(size=SIZE, strict=True))
    model(x).square().mean().backward()
    expected = capture.pop_rows(BATCH)
    model.zero_grad()
    model(x).square().mean().backward(create_graph=True)
    rows = capture.pop_rows(BATCH)
    torch.testing.assert_close(rows, expected)
    assert not rows.requires_grad
    model.zero_grad()  # of p.grad, which holds its graph


def test_inputs_overwritten_before_the_backward_are_refused() -> None:
    model, x = nn.Sequential(nn.Embedding(9, 4)), torch.randint(9, (BATCH, 3))
    Capture(model, TwoSidedRows())
    out = model(x)
    x.zero_()
    with pytest.raises(RuntimeError, match=r"an input of a layer.* was changed in place"):
        out.square().mean().backward()


def test_a_loss_that_is_kept_keeps_no_inputs_alive() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))
    capture = Capture(model, TwoSidedRows(size=SIZE))
    seen: list[weakref.ref[Tensor]] = []
    model[2].register_forward_pre_hook(lambda module, args: seen.append(weakref.ref(args[0])))
    loss = model(torch.randn(BATCH, 6)).square().mean()
    loss.backward()
    capture.pop_rows(BATCH)
    assert seen.pop()() is None, "the input of a layer outlives its backward"
    loss = model(torch.randn(BATCH, 6)).square().mean()
    loss.backward(retain_graph=True)
    once = capture.pop_rows(BATCH)
    loss.backward()
    torch.testing.assert_close(capture.pop_rows(BATCH), once)
    assert seen.pop()() is None


def test_a_torch_that_does_not_tell_what_is_packed_has_the_same_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = small(), torch.randn(BATCH, 3, 6)
    capture, rows = Capture(model, TwoSidedRows(size=SIZE, strict=True)), []
    for hooks in (sink.saved_tensor_hooks, lambda ignores_tracing: True):
        monkeypatch.setattr(sink, "saved_tensor_hooks", hooks)
        model(x).square().mean().backward()
        rows.append(capture.pop_rows(BATCH))
    torch.testing.assert_close(*rows)


def test_optimizers_that_step_in_the_backward_have_rows() -> None:
    model, x = small(), torch.randn(BATCH, 3, 6)
    expected_from = Capture(copy := deepcopy(model), TwoSidedRows(size=SIZE))
    copy(x).square().mean().backward()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    capture = Capture(model, TwoSidedRows(size=SIZE))
    model(x).square().mean().backward()
    torch.testing.assert_close(capture.pop_rows(BATCH), expected_from.pop_rows(BATCH))


def test_a_backward_that_fails_leaves_no_hooks_and_no_rows() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grads: Tensor) -> Tensor:
            raise ArithmeticError("on purpose")

    model, x = small(), torch.randn(BATCH, 3, 6)
    capture = Capture(model, TwoSidedRows(size=SIZE))
    model(x).square().mean().backward()
    expected = capture.pop_rows(BATCH)
    with pytest.raises(ArithmeticError):
        model(Fails.apply(x.clone().requires_grad_())).square().mean().backward()
    capture.clear()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    model(x).square().mean().backward()
    torch.testing.assert_close(capture.pop_rows(BATCH), expected)


class AddsInPlace(nn.Module):
    """Changes the input of a layer whose own backward does not need it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)
        y += self.second(y)
        return y


def test_inputs_that_no_backward_needs_may_be_overwritten() -> None:
    x = torch.randn(BATCH, 3, 6).double()
    check(Case(AddsInPlace, lambda: x), 4)


def test_offloaded_activations_have_the_same_rows() -> None:
    model, x = small(), torch.randn(BATCH, 3, 6)
    capture = Capture(model, TwoSidedRows(size=SIZE, strict=True))
    model(x).square().mean().backward()
    expected = capture.pop_rows(BATCH)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: packed.append(tensor) or tensor.clone(), lambda tensor: tensor
    ):
        loss = model(x).square().mean()
    loss.backward()
    torch.testing.assert_close(capture.pop_rows(BATCH), expected)
    assert packed, "nothing was offloaded"


# Activation checkpointing.


class TwoKinds(nn.Module):
    """One layer for sequences and for their means."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).tanh()
        return y + self.layer(y.mean(1))[:, None]


def blocks() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {
        "sequence": nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 6)),
        "shared": Shared(),
        "attention": nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True),
        "inputs of two kinds": TwoKinds(),
    }


class Checkpointed(nn.Module):
    """A block that may be checkpointed, between layers that share a sink."""

    def __init__(self, block: nn.Module, way: str) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.block, self.last = block, nn.Linear(6, 6)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.way == "plain":
            return self.last(self.block(y))
        return self.last(checkpoint(self.block, y, use_reentrant=self.way == "reentrant"))


@pytest.mark.parametrize("way", ["reentrant", "not reentrant"])
@pytest.mark.parametrize("kind", blocks())
def test_activation_checkpointing_changes_nothing(kind: str, way: str) -> None:
    x = torch.randn(BATCH, 3, 6, requires_grad=True)
    found = []
    for each in ("plain", way):
        torch.manual_seed(0)
        model = Checkpointed(blocks()[kind], each)
        capture = Capture(model, TwoSidedRows(size=SIZE, strict=True))
        rows = []
        for _ in range(FIRST_CHECKS + 1):  # also without checks
            model(x).square().mean().backward()
            rows.append(capture.pop_rows(BATCH))
        found.append(torch.stack(rows))
    torch.testing.assert_close(found[1], found[0])
    assert (found[0].norm(dim=2) > 0).all()


class Watched(nn.Module):
    """Remembers what it has returned, without holding it."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[weakref.ref[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        out = x.tanh()
        self.outputs.append(weakref.ref(out))
        return out

    def alive(self) -> int:
        return sum(one() is not None for one in self.outputs)


@pytest.mark.parametrize("way", ["reentrant", "not reentrant"])
def test_activations_inside_a_checkpoint_are_not_held(way: str) -> None:
    watched = Watched()
    model = Checkpointed(nn.Sequential(nn.Linear(6, 7), watched, nn.Linear(7, 6)), way)
    x = torch.randn(BATCH, 3, 6, requires_grad=True)
    capture = Capture(model, TwoSidedRows(size=SIZE, strict=True), batch_size=BATCH)
    for _ in range(FIRST_CHECKS + 1):
        loss = model(x).square().mean()
        assert watched.alive() == 0
        loss.backward()
        assert watched.alive() == 0
        capture.pop_rows(BATCH)


def test_activations_are_let_go_in_the_backward() -> None:
    watched = Watched()
    model = nn.Sequential(nn.Linear(6, 7), watched, nn.Linear(7, 6))
    capture = Capture(model, TwoSidedRows(size=SIZE, strict=True), batch_size=BATCH)
    for _ in range(FIRST_CHECKS + 1):
        loss = model(torch.randn(BATCH, 3, 6)).square().mean()  # keeps the graph
        assert watched.alive() == 1
        loss.backward()
        assert watched.alive() == 0
        capture.pop_rows(BATCH)


# Batches.


@pytest.mark.parametrize("examples", [2, 7])
def test_a_batch_of_another_size_is_refused(examples: int) -> None:
    model = small()
    capture = Capture(model, TwoSidedRows())
    model(torch.randn(BATCH, 3, 6)).square().mean().backward()
    with pytest.raises(RuntimeError, match=f"given {BATCH} examples, but the batch has {examples}"):
        capture.pop_rows(examples)
    assert not capture.waiting


def test_a_larger_forward_of_which_nothing_is_learned_does_no_harm() -> None:
    model, x = small(), torch.randn(BATCH, 3, 6)
    capture = Capture(model, TwoSidedRows(size=SIZE), batch_size=BATCH)
    model(x).square().mean().backward()
    expected = capture.pop_rows(BATCH)
    loss = model(x).square().mean()
    with torch.no_grad():
        model(torch.cat([x, x]))
    loss.backward()
    torch.testing.assert_close(capture.pop_rows(BATCH), expected)


def test_a_larger_forward_in_the_same_step_is_refused_when_rows_are_taken() -> None:
    model, x = small(), torch.randn(BATCH, 3, 6)
    capture = Capture(model, TwoSidedRows(size=SIZE), batch_size=BATCH)
    loss = model(x).square().mean() + model(torch.cat([x, x])).square().mean()
    loss.backward()  # training goes on
    with pytest.raises(RuntimeError, match=f"given {2 * BATCH} examples, .* has {BATCH}"):
        capture.pop_rows(BATCH)


def test_short_and_long_batches() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 5)).double()
    check_sizes(model, (4, 3, 1, 6, 2), 4)


def test_parts_of_the_model_are_refused_where_the_batch_is_unknown() -> None:
    model, x = small(), torch.randn(BATCH, 3, 6)
    capture = Capture(model, TwoSidedRows())
    model[2](model[0](x)).square().mean().backward()
    with pytest.raises(ValueError, match="the loop calls parts of the attached model"):
        capture.pop_rows(BATCH)


class CalledByParts(nn.Module):
    """A model whose parts a loop calls itself, with as many positions as examples."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.net = nn.Embedding(BATCH, 6), small()

    def encode(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x + self.positions(torch.arange(BATCH)))
        return out


def test_parts_of_the_model_have_rows_where_the_batch_dimension_is_given() -> None:
    torch.manual_seed(0)
    model, x = CalledByParts().double(), torch.randn(BATCH, BATCH, 6).double()

    def of_examples(part: slice) -> Tensor:
        return model.encode(x[part]).square().sum((1, 2))

    expected = loop_over_examples(model, of_examples, BATCH)
    capture = Capture(model, SketchRows(size=SIZE, batch_dim=0), batch_size=BATCH)
    for _ in range(FIRST_CHECKS + 1):
        of_examples(slice(None)).mean().backward()
        rows = capture.pop_rows(BATCH)
        # Indices may be examples or positions: left out.
        assert list(capture.left_out) == ["positions.weight"]
        assert is_close(rows, mapped(capture, expected))


def test_unused_layers_are_zero() -> None:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 4), nn.Linear(6, 4)

        def forward(self, x: Tensor, both: bool) -> Tensor:
            out: Tensor = self.one(x) + (self.two(x) if both else 0)
            return out

    model, x = Either(), torch.randn(BATCH, 3, 6)
    capture = Capture(model, TwoSidedRows(size=SIZE, strict=True))
    rows = []
    for both in (False, True, False):
        model(x, both).square().mean().backward()
        rows.append(capture.pop_rows(BATCH))
    torch.testing.assert_close(rows[0], rows[2], rtol=0, atol=0)
    assert not torch.allclose(rows[0], rows[1])


def test_parameters_frozen_later_have_no_rows() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 5), nn.LayerNorm(5))
    model, x = model.double(), torch.randn(BATCH, 3, 6).double()
    expected = loop_over_examples(model, lambda part: model(x[part]).sin().sum((1, 2)), BATCH)
    capture = Capture(model, TwoSidedRows(size=SIZE, strict=True))
    frozen = {"0.weight", "1.weight", "2.bias", "3.bias"}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    for _ in range(FIRST_CHECKS + 1):  # also when nothing is checked
        model(x).sin().sum((1, 2)).mean().backward()
        rows = capture.pop_rows(BATCH)
        views = capture.spec.views(expected)
        for name in frozen:
            views[name].zero_()
        assert is_close(rows, mapped(capture, expected))
    model.requires_grad_(False)
    assert not model(x).requires_grad


@pytest.mark.parametrize("settings", [ExactRows(), TwoSidedRows(size=SIZE)], ids=["exact", "two"])
def test_rows_of_a_backward_that_runs_survive_the_pop_of_the_one_before(settings) -> None:
    """As in loops that step after several batches: the next backward feeds back the last batch."""
    torch.manual_seed(0)
    model, (x, y) = small().double(), torch.randn(2, BATCH, 3, 6, dtype=torch.float64)

    def read(*, late: bool) -> list[Tensor]:
        capture, found = Capture(model, settings, batch_size=BATCH), []
        if late:
            capture.on_backward(
                lambda: found.append(capture.pop_rows(BATCH)) if capture.waiting else None
            )
        for batch in (x, y[:, :2], x, y, x):
            model(batch).square().mean().backward()
            if not late:
                found.append(capture.pop_rows(BATCH))
        if late:
            found.append(capture.pop_rows(BATCH))
        capture.remove_hooks()
        return found

    for late, early in zip(read(late=True), read(late=False), strict=True):
        torch.testing.assert_close(late, early)
