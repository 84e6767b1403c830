"""Passes on a GPU against float64 on the CPU: odd lengths, odd beginnings, poisoned memory.

Without a GPU they run through Triton's interpreter, which must be set before Triton is imported:
`tests/test_interpreted.py` does so.
"""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from gradherd.sparsify import kernels, triton_kernels
from gradherd.sparsify.kernels import BINS, SHIFT, MagnitudeHistogram
from tests.gpu import DEVICE, GPU, MARKS, only_gpu

pytestmark = MARKS
KINDS = [torch.float32, torch.bfloat16, torch.float16]
if not GPU:
    triton_kernels.TILE = 256  # the interpreter is slow
TILE = triton_kernels.TILE
# Around a tile, around a program's tiles, around a group of tiles.
LENGTHS = [1, 31, TILE - 1, TILE, TILE + 1, 7 * TILE + 77, 3_000_001]
SIZES = [(length, kind) for length in LENGTHS for kind in KINDS]
if not GPU:
    SIZES = [(1, KINDS[1]), (TILE, KINDS[0]), (TILE + 1, KINDS[2]), (4 * TILE + 77, KINDS[0])]


# Where slices begin, the gradients' factor, whether the sum replaces the residual, the threshold.
CASES = [(0, 1.0, True, 2.5), (1, 0.37, False, 1.0 if GPU else 2.0), (3, -2.0, True, 4.0)]


def inside(length, offset, dtype=torch.float32, values=None):
    """A slice that starts at `offset` of memory full of NaN, and that memory."""
    whole = torch.full((length + offset + 5,), torch.nan, dtype=dtype, device=DEVICE)
    part = whole[offset : offset + length]
    if values is not None:
        part.copy_(values)
    return part, whole


def untouched(part, whole, offset):
    rest = torch.cat([whole[:offset], whole[offset + len(part) :]])
    return bool(rest.isnan().all())


def fresh(length):
    return torch.randn(length)  # a new draw each time: the seed is nobody's


def counted(values, histogram):
    """Count magnitudes by bin in float64, by comparing with the edges."""
    window = int(histogram.window)
    bits = (np.arange(window + 1, window + BINS - 1, dtype=np.int64) << SHIFT).astype(np.int32)
    borders = bits.view(np.float32).astype(np.float64)
    sizes = np.abs(values.cpu().numpy().astype(np.float64))
    real = sizes[np.isfinite(sizes)]
    bins = np.searchsorted(borders, real, side="right")
    counts = np.bincount(bins, minlength=BINS)
    counts[-1] += len(sizes) - len(real)
    return counts


@pytest.mark.parametrize(("length", "dtype"), SIZES, ids=str)
def test_one_pass_adds_counts_marks_and_clears(length, dtype):
    for offset, unit, in_place, level in CASES:
        old, new = fresh(length), fresh(length).to(dtype)
        residual, kept_memory = inside(length, offset, values=old)
        grad, grad_memory = inside(length, 2 * offset, dtype, new)
        out, out_memory = (residual, kept_memory) if in_place else inside(length, offset)
        threshold = torch.tensor(level, device=DEVICE)
        histogram = MagnitudeHistogram.around(threshold)
        bitmap = triton_kernels.add(residual, grad, unit, out, histogram, threshold, clear=True)
        wanted = old.double() + unit * new.double()
        torch.testing.assert_close(out.cpu().double(), wanted, rtol=1e-6, atol=1e-7)
        assert not grad.any() and untouched(grad, grad_memory, 2 * offset)
        assert untouched(out, out_memory, offset)
        assert np.array_equal(histogram.counts.cpu().numpy(), counted(out, histogram))
        actual = np.flatnonzero(np.abs(out.cpu().numpy()) >= np.float32(level))
        assert np.array_equal(triton_kernels.indices_above(out, level).cpu().numpy(), actual)
        check_compact(out, out_memory, offset, bitmap, actual)


