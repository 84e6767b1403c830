"""Passes over whole vectors against numpy, on both sides of every short cut."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradherd.sparsify.kernels import above, largest
from tests.sparsify.work import normal

# Around a chunk of what is compared in one go, and around the length from which one samples.
LENGTHS = [0, 1, 7, 40_959, 40_960, 131_071, 131_072, 131_073, 300_000]
kinds = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


@kinds
@pytest.mark.parametrize("length", LENGTHS)
def test_what_is_above_a_floor(length, dtype):
    values = normal(length, length, dtype=dtype)
    values[::5] = 0
    for floor in (0.0, 1e-300, 0.5, 2.0, 3.5, 1e30, 1e300, float("inf")):
        wanted = np.flatnonzero(np.abs(values.numpy().astype(np.float64)) >= floor)
        found = above(values, floor)
        assert found.dtype == torch.int64
        assert np.array_equal(found.numpy(), wanted), floor


def test_a_floor_belongs_to_what_is_above_it():
    for dtype in (torch.float32, torch.float64):
        values = torch.tensor([1.0, -1.0, 0.999, 1.001], dtype=dtype)
        assert above(values, 1.0).tolist() == [0, 1, 3]


@kinds
@pytest.mark.parametrize("length", LENGTHS[1:])
@pytest.mark.parametrize("kind", ["normal", "few kinds", "mostly zero", "one region", "in step"])
def test_the_largest(length, kind, dtype):
    values = normal(length + 1, length, dtype=dtype)
    if kind == "few kinds":
        values = values.round()
    elif kind == "mostly zero":
        values[values.abs() < 3] = 0
    elif kind == "one region":  # A sample that is spread evenly sees little of it.
        values[length // 3 : length // 3 + 50] *= 1000
    elif kind == "in step" and length >= 8192:  # It sees all of these, and takes them for many.
        values[:: length // 8192] *= 1000
    sizes = values.abs().numpy()
    in_order = np.sort(sizes)[::-1]
    for k in {0, 1, min(30, length), length // 1000, length // 30, length // 9, length}:
        found = largest(values, k).numpy()
        assert len(found) == k
        assert (np.diff(found) > 0).all()
        assert np.array_equal(np.sort(sizes[found])[::-1], in_order[:k]), k


@given(st.lists(st.floats(-8, 8, width=16), min_size=1, max_size=30), st.data())
@settings(max_examples=60, deadline=None)
def test_the_largest_of_a_few(values, data):
    k = data.draw(st.integers(0, len(values)))
    sizes = [abs(value) for value in values]
    found = largest(torch.tensor(values), k).tolist()
    assert found == sorted(set(found))
    assert sorted((sizes[i] for i in found), reverse=True) == sorted(sizes, reverse=True)[:k]
