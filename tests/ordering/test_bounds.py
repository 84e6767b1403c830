import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradherd.ordering.bounds import parallel_herding_bound
from tests.ordering import reference

seeds = st.integers(0, 2**31)


def drawn(seed, sizes, dim=3):
    draw = np.random.RandomState(seed)
    vectors = [torch.from_numpy(draw.randn(n, dim)) for n in sizes]
    return vectors, [torch.from_numpy(draw.permutation(n)) for n in sizes]


@given(seed=seeds, sizes=st.lists(st.integers(0, 8), min_size=1, max_size=5))
@settings(max_examples=60, deadline=None)
def test_bound_is_that_of_the_loop(seed, sizes):
    vectors, orders = drawn(seed, sizes)
    expected = reference.herding([v.numpy() for v in vectors], [o.tolist() for o in orders])
    assert parallel_herding_bound(vectors, orders) == pytest.approx(expected, rel=1e-12, abs=1e-13)


@given(seed=seeds, size=st.integers(1, 12))
@settings(max_examples=30, deadline=None)
def test_one_worker(seed, size):
    (vectors,), (order,) = drawn(seed, [size])
    expected = reference.herding([vectors.numpy()], [order.tolist()])
    assert parallel_herding_bound([vectors], [order]) == pytest.approx(
        expected, rel=1e-12, abs=1e-13
    )


def test_a_tensor_of_all_workers_will_do():
    vectors, orders = drawn(1, [6, 6, 6])
    stacked = parallel_herding_bound(torch.stack(vectors), torch.stack(orders))
    assert stacked == parallel_herding_bound(vectors, orders) > 0


def test_by_hand():
    # The mean over all five is 2; worker 1 runs out after a step.
    vectors = [torch.tensor([[0.0], [4.0], [4.0], [1.0]]), torch.tensor([[1.0]])]
    # Steps: (0-2)+(1-2) = -3; +2 = -1; +2 = 1; -1 = 0.
    assert parallel_herding_bound(vectors, [torch.arange(4), torch.arange(1)]) == 3.0
    assert parallel_herding_bound(vectors, [torch.tensor([1, 0, 2, 3]), torch.arange(1)]) == 1.0


def test_a_million_half_precision_summands_are_added_exactly():
    # Alternating +1, -1: in float16 sums beyond 2048 would stand still.
    vectors = torch.ones(5000, 1, dtype=torch.float16)
    vectors[2500:] = -1
    assert parallel_herding_bound([vectors], [torch.arange(5000)]) == 2500.0


def test_the_worst_column_counts():
    vectors = torch.tensor([[1.0, 5.0], [-1.0, -5.0]])
    assert parallel_herding_bound([vectors], [torch.tensor([1, 0])]) == 5.0


def test_no_units_no_bound():
    assert parallel_herding_bound([torch.zeros(0, 2)], [torch.zeros(0, dtype=torch.int64)]) == 0.0


def test_workers_must_match_orders():
    with pytest.raises(ValueError):
        parallel_herding_bound([torch.zeros(2, 1)], [torch.arange(2), torch.arange(2)])
