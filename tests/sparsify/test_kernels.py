"""Passes over whole vectors against numpy, on both sides of every short cut."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradherd.sparsify.kernels import (
    add,
    count_marks,
    indices_above,
    marked,
    marks_for,
    overwrite_unless,
    scatter_to_bucket,
    topk_indices,
)
from tests.sparsify.rank_work import normal

# Around a chunk of what is compared in one go, and around the length from which one samples.
LENGTHS = [0, 1, 7, 40_959, 40_960, 131_071, 131_072, 131_073, 300_000]
kinds = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


@kinds
@pytest.mark.parametrize("length", LENGTHS)
def test_what_is_above_a_floor(length, dtype):
    values = normal(length, length, dtype=dtype)
    values[::5] = 0
    for threshold in (0.0, 1e-300, 0.5, 2.0, 3.5, 1e30, 1e300, float("inf")):
        wanted = np.flatnonzero(np.abs(values.numpy().astype(np.float64)) >= threshold)
        actual = indices_above(values, threshold)
        assert actual.dtype == torch.int64
        assert np.array_equal(actual.numpy(), wanted), threshold


def test_a_floor_belongs_to_what_is_above_it():
    for dtype in (torch.float32, torch.float64):
        values = torch.tensor([1.0, -1.0, 0.999, 1.001], dtype=dtype)
        assert indices_above(values, 1.0).tolist() == [0, 1, 3]


@kinds
@pytest.mark.parametrize("length", LENGTHS[1:])
@pytest.mark.parametrize("kind", ["normal", "few kinds", "mostly zero", "one region", "in step"])
def test_the_largest(length, kind, dtype):
    values = normal(length + 1, length, dtype=dtype)
    if kind == "few kinds":
        values = values.round()
    elif kind == "mostly zero":
        values[values.abs() < 3] = 0
    elif kind == "one region":  # An evenly spaced sample sees little of it.
        values[length // 3 : length // 3 + 50] *= 1000
    elif kind == "in step" and length >= 8192:  # It sees all of these, and takes them for many.
        values[:: length // 8192] *= 1000
    sizes = values.abs().numpy()
    in_order = np.sort(sizes)[::-1]
    for k in {0, 1, min(30, length), length // 1000, length // 30, length // 9, length}:
        actual = topk_indices(values, k).numpy()
        assert len(actual) == k
        assert (np.diff(actual) > 0).all()
        assert np.array_equal(np.sort(sizes[actual])[::-1], in_order[:k]), k


@given(st.lists(st.floats(-8, 8, width=16), min_size=1, max_size=30), st.data())
@settings(max_examples=60, deadline=None)
def test_the_largest_of_a_few(values, data):
    k = data.draw(st.integers(0, len(values)))
    sizes = [abs(value) for value in values]
    actual = topk_indices(torch.tensor(values), k).tolist()
    assert actual == sorted(set(actual))
    assert sorted((sizes[i] for i in actual), reverse=True) == sorted(sizes, reverse=True)[:k]


@pytest.mark.parametrize("grads", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_residual_and_gradient_are_added_checked_and_marked(grads):
    for seed, in_place in ((1, False), (2, True)):
        old, new = normal(seed, 3001), normal(seed + 9, 3001).to(grads)
        residual, grad = old.clone(), new.clone()
        out = residual if in_place else torch.full_like(residual, torch.nan)
        level, bad = torch.tensor(2.0), torch.zeros(1, dtype=torch.int32)
        marks = marks_for(out)
        scale = torch.tensor(0.5)
        add(residual, grad, scale, out, bad=bad, clear=True, threshold=level, marks=marks)
        total = old + 0.5 * new.float()
        assert torch.equal(out, total) and not grad.any() and not bad.any()
        assert in_place or torch.equal(residual, old)
        wanted = np.flatnonzero(np.abs(total.numpy()) >= 2)
        assert int(count_marks(out, level, marks)) == len(wanted) > 40
        for room in (40, len(wanted) + 5):
            positions, count = marked(out, level, marks, room)
            assert int(count) == len(wanted)
            assert positions[: len(wanted)].tolist() == wanted[:room].tolist()
            assert not positions[len(wanted) :].any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_noted_and_stays_so(value):
    bad = torch.zeros(1, dtype=torch.int32)
    for grads in (torch.ones(5), torch.tensor([1.0, value]), torch.ones(3)):
        add(torch.zeros(len(grads)), grads, 1.0, torch.empty(len(grads)), bad=bad)
        assert bool(bad) is not bool(len(grads) == 5)


def test_copies_and_fills_happen_unless_all_is_well():
    for ok in (True, False):
        source, target = torch.arange(5.0), torch.full((5,), 7.0)
        overwrite_unless(torch.tensor(ok), target, source)
        assert target.tolist() == ([7.0] * 5 if ok else source.tolist())
        overwrite_unless(torch.tensor(ok), target, torch.nan)
        assert bool(target.isnan().all()) is not ok


def test_a_mean_goes_to_its_bucket_as_far_as_its_type_holds_it():
    flat, held = torch.zeros(6, dtype=torch.float16), torch.full((4,), 7.0)
    number, at = torch.tensor([0, 1, 1, 1]), torch.tensor([0, 5, 1, 3])
    scatter_to_bucket(flat, number, 1, at, torch.tensor([1.0, 1e9, -1e9, 0.1]), held)
    assert flat.tolist() == [0, -65504, 0, flat[3].item(), 0, 65504]
    assert held.tolist() == [7, 65504, -65504, flat[3].item()] and abs(flat[3] - 0.1) < 1e-4
