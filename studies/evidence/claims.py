"""What is measured of the runs of a study, and whether that confirms its claims.

Training runs have the measures of `MEASURES`; all other runs have the entries of their summary.
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

from gradherd.lab.report.arms import late_epochs, values_over
from gradherd.lab.report.comparison import first_at_or_below
from gradherd.lab.report.stats import (
    MIN_SEEDS,
    Family,
    PairedDifference,
    mean_std,
    paired_difference,
)
from gradherd.lab.study.results import RunResult
from gradherd.lab.study.run import current_results
from gradherd.lab.text import check_known, counted, in_bytes, mean_and_std, p_value
from gradherd.lab.train.record import RunRecord, finite
from studies.evidence.file import PAIRED, Claim, PageStudy

CONFIRMED, WEAKER, NOT_CONFIRMED = "confirmed", "weaker", "not confirmed"
FEW_SEEDS = "not enough seeds"
BySeed = Mapping[int, float | None]
"""A value per seed; None where a run has none, for example because it diverged."""
EPOCH_FIELDS = ("train_loss", "metric", "herding_bound", "padding", "residual_norm", "density")
"""Measures that training runs have after each epoch."""
# Over all epochs: what a training took is what counts, not what its last epoch took.
_SUMS = ("bytes", "ordering_bytes", "seconds")
MEASURES = (*EPOCH_FIELDS, *(f"late_{one}" for one in EPOCH_FIELDS), *_SUMS, "density_off", *PAIRED)
"""All measures of training runs."""
ALWAYS = ("train_loss", "late_train_loss", "metric", "late_metric", *PAIRED)
"""Measures that every run has unless it diverged or missed the goal: missing ones count against
a claim."""
_HIGHER_IS_BETTER = ("steps_per_second",)
"""Entries of summaries of which more is better; of all others, less is."""


@dataclass(frozen=True)
class Measurement:
    """A measure of an arm, and of the reference arm if there is one."""

    arm: BySeed
    against: BySeed | None
    higher_is_better: bool
    in_percent: bool = False
    """Whether the values are percentages, whose differences are points."""

    def change(self, value: float | None, reference: float | None) -> float | None:
        """Return the change from a reference as a share, or in points; None if one is missing."""
        if value is None or reference is None:
            return None
        return relative_change(value, reference, self.in_percent)

    @property
    def available(self) -> bool:
        """Whether both arms have a value at all; expensive measures may be switched off."""
        arms = (self.arm, {0: 0.0} if self.against is None else self.against)
        return all(any(value is not None for value in arm.values()) for arm in arms)


def check_measures(study: PageStudy) -> None:
    """Raise ValueError if a claim of a study that trains needs a measure that no run has.

    Before any run: a misspelt measure must not surface after hours of training. Runs of other
    studies name their measures themselves, so theirs are checked when results are read.
    """
    for claim in study.claims if study.kind == "compare" else ():
        check_known(f"measure of claim {claim.id}", claim.measure, MEASURES)


def measure(
    name: str, epoch: int | None, arm: Sequence[RunResult], against: Sequence[RunResult] | None
) -> Measurement:
    """Return a measure per seed, of an arm and of the reference arm if there is one.

    Of a training it is one of `MEASURES`, after an epoch or, with None, after the last one; of any
    other run it is an entry of its summary.

    Raises:
        ValueError: There is no such measure, or it needs a reference arm.
    """
    # Only training runs are stored as columns over epochs; all others have a summary.
    if "summary" in arm[0].figures:
        own, other = _from_summary(name, arm), against and _from_summary(name, against)
        higher = name.rpartition(".")[2] in _HIGHER_IS_BETTER
        return Measurement(own, other or None, higher)
    runs, others = [one.record() for one in arm], [one.record() for one in against or ()]
    if name in PAIRED and not others:
        raise ValueError(f"{name} needs an arm to compare with")
    if name == "epochs_to_final":
        return Measurement(epochs_to_final(runs, others), epochs_to_final(others, others), False)
    if name == "epochs_share":
        # It already divides by the partner's own epochs, so the reference is always 1.
        shares = epochs_share(runs, others)
        return Measurement(shares, dict.fromkeys(shares, 1.0), False)
    return Measurement(
        measure_runs(name, epoch, runs),
        measure_runs(name, epoch, others) if others else None,
        name in ("metric", "late_metric") and runs[0].higher_is_better,
        in_percent(name, runs[0].metric_name),
    )


def in_percent(name: str, metric: str) -> bool:
    """Return whether a measure is a metric in percent."""
    return name in ("metric", "late_metric") and "%" in metric


def relative_change(value: float, reference: float, in_percent: bool = False) -> float | None:
    """Return the change relative to a reference; None if the reference alone is zero.

    Percentages differ by points: the change is then the difference divided by 100.

    >>> relative_change(3.0, 2.0), relative_change(62.0, 60.0, in_percent=True)
    (0.5, 0.02)
    >>> relative_change(1.0, 0.0)
    """
    # A gain from 10 % to 11 % accuracy is one point; calling it 10 % would mislead.
    if in_percent:
        return (value - reference) / 100
    if reference:
        return value / reference - 1
    return 0.0 if value == reference else None


def measure_runs(
    name: str, epoch: int | None, runs: Sequence[RunRecord]
) -> dict[int, float | None]:
    """Return a measure of training runs by seed, after an epoch or, with None, after the last one.

    `late_...` is the mean over the last half of the epochs, `bytes` and the like are sums.
    """
    # Of the longest run: one that diverged early has no value there, and that counts.
    end = max(len(run.epochs) for run in runs) if epoch is None else epoch
    if name in _SUMS:
        return {run.seed: sum(getattr(row, name) for row in run.epochs[:end]) for run in runs}
    if name == "density_off":  # The largest error: those above and below must not cancel out.
        return {
            run.seed: max(abs(row.density / run.density - 1) for row in run.epochs[:end])
            if run.density is not None
            else None
            for run in runs
        }
    check_known("measure", name, MEASURES)
    # Runs of fewer than four epochs have no late half: their last epoch stands in.
    epochs = (late_epochs(end) or [end]) if name.startswith("late_") else [end]
    values = values_over(runs, epochs, name.removeprefix("late_"))
    return dict(zip((run.seed for run in runs), values, strict=True))


def epochs_share(runs: Sequence[RunRecord], others: Sequence[RunRecord]) -> dict[int, float | None]:
    """Return when each run reaches its partner's best loss, relative to the partner's own epochs.

    The partner is the run of the other arm with the same seed.
    """
    # The best loss, because the final one of an oscillating run may be easier to reach. A partner
    # that diverged sets no goal, however low its loss was before.
    goals: dict[int, float | None] = {}
    for run in others:
        losses = [row.train_loss for row in run.epochs]
        known = [loss for loss in losses if loss is not None]
        goals[run.seed] = min(known) if known and len(known) == len(losses) else None
    reached, own = (_epochs_to(some, goals) for some in (runs, others))
    return {s: at / it if at and (it := own[s]) else None for s, at in reached.items()}


def epochs_to_final(
    runs: Sequence[RunRecord], others: Sequence[RunRecord]
) -> dict[int, float | None]:
    """Return the first epoch at which each run is at or below its partner's final loss."""
    goals = {run.seed: run.epochs[-1].train_loss if run.epochs else None for run in others}
    return dict(_epochs_to(runs, goals))


