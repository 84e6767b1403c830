"""From settings to records: the epochs of one or more runs, measured and written down."""

import dataclasses
import statistics
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from gradherd.tasks.task import Split, Task
from gradherd.train.config import RunConfig
from gradherd.train.fleet import Fleet, Quality, Tally
from gradherd.train.journal import Journal
from gradherd.train.record import EpochRow, RunRecord, finite
from gradherd.train.surroundings import hardware, versions
from gradherd.train.watch import Bins


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
    fleet: Fleet,
    configs: Sequence[RunConfig],
    journals: Sequence[Journal],
    progress: Progress,
) -> list[RunRecord]:
    """Train all epochs of runs that a fleet trains side by side; return their records."""
    for journal, quality in zip(journals, fleet.quality(), strict=True):
        journal.start(quality.loss, quality.metric)
    series = [Bins() for _ in journals]
    for number in range(1, configs[0].epochs + 1):
        tallies = fleet.epoch(number, progress.step)
        begin = time.perf_counter()
        found = fleet.quality()
        seconds = (time.perf_counter() - begin) / len(found)
        for at, (tally, quality) in enumerate(zip(tallies, found, strict=True)):
            for step in tally.sparse:
                series[at].add(step["density"])
            row = _row(number, configs[at], tally, quality, seconds)
            journals[at].add(row, series[at].listed())
        progress.epoch(number, [quality.loss for quality in found])
        if all(quality.loss is None for quality in found):
            break  # Nothing is left to be learned.
    return [journal.end(_status(journal.record)) for journal in journals]


def _status(record: RunRecord) -> str:
    return "diverged" if record.epochs[-1].train_loss is None else "done"


def _row(
    number: int, config: RunConfig, tally: Tally, quality: Quality, evaluation: float
) -> EpochRow:
    apart = tally.data_seconds + tally.ordering_seconds + tally.exchange_seconds
    sparse = [step for step in tally.sparse if step]
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
        evaluation_seconds=evaluation,
        bytes=tally.bytes,
        ordering_bytes=tally.ordering_bytes,
        density=statistics.fmean(step["density"] for step in sparse) if sparse else 1.0,
        padding=statistics.fmean(step["padding"] for step in sparse) if sparse else None,
        load=_load(sparse),
        residual_norm=_finite(tally.residual_norm),
        skipped_steps=tally.skipped_steps,
        herding_bound=_finite(tally.herding_bound),
    )


def _finite(value: float | None) -> float | None:
    return None if value is None else finite(value)


def _load(sparse: list[dict[str, Any]]) -> list[float] | None:
    if not sparse:
        return None
    columns = zip(*(step["per_rank"] for step in sparse), strict=True)
    return [statistics.fmean(column) for column in columns]
