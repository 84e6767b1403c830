"""Hashes and the count sketch: by slices, by columns, in every process the same."""

import gc
import statistics
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gradherd.hooks.row_sources import make_row_source
from gradherd.ordering.ordering import Ordering
from gradherd.ordering.registry import make_policy
from gradherd.rows.settings import SketchRows
from gradherd.rows.sketch import (
    CountSketch,
    buckets_and_signs,
    hashed_permutation,
    hashes,
    random_signs,
)
from tests.rows.reference import close


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
    whole = CountSketch(k, seed)(vector)
    close(whole, explicit(vector, k, seed))
    parts = CountSketch(k, seed)(vector[:cut]) + CountSketch(k, seed)(vector[cut:], offset=cut)
    close(whole, parts)


def test_count_sketch_of_several_vectors_at_once() -> None:
    vectors = torch.randn(3, 2, 50, dtype=torch.float64)
    for k in (4, 7, 64):
        close(CountSketch(k, 1)(vectors, name="w"), explicit(vectors, k, 1, "w"))


def test_inner_products_are_right_on_average() -> None:
    torch.manual_seed(0)
    vectors = torch.randn(4, 300, dtype=torch.float64) + torch.randn(300, dtype=torch.float64)
    gram, k, count = vectors @ vectors.T, 64, 300
    sketches = torch.stack([CountSketch(k, seed)(vectors) for seed in range(count)])
    products = sketches @ sketches.transpose(1, 2)
    error = products.std(0) / count**0.5
    assert ((products.mean(0) - gram).abs() < 4.5 * error).all()
    # Single ones are close, too: the relative error of a square is about sqrt(2 / k).
    squares = products.diagonal(dim1=1, dim2=2) / gram.diagonal()
    assert (squares.std(0) < 1.5 * (2 / k) ** 0.5).all()


@pytest.mark.parametrize("examples", [3, 40])  # in blocks, and bucket by bucket
@pytest.mark.parametrize("size", [1, 63, 64, 200])
def test_columns_are_sketched(examples: int, size: int) -> None:
    columns, sketch = torch.randn(examples, size, dtype=torch.float64), CountSketch(16, 3)
    for _ in range(2):  # the second time with hashes that are known
        close(sketch(columns, "w"), explicit(columns, 16, 3, "w"))


class HashedColumns(nn.Module):
    """A convolution with more columns than a row has, and a module that is looped over."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.scale = nn.Conv2d(3, 40, 3), nn.PReLU(40)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(self.conv(x)).mean((1, 2, 3))


@pytest.mark.parametrize("unit", [1, 20])
def test_hashes_are_gone_when_nothing_is_attached(unit: int) -> None:
    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(one), Tensor) for one in gc.get_objects())

    model, x = HashedColumns(), torch.randn(20, 3, 6, 6)

    def step(seed: int) -> None:
        source = make_row_source(model, SketchRows(size=32, seed=seed), unit, 20)
        model(x).mean().backward()
        source.take(20, 1.0)
        source.remove_hooks()

    step(0)
    before = tensors()
    step(1)
    assert tensors() <= before  # garbage of other tests may go meanwhile


def test_a_long_vector_is_sketched_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    vector = torch.randn(333, dtype=torch.float64)
    whole = CountSketch(8, 1)(vector)
    monkeypatch.setattr(sys.modules[CountSketch.__module__], "_MAX_TEMPORARY", 50)
    close(CountSketch(8, 1)(vector), whole)


def test_equal_seeds_give_equal_sketches_in_every_process() -> None:
    code = (
        "import torch; from gradherd.rows.sketch import CountSketch;"
        "torch.manual_seed(5); print(CountSketch(8, 3)(torch.arange(1000.0), name='w').tolist())"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    }
    assert runs == {f"{CountSketch(8, 3)(torch.arange(1000.0), name='w').tolist()}\n"}


def test_no_global_generator_is_used() -> None:
    state = torch.get_rng_state()
    CountSketch(7, 11)(torch.randn(100, generator=torch.Generator()))
    random_signs(11, "unseen before", 30, 7)
    hashed_permutation(11, "unseen before", 30)
    assert torch.equal(state, torch.get_rng_state())


def test_names_and_seeds_give_independent_hashes() -> None:
    values = [hashes(seed, name, 0, 4096) for seed in (0, 1) for name in ("a", "b")]
    for i, one in enumerate(values):
        bits = ((one & 1) * 2.0 - 1).astype(float)
        assert abs(bits.mean()) < 5 / 64
        for two in values[:i]:
            assert abs((bits * ((two & 1) * 2.0 - 1)).mean()) < 5 / 64


@pytest.mark.parametrize("columns", [1, 64, 130])
def test_random_signs_are_uncorrelated(columns: int) -> None:
    """Also columns of different hashes: one hash serves 64."""
    signs = random_signs(0, "w", 4096, columns)
    assert signs.shape == (4096, columns)
    assert signs.abs().eq(1).all()
    products = signs.T @ signs / 4096
    assert (products - torch.eye(columns)).abs().max() < 5.5 / 64
    assert signs.mean(0).abs().max() < 5.5 / 64
    # The first columns do not depend on how many there are.
    assert torch.equal(signs[:, :1], random_signs(0, "w", 4096, 1))


@given(st.integers(0, 50), st.integers(0, 99))
def test_a_permutation_has_every_position_once(count: int, seed: int) -> None:
    order = hashed_permutation(seed, "w", count)
    assert sorted(order.tolist()) == list(range(count))


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
        for name, rows in (("exact", vectors), ("sketch", CountSketch(1024, 0)(vectors))):
            ordering = Ordering(make_policy("grab"), [96], seed=seed)
            for _ in range(6):
                ordering.observe(rows[ordering.orders[0]].unsqueeze(1))
                ordering.end_epoch()
            bounds[name].append(longest(vectors, ordering.orders[0]) / random)
    exact, sketch = statistics.mean(bounds["exact"]), statistics.mean(bounds["sketch"])
    assert exact < 0.6 and sketch < 0.6
    assert sketch < 1.15 * exact
