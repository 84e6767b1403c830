"""The epoch loop of one or more runs, and the files it writes as it goes.

A run writes record.json, metrics.jsonl and, on request, TensorBoard events. The record is replaced
atomically after every epoch, so a run that is killed at any moment leaves a readable record.
"""

import dataclasses
import json
import os
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gradherd.lab.tasks.task import Split, Task
from gradherd.lab.train.checkpoint_schedule import RunStopped
from gradherd.lab.train.config import RunConfig
from gradherd.lab.train.environment import hardware, versions
from gradherd.lab.train.record import (
    EpochRow,
    RunRecord,
    finite_or_none,
    write_atomic,
    write_record,
)
from gradherd.lab.train.trainer import EpochCounters, Evaluation, Trainer

METRICS_FILE = "metrics.jsonl"


class RunWriter:
    """The record of one run; without a folder it is kept in memory alone."""

    def __init__(
        self, record: RunRecord, folder: Path | None, *, tensorboard: bool = False
    ) -> None:
        self.record = record
        self._folder = folder
        self._events: Any = None
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        write_record(record, folder)
        if record.epochs or (folder / METRICS_FILE).exists():  # A run that goes on, or starts over.
            lines = [_line(row) for row in record.epochs]
            write_atomic(folder / METRICS_FILE, "".join(f"{line}\n" for line in lines))
        if tensorboard:
            self._events = _event_writer(folder)

    def start(self, loss: float | None, metric: float | None) -> None:
        """Note what the model was worth before training."""
        self.record = dataclasses.replace(self.record, start_loss=loss, start_metric=metric)
        self._save()

    def add(self, row: EpochRow, density_by_step: list[dict[str, float]]) -> None:
        """Note an epoch."""
        self.record = dataclasses.replace(
            self.record, epochs=[*self.record.epochs, row], density_by_step=density_by_step
        )
        if self._folder is not None:
            _append(self._folder / METRICS_FILE, _line(row))
        self._save()
        if self._events is not None:
            for name, value in dataclasses.asdict(row).items():
                if isinstance(value, int | float) and name != "epoch":
                    self._events.add_scalar(
                        f"{_TENSORBOARD_GROUPS.get(name, 'run')}/{name}", value, row.epoch
                    )
            self._events.flush()

    def end(self, status: str) -> RunRecord:
        """Note how it ended and return the record."""
        self.record = dataclasses.replace(self.record, status=status)
        self._save()
        if self._events is not None:
            self._events.close()
        return self.record

    def _save(self) -> None:
        if self._folder is not None:
            write_record(self.record, self._folder)


_TENSORBOARD_GROUPS = {
    "train_loss": "quality",
    "metric": "quality",
    "herding_bound": "order",
    "bytes": "bytes",
    "ordering_bytes": "bytes",
    "density": "sparsify",
    "padding": "sparsify",
    "residual_norm": "sparsify",
    **{
        name: "seconds"
        for name in (f.name for f in dataclasses.fields(EpochRow))
        if name.endswith("seconds")
    },
}


def _line(row: EpochRow) -> str:
    return json.dumps(dataclasses.asdict(row), allow_nan=False)


def _append(path: Path, line: str) -> None:
    """Add a line; a disk that is full leaves the file as it was."""
    before = path.stat().st_size if path.exists() else 0
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError as error:
        if path.exists():
            os.truncate(path, before)
        raise OSError(error.errno, error.strerror, str(path)) from None


def _event_writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError(
            "tensorboard is not installed: pip install 'gradherd[tensorboard]'"
        ) from None
    return SummaryWriter(str(folder))


class Progress:
    """Is told how a training goes on; this one says nothing."""

    def begin(self, runs: int, steps: int) -> None:
        """So many runs begin, with so many steps in all."""

    def group(self, configs: Sequence[RunConfig]) -> None:
        """These go side by side now."""

    def step(self, steps: int = 1) -> None:
        """So many steps were done."""

    def epoch(self, number: int, losses: list[float | None]) -> None:
        """An epoch was measured."""


