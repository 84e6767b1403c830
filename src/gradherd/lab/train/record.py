"""What a run left behind: settings, surroundings and one row for each epoch, as JSON.

Reports and pages read records only. Epochs count from 1: row e holds what was true after e epochs.
"""

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradherd.lab.train.checked import problem_of, shown

FORMAT = 1
FILE = "record.json"
_LARGEST = 1 << 26
"""Bytes of a record: room for 100,000 epochs."""


@dataclass(frozen=True, kw_only=True)
class EpochRow:
    """One epoch of a run. Seconds and bytes are of this epoch alone, bytes of the mean worker."""

    epoch: int
    """Counted from 1."""
    train_loss: float | None
    """Mean loss over the full training set after this epoch; None if it is not finite."""
    metric: float | None
    """The task's metric on the test set; None if it is not finite."""
    lr: float
    """Learning rate of this epoch."""
    steps: int
    """Steps of the optimizer."""
    seconds: float
    """Time spent training (evaluation apart), of rank 0."""
    data_seconds: float
    """... waiting for batches."""
    compute_seconds: float
    """... in forward, backward and the optimizer."""
    ordering_seconds: float
    """... reading gradients for the order and sorting, as far as training waited for it."""
    exchange_seconds: float
    """... choosing and exchanging gradients, as far as training waited for it."""
    saving_seconds: float = 0.0
    """... writing checkpoints."""
    evaluation_seconds: float
    """Time spent to measure this row; no part of `seconds`."""
    bytes: int
    """What a worker sent, for gradients and for ordering."""
    ordering_bytes: int
    """What it sent for ordering alone."""
    density: float
    """Share of the gradient that travelled, mean over steps; 1 for dense runs."""
    padding: float | None = None
    """Workers x the most that one picked / all picked, mean over steps; None for dense runs."""
    load: list[float] | None = None
    """How many numbers each worker picked, mean over steps; None for dense runs."""
    residual_norm: float | None = None
    """Norm of what worker 0 keeps after this epoch; None for dense runs."""
    skipped_steps: int = 0
    """Steps that were called off because a gradient was not finite."""
    herding_bound: float | None = None
    """Largest entry of any prefix sum of (gradient - mean gradient of the epoch), summed over
    examples in the order they were visited; None where it would not be cheap."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Everything about one run that is worth keeping."""

    task: str
    """Name of the task."""
    description: str
    """What the task is, in one line."""
    order: str
    """Name of the order."""
    sparsify: str
    """Name of the sparsifier, "dense" if all of the gradient travels."""
    density: float | None
    """The density that was asked for; None if dense."""
    seed: int
    metric_name: str
    higher_is_better: bool
    config: dict[str, Any]
    """All settings of the run, by name."""
    parameters: int
    """Numbers in the model."""
    train_examples: int
    test_examples: int
    versions: dict[str, str]
    """Of gradherd, torch, numpy, python."""
    hardware: dict[str, Any]
    """cpu, cores, memory_bytes, accelerator (or None), system."""
    started: str
    """When, UTC, ISO 8601."""
    status: str = "running"
    """running, done, stopped (saved, and can be resumed), interrupted, diverged (the loss was not
    finite any more), or failed."""
    start_loss: float | None = None
    """Loss over the full training set before the first step."""
    start_metric: float | None = None
    epochs: list[EpochRow] = field(default_factory=list)
    density_by_step: list[dict[str, float]] = field(default_factory=list)
    """[{"step", "mean", "min", "max"}], each for the steps from `step` to the next entry's."""

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        return {"format": FORMAT, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "RunRecord":
        """Return the record that `to_json` described, or raise ValueError."""
        if not isinstance(found, Mapping) or found.get("format") != FORMAT:
            got = found.get("format") if isinstance(found, Mapping) else type(found).__name__
            raise ValueError(f"not a record of a run: format is {shown(got)}, expected {FORMAT}")
        try:
            rows = [_made(EpochRow, row) for row in found["epochs"]]
            record: RunRecord = _made(cls, {**found, "epochs": rows})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"damaged record: {error}") from None
        problem = problem_of(record)
        if problem is not None:
            raise ValueError(f"damaged record: {problem}")
        return record


def _made(kind: Any, values: Mapping[str, Any]) -> Any:
    """Build a dataclass; what later versions added is passed over."""
    known = {one.name for one in dataclasses.fields(kind)}
    return kind(**{key: value for key, value in values.items() if key in known})


def finite(value: float) -> float | None:
    """Return a number that JSON can hold: None for one that is not finite."""
    return value if math.isfinite(value) else None


def write_record(record: RunRecord, folder: Path) -> None:
    """Write `folder/record.json`, whole or not at all."""
    write_whole(folder / FILE, json.dumps(record.to_json(), allow_nan=False, indent=1) + "\n")


def read_record(path: Path) -> RunRecord:
    """Read a record.json, or raise ValueError that names it."""
    name = plain(str(path))
    try:
        found = json.loads(read_text(path))
    except (ValueError, RecursionError, OSError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(
            f"{name}: {why}: a damaged record; remove its folder, or train again"
        ) from None
    try:
        return RunRecord.from_json(found)
    except ValueError as error:
        raise ValueError(f"{name}: {error}; remove its folder, or train again") from None


def plain(text: str) -> str:
    """Return what can be shown on a terminal: files and what they hold may be called anything."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def read_text(path: Path) -> str:
    """Return a file's text, if it is one of bounded size; else raise ValueError or OSError."""
    if path.exists() and not path.is_file():  # A pipe would never end.
        raise ValueError("it is not a file")
    with path.open("rb") as file:
        content = file.read(_LARGEST + 1)
    if len(content) > _LARGEST:
        raise ValueError(f"it is longer than {_LARGEST:,} bytes")
    return content.decode("utf-8")


def write_whole(path: Path, text: str) -> None:
    """Write a file under another name, then rename it: a reader sees all of it or the old one."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
