import math
import random

import pytest

from gradherd.lab.report.stats import mean_std, paired_difference


def test_spread_by_hand():
    found = mean_std([2.0, 4.0, 4.0, 6.0])
    assert found.mean == 4 and found.std == pytest.approx(math.sqrt(8 / 3))
    assert (mean_std([3.0]).mean, mean_std([3.0]).std) == (3, 0)
    assert mean_std([]).mean is None


def test_a_run_that_is_not_finite_is_not_averaged_away():
    assert mean_std([1.0, None]).mean is None and mean_std([1.0, None]).std is None
    assert paired_difference([1.0, None, 2.0], [0.0, 0.0, 0.0], [0, 1, 2]) is None


def test_difference_by_hand():
    # 1, 0.5, 1.5: mean 1, standard error 0.5 / sqrt(3), t = 2 sqrt(3), t quantile 4.30265.
    found = paired_difference([1.0, 2.0, 3.5], [0.0, 1.5, 2.0], [4, 7, 9])
    assert found.mean == pytest.approx(1) and found.seeds == (4, 7, 9)
    assert found.low == pytest.approx(1 - 4.30265 * 0.288675, abs=1e-5)
    assert found.high == pytest.approx(1 + 4.30265 * 0.288675, abs=1e-5)
    assert found.p == pytest.approx(0.0741799, abs=1e-6)
    assert not found.excludes_zero


@pytest.mark.parametrize("seeds", [2, 3, 5, 12])
def test_difference_agrees_with_scipy(seeds):
    from scipy import stats  # takes a second, which every test process would spend

    chance = random.Random(seeds)
    arm = [chance.gauss(1, 1) for _ in range(seeds)]
    ref = [chance.gauss(0.2, 1) for _ in range(seeds)]
    found = paired_difference(arm, ref, range(seeds))
    theirs = stats.ttest_rel(arm, ref)
    ends = theirs.confidence_interval(0.95)
    assert found.p == pytest.approx(theirs.pvalue, rel=1e-9)
    assert (found.low, found.high) == pytest.approx((ends.low, ends.high), rel=1e-9)


def test_differences_without_spread_claim_nothing():
    same = paired_difference([1.0, 2.0], [1.0, 2.0], [0, 1])
    assert (same.mean, same.low, same.high, same.p, same.excludes_zero) == (0, 0, 0, 1, False)
    # 97.4 - 97.1 is the same number twice: no spread to build an interval from.
    steady = paired_difference([97.4, 96.4], [97.1, 96.1], [0, 1])
    assert steady.mean == pytest.approx(0.3)
    assert (steady.low, steady.high, steady.p, steady.excludes_zero) == (None, None, None, False)


def test_one_pair_is_no_difference():
    assert paired_difference([1.0], [0.0], [0]) is None
    assert paired_difference([], [], []) is None
