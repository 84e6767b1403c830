"""Compare the arms of one task: which arm is compared with which, and by how much they differ.

The first arm is the baseline. Runs are paired by seed: differences are taken over the seeds that
both arms have.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradherd.lab.report.arms import (
    ArmSummary,
    NamedRuns,
    check_unique,
    group_by_arm,
    late_epochs,
    summarize_arms,
    values_over,
)
from gradherd.lab.report.provenance import caveats
from gradherd.lab.report.stats import PairedDifference, paired_difference
from gradherd.lab.text import printable
from gradherd.lab.train.record import RunRecord

QUESTIONS = {
    "order": "Does a better order need fewer epochs?",
    "sparsify": "Does sending less cost accuracy?",
    "both": "What do order and sparsifier change together?",
    "arms": "How does each arm compare with the first?",
}
_ROUNDING = 1e-6
"""Relative difference that float32 losses may have from rounding alone."""


@dataclass(frozen=True, kw_only=True)
class ArmPair:
    """An arm and the arm it is compared with."""

    arm: ArmSummary
    reference: ArmSummary
    epochs_to: int | None
    """First epoch whose mean loss is at or below the reference's final mean; None if never."""
    reference_epochs_to: int | None
    """The same for the reference itself: its last epoch, or an earlier one if it got worse."""
    epochs_to_by_seed: tuple[int | None, ...]
    """The same for each single run of the arm."""
    seconds_to: float | None
    """Seconds up to the end of that epoch, mean over seeds."""
    bytes_to: float | None
    """Bytes up to the end of that epoch, mean over seeds."""
    loss: PairedDifference | None
    """Of final losses; None with fewer than two common seeds, or if one is not finite."""
    late_loss: PairedDifference | None
    """Of mean losses over the last half of the epochs that both arms have; None with fewer than
    4 epochs or two common seeds, or if one of these losses is not finite."""
    metric: PairedDifference | None
    """Of final metrics."""
    bytes_ratio: float | None
    """Bytes of the arm / of the reference, both up to their last common epoch."""
    seconds_ratio: float | None

    @property
    def common_seeds(self) -> tuple[int, ...]:
        """Seeds that both arms have, in the arm's order."""
        return tuple(seed for seed in self.arm.seeds if seed in self.reference.seeds)

    @property
    def same_clock(self) -> bool:
        """Whether seconds of both arms can be compared: real workers on the same hardware."""
        runs = [*self.arm.used, *self.reference.used]
        # Virtual workers take turns in one process: their seconds are not those of real workers.
        alike = all(run.hardware == runs[0].hardware for run in runs)
        return alike and not any(run.config.get("virtual") is True for run in runs)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All arms of one task."""

    task: str
    description: str
    metric_name: str
    higher_is_better: bool
    arms: tuple[ArmSummary, ...]
    """The first one is the baseline."""
    pairs: tuple[ArmPair, ...]
    """Each arm with the baseline, the baseline with itself."""
    questions: Mapping[str, Sequence[ArmPair]]
    """What the arms answer, one of `QUESTIONS`: the pairs that do."""
    notes: tuple[str, ...]
    """What a reader has to know before trusting the figures."""

    @property
    def baseline(self) -> ArmSummary:
        """The first arm."""
        return self.arms[0]


def compare(records: Sequence[RunRecord]) -> Comparison:
    """Compare the runs of one task, paired by seed; the arm of the first one is the baseline.

    Raises:
        ValueError: There is no record, tasks or metrics differ, or a seed occurs twice in an arm.
    """
    _check_comparable(records)
    arms = summarize_arms(group_by_arm(records))
    return _comparison(arms, _questions(arms), caveats(arms))


def compare_named(groups: NamedRuns) -> Comparison:
    """Compare arms that a study names, which may differ in any setting; the first is the baseline.

    Raises:
        ValueError: As `compare`.
    """
    for _, runs in groups:
        _check_comparable(runs)
    arms = summarize_arms(groups)
    pairs = [compare_pair(arm, arms[0]) for arm in arms[1:]]
    return _comparison(arms, {"arms": pairs} if pairs else {}, caveats(arms, same_settings=False))


def _comparison(
    arms: tuple[ArmSummary, ...],
    questions: Mapping[str, Sequence[ArmPair]],
    notes: tuple[str, ...],
) -> Comparison:
    first = arms[0].runs[0]
    return Comparison(
        task=printable(first.task, 200),
        description=printable(first.description, 200),
        metric_name=printable(first.metric_name, 60),
        higher_is_better=first.higher_is_better,
        arms=arms,
        pairs=tuple(compare_pair(arm, arms[0]) for arm in arms),
        questions=questions,
        notes=notes,
    )


def compare_all(records: Sequence[RunRecord]) -> list[Comparison]:
    """Compare the runs of each task, tasks in order of first appearance; see `compare`."""
    if not records:
        raise ValueError("there is no record to compare")
    by_task: dict[str, list[RunRecord]] = {}
    for record in records:
        # A dict keeps the order of first appearance, which the page follows.
        by_task.setdefault(record.task, []).append(record)
    return [compare(group) for group in by_task.values()]


def _check_comparable(records: Sequence[RunRecord]) -> None:
    if not records:
        raise ValueError("there is no record to compare")
    for field in ("task", "metric_name", "higher_is_better"):
        values = dict.fromkeys(getattr(record, field) for record in records)
        if len(values) > 1:
            expected, value, *_ = map(printable, values)
            raise ValueError(
                f"records of one comparison must share their {field}, got {expected!r} and "
                f"{value!r}; compare them separately"
            )
    check_unique(records)


def _questions(arms: Sequence[ArmSummary]) -> dict[str, list[ArmPair]]:
    """Return the questions these arms answer; paired arms differ in one thing where possible."""
    base, pairs = arms[0], dict[str, list[ArmPair]](order=[], sparsify=[], both=[])
    for position, arm in enumerate(arms):
        # The first arm with the rest equal, since a difference then has one possible cause.
        same_exchange = (one for one in arms[:position] if one.key[1:] == arm.key[1:])
        same_order = (one for one in arms[:position] if one.order == arm.order)
        for kind, references in (("order", same_exchange), ("sparsify", same_order)):
            pairs[kind] += [compare_pair(arm, one) for one in itertools.islice(references, 1)]
        if arm.order != base.order and arm.key[1:] != base.key[1:]:
            pairs["both"].append(compare_pair(arm, base))
    return {kind: some for kind, some in pairs.items() if some}


def compare_pair(arm: ArmSummary, reference: ArmSummary) -> ArmPair:
    """Compare an arm with a reference, which may be itself, over the seeds that both have."""
    # One goal for all seeds: a single run of the reference may end unusually high or low.
    goal = reference.final_loss.mean
    reached = first_at_or_below([point.mean for point in arm.loss_by_epoch], goal)
    # An arm that was cut short is compared after the epochs that both have.
    finished = arm.finished and reference.finished
    ends = (arm.epochs, reference.epochs) if finished else (min(arm.epochs, reference.epochs),) * 2
    return ArmPair(
        arm=arm,
        reference=reference,
        # A loss that oscillates may reach its final value before the last epoch. Counting all
        # epochs of the reference would then overstate how much earlier the arm gets there.
        reference_epochs_to=first_at_or_below(
            [point.mean for point in reference.loss_by_epoch], goal
        ),
        epochs_to=reached,
        epochs_to_by_seed=tuple(
            first_at_or_below([row.train_loss for row in run.epochs[: arm.epochs]], goal)
            for run in arm.used
        ),
        seconds_to=arm.seconds_by_epoch[reached - 1] if reached else None,
        bytes_to=arm.bytes_by_epoch[reached - 1] if reached else None,
        loss=_difference(arm, reference, "train_loss", *([end] for end in ends)),
        # The same epochs of both: the last half of a longer run is another part of training.
        late_loss=_difference(arm, reference, "train_loss", *[late_epochs(min(ends))] * 2),
        metric=_difference(arm, reference, "metric", *([end] for end in ends)),
        bytes_ratio=_ratio(arm.bytes_by_epoch, reference.bytes_by_epoch, ends),
        seconds_ratio=_ratio(arm.seconds_by_epoch, reference.seconds_by_epoch, ends),
    )


def first_at_or_below(values: Sequence[float | None], goal: float | None) -> int | None:
    """Return the first epoch, counted from 1, whose value is at or below the goal.

    >>> first_at_or_below([3.0, None, 1.0], 1.0), first_at_or_below([0.1 + 1.49e-8], 0.1)
    (3, 1)
    """
    if goal is None:
        return None
    # Losses are float32: what differs by a rounding error is the same.
    goal += _ROUNDING * abs(goal)
    return next(
        (e for e, value in enumerate(values, 1) if value is not None and value <= goal), None
    )


def _difference(
    arm: ArmSummary,
    reference: ArmSummary,
    field: str,
    own_epochs: Sequence[int],
    other_epochs: Sequence[int],
) -> PairedDifference | None:
    """Compare the means of a field over these epochs."""
    # An arm minus itself is zero for every seed, which is no result.
    if arm is reference or not own_epochs or not (own_epochs[-1] and other_epochs[-1]):
        return None
    # Seeds that only one arm has say nothing about the difference between the two.
    partners = {run.seed: run for run in reference.used}
    runs = [run for run in arm.used if run.seed in partners]
    at_end = (own_epochs[-1], other_epochs[-1]) == (arm.epochs, reference.epochs)
    finished = arm.finished and reference.finished and at_end
    return paired_difference(
        values_over(runs, own_epochs, field),
        values_over([partners[run.seed] for run in runs], other_epochs, field),
        [run.seed for run in runs],
        epoch=None if finished else own_epochs[-1],
    )


def _ratio(arm: Sequence[float], reference: Sequence[float], ends: tuple[int, int]) -> float | None:
    if not min(ends) or not reference[ends[1] - 1]:
        return None
    return arm[ends[0] - 1] / reference[ends[1] - 1]