def check_compact(values, memory, offset, bitmap, actual):
    """Take with room for some, for all, for more."""
    before = values.clone()
    for room in (len(actual) // 2, len(actual) + 3, *([0, len(actual)] if GPU else [])):
        values.copy_(before)
        indices, selected, count = triton_kernels.compact(values, bitmap, room, clear=True)
        expected = torch.from_numpy(actual[:room]).to(DEVICE)
        assert int(count) == len(actual) and len(indices) == len(selected) == room
        assert torch.equal(indices[: len(expected)], expected)
        assert torch.equal(selected[: len(expected)], before[expected])
        assert not indices[len(expected) :].any() and not selected[len(expected) :].any()
        left = before.clone()
        left[expected] = 0
        assert torch.equal(values, left)  # what did not fit is unchanged
        assert untouched(values, memory, offset)


def test_without_a_tally_and_a_floor_it_only_adds():
    residual, grad = fresh(TILE + 5).to(DEVICE), fresh(TILE + 5).to(DEVICE)
    before, out = grad.clone(), torch.full_like(residual, torch.nan)
    assert triton_kernels.add(residual, grad, 1.0, out, None, None, clear=False) is None
    assert torch.equal(out, residual + grad) and torch.equal(grad, before)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_counted_and_nan_is_not_picked(bad):
    residual, grad = torch.zeros(TILE + 9, device=DEVICE), fresh(TILE + 9).to(DEVICE)
    for at in (3, TILE + 8):
        grad[at] = bad
        threshold = torch.tensor(0.0, device=DEVICE)
        histogram = MagnitudeHistogram.around(torch.tensor(1.0, device=DEVICE))
        out = torch.empty_like(residual)
        bitmap = triton_kernels.add(residual, grad, 1.0, out, histogram, threshold, clear=False)
        assert not histogram.finite()
        _, _, actual = triton_kernels.compact(out, bitmap, 1, clear=False)
        assert int(actual) == int((out.abs() >= 0).sum())
        grad[at] = 1.0
    histogram.counts.zero_()
    triton_kernels.add(residual, grad, 1.0, out, histogram, None, clear=False)
    assert histogram.finite()


def test_floors_at_the_ends_of_the_range():
    values = torch.tensor([0.0, -1e-45, 1e-40, 1.0, -3e38, torch.inf, torch.nan], device=DEVICE)
    sizes = values.cpu().double().abs().numpy()
    for threshold in (0.0, 1.4e-45, 1e-40, 1.0, 3e38, 3.4028234e38):
        wanted = np.flatnonzero(sizes >= np.float64(np.float32(threshold)))
        assert triton_kernels.indices_above(values, threshold).tolist() == wanted.tolist(), (
            threshold
        )


@pytest.mark.parametrize("k", [1, 5, 100, TILE - 3, 10_000])
def test_the_floor_leaves_at_least_k(k):
    values = fresh(TILE + 1).to(DEVICE)
    histogram = MagnitudeHistogram.around(torch.tensor(0.9, device=DEVICE))
    out = torch.empty_like(values)
    triton_kernels.add(torch.zeros_like(values), values, 1.0, out, histogram, None, clear=False)
    threshold = triton_kernels.topk_threshold(histogram, k)
    on_cpu = MagnitudeHistogram(histogram.counts.cpu(), histogram.window.cpu())
    assert threshold.cpu() == on_cpu.topk_threshold(k)
    reach = int((out.abs() >= threshold).sum())
    assert reach >= min(k, len(values))
    if threshold > 0:  # and at the next border there are fewer
        following = (threshold.view(torch.int32) + (1 << SHIFT)).view(torch.float32)
        assert int((out.abs() >= following).sum()) < k
    assert (threshold > 0) == (k < TILE - 3)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_a_mean_is_scattered_to_its_bucket(dtype):
    flat, memory = inside(3000, 1, dtype, torch.zeros(3000))
    count = 1500
    at, number = torch.randperm(3000)[:count], torch.randint(0, 3, (count,))
    values = fresh(count) * 1e3
    values[:3] = torch.tensor([1e38, -1e38, torch.nan])
    number[:3] = 1
    held = torch.full((count,), 7.0)
    wanted, wanted_held = torch.zeros(3000, dtype=dtype), held.clone()
    kernels.scatter_to_bucket(wanted, number, 1, at, values, wanted_held)
    on_device = [one.to(DEVICE) for one in (number, at, values, held)]
    triton_kernels.scatter_to_bucket(flat, on_device[0], 1, *on_device[1:])
    # The interpreter cuts bits off where a GPU rounds.
    exact = {"rtol": 0 if GPU or dtype != torch.bfloat16 else 2**-7, "atol": 0, "equal_nan": True}
    torch.testing.assert_close(flat.cpu(), wanted, **exact)
    torch.testing.assert_close(on_device[3].cpu(), wanted_held, **exact)
    assert int(flat.isnan().sum()) == 1
    assert untouched(flat, memory, 1)


@only_gpu
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_the_gpu_does_what_the_twin_does(dtype):
    length = 1_000_003
    old, new = fresh(length), fresh(length).to(dtype)
    results = []
    for device in ("cpu", "cuda", "cuda"):
        residual, grad = old.to(device, copy=True), new.to(device, copy=True)
        threshold = torch.tensor(2.5, device=device)
        histogram = MagnitudeHistogram.around(threshold)
        selections = kernels.add_select(
            residual, grad, 1.0, residual, threshold, 9000, histogram=histogram, clear=True
        )
        again = kernels.select(residual, threshold, 9000, clear=True)
        state = [
            *selections,
            *again,
            residual,
            histogram.counts,
            kernels.topk_threshold(histogram, 1000),
            histogram.finite(),
        ]
        results.append([one.cpu() for one in state])
        assert not grad.any() and int(selections.total) > 9000
    for one in results[1:]:
        for mine, twin in zip(one, results[0], strict=True):
            assert torch.equal(mine, twin.to(mine.dtype))


@only_gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits_for_the_host():
    residual, grad = torch.randn(2, 1_000_003, device=DEVICE)
    threshold = torch.tensor(2.5, device=DEVICE)
    for mode in (0, "error"):  # the first time Triton compiles
        torch.cuda.set_sync_debug_mode(mode)
        try:
            histogram = MagnitudeHistogram.around(threshold)
            kernels.add_select(
                residual, grad, 1.0, residual, threshold, 9000, histogram=histogram, clear=True
            )
            kernels.add(residual, grad, 1.0, residual, histogram=histogram, clear=True)
            kernels.select(residual, kernels.topk_threshold(histogram, 1000), 2000, clear=True)
        finally:
            torch.cuda.set_sync_debug_mode(0)


@only_gpu
def test_above_and_largest_on_a_gpu():
    for length in (0, 1, 40_960, 300_001):
        values = fresh(length)
        for threshold in (0.0, 1e-300, 0.5, 3.5, 1e30, 1e300, float("inf")):
            actual = kernels.indices_above(values.cuda(), threshold).cpu()
            assert torch.equal(actual, kernels.indices_above(values, threshold)), (
                length,
                threshold,
            )
        for k in {0, min(length, 30), length // 9}:
            actual = kernels.topk_indices(values.cuda(), k).cpu()
            assert torch.equal(actual, kernels.topk_indices(values, k))