def _epochs_to(
    runs: Sequence[RunRecord], goals: Mapping[int, float | None]
) -> dict[int, int | None]:
    """Return when each run reaches its goal, by seed: runs of one seed share their initial weights.

    None for a run that never does, or that has none; runs without partner are left out.
    """
    return {
        run.seed: first_at_or_below([row.train_loss for row in run.epochs], goals[run.seed])
        for run in runs
        if run.seed in goals
    }


def _from_summary(name: str, results: Sequence[RunResult]) -> dict[int, float | None]:
    for one in results:
        check_known("measure", name, one.figures["summary"])
    # A figure that is not finite counts as none: no mean may hide it.
    return {one.seed: finite(one.figures["summary"][name]) for one in results}


@dataclass(frozen=True)
class ClaimVerdict:
    """What the results say about a claim."""

    claim: Claim
    measured: Measurement
    effects: Mapping[int, float | None]
    """By seed; None if the run diverged or never reached the goal."""
    test: PairedDifference | None
    """Of the mean effect against zero; None if an effect is missing."""
    paper: float | None
    """The effect that the paper reports, if it gives numbers."""
    corrected_p: float | None
    """Of the test, among all claims of the study; None without one."""
    tests: int
    """Number of claims that it was corrected for."""
    shown: bool
    """Whether the effect is shown: by the test, or because it is no matter of chance."""

    @property
    def verdict(self) -> str:
        """Confirmed, weaker, not confirmed or not enough seeds."""
        if len(self.effects) < MIN_SEEDS:
            return FEW_SEEDS
        # One missing effect decides: leaving it out would favour the arm that diverges.
        if self.test is None or self.test.mean <= 0:
            return NOT_CONFIRMED
        # The right direction is not enough where the paper also says how much.
        if self.shown and (self.paper is None or self.test.mean >= self.paper / 2):
            return CONFIRMED
        agree = all(effect is not None and effect > 0 for effect in self.effects.values())
        return WEAKER if self.shown or agree else NOT_CONFIRMED

    @property
    def ours(self) -> str:
        """Our figures in words: both means, the corrected p value, and seeds."""
        claim, seeds = self.claim, list(self.effects)
        both = [values for values in (self.measured.arm, self.measured.against) if values]
        means = " against ".join(mean_text(claim, values, seeds) for values in both)
        p = "" if self.corrected_p is None else f"; corrected {p_value(self.corrected_p)}"
        return f"{claim.measure}: {means}{p}; {counted(len(seeds), 'seed')}"


