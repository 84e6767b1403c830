"""The online rule."""

import math

import numpy as np
import pytest

from gradherd.sparsify.partitioned import first_threshold, next_threshold
from gradherd.sparsify.selecting import padding


@pytest.mark.parametrize(
    ("selected", "factor"),
    [
        (10_000, 1.005),
        (1_101, 1.005),
        (1_100, 1.00125),  # the edge of the band belongs to it
        (1_001, 1.00125),
        (1_000, 0.9987),  # the branch that the published code cannot reach
        (910, 0.9987),
        (909, 0.995),
        (1, 0.995),
        (0, 0.995),
    ],
)
def test_the_online_rule(selected, factor):
    assert next_threshold(2.0, selected, 1_000) == 2.0 * factor


@pytest.mark.parametrize("k", [1, 7, 100, 31_832])
def test_the_first_online_threshold_is_that_of_the_paper(k):
    assert first_threshold(k) == pytest.approx(1 / (2 * math.sqrt(k)), rel=1e-15)


def test_stationary_noise_stays_within_a_tenth_of_the_target():
    dim, k = 1_000_000, 10_000
    draw = np.random.RandomState(0)
    threshold, shares = first_threshold(k), []
    for _ in range(3_000):
        selected = draw.binomial(dim, math.erfc(threshold / math.sqrt(2)))
        shares.append(selected / k)
        threshold = next_threshold(threshold, selected, k)
    assert shares[0] > 50  # The paper's start is far off here.
    late = np.array(shares[1_500:])
    assert late.min() > 0.9 and late.max() < 1.1
    # Rising and falling alike, it is on the target, not at the lower edge of the band.
    assert late.mean() == pytest.approx(1, abs=0.01)


def test_padding_is_what_the_longest_costs():
    assert padding([3, 3, 3]) == 1
    assert padding([4, 0, 0, 0]) == 4
    assert padding([3, 2, 1]) == 1.5
    assert padding([0, 0]) == 1
