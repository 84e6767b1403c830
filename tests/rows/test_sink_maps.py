"""The maps of rows: one from factors, one from whole gradients, and both are the same."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradherd.rows import sink_maps
from gradherd.rows.sink_maps import (
    FilterMap,
    MapSettings,
    MatrixMap,
    OuterMap,
    VectorMap,
)

LIKE = torch.zeros(0, dtype=torch.float64)
SIDES = st.integers(1, 40)
FEW = st.integers(1, 4)
SEEDS = st.integers(0, 1000)


def drawn(seed: int, *, columns: int = 0, buckets: int = 0, like: Tensor = LIKE) -> MapSettings:
    """Return what maps are drawn by."""
    return MapSettings(columns, buckets, seed, like)


def matrix_map(
    shape: tuple[int, int], *, keep: int, columns: int, seed: int, most: int
) -> MatrixMap:
    """Return a map that folds kept sides of more than `most` elements."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sink_maps, "MOST_KEPT", most)
        return MatrixMap(shape, "w", drawn(seed, columns=columns), keep=keep)


def factors(examples: int, positions: int, shape: tuple[int, ...], seed: int) -> list[Tensor]:
    """Return gradients (B, T, rows) and inputs (B, T, columns)."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(examples, positions, size, generator=generator, dtype=torch.float64)
        for size in shape
    ]


def close(one: Tensor, two: Tensor) -> None:
    torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)


@given(FEW, FEW, SIDES, SIDES, st.integers(0, 1), st.integers(1, 20), st.integers(1, 45), SEEDS)
@settings(max_examples=80)
def test_rows_of_a_matrix_are_the_map_of_its_gradient(
    examples: int, positions: int, rows: int, columns: int, keep: int, c: int, most: int, seed: int
) -> None:
    shape = (rows, columns)
    one = matrix_map(shape, keep=keep, columns=c, seed=seed, most=most)
    left, right = factors(examples, positions, shape, seed)
    pair = (left, right) if keep == 1 else (right, left)
    found = one.finish(one.columns_of(*pair))
    grads = left.transpose(1, 2) @ right
    close(found, torch.stack([one.project(grad) for grad in grads]))
    assert found.shape == (examples, one.size)
    assert one.columns == min(c, shape[1 - keep])
    assert one.size <= one.columns * min(most, shape[keep])
    if one.columns == shape[1 - keep] and shape[keep] <= most:  # nothing is projected or folded
        close(found @ found.T, grads.flatten(1) @ grads.flatten(1).T)


@given(
    window=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    channels=st.integers(1, 9),
    outputs=st.integers(1, 9),
    c=st.integers(1, 12),
    stride=st.integers(1, 2),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    most=st.integers(1, 10),
    seed=SEEDS,
)
@settings(max_examples=60)
def test_rows_of_a_convolution_are_the_map_of_its_gradient(
    window: list[int], channels: int, outputs: int, c: int, stride: int, padding: int,
    dilation: int, most: int, seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    dims, examples = len(window), 2
    shape = (outputs, channels, *window)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sink_maps, "MOST_KEPT", most)
        one = FilterMap(shape, "w", drawn(seed, columns=c))
    conv = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
    x = torch.randn(examples, channels, *(6 for _ in window), dtype=torch.float64)
    weight = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    sizes = ((stride,) * dims, (padding,) * dims, (dilation,) * dims)
    out = conv(x, weight, None, *sizes)
    grads = torch.randn_like(out)
    thin = one.thin(x, *sizes).flatten(2).transpose(1, 2)
    right = grads.flatten(2).transpose(1, 2)
    found = one.finish(one.combine(thin, right))
    expected = []
    for at in range(examples):
        mask = torch.zeros_like(grads)
        mask[at] = grads[at]
        (grad,) = torch.autograd.grad(out, weight, mask, retain_graph=True)
        expected.append(one.project(grad.flatten(1)))
    close(found, torch.stack(expected))
    assert one.columns == min(c, weight[0].numel())


def test_filters_are_products_where_channels_are_many() -> None:
    many = FilterMap((5, 8, 3, 3), "w", drawn(0, columns=4))
    few = FilterMap((5, 2, 3, 3), "w", drawn(0, columns=4))
    assert many.places is not None and many.filters.shape == (4, 8, 1, 1)
    assert few.places is None and few.filters.shape == (4, 2, 3, 3)


@given(FEW, FEW, st.integers(1, 60), st.integers(1, 60), st.integers(1, 25), SEEDS)
@settings(max_examples=80)
def test_rows_of_an_outer_product_are_the_map_of_its_gradient(
    examples: int, positions: int, rows: int, columns: int, buckets: int, seed: int
) -> None:
    one = OuterMap((rows, columns), "w", drawn(seed, buckets=buckets))
    left, right = factors(examples, positions, (rows, columns), seed)
    found = one.finish(one.columns_of(left, right))
    expected = torch.stack([one.project(grad) for grad in left.transpose(1, 2) @ right])
    close(found, expected)
    assert found.shape == (examples, one.size)
    vectors = one.vectors(found)
    assert vectors.shape == (examples, buckets)
    # The spectrum of a real vector, which is what rows end up with.
    again = torch.view_as_real(torch.fft.rfft(vectors)).flatten(-2)
    close(again, found)


def test_a_long_gradient_is_mapped_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    one = OuterMap((70, 9), "w", drawn(0, buckets=8))
    grad = torch.randn(70, 9, dtype=torch.float64)
    whole = one.project(grad)
    monkeypatch.setattr(sink_maps, "_MAX_TEMPORARY", 50)
    close(one.project(grad), whole)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=3), FEW, SEEDS)
def test_rows_of_vectors_are_the_map_of_their_gradients(
    sizes: list[int], examples: int, seed: int
) -> None:
    named = {str(at): size for at, size in enumerate(sizes)}
    one = VectorMap(named, "w", drawn(seed))
    vectors = torch.randn(examples, sum(sizes), dtype=torch.float64)
    found = one.finish(vectors)
    for name, part in zip(named, vectors.split(sizes, 1), strict=True):
        expected = torch.stack([one.project(name, grad) for grad in part])
        close(found[:, one.parts[name]], expected)
    close(found @ found.T, vectors @ vectors.T)  # nothing is lost


KEPT, PROJECTED = 12, 30


def both(one: MatrixMap | OuterMap, grads: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Return the columns of two gradients."""
    columns = [one.project(grad) for grad in grads]
    return (
        [one.vectors(part[None])[0] for part in columns] if isinstance(one, OuterMap) else columns
    )