def new_record(config: RunConfig, task: Task, split: Split, parameters: int) -> RunRecord:
    """Return the record of a run that begins now."""
    settings: dict[str, Any] = dataclasses.asdict(config)
    return RunRecord(
        task=task.name,
        description=task.description,
        order=config.order,
        sparsify=config.sparsify,
        density=config.density,
        seed=config.seed,
        metric_name=task.metric_name,
        higher_is_better=task.higher_is_better,
        config=settings | {"source": task.defaults.source},
        parameters=parameters,
        train_examples=len(split.train[0]),
        test_examples=len(split.test[0]),
        versions=versions(),
        hardware=hardware(config.device),
        started=datetime.now(UTC).isoformat(timespec="microseconds"),
    )


def run_epochs(
    fleet: Trainer,
    configs: Sequence[RunConfig],
    journals: Sequence[RunWriter],
    progress: Progress,
    *,
    first: int = 1,
    resumed: bool = False,
) -> list[RunRecord]:
    """Train all epochs of runs that a fleet trains side by side; return their records.

    Args:
        fleet: Who trains.
        configs: The settings of each run.
        journals: Where each run is written down.
        progress: Is told how it goes on.
        first: The epoch to go on with.
        resumed: Whether it goes on; the start was measured before then.
    """
    try:
        _epochs(fleet, configs, journals, progress, first, resumed)
    except RunStopped:
        return [journal.end("stopped") for journal in journals]
    return [journal.end(_status(journal.record)) for journal in journals]


def _epochs(
    fleet: Trainer,
    configs: Sequence[RunConfig],
    journals: Sequence[RunWriter],
    progress: Progress,
    first: int,
    resumed: bool,
) -> None:
    if not resumed:
        for journal, quality in zip(journals, fleet.quality(), strict=True):
            journal.start(quality.loss, quality.metric)
    for number in range(first, configs[0].epochs + 1):
        tallies = fleet.epoch(number, progress.step)
        begin = time.perf_counter()
        found = fleet.quality()
        seconds = (time.perf_counter() - begin) / len(found)
        for at, (tally, quality) in enumerate(zip(tallies, found, strict=True)):
            if _diverged(journals[at].record):
                continue  # It ended there; those beside it go on.
            row = _row(number, configs[at], tally, quality, seconds)
            journals[at].add(row, fleet.series[at].listed())
        progress.epoch(number, [quality.loss for quality in found])
        if all(quality.loss is None for quality in found):
            break  # Nothing is left to be learned.


def _diverged(record: RunRecord) -> bool:
    return bool(record.epochs) and record.epochs[-1].train_loss is None


def _status(record: RunRecord) -> str:
    return "diverged" if _diverged(record) else "done"


def _row(
    number: int, config: RunConfig, tally: EpochCounters, quality: Evaluation, evaluation: float
) -> EpochRow:
    apart = tally.data_seconds + tally.ordering_seconds + tally.exchange_seconds
    apart += tally.saving_seconds
    sparse = tally.sparse_steps
    return EpochRow(
        epoch=number,
        train_loss=quality.loss,
        metric=quality.metric,
        lr=config.lr_at(number),
        steps=tally.steps,
        seconds=tally.seconds,
        data_seconds=tally.data_seconds,
        compute_seconds=max(0.0, tally.seconds - apart),
        ordering_seconds=tally.ordering_seconds,
        exchange_seconds=tally.exchange_seconds,
        saving_seconds=tally.saving_seconds,
        evaluation_seconds=evaluation,
        bytes=tally.bytes,
        ordering_bytes=tally.ordering_bytes,
        density=tally.density / sparse if sparse else 1.0,
        padding=tally.padding / sparse if sparse else None,
        load=[picked / tally.load_steps for picked in tally.load] if tally.load else None,
        residual_norm=_finite(tally.residual_norm),
        skipped_steps=tally.skipped_steps,
        herding_bound=_finite(tally.herding_bound),
    )


def _finite(value: float | None) -> float | None:
    return None if value is None else finite_or_none(value)
