"""Which arm is measured against which, and by how much they differ."""

from collections.abc import Callable, Sequence

from gradherd.lab.report.arms import late_losses, values_at
from gradherd.lab.report.model import Arm, Difference, Pair, Question
from gradherd.lab.report.stats import difference, number
from gradherd.lab.train.record import RunRecord

Reader = Callable[[Sequence[RunRecord], int], Sequence[float | None]]
"""Returns a figure of each run after so many epochs."""
QUESTIONS = {
    "order": "Does a better order need fewer epochs?",
    "sparsify": "Does sending less cost accuracy?",
    "both": "What do order and sparsifier change together?",
}


def questions_of(arms: Sequence[Arm]) -> tuple[Question, ...]:
    """Return what these arms can answer, each pair of arms differing in one thing if possible."""
    ordered = _pairs(arms, lambda arm: (arm.sparsify, arm.density))
    sparsified = _pairs(arms, lambda arm: arm.order)
    base = arms[0]
    both = [
        pair_of(arm, base)
        for arm in arms
        if arm.order != base.order and (arm.sparsify, arm.density) != (base.sparsify, base.density)
    ]
    found = {"order": ordered, "sparsify": sparsified, "both": both}
    return tuple(
        Question(kind=kind, text=QUESTIONS[kind], pairs=tuple(pairs))
        for kind, pairs in found.items()
        if pairs
    )


def _pairs(arms: Sequence[Arm], shared: Callable[[Arm], object]) -> list[Pair]:
    """Put each arm beside the first one that shares something with it."""
    firsts: dict[object, Arm] = {}
    pairs = []
    for arm in arms:
        reference = firsts.setdefault(shared(arm), arm)
        if reference is not arm:
            pairs.append(pair_of(arm, reference))
    return pairs


def pair_of(arm: Arm, reference: Arm) -> Pair:
    """Put an arm beside another one."""
    goal = reference.final_loss.mean
    reached = first_at_or_below([point.mean for point in arm.loss_by_epoch], goal)
    # An arm that was cut short is compared after the epochs that both have.
    whole = arm.finished and reference.finished
    ends = (arm.epochs, reference.epochs) if whole else (min(arm.epochs, reference.epochs),) * 2
    return Pair(
        arm=arm,
        reference=reference,
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
        late_loss=_difference(arm, reference, (min(ends),) * 2, late_losses),
        metric=_difference(arm, reference, ends, _metric),
        bytes_ratio=_ratio(arm.bytes_by_epoch, reference.bytes_by_epoch, ends),
        seconds_ratio=_ratio(arm.seconds_by_epoch, reference.seconds_by_epoch, ends),
    )


def first_at_or_below(values: Sequence[float | None], goal: float | None) -> int | None:
    """Return the first epoch, counted from 1, whose value is at or below the goal.

    >>> first_at_or_below([3.0, None, 1.0], 1.0)
    3
    """
    if goal is None:
        return None
    known = (number(value) for value in values)
    return next(
        (e for e, value in enumerate(known, 1) if value is not None and value <= goal), None
    )


def _loss(runs: Sequence[RunRecord], end: int) -> list[float | None]:
    return values_at(runs, end, lambda row: row.train_loss)


def _metric(runs: Sequence[RunRecord], end: int) -> list[float | None]:
    return values_at(runs, end, lambda row: row.metric)


def _difference(arm: Arm, reference: Arm, ends: tuple[int, int], read: Reader) -> Difference | None:
    if arm is reference or not min(ends):
        return None
    there = {run.seed: run for run in reference.used}
    runs = [run for run in arm.used if run.seed in there]
    whole = arm.finished and reference.finished and ends == (arm.epochs, reference.epochs)
    return difference(
        read(runs, ends[0]),
        read([there[run.seed] for run in runs], ends[1]),
        [run.seed for run in runs],
        epoch=None if whole else ends[0],
    )


def _ratio(here: Sequence[float], there: Sequence[float], ends: tuple[int, int]) -> float | None:
    if not min(ends) or not there[ends[1] - 1]:
        return None
    return here[ends[0] - 1] / there[ends[1] - 1]
