"""Decide whether a claim is confirmed, by one rule for all of them.

Every claim becomes an *effect* per seed, a share that is positive if the claim holds there:

- less:      1 - arm / against          - greater:   arm / against - 1
- at-most:   1 - arm / value            - at-least:  arm / value - 1
- no-worse:  value - (share by which the arm is worse than against)

For percentages, such as accuracies, the difference in points counts instead of the share.

The effects of all claims of a study are one family of tests; `stats` says which of them are shown.
What is counted, such as bytes, needs no test if it is the same in every seed. Then a claim is

- **confirmed** if its effect is shown, and is at least half of the paper's, if the paper has one;
- **weaker** if only one of the two holds, or if every single seed agrees;
- **not confirmed** otherwise; also if a run diverged or never reached the goal;
- without a verdict for want of seeds: **not enough seeds**.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gradherd.lab.report.measures import ALWAYS, BySeed, Measurement, measure, relative_change
from gradherd.lab.report.stats import (
    MIN_SEEDS,
    Family,
    PairedDifference,
    mean_std,
    paired_difference,
)
from gradherd.lab.study.file import PAIRED, Arm, Claim, Study
from gradherd.lab.study.results import RunResult, read_arms, same_settings
from gradherd.lab.text import counted, in_bytes, mean_and_std, p_value

CONFIRMED, WEAKER, NOT_CONFIRMED = "confirmed", "weaker", "not confirmed"
FEW_SEEDS = "not enough seeds"


@dataclass(frozen=True)
class MeasuredClaim:
    """A claim that the results can settle, with its effects."""

    claim: Claim
    measured: Measurement
    effects: Mapping[int, float | None]
    """By seed; None if the run diverged or never reached the goal."""

    @property
    def test(self) -> PairedDifference | None:
        """The test of the mean effect against zero; None if an effect is missing."""
        return against_zero(list(self.effects.values()))

    @property
    def is_certain(self) -> bool:
        """Whether the effect is no matter of chance: counted, or none, and equal in every seed."""
        test = self.test
        if test is None or test.p is not None:
            return False
        # Accuracies are multiples of one example: three equal ones may be luck.
        same = self.measured.against == self.measured.arm
        return same or self.claim.measure not in ALWAYS

    @property
    def paper(self) -> float | None:
        """The effect that the paper reports, if it gives numbers."""
        return paper_effect(self.claim, self.measured.in_percent, self.measured.higher_is_better)


@dataclass(frozen=True)
class ClaimVerdict:
    """What the results say about a claim."""

    claim: Claim
    verdict: str
    """confirmed, weaker, not confirmed or not enough seeds."""
    ours: str
    """Our figures in words: both means, the corrected p value, and seeds."""
    basis: MeasuredClaim
    corrected_p: float | None
    """Of the effect, among all claims of the study; None without a test."""
    tests: int
    """Number of claims that it was corrected for."""


def judge_claims(
    claims: Sequence[Claim], results: Mapping[str, Sequence[RunResult]]
) -> list[ClaimVerdict]:
    """Judge the claims of a study, which are one family of tests, by runs of its arms.

    Claims that have not been measured, because an arm or an epoch is missing, are left out.
    """
    found = [one for claim in claims if (one := _measured(claim, results)) is not None]
    family = Family(one.test for one in found)
    return [_judge(one, family) for one in found]


def judge_study(
    study: Study, folder: Path
) -> tuple[dict[str, list[RunResult]], list[ClaimVerdict]]:
    """Return the results of a study by arm, and the verdicts on the claims that they settle.

    Raises:
        ValueError: A file of results is damaged.
    """
    stored = read_arms(folder, [arm.name for arm in study.arms])
    # Results of earlier settings stay on disk until the arm runs again; they say nothing about the
    # arm as the file defines it now.
    current = {
        arm.name: [one for one in stored[arm.name] if is_current(study, arm, one)]
        for arm in study.arms
        if arm.name in stored
    }
    results = {name: runs for name, runs in current.items() if runs}
    return results, judge_claims(study.claims, results)


def is_current(study: Study, arm: Arm, result: RunResult) -> bool:
    """Return whether a result has the settings in the study file, which may have changed since."""
    from gradherd.lab.study.kinds import kind_of  # late: it imports torch

    settings = kind_of(study).settings(study, arm.settings)
    return same_settings(result.settings, settings) and result.seed in study.seeds


def _measured(claim: Claim, results: Mapping[str, Sequence[RunResult]]) -> MeasuredClaim | None:
    arm = results.get(claim.arm)
    against = results.get(claim.against) if claim.against is not None else None
    if not arm or (claim.against is not None and not against):
        return None
    # Not measured, rather than not confirmed: the claim is about an epoch that was never run.
    if any(_too_short(one, claim.epoch) for one in [*arm, *(against or ())]):
        return None
    measured = measure(claim.measure, claim.epoch, arm, against)
    effects = effects_by_seed(claim, measured)
    # A measure that was switched off says nothing; a loss that is missing counts against the claim.
    if not effects or not (measured.available or claim.measure in ALWAYS):
        return None
    return MeasuredClaim(claim, measured, effects)


def _judge(one: MeasuredClaim, family: Family) -> ClaimVerdict:
    test, seeds = one.test, list(one.effects)
    corrected = None if test is None else family.corrected_p(test)
    both = [values for values in (one.measured.arm, one.measured.against) if values is not None]
    ours = f"{one.claim.measure}: {' against '.join(mean_text(one.claim, v, seeds) for v in both)}"
    if corrected is not None:
        ours += f"; corrected {p_value(corrected)}"
    ours += f"; {counted(len(seeds), 'seed')}"
    return ClaimVerdict(one.claim, _verdict_of(one, family), ours, one, corrected, family.size)


def _verdict_of(one: MeasuredClaim, family: Family) -> str:
    if len(one.effects) < MIN_SEEDS:
        return FEW_SEEDS
    test = one.test
    # One missing effect decides: leaving it out would favour the arm that diverges.
    if test is None or test.mean <= 0:
        return NOT_CONFIRMED
    shown = one.is_certain or family.finds(test) == "higher"
    # The right direction is not enough where the paper also says how much.
    if shown and (one.paper is None or test.mean >= one.paper / 2):
        return CONFIRMED
    agree = all(effect is not None and effect > 0 for effect in one.effects.values())
    return WEAKER if shown or agree else NOT_CONFIRMED


def against_zero(values: Sequence[float | None]) -> PairedDifference | None:
    """Return the test of a mean against zero; None with a single value, or if one is missing."""
    # A paired test against zeros is the test of a single sample.
    return paired_difference(values, [0.0] * len(values), range(len(values)))


def effects_by_seed(claim: Claim, measured: Measurement) -> dict[int, float | None]:
    """Return the effect of each seed that both arms have, by the table above."""
    # Paired by seed: both runs start from the same weights, so what the seed decides cancels out.
    seeds = [s for s in measured.arm if measured.against is None or s in measured.against]
    bounded = claim.test in ("at-most", "at-least")
    effects: dict[int, float | None] = {}
    for seed in seeds:
        reference = claim.value if bounded or measured.against is None else measured.against[seed]
        # A share, not a difference: the paper's losses and bytes have another scale than ours.
        change = measured.change(measured.arm[seed], reference)
        effects[seed] = (
            None if change is None else _effect(claim, change, measured.higher_is_better)
        )
    return effects


def _effect(claim: Claim, change: float, higher_is_better: bool) -> float:
    if claim.test == "no-worse":
        assert claim.value is not None
        return claim.value + (change if higher_is_better else -change)
    return -change if claim.test in ("less", "at-most") else change


def paper_effect(
    claim: Claim, in_percent: bool = False, higher_is_better: bool = False
) -> float | None:
    """Return the paper's effect; None if it gives no numbers.

    >>> claim = Claim(id="a", text="", source="", paper="9 of 36", paper_values=(9, 36),
    ...               measure="epochs_share", test="less", arm="a", against="b")
    >>> paper_effect(claim)
    0.75
    """
    if claim.paper_values is None:
        return None
    change = relative_change(*claim.paper_values, in_percent)
    return None if change is None else _effect(claim, change, higher_is_better)


def _too_short(result: RunResult, epoch: int | None) -> bool:
    """Return whether a run that has not diverged has fewer epochs than the claim reads."""
    # Without an epoch a claim is about the end, which a stopped run has not seen.
    wanted, epochs = epoch or result.settings.get("epochs"), result.figures.get("epochs")
    short = wanted is not None and epochs is not None and epochs < wanted
    return short and result.status != "diverged"


def mean_text(claim: Claim, values: BySeed, seeds: Sequence[int]) -> str:
    """Return the mean of a claim's measure over seeds, in words."""
    found = mean_std([values[seed] for seed in seeds])
    # No mean of the rest: it would hide the runs that failed.
    if found.mean is None:
        missing = "not reached" if claim.measure in PAIRED else "not finite"
        count = sum(values[seed] is None for seed in seeds)
        return f"{missing} in {count} of {counted(len(seeds), 'run')}"
    if claim.measure.endswith("bytes"):
        return in_bytes(found.mean)
    return mean_and_std(found.mean, found.std, len(seeds))
