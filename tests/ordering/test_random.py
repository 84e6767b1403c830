import numpy as np
import pytest
import torch

from gradherd.ordering.random import SeededRandom


def test_seed_must_not_be_negative():
    with pytest.raises(ValueError, match="seed must be at least 0, got -1"):
        SeededRandom(-1)


def test_permutations_are_permutations():
    for order, size in zip(
        SeededRandom(3).permutations([5, 0, 1, 8], 2), [5, 0, 1, 8], strict=True
    ):
        assert sorted(order.tolist()) == list(range(size))


def test_draws_do_not_depend_on_what_was_drawn_before():
    forward, backward = SeededRandom(7), SeededRandom(7)
    first = {e: (forward.permutations([9, 9], e), forward.draws(4, 2, e)) for e in range(5)}
    torch.randperm(100)  # Nor on the global generator.
    for e in reversed(range(5)):
        draws, orders = backward.draws(4, 2, e), backward.permutations([9, 9], e)
        assert np.array_equal(draws, first[e][1])
        assert all(torch.equal(a, b) for a, b in zip(orders, first[e][0], strict=True))


def test_drawing_leaves_the_global_generators_alone():
    before, numpys = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    SeededRandom(1).permutations([10], 0)
    SeededRandom(1).draws(3, 2, 0)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], numpys)


def test_a_workers_permutation_does_not_depend_on_the_other_workers():
    assert torch.equal(
        SeededRandom(0).permutations([6, 20], 1)[1], SeededRandom(0).permutations([9, 20], 1)[1]
    )


def test_seed_epoch_and_worker_all_matter():
    orders = {
        tuple(order.tolist())
        for seed in range(3)
        for epoch in range(3)
        for order in SeededRandom(seed).permutations([20] * 3, epoch)
    }
    assert len(orders) == 27
    tables = {SeededRandom(seed).draws(4, 2, e).tobytes() for seed in range(3) for e in range(3)}
    assert len(tables) == 9


def test_draws_are_uniform_in_minus_one_to_one_and_read_only():
    draws = SeededRandom(0).draws(5000, 4, 0)
    assert draws.shape == (5000, 4) and draws.dtype == np.float64
    assert draws.min() >= -1 and draws.max() < 1
    # Mean and variance within five standard errors.
    assert abs(draws.mean()) < 5 * np.sqrt(1 / 3 / draws.size)
    assert abs((draws**2).mean() - 1 / 3) < 5 * np.sqrt(4 / 45 / draws.size)
    with pytest.raises(ValueError, match="read-only"):
        draws[0, 0] = 0
