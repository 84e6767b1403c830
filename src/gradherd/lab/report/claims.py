"""Decide whether a claim is confirmed, by one rule for all of them.

Every claim becomes an *effect* per seed, a share that is positive if the claim holds there:

- less:      1 - arm / against          - greater:   arm / against - 1
- at-most:   1 - arm / value            - at-least:  arm / value - 1
- no-worse:  value - (share by which the arm is worse than against)

For percentages, such as accuracies, the difference in points counts instead of the share.

The effects of all claims of a study are one family of tests; `rule` says which of them are shown.
What is counted, such as bytes, needs no test if it is the same in every seed. Then a claim is

- **confirmed** if its effect is shown, and is at least half of the paper's, if the paper has one;
- **weaker** if only one of the two holds, or if every single seed agrees;
- **not confirmed** otherwise; also if a run diverged or never reached the goal;
- without a verdict for want of seeds: **not enough seeds**.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gradherd.lab.report.measures import ALWAYS, BySeed, Measurement, measure, relative_change
from gradherd.lab.report.rule import MIN_SEEDS, Family
from gradherd.lab.report.stats import PairedDifference, mean_std, paired_difference
from gradherd.lab.study.file import PAIRED, Arm, Claim, Study
from gradherd.lab.study.results import RunResult, read_arms, same_settings
from gradherd.lab.text import (
    counted,
    fixed,
    in_bytes,
    mean_and_std,
    p_value,
    percent,
    significant,
)

CONFIRMED, WEAKER, NOT_CONFIRMED = "confirmed", "weaker", "not confirmed"
FEW_SEEDS = "not enough seeds"


@dataclass(frozen=True)
class MeasuredClaim:
    """A claim that the results can settle, with its effects."""

    claim: Claim
    measured: Measurement
    other_reading: tuple[str, Measurement] | None
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

    @property
    def changes(self) -> list[float]:
        """By how much the arm differs from the reference in each seed; empty if unknown."""
        return changes_of(self.measured, list(self.effects))


@dataclass(frozen=True)
class ClaimVerdict:
    """What the results say about a claim."""

    claim: Claim
    verdict: str
    """confirmed, weaker, not confirmed or not enough seeds."""
    ours: str
    """Our figures, with standard deviations, intervals and seeds."""
    basis: MeasuredClaim
    corrected_p: float | None
    """Of the effect, among all claims of the study; None without a test."""


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
    other = None if against is None else _other_reading(claim, arm, against)
    return MeasuredClaim(claim, measured, other, effects)


def _judge(one: MeasuredClaim, family: Family) -> ClaimVerdict:
    test = one.test
    corrected = None if test is None else family.corrected_p(test)
    ours = _our_figures(one, family.size, corrected)
    return ClaimVerdict(one.claim, _verdict_of(one, family), ours, one, corrected)


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


def _other_reading(
    claim: Claim, arm: Sequence[RunResult], against: Sequence[RunResult]
) -> tuple[str, Measurement] | None:
    """Return the measure at the end for one over the last half, and the other way round.

    Rows show both, so that nobody has to trust our choice between them.
    """
    name, field = claim.measure, claim.measure.removeprefix("late_")
    if field not in ("train_loss", "metric"):
        return None
    if name != field:
        return "after the last epoch alone", measure(field, claim.epoch, arm, against)
    # At an earlier epoch there is no end to compare with.
    last = max(one.figures.get("epochs", 0) for one in arm)
    if claim.epoch not in (None, last):
        return None
    return "over the last half of the epochs", measure(f"late_{field}", None, arm, against)


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


def _our_figures(one: MeasuredClaim, tests: int, corrected: float | None) -> str:
    """Return our figures on a claim in words, over the seeds that both arms have."""
    claim, measured, seeds = one.claim, one.measured, list(one.effects)
    figures = f"{measured.words}: {mean_text(claim, measured.arm, seeds)}"
    if measured.against is not None and claim.measure != "epochs_share":
        figures += f" against {mean_text(claim, measured.against, seeds)}"
    parts = [figures, change_text(one.changes, in_points=measured.in_percent)]
    parts.append(threshold(claim, measured.in_percent))
    if one.other_reading is not None:
        when, other = one.other_reading
        change = change_text(changes_of(other, seeds), in_points=other.in_percent)
        parts.append(f"{when} {change}" if change else "")
    if one.test is not None and corrected is not None:
        told = p_value(one.test.p)
        if p_value(corrected) != told:
            told += f", corrected for {counted(tests, 'claim')} {p_value(corrected)}"
        parts.append(told)
    return "; ".join([*(part for part in parts if part), counted(len(seeds), "seed")])


def changes_of(measured: Measurement, seeds: Sequence[int]) -> list[float]:
    """Return by how much the arm differs in each seed; empty where a value is missing."""
    changes: list[float] = []
    for seed in seeds if measured.against is not None else ():
        change = measured.change(measured.arm[seed], (measured.against or {})[seed])
        # The change over the remaining seeds would look like a result.
        if change is None:
            return []
        changes.append(change)
    return changes


def change_text(changes: Sequence[float], *, in_points: bool = False) -> str:
    """Return a mean change with its interval in words; empty without changes.

    Args:
        changes: A change per seed, as a share.
        in_points: Whether they are differences of percentages.

    >>> change_text([-0.29, -0.3, -0.31]), change_text([4.0])
    ('30 % less (95 % interval 28 % to 32 %)', '5 times as much')
    >>> change_text([-0.02, -0.03], in_points=True)
    '2.5 points less (95 % interval \N{MINUS SIGN}3.9 to 8.9)'
    """
    if not changes:
        return ""
    mean, interval = statistics.fmean(changes), interval_of(changes) or ()
    if mean >= 2 and not in_points:  # Easier to read than "400 % more".
        text, *ends = (significant(1 + one, 3) for one in (mean, *interval))
        text += " times as much"
    else:
        # The interval turns around with the mean, so that its ends agree with the word "less".
        sign = 1 if mean >= 0 else -1
        turned = (sign * mean, *sorted(sign * end for end in interval))
        text, *ends = (_points(one) if in_points else percent(one) for one in turned)
        text += f"{' points' if in_points else ''} {'more' if sign > 0 else 'less'}"
    # Bytes hardly differ from seed to seed.
    return f"{text} (95 % interval {ends[0]} to {ends[1]})" if len(set(ends)) > 1 else text


def _points(share: float) -> str:
    return fixed(100 * share, 1 if abs(share) >= 0.00995 else 2)


def interval_of(changes: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % t interval of the mean; None without variance or with a single value."""
    difference = against_zero(changes)
    if difference is None or difference.low is None or difference.high is None:
        return None
    return difference.low, difference.high


def threshold(claim: Claim, in_percent: bool) -> str:
    """Return the number of the claim that the verdict depends on, if it has one."""
    if claim.value is None:
        return ""
    if claim.test == "no-worse":
        tolerance = f"{_points(claim.value)} points" if in_percent else percent(claim.value)
        return f"up to {tolerance} worse is allowed"
    value = in_bytes if claim.measure.endswith("bytes") else partial(significant, digits=3)
    return f"must be {claim.test.replace('-', ' ')} {value(claim.value)}"


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
