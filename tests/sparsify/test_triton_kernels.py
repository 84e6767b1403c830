"""Passes on a GPU against float64 on the CPU: odd lengths, odd beginnings, poisoned memory.

Without a GPU they run through Triton's interpreter, which must be set before Triton is imported:
`tests/test_interpreted.py` does so.
"""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from gradherd.sparsify import kernels, triton_kernels
from gradherd.sparsify import marks as marks_module
from gradherd.sparsify.marks import Marks
from tests.gpu import DEVICE, GPU, MARKS, only_gpu

pytestmark = MARKS
KINDS = [torch.float32, torch.bfloat16, torch.float16]
if not GPU:
    triton_kernels.TILE, triton_kernels._PART = 256, 64  # the interpreter is slow
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


def new_marks(values):
    tiles = -(-len(values) // TILE)
    words = torch.full((tiles * TILE // 32,), -1, dtype=torch.int32, device=DEVICE)
    return Marks(words, torch.full((tiles,), -1, dtype=torch.int32, device=DEVICE))


def new_bad():
    return torch.zeros(1, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize(("length", "dtype"), SIZES, ids=str)
def test_one_pass_adds_checks_marks_and_clears(length, dtype):
    for offset, unit, in_place, level in CASES:
        old, new = fresh(length), fresh(length).to(dtype)
        residual, kept_memory = inside(length, offset, values=old)
        grad, grad_memory = inside(length, 2 * offset, dtype, new)
        out, out_memory = (residual, kept_memory) if in_place else inside(length, offset)
        threshold, scale = torch.tensor(level, device=DEVICE), torch.tensor(unit, device=DEVICE)
        marks, bad = new_marks(out), new_bad()
        triton_kernels.add(
            residual, grad, scale, out, bad=bad, clear=True, threshold=threshold, marks=marks
        )
        wanted = old.double() + unit * new.double()
        torch.testing.assert_close(out.cpu().double(), wanted, rtol=1e-6, atol=1e-7)
        assert not grad.any() and untouched(grad, grad_memory, 2 * offset)
        assert untouched(out, out_memory, offset) and not bad.any()
        actual = np.flatnonzero(np.abs(out.cpu().numpy()) >= np.float32(level))
        assert np.array_equal(triton_kernels.indices_above(out, level).cpu().numpy(), actual)
        check_compact(marks, actual)


def check_compact(marks, actual):
    """Read marks with room for some, for all, for more."""
    for room in (len(actual) // 2, len(actual) + 3, *([0, len(actual)] if GPU else [])):
        indices, count = triton_kernels.compact(marks, room)
        expected = torch.from_numpy(actual[:room]).to(DEVICE)
        assert int(count) == len(actual) and len(indices) == room
        assert torch.equal(indices[: len(expected)], expected)
        assert not indices[len(expected) :].any()


def test_without_marks_it_only_adds():
    residual, grad = fresh(TILE + 5).to(DEVICE), fresh(TILE + 5).to(DEVICE)
    before, out = grad.clone(), torch.full_like(residual, torch.nan)
    triton_kernels.add(residual, grad, 1.0, out)
    assert torch.equal(out, residual + grad) and torch.equal(grad, before)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_noted_and_nan_is_not_marked(value):
    residual, grad = torch.zeros(TILE + 9, device=DEVICE), fresh(TILE + 9).to(DEVICE)
    threshold, bad, marks = torch.tensor(0.0, device=DEVICE), new_bad(), new_marks(residual)
    out = torch.empty_like(residual)
    triton_kernels.add(residual, grad, 1.0, out, bad=bad, threshold=threshold, marks=marks)
    triton_kernels.add(residual, grad, 1.0, out, bad=bad)
    assert not bad.any()
    for at in (3, TILE + 8):
        grad[at] = value
        for options in ({"threshold": threshold, "marks": marks}, {}):
            bad.zero_()
            triton_kernels.add(residual, grad, 1.0, out, bad=bad, **options)
            assert bool(bad)
        _, count = triton_kernels.compact(marks, 1)
        assert int(count) == int((out.abs() >= 0).sum())
        grad[at] = 1.0


@pytest.mark.parametrize("length", [1, 1500, TILE + 1])
def test_what_hangs_on_a_condition_happens_only_then(length):
    values, level = fresh(length).to(DEVICE), torch.tensor(0.5, device=DEVICE)
    for condition in (True, False):
        flag = torch.tensor(condition, device=DEVICE)
        marks = new_marks(values)
        triton_kernels.mark(values, level, marks, flag)
        wanted = int((values.abs() >= 0.5).sum()) if condition else -len(marks.counts)
        assert int(marks.counts.sum()) == wanted
        target, memory = inside(length, 3, values=torch.zeros(length))
        triton_kernels.overwrite_unless(flag, target, values)
        assert torch.equal(target, torch.zeros_like(values) if condition else values)
        assert untouched(target, memory, 3)
        for kind in KINDS:
            filled = torch.ones(length + 1, dtype=kind, device=DEVICE)
            triton_kernels.overwrite_unless(flag, filled[:length], torch.nan)
            assert filled[:length].isnan().all() == (not condition)
            assert float(filled[length]) == 1


def test_floors_at_the_ends_of_the_range():
    values = torch.tensor([0.0, -1e-45, 1e-40, 1.0, -3e38, torch.inf, torch.nan], device=DEVICE)
    sizes = values.cpu().double().abs().numpy()
    for threshold in (0.0, 1.4e-45, 1e-40, 1.0, 3e38, 3.4028234e38):
        wanted = np.flatnonzero(sizes >= np.float64(np.float32(threshold)))
        assert triton_kernels.indices_above(values, threshold).tolist() == wanted.tolist(), (
            threshold
        )


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
    length = 122 * marks_module.TILE
    old, new = fresh(length), fresh(length).to(dtype)
    results = []
    for device in ("cpu", "cuda", "cuda"):
        residual, grad = old.to(device, copy=True), new.to(device, copy=True)
        threshold, scale = torch.tensor(2.5, device=device), torch.tensor(1.0, device=device)
        bad = torch.zeros(1, dtype=torch.int32, device=device)
        marks = kernels.marks_for(residual)
        kernels.add(
            residual, grad, scale, residual, bad=bad, clear=True, threshold=threshold, marks=marks
        )
        positions, total = kernels.marked(residual, threshold, marks, 9000)
        count = kernels.count_marks(residual, threshold, marks)
        results.append([one.cpu() for one in (residual, positions, total, count, bad)])
        assert not grad.any() and int(total) > 9000
    for one in results[1:]:
        for mine, twin in zip(one, results[0], strict=True):
            assert torch.equal(mine, twin.to(mine.dtype))


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
