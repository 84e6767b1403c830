"""Compare the arms of one task: which arm is compared with which, and by how much they differ.

The first arm is the baseline. Runs are paired by seed: differences are taken over the seeds that
both arms have.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradherd.lab.report.arms import ArmSummary, arm_key, late_losses, summarize_arms, values_at
from gradherd.lab.report.provenance import caveats
from gradherd.lab.report.stats import PairedDifference, finite, paired_difference
from gradherd.lab.text import printable
from gradherd.lab.train.record import RunRecord

QUESTIONS = {
    "order": "Does a better order need fewer epochs?",
    "sparsify": "Does sending less cost accuracy?",
    "both": "What do order and sparsifier change together?",
}
_ROUNDING = 1e-6
"""Relative difference that float32 losses may have from rounding alone."""
ReadValues = Callable[[Sequence[RunRecord], int], Sequence[float | None]]
"""Returns a value of each run after an epoch."""


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
class Question:
    """A question that some arms of a comparison answer."""

    kind: str
    """order, sparsify, or both."""
    text: str
    pairs: tuple[ArmPair, ...]


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
    questions: tuple[Question, ...]
    notes: tuple[str, ...]
    """What a reader has to know before trusting the figures."""

    @property
    def baseline(self) -> ArmSummary:
        """The first arm."""
        return self.arms[0]

    @property
    def records(self) -> tuple[RunRecord, ...]:
        """All runs of all arms."""
        return tuple(run for arm in self.arms for run in arm.runs)


def compare(records: Sequence[RunRecord]) -> Comparison:
    """Compare the runs of one task, paired by seed; the arm of the first one is the baseline.

    Raises:
        ValueError: There is no record, tasks or metrics differ, or a seed occurs twice in an arm.
    """
    if not records:
        raise ValueError("there is no record to compare")
    first = records[0]
    for record in records:
        _check_same(first, record)
    _check_seeds(records)
    arms = summarize_arms(records)
    return Comparison(
        task=printable(first.task, 200),
        description=printable(first.description, 200),
        metric_name=printable(first.metric_name, 60),
        higher_is_better=first.higher_is_better,
        arms=arms,
        pairs=tuple(compare_pair(arm, arms[0]) for arm in arms),
        questions=_questions(arms),
        notes=caveats(arms),
    )


def compare_all(records: Sequence[RunRecord]) -> list[Comparison]:
    """Compare the runs of each task, tasks in order of first appearance."""
    by_task: dict[str, list[RunRecord]] = {}
    for record in records:
        # A dict keeps the order of first appearance, which the page follows.
        by_task.setdefault(record.task, []).append(record)
    return [compare(group) for group in by_task.values()]


def _check_same(first: RunRecord, record: RunRecord) -> None:
    for field in ("task", "metric_name", "higher_is_better"):
        expected, value = getattr(first, field), getattr(record, field)
        if expected != value:
            raise ValueError(
                f"records of one comparison must share their {field}, got {printable(expected)!r} "
                f"and {printable(value)!r}; compare them separately"
            )


def _check_seeds(records: Sequence[RunRecord]) -> None:
    seen = set()
    for record in records:
        run = (*arm_key(record), record.seed)
        # A seed that counted twice would make the interval narrower than the runs allow.
        if run in seen:
            order, sparsify, density, seed = run
            suffix = "" if density is None else f" {density:g}"
            raise ValueError(
                f"two records of {printable(order)} + {printable(sparsify)}{suffix} on "
                f"{printable(record.task)} with seed {seed}: a seed counts once; remove one of them"
            )
        seen.add(run)


def _questions(arms: Sequence[ArmSummary]) -> tuple[Question, ...]:
    """Return the questions these arms answer; paired arms differ in one thing where possible."""
    base = arms[0]
    pairs = {
        "order": _pair_up(arms, lambda arm: (arm.sparsify, arm.density)),
        "sparsify": _pair_up(arms, lambda arm: arm.order),
        "both": [
            compare_pair(arm, base)
            for arm in arms
            if arm.order != base.order
            and (arm.sparsify, arm.density) != (base.sparsify, base.density)
        ],
    }
    return tuple(
        Question(kind=kind, text=QUESTIONS[kind], pairs=tuple(some))
        for kind, some in pairs.items()
        if some
    )


def _pair_up(arms: Sequence[ArmSummary], shared: Callable[[ArmSummary], object]) -> list[ArmPair]:
    """Pair each arm with the first one that has the same shared part."""
    # The first arm with the same shared part, as the first arm of all is the baseline.
    references: dict[object, ArmSummary] = {}
    pairs = []
    for arm in arms:
        # With the rest equal, a difference has one possible cause.
        reference = references.setdefault(shared(arm), arm)
        if reference is not arm:
            pairs.append(compare_pair(arm, reference))
    return pairs


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
        loss=_difference(arm, reference, ends, _loss),
        # The same epochs of both: the last half of a longer run is another part of training.
        late_loss=_difference(arm, reference, (min(ends),) * 2, late_losses),
        metric=_difference(arm, reference, ends, _metric),
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
    known = (finite(value) for value in values)
    return next(
        (e for e, value in enumerate(known, 1) if value is not None and value <= goal), None
    )


def _loss(runs: Sequence[RunRecord], end: int) -> list[float | None]:
    return values_at(runs, end, lambda row: row.train_loss)


def _metric(runs: Sequence[RunRecord], end: int) -> list[float | None]:
    return values_at(runs, end, lambda row: row.metric)


def _difference(
    arm: ArmSummary, reference: ArmSummary, ends: tuple[int, int], read: ReadValues
) -> PairedDifference | None:
    # An arm minus itself is zero for every seed, which is no result.
    if arm is reference or not min(ends):
        return None
    # Seeds that only one arm has say nothing about the difference between the two.
    partners = {run.seed: run for run in reference.used}
    runs = [run for run in arm.used if run.seed in partners]
    finished = arm.finished and reference.finished and ends == (arm.epochs, reference.epochs)
    return paired_difference(
        read(runs, ends[0]),
        read([partners[run.seed] for run in runs], ends[1]),
        [run.seed for run in runs],
        epoch=None if finished else ends[0],
    )


def _ratio(arm: Sequence[float], reference: Sequence[float], ends: tuple[int, int]) -> float | None:
    if not min(ends) or not reference[ends[1] - 1]:
        return None
    return arm[ends[0] - 1] / reference[ends[1] - 1]
