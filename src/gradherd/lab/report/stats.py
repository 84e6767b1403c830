"""Means, standard deviations and paired differences over seeds, and which of them are shown.

Differences are paired: runs of two arms with the same seed start from the same weights, so what
the seed decides is in both and cancels out. Unpaired tests would count it as noise.

scipy provides the t distribution. The rest is written out: runs that are not finite and differences
without variance need rules of their own, and sums in a fixed order keep every report equal to the
bit (scipy's tests go through numpy's pairwise sums).

One rule says which differences are shown, on pages and in claims. All of these must hold:

- it rests on at least three seeds, paired: with two, the interval rests on a single degree of
  freedom;
- its 95 % interval excludes zero;
- its p value stays below 5 % after Holm's correction for all tests of its family: the losses and
  metrics of all pairs of arms in a comparison, pairs with the control arm included; or all claims
  of a study.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

# Not scipy.stats, which takes most of a second to import; its t distribution calls these.
from scipy.special import stdtr, stdtrit  # type: ignore[import-untyped]

MIN_SEEDS = 3
"""Fewer seeds show no difference."""
LEVEL = 0.05
"""Corrected p values below this count."""
Finding = Literal["higher", "lower", "open", "few"]
"""What a difference shows: few is for want of seeds."""


@dataclass(frozen=True, kw_only=True)
class MeanStd:
    """Mean and sample standard deviation over seeds."""

    mean: float | None
    """None if there is no run, or if one of them was not finite."""
    std: float | None
    """0.0 for a single seed, which says nothing about the variation; None where the mean is."""


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """Arm minus reference, paired by seed."""

    mean: float
    low: float | None
    """Lower end of the 95 % t interval; None if all differences are equal and not zero."""
    high: float | None
    p: float | None
    """Two-sided p value of the paired t-test; None where the interval is."""
    seeds: tuple[int, ...]
    """Seeds that both arms have; at least two."""
    epoch: int | None
    """Epoch after which both were read; None if each was read after its own last epoch."""

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def mean_std(values: Sequence[float | None]) -> MeanStd:
    """Return mean and sample standard deviation.

    One value that is not finite makes the mean None: leaving out runs that diverged would make
    an arm look better than it is.

    >>> mean_std([1.0, 2.0, 3.0])
    MeanStd(mean=2.0, std=1.0)
    >>> mean_std([1.0, None])
    MeanStd(mean=None, std=None)
    """
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return MeanStd(mean=None, std=None)
    # The sample's (n - 1): a few seeds stand for all that could have been drawn.
    std = statistics.stdev(known) if len(known) > 1 else 0.0
    return MeanStd(mean=statistics.fmean(known), std=std)


def paired_difference(
    arm: Sequence[float | None],
    reference: Sequence[float | None],
    seeds: Sequence[int],
    *,
    epoch: int | None = None,
) -> PairedDifference | None:
    """Compare two arms seed by seed, arm minus reference; both have one value per seed.

    None with fewer than two seeds, or if a value is not finite. `epoch` is the one after which the
    values were read, if not the last one.

    >>> paired_difference([1.0, 2.0, 3.5], [0.0, 1.5, 2.0], [0, 1, 2]).mean
    1.0
    """
    pairs = zip(arm, reference, strict=True)
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    # As in `mean_std`, a run that is not finite may not be dropped silently.
    if len(known) < max(2, len(arm)):
        return None
    deltas = [a - b for a, b in known]
    low, high, p = _t_test(deltas, scale=max(max(abs(a), abs(b)) for a, b in known))
    return PairedDifference(
        mean=statistics.fmean(deltas),
        seeds=tuple(seeds),
        epoch=epoch,
        low=low,
        high=high,
        p=p,
    )


def _t_test(
    deltas: Sequence[float], *, scale: float
) -> tuple[float | None, float | None, float | None]:
    """Return the 95 % t interval of the mean and the two-sided p value of "the mean is zero".

    Differences that are all equal have no variance to build an interval from: if they are all
    zero, so are the ends of the interval, otherwise nothing can be said.
    """
    mean, error = statistics.fmean(deltas), statistics.stdev(deltas) / math.sqrt(len(deltas))
    if not any(deltas):
        return 0.0, 0.0, 1.0
    if error <= 1e-14 * scale:  # Below this it is rounding error, not variance.
        return None, None, None
    freedom = len(deltas) - 1
    # 0.975 leaves 2.5 % on each side. With three seeds t is 4.3: far from the normal 1.96.
    margin = float(stdtrit(freedom, 0.975)) * error
    # The lower tail, not 1 - the upper: the subtraction would round small p values to zero.
    return mean - margin, mean + margin, float(2 * stdtr(freedom, -abs(mean) / error))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values corrected for being several, by Holm's method.

    The chance that any of them falls below 5 % by luck alone is then at most 5 %, however they
    depend on each other.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    corrected, least = list(p_values), 0.0
    by_size = sorted(range(len(p_values)), key=lambda at: p_values[at])
    for rank, at in enumerate(by_size):
        # The smallest counts for all tests, the next for all but one. A larger p value never gets a
        # smaller correction than the one before it.
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[at]))
        corrected[at] = least
    return corrected


class Family:
    """Differences that are tested together, with p values corrected for their number."""

    def __init__(self, differences: Iterable[PairedDifference | None]) -> None:
        # Tests that are not decided, for want of seeds or of variance, cost the others nothing.
        tested = [one for one in differences if one is not None and _is_tested(one)]
        self.size = len(tested)
        corrected = holm([one.p for one in tested if one.p is not None])
        self._corrected = dict(zip(tested, corrected, strict=True))

    def corrected_p(self, difference: PairedDifference) -> float | None:
        """Return the corrected p value; None without one.

        Raises:
            KeyError: The difference is not of this family: its p value would not be corrected.
        """
        return self._corrected[difference] if _is_tested(difference) else None

    def finds(self, difference: PairedDifference) -> Finding:
        """Return what a difference of this family shows."""
        if len(difference.seeds) < MIN_SEEDS:
            return "few"
        p = self.corrected_p(difference)
        if p is None or p >= LEVEL or not difference.excludes_zero:
            return "open"
        return "higher" if difference.mean > 0 else "lower"


def _is_tested(difference: PairedDifference) -> bool:
    return difference.p is not None and len(difference.seeds) >= MIN_SEEDS