def judge_claims(
    claims: Sequence[Claim], results: Mapping[str, Sequence[RunResult]]
) -> list[ClaimVerdict]:
    """Judge the claims of a study, which are one family of tests, by runs of its arms.

    Claims that have not been measured, because an arm or an epoch is missing, are left out.
    """
    found = [(claim, *both) for claim in claims if (both := _measured(claim, results)) is not None]
    tests = [against_zero(list(effects.values())) for _, _, effects in found]
    family = Family(tests)
    return [_verdict(*one, test, family) for one, test in zip(found, tests, strict=True)]


def _verdict(
    claim: Claim,
    measured: Measurement,
    effects: Mapping[int, float | None],
    test: PairedDifference | None,
    family: Family,
) -> ClaimVerdict:
    paper = paper_effect(claim, measured.in_percent, measured.higher_is_better)
    p = None if test is None else family.corrected_p(test)
    # Equal in every seed is no chance if it is counted, or if arms do not differ at all. Accuracies
    # are multiples of one example: three equal ones may be luck.
    exact = measured.against == measured.arm or claim.measure not in ALWAYS
    shown = test is not None and ((test.p is None and exact) or family.finds(test) == "higher")
    return ClaimVerdict(claim, measured, effects, test, paper, p, family.size, shown)


def judge_study(
    study: PageStudy, folder: Path
) -> tuple[dict[str, list[RunResult]], list[ClaimVerdict]]:
    """Return the results of a study by arm, and the verdicts on the claims that they settle.

    Raises:
        ValueError: A file of results is damaged.
    """
    results = current_results(study, folder)
    return results, judge_claims(study.claims, results)


def _measured(
    claim: Claim, results: Mapping[str, Sequence[RunResult]]
) -> tuple[Measurement, dict[int, float | None]] | None:
    """Return what the results say about a claim, and its effects; None if they cannot settle it."""
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
    return measured, effects


def against_zero(values: Sequence[float | None]) -> PairedDifference | None:
    """Return the test of a mean against zero; None with a single value, or if one is missing."""
    # A paired test against zeros is the test of a single sample.
    return paired_difference(values, [0.0] * len(values), range(len(values)))


def effects_by_seed(claim: Claim, measured: Measurement) -> dict[int, float | None]:
    """Return the effect of each seed that both arms have, by the table above."""
    bounded = claim.test in ("at-most", "at-least")
    effects: dict[int, float | None] = {}
    # Paired by seed: both runs start from the same weights, so what the seed decides cancels out.
    for seed, value in measured.arm.items():
        if measured.against is None or seed in measured.against:
            fixed = bounded or measured.against is None
            reference = claim.value if fixed else (measured.against or {})[seed]
            # A share, not a difference: the paper's losses and bytes have another scale than ours.
            change = measured.change(value, reference)
            higher = measured.higher_is_better
            effects[seed] = None if change is None else _effect(claim, change, higher)
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
