import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from studies.methods.randomk import RandomK, sample
from tests.sparsify import one_step
from tests.sparsify.reference_error_feedback import (
    actual,
    assert_conserved,
    assert_same,
    expected,
    gradients,
    number,
)


def drawn(method, dim, k, step):
    """Return what is sent in a step; it depends on nothing else."""
    (only,) = one_step.together(method, torch.zeros(1, dim), k, step=step)
    return only["indices"]


def chooser(method, k):
    def choose(acc, step):
        sent_indices = drawn(method, acc.shape[1], k, step).numpy()
        sent = np.zeros_like(acc)
        sent[:, sent_indices] = acc[:, sent_indices]
        return sent

    return choose


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize(
    ("dim", "density"), [(1, 1.0), (2, 0.5), (31, 0.1), (31, 0.9), (31, 1.0), (1000, 0.05)]
)
def test_all_send_the_same_lot(size, dim, density):
    grads, k, method = gradients(size, dim), number(density, dim), RandomK(density, seed=3)
    means, residual, metrics = actual(grads, method)
    assert_same((means, residual), expected(grads, chooser(method, k)))
    assert_conserved(grads, means, residual)
    for one in metrics:
        assert one["selected"] == sum(one["per_rank"]) == k
        assert max(one["per_rank"]) - min(one["per_rank"]) <= 1


def test_density_one_is_the_mean():
    grads = gradients(3, 31, steps=1)
    means, residual, _ = actual(grads, RandomK(1.0))
    np.testing.assert_allclose(means[0], grads[0].mean(0), rtol=1e-14)
    assert not residual.any()


@given(st.integers(1, 3000), st.data())
def test_a_sample_is_k_different_coordinates(dim, data):
    k = data.draw(st.integers(0, dim))
    actual = sample(dim, k, torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    assert actual.dtype == torch.int64 and len(actual) == k
    assert bool((actual.diff() > 0).all())
    if k:
        assert actual[0] >= 0 and actual[-1] < dim


# Few of many, up to half, and more than half are drawn in different ways.
@pytest.mark.parametrize(("dim", "k"), [(40, 2), (6, 2), (6, 4)])
def test_every_set_is_as_likely(dim, k):
    generator, draws = torch.Generator().manual_seed(1), 6000
    counts = dict.fromkeys(itertools.combinations(range(dim), k), 0)
    for _ in range(draws):
        counts[tuple(sample(dim, k, generator).tolist())] += 1
    mean = draws / len(counts)
    chi2 = sum((count - mean) ** 2 / mean for count in counts.values())
    degrees = len(counts) - 1
    assert abs(chi2 - degrees) < 4.5 * np.sqrt(2 * degrees)


def test_few_of_very_many_are_drawn_from_all_of_them():
    # torch's own randint would draw from the first third with probability 0.344.
    dim = 3 << 26
    actual = sample(dim, 100_000, torch.Generator().manual_seed(0))
    assert len(actual) == 100_000
    share = float((actual < dim // 3).double().mean())
    assert abs(share - 1 / 3) < 4 * np.sqrt(2 / 9 / 100_000)


def test_draws_differ_between_steps_and_seeds_and_come_again():
    draws = {
        (seed, step): tuple(drawn(RandomK(0.1, seed=seed), 500, 50, step).tolist())
        for seed in range(4)
        for step in range(4)
    }
    assert len(set(draws.values())) == len(draws)
    assert tuple(drawn(RandomK(0.1, seed=2), 500, 50, 3).tolist()) == draws[2, 3]


def test_every_coordinate_has_its_turn():
    method = RandomK(0.1)
    seen = torch.cat([drawn(method, 50, 5, step) for step in range(200)])
    assert set(seen.tolist()) == set(range(50))


def test_generators_of_others_are_left_alone():
    torch.manual_seed(5)
    np.random.seed(5)
    want = torch.rand(3), np.random.rand(3)
    torch.manual_seed(5)
    np.random.seed(5)
    for dim, k in [(1000, 5), (1000, 300), (1000, 900)]:
        drawn(RandomK(0.1), dim, k, 0)
    assert torch.equal(torch.rand(3), want[0])
    assert np.array_equal(np.random.rand(3), want[1])


def test_no_index_is_sent():
    results = one_step.together(RandomK(0.1), torch.randn(4, 300), 30, step=2)
    assert [result["bytes"] for result in results] == [0] * 4
    assert all(torch.equal(result["indices"], results[0]["indices"]) for result in results)


def test_arguments_out_of_range_are_refused():
    with pytest.raises(ValueError, match=r"density must be in \(0, 1\], got 0"):
        RandomK(0)
    with pytest.raises(ValueError, match="seed must be at least 0, got -1"):
        RandomK(seed=-1)
