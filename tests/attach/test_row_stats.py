"""Norms and noise scale of rows, against definitions."""

from itertools import product

import pytest
import torch

from gradherd.hooks.transports import RowFigures, signal_and_noise

POPULATION = torch.tensor([[1.0, 2.0], [-1.0, 0.5], [3.0, 0.0]], dtype=torch.float64)


@pytest.mark.parametrize("unit", [1, 2])
def test_signal_and_noise_are_right_on_average_over_all_batches(unit):
    # All batches of two rows that can be drawn from three examples, with replacement.
    found = []
    for drawn in product(range(3), repeat=2 * unit):
        rows = POPULATION[list(drawn)].view(2, unit, 2).mean(1)
        found.append(signal_and_noise(rows, unit))
    mean = POPULATION.mean(0)
    truth = torch.stack([mean.square().sum(), (POPULATION - mean).square().sum(1).mean()])
    torch.testing.assert_close(torch.stack(found).double().mean(0), truth, rtol=1e-5, atol=1e-6)


def test_one_row_has_a_norm_and_no_noise_scale():
    figures = RowFigures(unit=4)
    figures.add(torch.tensor([[3.0, 4.0]]))
    assert figures.scalars() == {f"row_norm_{level}": 5.0 for level in ("p10", "p50", "p90")}


def test_the_noise_scale_is_that_of_mean_signal_and_mean_noise():
    figures, generator = RowFigures(unit=1), torch.Generator().manual_seed(1)
    assert figures.scalars() == {}
    # True gradient (1, 0, ..., 0), unit variance in each of 20 columns: noise scale 20.
    for _ in range(400):
        rows = torch.randn(32, 20, generator=generator)
        rows[:, 0] += 1
        figures.add(rows)
    assert figures.scalars()["noise_scale"] == pytest.approx(20, rel=0.2)


def test_a_batch_that_overflowed_does_not_count():
    figures = RowFigures(unit=1)
    figures.add(torch.tensor([[3.0, 0.0], [1.0, 0.0]]))
    before = figures.scalars()["noise_scale"]
    figures.add(torch.tensor([[torch.inf, 0.0], [1.0, 0.0]]))
    assert figures.scalars()["noise_scale"] == before == pytest.approx(2 / 3)
