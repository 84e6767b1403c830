"""Find run records below folders, group them into arms, and summarise each arm over its seeds.

An arm is an order, a sparsifier and a density, or what a study calls one; its runs differ by their
seed alone.
"""

import itertools
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gradherd.lab.report.stats import MeanStd, mean_std
from gradherd.lab.text import printable
from gradherd.lab.train.record import RECORD_FILE, RunRecord, read_record

TIME_PARTS = ("data", "compute", "ordering", "exchange", "other")
"""Parts that the seconds of an epoch are split into."""
ArmKey = tuple[str, str, float | None]
"""Order, sparsifier and density."""


@dataclass(frozen=True, kw_only=True)
class ArmSummary:
    """All runs of one order, sparsifier and density."""

    label: str
    order: str
    sparsify: str
    density: float | None
    runs: tuple[RunRecord, ...]
    """All runs, by seed."""
    used: tuple[RunRecord, ...]
    """Runs that reached `epochs`, or diverged before: all figures are over these."""
    epochs: int
    """Epochs that the figures cover: all that were planned, or as many as the longest run has."""
    planned: int
    """Epochs that were planned."""
    final_loss: MeanStd
    final_metric: MeanStd
    loss_by_epoch: tuple[MeanStd, ...]
    metric_by_epoch: tuple[MeanStd, ...]
    seconds_by_epoch: tuple[float, ...]
    """Seconds since the start after each epoch, mean over seeds."""
    bytes_by_epoch: tuple[float, ...]
    """Bytes sent since the start after each epoch, mean over seeds."""
    mean_density: float | None
    """Share of elements sent, mean over steps and seeds."""
    padding: float | None
    """Mean over epochs and seeds; None for dense arms."""

    @property
    def key(self) -> ArmKey:
        """What identifies the arm."""
        return self.order, self.sparsify, self.density

    @property
    def finished(self) -> bool:
        """Whether at least one run completed all planned epochs."""
        return self.epochs > 0 and self.epochs >= self.planned

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds that the figures are over."""
        return tuple(run.seed for run in self.used)

    @property
    def seconds(self) -> float | None:
        """Total seconds, mean over seeds."""
        return self.seconds_by_epoch[-1] if self.seconds_by_epoch else None

    @property
    def bytes(self) -> float | None:
        """Total bytes sent by the average worker, mean over seeds."""
        return self.bytes_by_epoch[-1] if self.bytes_by_epoch else None


def find_records(folders: Sequence[Path]) -> list[tuple[Path, RunRecord]]:
    """Return every record below these folders with its path, ordered by the runs' start time.

    Raises:
        ValueError: A folder has no record, a record is damaged, or two records are of the same
            task, arm and seed; the message names the paths.
    """
    paths: dict[Path, Path] = {}
    for folder in folders:
        if not os.path.exists(folder):  # Path.exists raises if the name is too long.
            raise ValueError(f"{printable(folder)}: no such folder")
        if not folder.is_dir():
            name = printable(folder)
            raise ValueError(f"{name} is not a folder; give the folder that holds {RECORD_FILE}")
        matches = _record_paths(folder)
        if not matches:
            raise ValueError(
                f"{printable(folder)}: no {RECORD_FILE} in it or below; runs of gradherd write one"
            )
        for path in matches:  # Folders may overlap; a run counts once.
            paths.setdefault(Path(os.path.realpath(path)), path)
    found = [(path, read_record(path)) for path in paths.values()]
    # Runs that hold examples out have chosen a learning rate; they are not compared.
    records = [one for one in found if one[1].config.get("held_out") is None]
    check_unique([record for _, record in records], [printable(path) for path, _ in records])
    # The arm of the first run becomes the baseline: the names of folders must not decide that.
    return sorted(records, key=lambda one: one[1].started)


def _record_paths(folder: Path) -> list[Path]:
    """Return the records at any depth, without following links to folders."""
    paths, pending = [], [str(folder)]
    while pending:  # not recursive, as `os.walk` is: a tree may be deeper than Python's stack
        try:
            entries = list(os.scandir(pending.pop()))
        except OSError:  # Not readable, or its path is too long by now.
            continue
        paths += [Path(entry.path) for entry in entries if entry.name == RECORD_FILE]
        # A link to a folder above would never come to an end.
        pending += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    return sorted(paths)


def check_unique(records: Sequence[RunRecord], names: Sequence[str] | None = None) -> None:
    """Raise ValueError if two records are of the same task, arm and seed; `names` tells which."""
    first: dict[tuple[object, ...], int] = {}
    for at, record in enumerate(records):
        other = first.setdefault((record.task, *arm_key(record), record.seed), at)
        # A seed that counted twice would make the interval narrower than the runs allow.
        if other != at:
            both = "two records" if names is None else f"{names[other]} and {names[at]}"
            order, sparsify, density = arm_key(record)
            arm = f"{printable(order)} + {printable(sparsify)}"
            arm += "" if density is None else f" {density:g}"
            raise ValueError(
                f"{both} are of the same task, arm and seed ({printable(record.task)}, {arm}, seed "
                f"{record.seed}): a seed counts once; keep one of them"
            )


def arm_key(record: RunRecord) -> ArmKey:
    """Return the arm that a run belongs to."""
    # A density means nothing to a dense run, and must not split its arm in two.
    dense = record.sparsify == "dense"
    return record.order, record.sparsify, None if dense else record.density


NamedRuns = Sequence[tuple[str, Sequence[RunRecord]]]
"""Names of arms, and the runs of each."""


def group_by_arm(records: Sequence[RunRecord]) -> NamedRuns:
    """Return the runs of one task by arm, in order of first appearance."""
    groups: dict[ArmKey, list[RunRecord]] = {}
    for record in records:
        groups.setdefault(arm_key(record), []).append(record)
    return [(arm_label(key, list(groups)), runs) for key, runs in groups.items()]


def summarize_arms(groups: NamedRuns) -> tuple[ArmSummary, ...]:
    """Return the arms of one task."""
    # Stands in for the planned epochs where the settings of a record do not name them.
    longest = max(len(record.epochs) for _, runs in groups for record in runs)
    return tuple(
        _summarize(name, sorted(runs, key=lambda run: run.seed), longest) for name, runs in groups
    )


def arm_label(key: ArmKey, keys: Sequence[ArmKey]) -> str:
    """Return the name of an arm among others; what all of them share is left out.

    >>> arm_label(("cd-grab", "dense", None), [("d-rr", "dense", None), ("cd-grab", "dense", None)])
    'cd-grab'
    >>> arm_label(("d-rr", "exdyna", 0.01), [("d-rr", "dense", None), ("d-rr", "exdyna", 0.01)])
    'exdyna 0.01'
    >>> arm_label(("d-rr", "dense", None), [("d-rr", "dense", None), ("cd-grab", "topk", 0.1)])
    'd-rr + dense'
    """
    order, sparsify, density = key
    order_name, sparsify_name = printable(order, 60), printable(sparsify, 60)
    if density is not None:
        sparsify_name = f"{sparsify_name} {density:.12g}"
    if all(other[1] == "dense" for other in keys):
        return order_name
    if all(other[0] == order for other in keys):
        return sparsify_name
    return f"{order_name} + {sparsify_name}"


def diverged(run: RunRecord) -> bool:
    """Return whether a run ended with a loss that is not finite."""
    # The status alone misses runs that were interrupted after their loss was lost.
    lost = bool(run.epochs) and run.epochs[-1].train_loss is None
    return lost or run.status == "diverged"


def values_over(runs: Sequence[RunRecord], epochs: Sequence[int], field: str) -> list[float | None]:
    """Return a field of each run, mean over these epochs, counted from 1.

    None for a run that ended before, or without finite values in all of these epochs.
    """
    return [
        mean_std(
            [getattr(run.epochs[e - 1], field) if e <= len(run.epochs) else None for e in epochs]
        ).mean
        for run in runs
    ]


def late_epochs(end: int) -> range:
    """Return the last half of the epochs up to `end`, counted from 1; empty below 4 epochs.

    The loss after a single epoch oscillates from one epoch to the next, so a difference between two
    arms there may be luck; the mean over many epochs is steadier.

    >>> late_epochs(20), late_epochs(7), len(late_epochs(3))
    (range(11, 21), range(4, 8), 0)
    """
    return range(end // 2 + 1, end + 1) if end >= 4 else range(0)


def mean_seconds(arm: ArmSummary, part: str) -> float:
    """Return the seconds of an epoch that one of `TIME_PARTS` takes, mean over epochs and seeds."""
    seconds = []
    for row in (row for run in arm.used for row in run.epochs[: arm.epochs]):
        parts = {name: getattr(row, f"{name}_seconds") for name in TIME_PARTS[:-1]}
        # Compute is a remainder that training clamps at zero, so the sum may exceed the epoch.
        rest = max(0.0, row.seconds - sum(parts.values()))
        seconds.append(parts.get(part, rest))
    return statistics.fmean(seconds)


def _summarize(label: str, runs: Sequence[RunRecord], longest: int) -> ArmSummary:
    # A damaged record may hold anything; True, for one, is an integer.
    plans = [run.config.get("epochs") for run in runs]
    planned = max((plan if type(plan) is int else 0) or longest for plan in plans)
    # The longest run sets the end: one interrupted seed must not cut the others short.
    epochs = min(planned, max(len(run.epochs) for run in runs))
    # A run that diverged may have stopped early. It counts: without it the arm would look better.
    used = tuple(run for run in runs if epochs and (len(run.epochs) >= epochs or diverged(run)))
    loss, metric = (mean_by_epoch(used, epochs, name) for name in ("train_loss", "metric"))
    none = MeanStd(mean=None, std=None)
    rows = [row for run in used for row in run.epochs[:epochs]]
    paddings = [row.padding for row in rows if row.padding is not None]
    steps = sum(row.steps for row in rows)
    order, sparsify, density = arm_key(runs[0])
    return ArmSummary(
        label=label,
        order=order,
        sparsify=sparsify,
        density=density,
        runs=tuple(runs),
        used=used,
        epochs=epochs,
        planned=planned,
        final_loss=loss[-1] if loss else none,
        final_metric=metric[-1] if metric else none,
        loss_by_epoch=loss,
        metric_by_epoch=metric,
        seconds_by_epoch=_cumulative(used, epochs, "seconds"),
        bytes_by_epoch=_cumulative(used, epochs, "bytes"),
        # Weighted by steps, because epochs may differ in their number of steps.
        mean_density=sum(row.density * row.steps for row in rows) / steps if steps else None,
        padding=statistics.fmean(paddings) if paddings else None,
    )


def mean_by_epoch(runs: Sequence[RunRecord], epochs: int, field: str) -> tuple[MeanStd, ...]:
    """Return a field after each epoch, over runs."""
    return tuple(mean_std(values_over(runs, [e], field)) for e in range(1, epochs + 1))


def _cumulative(runs: Sequence[RunRecord], epochs: int, field: str) -> tuple[float, ...]:
    """Return the sum up to each epoch, mean over the runs that reached it."""
    sums = [list(itertools.accumulate(getattr(row, field) for row in run.epochs)) for run in runs]
    # A run that diverged early has no later sums; the others still do.
    return tuple(
        statistics.fmean(column[epoch] for column in sums if epoch < len(column))
        for epoch in range(epochs)
    )
