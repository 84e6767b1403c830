"""What is measured of each run of a study, by the names that claims and figures use.

Training runs have the measures below; all other runs have the entries of their summary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradherd.lab.report.arms import late_epochs, values_over
from gradherd.lab.report.comparison import first_at_or_below
from gradherd.lab.report.stats import finite
from gradherd.lab.study.file import PAIRED, Study
from gradherd.lab.study.results import RunResult
from gradherd.lab.text import check_known
from gradherd.lab.train.record import RunRecord

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


def check_measures(study: Study) -> None:
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

    Args:
        name: One of `MEASURES` for training runs, else an entry of their summary.
        epoch: The epoch to read after; None reads after the last one.
        arm: Runs of the arm.
        against: Runs of the reference arm.

    Raises:
        ValueError: There is no such measure, or it needs a reference arm.
    """
    # Only training runs are stored as columns over epochs; all others have a summary.
    if "summary" in arm[0].figures:
        own, other = _from_summary(name, arm), against and _from_summary(name, against)
        higher = name.rpartition(".")[2] in _HIGHER_IS_BETTER
        return Measurement(own, other or None, higher)
    runs, others = [one.record() for one in arm], [one.record() for one in against or ()]
    if name in PAIRED:
        if not others:
            raise ValueError(f"{name} needs an arm to compare with")
        if name == "epochs_to_final":
            reached = epochs_to_final(runs, others)
            return Measurement(reached, epochs_to_final(others, others), False)
        # The share already divides by the partner's own epochs, so the reference is always 1.
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
    seeds = [run.seed for run in runs]
    if name in _SUMS:
        sums = [sum(getattr(row, name) for row in run.epochs[:end]) for run in runs]
        return dict(zip(seeds, sums, strict=True))
    if name == "density_off":
        return {run.seed: _density_off(run, end) for run in runs}
    field = name.removeprefix("late_")
    check_known("measure", name, MEASURES)
    # Runs of fewer than four epochs have no late half: their last epoch stands in.
    epochs = (late_epochs(end) or [end]) if name.startswith("late_") else [end]
    return dict(zip(seeds, values_over(runs, epochs, field), strict=True))


def _density_off(run: RunRecord, end: int) -> float | None:
    """Return the largest relative error of an epoch's density."""
    if run.density is None:
        return None
    # The largest, not the mean: epochs above and below the target must not cancel out.
    return max(abs(row.density / run.density - 1) for row in run.epochs[:end])


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
    values = {}
    for one in results:
        summary = one.figures["summary"]
        check_known("measure", name, summary)
        # A figure that is not finite counts as none: no mean may hide it.
        values[one.seed] = finite(summary[name])
    return values
