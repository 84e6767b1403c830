"""Records -> arms: which runs count, and their figures epoch by epoch."""

import itertools
import statistics
from collections.abc import Callable, Sequence

from gradherd.lab.report.model import Arm, ArmKey, Spread
from gradherd.lab.report.stats import number, spread
from gradherd.lab.text import printable
from gradherd.lab.train.record import EpochRow, RunRecord


def key_of(record: RunRecord) -> ArmKey:
    """Return what arm a run belongs to."""
    dense = record.sparsify == "dense"
    return record.order, record.sparsify, None if dense else record.density


def arms_of(records: Sequence[RunRecord]) -> tuple[Arm, ...]:
    """Group the runs of one task into arms, in the order they are given."""
    groups: dict[ArmKey, list[RunRecord]] = {}
    for record in records:
        groups.setdefault(key_of(record), []).append(record)
    longest = max((len(record.epochs) for record in records), default=0)
    return tuple(
        _arm(key, sorted(runs, key=lambda run: run.seed), label_of(key, list(groups)), longest)
        for key, runs in groups.items()
    )


def label_of(key: ArmKey, keys: Sequence[ArmKey]) -> str:
    """Return the name of an arm among others: what they share is not repeated.

    >>> label_of(("cd-grab", "dense", None), [("d-rr", "dense", None), ("cd-grab", "dense", None)])
    'cd-grab'
    >>> label_of(("d-rr", "exdyna", 0.01), [("d-rr", "dense", None), ("d-rr", "exdyna", 0.01)])
    'exdyna 0.01'
    >>> label_of(("d-rr", "dense", None), [("d-rr", "dense", None), ("cd-grab", "topk", 0.1)])
    'd-rr + dense'
    """
    order, sparsify, density = key
    moved, sent = printable(order, 60), printable(sparsify, 60)
    sent = sent if density is None else f"{sent} {density:.12g}"
    if all(other[1] == "dense" for other in keys):
        return moved
    return sent if all(other[0] == order for other in keys) else f"{moved} + {sent}"


def planned_epochs(record: RunRecord) -> int | None:
    """Return how many epochs a run was asked for, if its settings say so."""
    asked = record.config.get("epochs")
    return asked if isinstance(asked, int) and not isinstance(asked, bool) else None


def diverged(run: RunRecord) -> bool:
    """Return whether a run ended with a loss that is not finite."""
    lost = bool(run.epochs) and number(run.epochs[-1].train_loss) is None
    return lost or run.status == "diverged"


def row_at(run: RunRecord, epoch: int) -> EpochRow | None:
    """Return what was true after so many epochs; None if a run ended before."""
    return run.epochs[epoch - 1] if epoch <= len(run.epochs) else None


def values_at(
    runs: Sequence[RunRecord], epoch: int, value: Callable[[EpochRow], float | None]
) -> list[float | None]:
    """Return a figure of each run after so many epochs; None for those that have none."""
    rows = (row_at(run, epoch) for run in runs)
    return [None if row is None else value(row) for row in rows]


def late_epochs(end: int) -> range:
    """Return the last half of so many epochs, counted from 1; none of fewer than 4.

    >>> late_epochs(20), late_epochs(7), len(late_epochs(3))
    (range(11, 21), range(4, 8), 0)
    """
    return range(end // 2 + 1, end + 1) if end >= 4 else range(0)


def late_losses(runs: Sequence[RunRecord], end: int) -> list[float | None]:
    """Return each run's mean train loss over the last half of so many epochs.

    None for a run that has not come through them with finite losses; nothing where no epoch is
    late.
    """
    by_epoch = [values_at(runs, epoch, lambda row: row.train_loss) for epoch in late_epochs(end)]
    return [spread(losses).mean for losses in zip(*by_epoch, strict=True)]


def _arm(key: ArmKey, runs: Sequence[RunRecord], label: str, longest: int) -> Arm:
    planned = max((planned_epochs(run) or longest for run in runs), default=longest)
    epochs = min(planned, max(len(run.epochs) for run in runs))
    # A run that diverged may have stopped early. It counts: without it the arm would look better.
    used = tuple(run for run in runs if epochs and (len(run.epochs) >= epochs or diverged(run)))
    loss = _by_epoch(used, epochs, lambda row: row.train_loss)
    metric = _by_epoch(used, epochs, lambda row: row.metric)
    nothing = Spread(mean=None, std=None)
    rows = [row for run in used for row in run.epochs[:epochs]]
    paddings = [p for row in rows if (p := number(row.padding)) is not None]
    steps = sum(row.steps for row in rows)
    return Arm(
        label=label,
        order=key[0],
        sparsify=key[1],
        density=key[2],
        runs=tuple(runs),
        used=used,
        epochs=epochs,
        planned=planned,
        final_loss=loss[-1] if loss else nothing,
        final_metric=metric[-1] if metric else nothing,
        loss_by_epoch=loss,
        metric_by_epoch=metric,
        seconds_by_epoch=_so_far(used, epochs, lambda row: row.seconds),
        bytes_by_epoch=_so_far(used, epochs, lambda row: row.bytes),
        mean_density=sum(row.density * row.steps for row in rows) / steps if steps else None,
        padding=statistics.fmean(paddings) if paddings else None,
    )


def _by_epoch(
    runs: Sequence[RunRecord], epochs: int, value: Callable[[EpochRow], float | None]
) -> tuple[Spread, ...]:
    return tuple(spread(values_at(runs, epoch, value)) for epoch in range(1, epochs + 1))


def _so_far(
    runs: Sequence[RunRecord], epochs: int, value: Callable[[EpochRow], float]
) -> tuple[float, ...]:
    """Return what has added up after each epoch, mean over the runs that came so far."""
    sums = [list(itertools.accumulate(value(row) for row in run.epochs)) for run in runs]
    return tuple(
        statistics.fmean(column[epoch] for column in sums if epoch < len(column))
        for epoch in range(epochs)
    )
