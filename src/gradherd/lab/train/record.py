"""The record of a run: settings, environment and one row per epoch, as JSON.

Reports and pages read records only. Epochs count from 1: row e describes the run after e epochs.
Record files may hold anything, so every value is checked when a record is read.
"""

import dataclasses
import json
import math
import os
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from gradherd.lab.text import printable

_TEXT_FIELDS = ("task", "description", "order", "sparsify", "metric_name", "started", "status")
_COUNT_FIELDS = ("seed", "parameters", "train_examples", "test_examples")
_OPTIONAL_FIELDS = ("train_loss", "metric", "padding", "residual_norm", "herding_bound")
_NON_FINITE_FIELDS = ("train_loss", "metric")
_MAX_VALUE = 1e100
"""Beyond it, sums and squares of numbers are none any more."""
_MAX_DEPTH = 16
"""Levels of lists and mappings in a setting; ours have two."""


def find_problem(record: Any) -> str | None:
    """Return what is wrong with the values of a RunRecord, or None."""
    for name in _TEXT_FIELDS:
        if not isinstance(value := getattr(record, name), str):
            return f"{name} is {short_repr(value)}, not text"
    for name in ("config", "versions", "hardware"):
        if not isinstance(value := getattr(record, name), dict):
            return f"{name} is {short_repr(value)}, not a mapping"
        if (problem := _nested_problem(value)) is not None:
            return f"{name} holds {problem}"
    for name in _COUNT_FIELDS:
        value = getattr(record, name)
        if not isinstance(value, int) or abs(value) >= 2**63:
            return f"{name} is {short_repr(value)}, not a whole number"
    if not isinstance(record.higher_is_better, bool):
        return f"higher_is_better is {short_repr(record.higher_is_better)}, neither true nor false"
    for name in ("density", "start_loss", "start_metric"):
        value = getattr(record, name)
        if value is not None and not is_number(value):
            return f"{name} is {short_repr(value)}, not a number"
    for position, row in enumerate(record.epochs, 1):
        if (problem := _row_problem(row, position)) is not None:
            return f"epoch {position}: {problem}"
    if not isinstance(record.density_by_step, list):
        return "density_by_step is not a list"
    for point in record.density_by_step:
        if not isinstance(point, dict) or not all(map(is_number, point.values())):
            return f"density_by_step holds {short_repr(point)}"
    return None


def _row_problem(row: Any, position: int) -> str | None:
    if row.epoch != position:
        return f"epoch is {short_repr(row.epoch)}"
    for one in fields(row):
        value = getattr(row, one.name)
        if one.name == "load":
            if value is not None and not (isinstance(value, list) and all(map(is_number, value))):
                return f"load is {short_repr(value)}"
        elif value is None and one.name in _OPTIONAL_FIELDS:
            continue
        elif (
            one.name in _NON_FINITE_FIELDS and isinstance(value, float) and not math.isfinite(value)
        ):
            continue  # Not finite is a finding, not damage.
        elif not is_number(value):
            return f"{one.name} is {short_repr(value)}, not a number"
    return None


def _nested_problem(value: dict[str, Any]) -> str | None:
    """Return what a setting must not hold: it is shown, compared and written as JSON."""
    level: list[Any] = [value]
    for _ in range(_MAX_DEPTH):
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict | list):
                inner += one.values() if isinstance(one, dict) else one
            elif isinstance(one, int | float) and not isinstance(one, bool) and not is_number(one):
                return f"{short_repr(one)}, which is too large or no number"
        level = inner
        if not level:
            return None
    return f"more than {_MAX_DEPTH} levels"


def is_number(value: object) -> bool:
    """Return whether a value is a number that figures can be made of."""
    return isinstance(value, int | float) and not isinstance(value, bool) and _in_range(value)


def _in_range(value: float) -> bool:
    return -_MAX_VALUE <= value <= _MAX_VALUE  # False for NaN; whole numbers may be of any length


def short_repr(value: object) -> str:
    """Return a value out of a file as it can be told: shortened, on one line.

    >>> short_repr(10**50), short_repr([[[[[[[1]]]]]]])
    ('1000000000...0000000000', '[[[[[[[...]]]]]]]')
    """
    return _SHORT_REPR.repr(value)


_SHORT_REPR = reprlib.Repr()
_SHORT_REPR.maxstring = _SHORT_REPR.maxother = 60
_SHORT_REPR.maxlong = 23


RECORD_FORMAT = 1
RECORD_FILE = "record.json"
_MAX_BYTES = 1 << 26
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
        return {"format": RECORD_FORMAT, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "RunRecord":
        """Return the record that `to_json` described, or raise ValueError."""
        if not isinstance(found, Mapping) or found.get("format") != RECORD_FORMAT:
            got = found.get("format") if isinstance(found, Mapping) else type(found).__name__
            raise ValueError(
                f"not a record of a run: format is {short_repr(got)}, expected {RECORD_FORMAT}"
            )
        try:
            rows = [_build_dataclass(EpochRow, row) for row in found["epochs"]]
            record: RunRecord = _build_dataclass(cls, {**found, "epochs": rows})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"damaged record: {error}") from None
        problem = find_problem(record)
        if problem is not None:
            raise ValueError(f"damaged record: {problem}")
        return record


def _build_dataclass(kind: Any, values: Mapping[str, Any]) -> Any:
    """Build a dataclass; what later versions added is passed over."""
    known = {one.name for one in dataclasses.fields(kind)}
    return kind(**{key: value for key, value in values.items() if key in known})


def finite_or_none(value: float) -> float | None:
    """Return a number that JSON can hold: None for one that is not finite."""
    return value if math.isfinite(value) else None


def write_record(record: RunRecord, folder: Path) -> None:
    """Write `folder/record.json`, whole or not at all."""
    write_atomic(
        folder / RECORD_FILE, json.dumps(record.to_json(), allow_nan=False, indent=1) + "\n"
    )


def read_record(path: Path) -> RunRecord:
    """Read a record.json, or raise ValueError that names it."""
    name = printable(str(path))
    try:
        found = json.loads(read_bounded_text(path))
    except (ValueError, RecursionError, OSError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(
            f"{name}: {why}: a damaged record; remove its folder, or train again"
        ) from None
    try:
        return RunRecord.from_json(found)
    except ValueError as error:
        raise ValueError(f"{name}: {error}; remove its folder, or train again") from None


def read_bounded_text(path: Path) -> str:
    """Return a file's text, if it is one of bounded size; else raise ValueError or OSError."""
    if path.exists() and not path.is_file():  # A pipe would never end.
        raise ValueError("it is not a file")
    with path.open("rb") as file:
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise ValueError(f"it is longer than {_MAX_BYTES:,} bytes")
    return content.decode("utf-8")


def write_atomic(path: Path, text: str) -> None:
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
