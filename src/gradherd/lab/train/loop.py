"""The epoch loop of one or more runs, and the files it writes as it goes.

A run writes record.json and metrics.jsonl. The record is replaced atomically after every epoch, so
a run that is killed at any moment leaves a readable record.
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
from gradherd.lab.train.checkpoint import RunStopped
from gradherd.lab.train.config import RunConfig
from gradherd.lab.train.measurements import hardware, versions
from gradherd.lab.train.record import EpochRow, RunRecord, write_atomic, write_record
from gradherd.lab.train.trainer import Trainer

METRICS_FILE = "metrics.jsonl"


class BadStart(RuntimeError):
    """The loss is not finite before the first step: a defect of the task, not of a run."""


class RunWriter:
    """Updates the record of one run and its files; without a folder, the record in memory only."""

    def __init__(self, record: RunRecord, folder: Path | None) -> None:
        """Write the record as it is now."""
        self.record = record
        self._folder = folder
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        # At once: a folder that cannot be written to should fail before the first epoch.
        write_record(record, folder)
        # A resumed run drops lines after its checkpoint, one that starts over drops all.
        if record.epochs or (folder / METRICS_FILE).exists():
            lines = [_json_line(row) for row in record.epochs]
            write_atomic(folder / METRICS_FILE, "".join(f"{line}\n" for line in lines))

    def add(self, row: EpochRow) -> None:
        """Record an epoch."""
        if self._folder is not None:
            # Lines before the record: a reader that sees an epoch in the record finds its line.
            _append(self._folder / METRICS_FILE, _json_line(row))
        self.update(epochs=[*self.record.epochs, row])

    def update(self, **changes: Any) -> RunRecord:
        """Change fields of the record and return it."""
        self.record = dataclasses.replace(self.record, **changes)
        if self._folder is not None:
            write_record(self.record, self._folder)
        return self.record


def _json_line(row: EpochRow) -> str:
    return json.dumps(dataclasses.asdict(row), allow_nan=False)


def _append(path: Path, line: str) -> None:
    """Append a line; if the disk is full, the file stays as it was."""
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError as error:
        if path.exists():
            # Half a line would make the whole file unreadable as JSON lines.
            os.truncate(path, size)
        raise OSError(error.errno, error.strerror, str(path)) from None


# A base class, not a protocol: a caller overrides only what it displays.
class Progress:
    """Receives the progress of training; this one ignores it."""

    def begin(self, runs: int, steps: int) -> None:
        """A number of runs begin, with this many steps in all."""

    def group(self, configs: Sequence[RunConfig]) -> None:
        """These runs are trained side by side now."""

    def begin_arm(self, arm: str, seed: int, runs: int) -> None:
        """So many runs of a study start, of which the first is that of an arm and a seed."""

    def start(self, name: str, total: int | None) -> None:
        """Something else begins, with so many steps if that is known."""

    def step(self, steps: int = 1) -> None:
        """A number of steps are done."""

    def epoch(self, number: int, losses: list[float | None]) -> None:
        """An epoch was trained and evaluated."""


def new_record(config: RunConfig, task: Task, split: Split, parameters: int) -> RunRecord:
    """Return the record of a run that starts now."""
    settings: dict[str, Any] = dataclasses.asdict(config)
    metric = (task.metric_name, task.higher_is_better)
    if config.held_out is not None:
        metric = ("loss on held-out examples", False)
    return RunRecord(
        task=task.name,
        description=task.description,
        order=config.order,
        sparsify=config.exchange,
        density=config.density,
        seed=config.seed,
        metric_name=metric[0],
        higher_is_better=metric[1],
        config=settings | {"source": task.defaults.source},
        parameters=parameters,
        train_examples=len(split.train[0]),
        test_examples=len(split.test[0]),
        versions=versions(),
        hardware=hardware(config.device),
        # Microseconds: reports sort arms by when their first run started, and runs can take less
        # than a second.
        started=datetime.now(UTC).isoformat(timespec="microseconds"),
    )


def run_epochs(
    trainer: Trainer,
    configs: Sequence[RunConfig],
    writers: Sequence[RunWriter],
    progress: Progress,
    *,
    first: int = 1,
    resumed: bool = False,
) -> list[RunRecord]:
    """Train the epochs of a trainer's runs from `first` on; return their records.

    Runs that resume have the evaluation before training on record.

    Raises:
        BadStart: A run starts with a loss that is not finite; raised on all ranks.
    """
    if not resumed:
        start = trainer.evaluate()
        for config, writer, evaluation in zip(configs, writers, start, strict=True):
            # No run can have diverged yet, and as a result it would be kept.
            if evaluation.loss is None:
                raise BadStart(
                    "the loss before training is nan or infinite: check the task's data and model "
                    f"(task {writer.record.task}, seed {config.seed})"
                )
        for writer, evaluation in zip(writers, start, strict=True):
            writer.update(start_loss=evaluation.loss, start_metric=evaluation.metric)
    end = "done"
    for number in range(first, configs[0].epochs + 1):
        try:
            counters = trainer.train_epoch(number, progress.step)
        except RunStopped:
            # Not evaluated: the time until SIGKILL is short, and the checkpoint is what counts.
            end = "stopped"
            break
        begin = time.perf_counter()
        evaluations = trainer.evaluate()
        # Stacked runs are evaluated one after the other; each gets its share.
        seconds = (time.perf_counter() - begin) / len(evaluations)
        for at, (own, evaluation) in enumerate(zip(counters, evaluations, strict=True)):
            if _diverged(writers[at].record):
                continue  # This run has ended; the others of its stack continue.
            writers[at].add(own.row(number, configs[at].lr_at(number), evaluation, seconds))
        progress.epoch(number, [evaluation.loss for evaluation in evaluations])
        if all(evaluation.loss is None for evaluation in evaluations):
            break  # All runs have diverged.
    return [one.update(status="diverged" if _diverged(one.record) else end) for one in writers]


def _diverged(record: RunRecord) -> bool:
    return bool(record.epochs) and record.epochs[-1].train_loss is None
