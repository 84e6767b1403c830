"""What has been measured: step times of well-known models, and what sparse exchanges cost.

The figures are those of the records in `benchmarks/results`, which an installed package does not
have; tests compare them.
"""

import csv
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class ModelFigures:
    """A training step of a model on one GPU, without any exchange."""

    params: float
    step_seconds: float
    """Forward, backward and optimizer."""
    batch: str
    """What a step works on."""

    @property
    def backward(self) -> float:
        """Seconds of the backward pass, which computes twice what a forward pass does."""
        return self.step_seconds * 2 / 3

    @property
    def forward(self) -> float:
        """Seconds of everything else."""
        return self.step_seconds - self.backward

    @property
    def source(self) -> str:
        """Where the figures come from, in words."""
        return (
            f"a step of {1e3 * self.step_seconds:.3g} ms with {self.batch} on one NVIDIA H200 "
            "(benchmarks/results/2026-11-16-rows-h200.json), two thirds of it backward"
        )


MODELS = {
    "resnet18": ModelFigures(11_173_962, 9.64e-3, "128 images of 32 x 32 pixels in float32"),
    "resnet50": ModelFigures(23_528_522, 29.1e-3, "64 images of 224 x 224 pixels in bfloat16"),
    "vit-b16": ModelFigures(85_806_346, 33.4e-3, "64 images of 224 x 224 pixels in bfloat16"),
    "gpt2-124m": ModelFigures(124_439_808, 41.4e-3, "8 texts of 512 tokens in bfloat16"),
}
"""Models whose step was timed, by name."""


_LEVEL = {"accuracy": 1.0, "perplexity": 5.0}
"""Points of accuracy, or percent of perplexity: less is level with dense."""


@dataclass(frozen=True)
class AccuracyRecord:
    """The accuracy of a run with few bytes and of the dense run beside it: a line of the table."""

    task: str
    """What was trained, in words."""
    method: str
    """topk, exdyna, powersgd or local."""
    density: float
    """Share of the coordinates that were sent; PowerSGD: of a dense exchange's bytes."""
    every: int
    """Steps from one exchange to the next."""
    metric: Literal["accuracy", "perplexity"]
    """What `dense` and `sparse` are: accuracy in percent, or perplexity."""
    epoch: Literal["last", "best"]
    """Which epoch they are of."""
    dense: float
    sparse: float
    seeds: int
    study: str
    """A folder of `benchmarks/results`, or a file there without ".json"."""
    arm: str
    """A file in the folder of the study, or an arm in its file."""
    against: str
    """The dense run, in the same way."""

    @property
    def lost(self) -> float:
        """Points of accuracy lost, or by how many percent the perplexity is higher."""
        if self.metric == "accuracy":
            return self.dense - self.sparse
        return 100 * (self.sparse / self.dense - 1)

    @property
    def severity(self) -> float:
        """What was lost, in multiples of what counts; below 1 is level with dense."""
        return self.lost / _LEVEL[self.metric]


def _read_table() -> tuple[AccuracyRecord, ...]:
    numbers = {"density": float, "every": int, "dense": float, "sparse": float, "seeds": int}
    with Path(__file__).with_name("accuracy.csv").open(encoding="utf-8", newline="") as table:
        return tuple(
            AccuracyRecord(**{key: numbers.get(key, str)(cell) for key, cell in row.items()})
            for row in csv.DictReader(table)
        )


ACCURACY = _read_table()
"""`accuracy.csv`: every task at the best setting that was tried there."""


def accuracy_records(exchange: str, density: float) -> list[AccuracyRecord]:
    """Return the records of an exchange at about a density, or at the nearest that was recorded.

    The smallest loss of accuracy comes first. Of local steps, one of each task: that with the
    nearest number of steps.

    >>> {record.density for record in accuracy_records("exdyna-int2", 0.002)}
    {0.001}
    >>> {record.every for record in accuracy_records("local-2", 0.002)}
    {2, 4, 5}
    """
    method, _, detail = exchange.partition("-")
    known = [record for record in ACCURACY if record.method == method]
    if method == "local":
        # Of two that are as near, the one that has lost more.
        known = [
            min(
                (one for one in known if one.task == task),
                key=lambda one: (abs(math.log(one.every / int(detail))), -one.lost),
            )
            for task in {one.task: None for one in known}
        ]
    if method in ("topk", "exdyna"):
        distances = [abs(math.log(record.density / density)) for record in known]
        # Up to a factor of four away: a study of another density is better than one kind of task.
        near = max(math.log(4), min(distances)) * (1 + 1e-9)
        each = zip(known, distances, strict=True)
        known = [record for record, distance in each if distance <= near]
    return sorted(known, key=lambda one: one.lost)


def least_speedup(exchange: str, density: float) -> float:
    """Return how many times as fast as dense an exchange must be for what it lost in our records.

    1 if it ended level with dense. Otherwise the point of accuracy, or the 5 % of perplexity, that
    count must buy twice the speed, and each further one as much again: more steps in the same time
    may make up for it.

    >>> [round(least_speedup(name, 0.01), 1) for name in ("local-4", "local-8", "local-16", "fp16")]
    [2.5, 4.5, 4.5, 1.0]
    """
    worst = max((one.severity for one in accuracy_records(exchange, density)), default=0.0)
    return 1 + worst if worst >= 1 else 1.0


def accuracy_sentence(exchange: str, density: float) -> str:
    """Say what an exchange cost in this repository's own records: the mildest and the worst."""
    records = accuracy_records(exchange, density)
    if not records:
        return f"This repository has no record of what {exchange} costs in accuracy."
    mildest, worst = (pick(records, key=lambda one: one.severity) for pick in (min, max))
    is_local = mildest.method == "local"
    sent = "local steps" if is_local else f"{mildest.method} at density {mildest.density:g}"
    text = " and ".join(dict.fromkeys((_lost(mildest, mildest), _lost(worst, mildest))))
    fewest = min(one.seeds for one in records)
    return (
        f"In this repository's records, {sent} ended {text}, "
        f"{fewest} {'seed' if fewest == 1 else 'seeds'} or more."
    )


LOCAL_LIMITS = (
    "Short runs lose more: with 16 workers, 1,490 steps and 4 local steps a GPT-2 of 11 M "
    "parameters ended with 17 % more perplexity than dense, after 2,980 steps level with it (one "
    "seed); train language models that way for 3,000 steps or more, from about 1,000 tokens a "
    "worker and step on."
)
"""Where local steps did not hold."""


def _lost(record: AccuracyRecord, first: AccuracyRecord) -> str:
    density = "" if record.density == first.density else f", density {record.density:g}"
    if record.method == "local":
        density = f", {record.every} local steps"
    is_accuracy, lost = record.metric == "accuracy", record.lost
    unit = " %" if is_accuracy else ""
    source = f"({record.task}{density}: {record.sparse:.3g} and {record.dense:.3g}{unit})"
    level = "level with dense" if record.severity < 1 else ""
    if is_accuracy:
        return f"{level or f'{lost:.2g} points below dense'} {source}"
    percent = f"{abs(lost):.{0 if abs(lost) >= 5 else 1}f} %"
    more = f"with {percent} {'more' if lost > 0 else 'less'} perplexity"
    return f"{level}{', ' * bool(level)}{more} {source}"