MAPS: dict[str, Callable[[int, str], MatrixMap | OuterMap]] = {
    "rows are kept": lambda seed, name: MatrixMap(
        (KEPT, PROJECTED), name, drawn(seed, columns=5), keep=0
    ),
    "columns are kept": lambda seed, name: MatrixMap(
        (PROJECTED, KEPT), name, drawn(seed, columns=5), keep=1
    ),
    "products of filters": lambda seed, name: FilterMap(
        (KEPT, 10, 3), name, drawn(seed, columns=5)
    ),
    "filters": lambda seed, name: FilterMap((KEPT, 3, 10), name, drawn(seed, columns=5)),
    "outer product": lambda seed, name: OuterMap((KEPT, PROJECTED), name, drawn(seed, buckets=25)),
}
COUNT = 400


def correlated(kind: str) -> tuple[Tensor, Tensor]:
    """Return two gradients that have something in common."""
    generator = torch.Generator().manual_seed(0)
    shape = (PROJECTED, KEPT) if kind == "columns are kept" else (KEPT, PROJECTED)
    common, *own = (torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(3))
    return common + 0.5 * own[0], common + 0.5 * own[1]


@pytest.mark.parametrize("most", [5, 1024])
@pytest.mark.parametrize("kind", MAPS)
def test_inner_products_are_right_on_average(
    kind: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_maps, "MOST_KEPT", most)  # also where the kept side is folded
    one, two = correlated(kind)
    products = []
    for seed in range(COUNT):
        left, right = both(MAPS[kind](seed, "w"), (one, two))
        products.append(torch.stack([left @ right, left @ left]))
    found = torch.stack(products)
    exact = torch.stack([(one * two).sum(), (one * one).sum()])
    assert float(found.std()) > 0
    error = (found.mean(0) - exact).abs() / (found.std(0) / COUNT**0.5)
    assert error.max() < 4.5  # standard errors


@pytest.mark.parametrize("kind", MAPS)
def test_layers_that_share_their_columns_stay_apart_on_average(kind: str) -> None:
    grads = correlated(kind)
    products = []
    for seed in range(COUNT):
        left, _ = both(MAPS[kind](seed, "one"), grads)
        _, right = both(MAPS[kind](seed, "two"), grads)
        products.append(left @ right)
    found = torch.stack(products)
    assert float(found.mean().abs() / (found.std() / COUNT**0.5)) < 4.5


def test_one_position_loses_no_more_than_a_plain_sketch() -> None:
    """What the outer product is for: projecting one side of it would be coarse."""
    left, right = factors(1, 1, (40, 50), 0)
    grad, k = (left.transpose(1, 2) @ right)[0], 64
    exact = float(grad.square().sum())
    squares, projected = [], []
    for seed in range(COUNT):
        outer = OuterMap((40, 50), "w", drawn(seed, buckets=k))
        squares.append(float(outer.vectors(outer.project(grad)[None]).square().sum()))
        # 80 elements, which are more than those buckets.
        matrix = MatrixMap((40, 50), "w", drawn(seed, columns=2), keep=0)
        projected.append(float(matrix.project(grad).square().sum()))
    spread, coarse = torch.tensor(squares).std() / exact, torch.tensor(projected).std() / exact
    assert float(spread) < 1.5 * (2 / k) ** 0.5
    assert float(coarse) > 2 * float(spread)


@pytest.mark.parametrize("kind", ["matrix", "filters"])
def test_factors_of_lower_precision_are_multiplied_in_it(kind: str) -> None:
    by = drawn(0, columns=8, like=torch.zeros(0))
    if kind == "matrix":
        one: MatrixMap = MatrixMap((30, 12), "w", by, keep=1)
    else:
        one = FilterMap((12, 30, 1), "w", by)
    left, right = (factor.float() for factor in factors(3, 4, (30, 12), 0))
    pairs = ((left, right), (left.bfloat16(), right.bfloat16()))
    exact, half = (one.finish(one.columns_of(*pair)) for pair in pairs)
    assert exact.dtype == half.dtype == torch.float32  # that of rows
    assert 0 < float((half - exact).norm() / exact.norm()) < 0.02


def test_a_seed_and_a_name_say_everything() -> None:
    def draw(seed: int, name: str) -> Tensor:
        one = MatrixMap((30, 12), name, drawn(seed, columns=8), keep=1)
        return torch.cat([one.side.flatten(), one.signs])

    state = torch.get_rng_state()
    assert torch.equal(draw(1, "w"), draw(1, "w"))
    assert not torch.equal(draw(1, "w"), draw(2, "w"))
    assert not torch.equal(draw(1, "w"), draw(1, "v"))
    assert torch.equal(state, torch.get_rng_state())
