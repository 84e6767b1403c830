import copy
import gc
import statistics
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradherd.ordering.ordering import Ordering
from gradherd.ordering.registry import make_policy
from gradherd.rows import Capture, count_sketch
from gradherd.rows.forward_replay import ModuleCall
from gradherd.rows.sketch import (
    buckets_and_signs,
    count_sketch_matrix,
    factor_sketch,
    hashes,
    one_hot_sketch,
    tensor_sketch,
    tensor_sketch_by_matrix,
)
from tests.rows.reference import close, loop_over_examples
from tests.rows.test_capture import BATCH, MODELS, per_example


def explicit(vectors: Tensor, k: int, seed: int, name: str = "") -> Tensor:
    """Count sketch one coordinate at a time."""
    size = vectors.shape[-1]
    shifts, block_signs = buckets_and_signs(
        seed, f"{name}/block", 0, -(-size // k), k, vectors.device
    )
    _, signs = buckets_and_signs(seed, f"{name}/column", 0, k, k, vectors.device)
    total = vectors.new_zeros((*vectors.shape[:-1], k))
    for j in range(size):
        b, c = divmod(j, k)
        total[..., (c + int(shifts[b])) % k] += vectors[..., j] * block_signs[b] * signs[c]
    return total


@given(
    size=st.integers(0, 60), k=st.integers(1, 9), cut=st.integers(0, 60), seed=st.integers(0, 99)
)
@settings(max_examples=60, deadline=None)
def test_count_sketch_by_slices_is_that_of_the_whole(
    size: int, k: int, cut: int, seed: int
) -> None:
    cut = min(cut, size)
    vector = torch.randn(size, dtype=torch.float64)
    whole = count_sketch(vector, k, seed)
    close(whole, explicit(vector, k, seed))
    parts = count_sketch(vector[:cut], k, seed) + count_sketch(vector[cut:], k, seed, offset=cut)
    close(whole, parts)


def test_count_sketch_of_several_vectors_at_once() -> None:
    vectors = torch.randn(3, 2, 50, dtype=torch.float64)
    for k in (4, 7, 64):
        close(count_sketch(vectors, k, 1, name="w"), explicit(vectors, k, 1, "w"))


def test_tensor_sketch_hashes_every_entry_of_the_outer_product() -> None:
    left = torch.randn(2, 3, 5, dtype=torch.float64)
    right = torch.randn(2, 3, 4, dtype=torch.float64)
    for k in (1, 6, 7):
        sketches = tensor_sketch(factor_sketch(left, k, 3, "l"), factor_sketch(right, k, 3, "r"))
        one, two = (
            buckets_and_signs(3, "l", 0, 5, k, left.device),
            buckets_and_signs(3, "r", 0, 4, k, left.device),
        )
        expected = torch.zeros(2, k, dtype=torch.float64)
        grads = left.transpose(1, 2) @ right
        for i in range(5):
            for j in range(4):
                at = int(one[0][i] + two[0][j]) % k
                expected[:, at] += grads[:, i, j] * one[1][i] * two[1][j]
        close(sketches, expected)


def test_tokens_are_sketched_as_one_hot_rows() -> None:
    tokens = torch.tensor([[0, 4, 4], [2, 1, 3]])
    rows = nn.functional.one_hot(tokens, 5).double()
    close(one_hot_sketch(tokens, 5, 6, 9, "x", torch.float64), factor_sketch(rows, 6, 9, "x"))


class Net(nn.Module):
    """Every type of term, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.conv = nn.Conv1d(6, 6, 3, padding=1)
        self.norm = nn.LayerNorm(6)
        self.slope = nn.PReLU(6)
        self.head = nn.Linear(6, 9)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        y = self.conv(self.embed(tokens).transpose(1, 2))
        return self.head(self.norm(self.slope(y).transpose(1, 2)))


def net_sketch(k: int, seeds: range) -> tuple[Tensor, Tensor]:
    """Return sketches (seeds, B, k) and the exact Gram matrix (B, B) of one backward."""
    torch.manual_seed(0)
    model = Net().double()
    capture = Capture(model)
    tokens = torch.randint(9, (4, 5))

    def backward() -> None:
        model(tokens).tanh().flatten(1).pow(2).sum(1).mean().backward()

    sketches = []
    for seed in seeds:
        backward()
        sketches.append(capture.pop_sketch(4, k, seed))
    backward()
    return torch.stack(sketches), capture.pop_rows(4).gram()


def test_inner_products_are_right_on_average() -> None:
    sketches, gram = net_sketch(64, range(300))
    products = sketches @ sketches.transpose(1, 2)
    error = products.std(0) / 300**0.5
    assert ((products.mean(0) - gram).abs() < 4.5 * error).all()
    # Single ones are close, too: the relative error of a square is about sqrt(2 / k).
    squares = products.diagonal(dim1=1, dim2=2) / gram.diagonal()
    assert (squares.std(0) < 2 * (2 / 64) ** 0.5).all()


def test_equal_seeds_give_equal_sketches_in_every_process() -> None:
    code = (
        "import torch; from gradherd.rows import count_sketch;"
        "torch.manual_seed(5); print(count_sketch(torch.arange(1000.0), 8, 3, name='w').tolist())"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    }
    assert runs == {f"{count_sketch(torch.arange(1000.0), 8, 3, name='w').tolist()}\n"}
    one, two = net_sketch(32, range(2))[0], net_sketch(32, range(2))[0]
    assert torch.equal(one, two)
    assert not torch.equal(one[0], one[1])


def test_no_global_generator_is_used() -> None:
    state = torch.get_rng_state()
    count_sketch(torch.randn(100, generator=torch.Generator()), 7, 11)
    factor_sketch(torch.ones(1, 1, 30), 7, 11, "unseen before")
    assert torch.equal(state, torch.get_rng_state())


def test_names_and_seeds_give_independent_hashes() -> None:
    values = [hashes(seed, name, 0, 4096) for seed in (0, 1) for name in ("a", "b")]
    for i, one in enumerate(values):
        bits = ((one & 1) * 2.0 - 1).astype(float)
        assert abs(bits.mean()) < 5 / 64
        for two in values[:i]:
            assert abs((bits * ((two & 1) * 2.0 - 1)).mean()) < 5 / 64


def test_reduction_and_loss_scale_reach_the_sketch() -> None:
    model = nn.Linear(3, 2).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    capture = Capture(model)
    model(x).pow(2).sum().backward()
    summed = capture.pop_sketch(4, 16, 0, reduction="sum")
    (model(x).pow(2).sum(1).mean() * 8).backward()
    close(capture.pop_sketch(4, 16, 0, loss_scale=8.0), summed)
    assert capture.num_calls == 0


def test_an_invalid_size_raises() -> None:
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        count_sketch(torch.ones(3), 0, 0)
    with pytest.raises(ValueError, match="k must be at least 1, got -2"):
        Capture(nn.Linear(2, 2)).pop_sketch(4, -2, 0)
    with pytest.raises(ValueError, match="offset must not be negative, got -1"):
        count_sketch(torch.ones(3), 2, 0, offset=-1)


@pytest.mark.parametrize("k", [1, 2, 7, 64, 255])
@pytest.mark.parametrize("positions", [1, 3])
def test_the_matrices_for_gpus_give_the_same_sketches(k: int, positions: int) -> None:
    cpu, keys = torch.device("cpu"), ("w/left", "w/right")
    for size in (1, 33, 300):
        vectors = torch.randn(4, size)
        by_matrix = vectors @ count_sketch_matrix(5, "b", size, k, cpu)
        torch.testing.assert_close(by_matrix, explicit(vectors, k, 5, "b"), rtol=1e-4, atol=1e-4)
        left, right = torch.randn(4, positions, size), torch.randn(4, positions, 21)
        factors = (factor_sketch(f, k, 5, key) for f, key in zip((left, right), keys, strict=True))
        by_matrix = tensor_sketch_by_matrix(left, right, k, 5, keys)
        torch.testing.assert_close(by_matrix, tensor_sketch(*factors), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["shared", "tied", "transformer", "relu-in-place", "own", "gru"])
def test_sketches_made_during_the_backward_have_the_bits_of_later_ones(kind: str) -> None:
    torch.manual_seed(0)
    make, x = MODELS[kind]
    model = make().double()
    # Copies: captures would see what the others run again.
    models = [model, copy.deepcopy(model), copy.deepcopy(model)]
    late, early = Capture(models[0]), Capture(models[1], sketch=(32, 5))
    known = Capture(models[2], sketch=(32, 5), batch_size=BATCH)
    for batch in range(6):
        inputs = x + 0.1 * batch if x.is_floating_point() else (x + batch) % 7
        for one in models:
            per_example(one(inputs)).mean().backward()
        held = [
            any(call.context is None for call in capture._recorder.calls)
            for capture in (early, known)
        ]
        assert held == [batch == 0, False]  # only until it is known where the examples are
        expected = late.pop_sketch(BATCH, 32, 5)
        assert torch.equal(early.pop_sketch(BATCH, 32, 5), expected)
        assert torch.equal(known.pop_sketch(BATCH, 32, 5), expected)
    with pytest.raises(ValueError, match=r"size and seed \(32, 5\), got \(8, 5\)"):
        early.pop_sketch(BATCH, 8, 5)
    with pytest.raises(RuntimeError, match="pop_sketch"):
        early.pop_rows(BATCH)


def test_sketches_made_early_count_only_for_gradients_of_parameters() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    capture = Capture(model, sketch=(16, 0))
    for batch in range(5):
        x = torch.randn(BATCH, 3, dtype=torch.float64, requires_grad=True)
        loss = per_example(model(x)).mean()
        if batch == 4:
            torch.autograd.grad(loss, x, retain_graph=True)
        loss.backward()
        sketch = capture.pop_sketch(BATCH, 16, 0)
    capture.remove_hooks()
    plain = Capture(model)
    per_example(model(x)).mean().backward()
    torch.testing.assert_close(sketch, plain.pop_sketch(BATCH, 16, 0))


def test_a_batch_of_another_size_than_the_model_was_given_is_named() -> None:
    model = nn.Linear(3, 2)
    capture = Capture(model, sketch=(16, 0))
    for batch in range(4):
        per_example(model(torch.randn(BATCH, 3))).mean().backward()
        if batch < 3:
            capture.pop_sketch(BATCH, 16, 0)
    with pytest.raises(RuntimeError, match="given 4 examples, but the batch has 5"):
        capture.pop_sketch(5, 16, 0)
    assert not capture.waiting


@pytest.mark.parametrize("sketch", [None, (16, 0)])
def test_inputs_inside_a_checkpoint_are_not_held(sketch: tuple[int, int] | None) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))
            self.head = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(self.block, x, use_reentrant=False))

    def held() -> list[str]:
        calls = [object for object in gc.get_objects() if type(object) is ModuleCall]
        return [call.name for call in calls if call.name.startswith("block") and call.args]

    model = Net().double()
    capture = Capture(model, strict=True, sketch=sketch)
    for batch in range(5):
        x = torch.randn(BATCH, 3, dtype=torch.float64)
        loss = per_example(model(x)).mean()
        assert held() == []
        loss.backward()
        if sketch and batch:
            assert held() == []
        rows = capture.pop_sketch(BATCH, 16, 0)
    expected = loop_over_examples(model, lambda part: per_example(model(x[part])), BATCH)
    capture.remove_hooks()
    plain = Capture(model)
    per_example(model(x)).mean().backward()
    exact = plain.pop_rows(BATCH)
    close(exact.dense(), expected)
    per_example(model(x)).mean().backward()
    close(rows, plain.pop_sketch(BATCH, 16, 0))


def test_orders_by_sketches_of_batches_balance_like_exact_ones():
    """Longest prefix sum after a few epochs, of exact gradients, relative to random orders."""

    def longest(vectors, order):
        return float((vectors - vectors.mean(0))[order].cumsum(0).norm(dim=1).max())

    bounds: dict[str, list[float]] = {"exact": [], "sketch": []}
    for seed in range(6):
        torch.manual_seed(seed)
        # Batches of a few kinds: gradients of low rank, and noise.
        vectors = torch.randn(96, 8) @ torch.randn(8, 3000) + torch.randn(96, 3000)
        random = statistics.mean(longest(vectors, torch.randperm(96)) for _ in range(10))
        for name, rows in (("exact", vectors), ("sketch", count_sketch(vectors, 1024, 0))):
            ordering = Ordering(make_policy("grab"), [96], seed=seed)
            for _ in range(6):
                ordering.observe(rows[ordering.orders[0]].unsqueeze(1))
                ordering.end_epoch()
            bounds[name].append(longest(vectors, ordering.orders[0]) / random)
    exact, sketch = statistics.mean(bounds["exact"]), statistics.mean(bounds["sketch"])
    assert exact < 0.6 and sketch < 0.6
    assert sketch < 1.15 * exact
