"""The one rule by which a difference counts as shown: on pages, in claims, in the README.

A difference over seeds is shown if all of these hold:

- it rests on at least three seeds, paired: with two, the interval rests on a single degree of
  freedom;
- its 95 % interval excludes zero;
- its p value stays below 5 % after Holm's correction for all tests of its family.

A family is everything that is tested together: the losses and metrics of all pairs of arms in a
comparison, pairs with the control arm included; or all claims of a study.
"""

from collections.abc import Iterable
from typing import Literal

from gradherd.lab.report.stats import PairedDifference, holm

MIN_SEEDS = 3
"""Fewer seeds show no difference."""
LEVEL = 0.05
"""Corrected p values below this count."""
Finding = Literal["higher", "lower", "open", "few"]
"""What a difference shows: few is for want of seeds."""


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
