"""Means, spreads and paired differences over seeds, as pure functions."""

import math
import statistics
from collections.abc import Sequence

import numpy as np
from scipy import stats  # type: ignore[import-untyped]

from gradherd.lab.report.model import Difference, Spread

MOST_FLIPPED = 20
"""Exact sign-flip tests look at 2**seeds cases; above this many seeds they are left out."""


def number(value: float | None) -> float | None:
    """Return a finite number, or None for what is none."""
    return None if value is None or not math.isfinite(value) else float(value)


def spread(values: Sequence[float | None]) -> Spread:
    """Return mean and sample standard deviation.

    One value that is not finite makes the mean None: leaving out runs that diverged would make
    an arm look better than it is.

    >>> spread([1.0, 2.0, 3.0])
    Spread(mean=2.0, std=1.0)
    >>> spread([1.0, None])
    Spread(mean=None, std=None)
    """
    known = [value for value in map(number, values) if value is not None]
    if not known or len(known) < len(values):
        return Spread(mean=None, std=None)
    std = statistics.stdev(known) if len(known) > 1 else 0.0
    return Spread(mean=statistics.fmean(known), std=std)


def difference(
    arm: Sequence[float | None],
    reference: Sequence[float | None],
    seeds: Sequence[int],
    *,
    epoch: int | None = None,
) -> Difference | None:
    """Compare two arms seed by seed, arm minus reference.

    Args:
        arm: one value for each seed.
        reference: the other arm's, in the same order.
        seeds: the seeds.
        epoch: after which epoch they were read, if not after the last one.

    Returns:
        None with fewer than two seeds, or if a value is not finite.

    >>> difference([1.0, 2.0, 3.5], [0.0, 1.5, 2.0], [0, 1, 2]).mean
    1.0
    """
    pairs = [(number(a), number(b)) for a, b in zip(arm, reference, strict=True)]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    if len(known) < 2 or len(known) < len(pairs):
        return None
    deltas = [a - b for a, b in known]
    mean = statistics.fmean(deltas)
    low, high, p = _t_test(deltas, size=max(max(abs(a), abs(b)) for a, b in known))
    return Difference(
        mean=mean,
        seeds=tuple(seeds),
        epoch=epoch,
        low=low,
        high=high,
        p=p,
        sign_flip_p=sign_flip_p(deltas),
    )


def _t_test(
    deltas: Sequence[float], *, size: float
) -> tuple[float | None, float | None, float | None]:
    """Return the 95 % t interval of the mean and the two-sided p of "the mean is zero".

    Differences that are all equal have no spread to build an interval from: if they are zero, so
    is everything, otherwise nothing can be said.
    """
    mean, error = statistics.fmean(deltas), statistics.stdev(deltas) / math.sqrt(len(deltas))
    if not any(deltas):
        return 0.0, 0.0, 1.0
    if error <= 1e-14 * size:  # Below this it is rounding, not spread.
        return None, None, None
    freedom = len(deltas) - 1
    reach = float(stats.t.ppf(0.975, freedom)) * error
    return mean - reach, mean + reach, float(2 * stats.t.sf(abs(mean) / error, freedom))


def sign_flip_p(deltas: Sequence[float]) -> float | None:
    """Return the share of all sign patterns whose sum is at least as far from zero.

    If an arm changes nothing, each difference could as well have had the other sign: no other
    assumption is needed. With 3 seeds the smallest possible value is 0.25.

    >>> sign_flip_p([1.0, 2.0, 3.0])
    0.25
    """
    if len(deltas) > MOST_FLIPPED:
        return None
    sums = np.zeros(1)
    for delta in deltas:
        sums = np.concatenate([sums + delta, sums - delta])
    # Sums of the same terms in another order differ in their last bits.
    slack = 1e-12 * float(np.abs(deltas).sum())
    return float(np.mean(np.abs(sums) >= abs(math.fsum(deltas)) - slack))
