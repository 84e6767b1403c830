"""The record of a run: settings, environment and one row per epoch, as JSON.

Reports and pages read records only. Epochs count from 1: row e describes the run after e epochs.
Record files may hold anything, so every value is checked when a record is read.
"""

import contextlib
import dataclasses
import json
import math
import os
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from gradherd.lab.text import printable

_MAX_VALUE = 1e100
"""Largest number; squares and sums of these stay finite."""
_MAX_DEPTH = 16
"""Nesting of lists and mappings in a setting; the ones we write have two levels."""
_WORDS = {str: "a string", bool: "true or false", int: "an integer", float: "a number"}


def find_problem(record: "RunRecord") -> str | None:
    """Return what is wrong with the values of a record, by the types of its fields, or None."""
    for name, hint in _types(RunRecord).items():
        value = getattr(record, name)
        if name != "epochs" and not has_type(value, hint):
            return f"{name} is {short_repr(value)}, not {type_words(hint)}"
        if isinstance(value, dict) and (problem := _nested_problem(value)) is not None:
            return f"{name} holds {problem}"
    for position, row in enumerate(record.epochs, 1):
        if row.epoch != position:
            return f"epoch {position}: epoch is {short_repr(row.epoch)}"
        for name, hint in _types(EpochRow).items():
            value = getattr(row, name)
            # Counts may have been averaged.
            if not has_type(value, float if hint is int else hint):
                return f"epoch {position}: {name} is {short_repr(value)}, not {type_words(hint)}"
    return None


_types = cache(get_type_hints)  # of each class, once for all records


def has_type(value: Any, expected: Any) -> bool:
    """Return whether a value of a file has a type, and one can compute with it.

    Lists stand for tuples, and integers for floats; numbers are finite.

    >>> has_type(1, float), has_type(True, float), has_type(1.0, int), has_type(None, int | None)
    (True, False, False, True)
    >>> has_type([1, 2], tuple[float, float] | None), has_type([1], tuple[float, float])
    (True, False)
    >>> has_type(["a"], tuple[str, ...]), has_type("a", tuple[str, ...]), has_type([1], list[float])
    (True, False, True)
    """
    if isinstance(expected, UnionType):
        return any(has_type(value, one) for one in get_args(expected))
    kind, items = get_origin(expected), get_args(expected)
    if kind in (tuple, list):
        # tuple[float, float] has a length; tuple[float, ...] and list[float] have any.
        length = len(items) if kind is tuple and items[-1] is not ... else None
        return (
            isinstance(value, list)
            and length in (None, len(value))
            and all(has_type(one, items[0]) for one in value)
        )
    if kind is not None:
        return isinstance(value, dict) and all(has_type(one, items[1]) for one in value.values())
    if expected is Any:
        return True
    if expected is float:
        return is_number(value)
    if expected is int:  # Bounded: JSON has integers of any length, tables and charts do not.
        return type(value) is int and abs(value) < 2**63
    return type(value) is (NoneType if expected is None else expected)


def type_words(expected: Any) -> str:
    """Return what a value of a type is called in errors."""
    if isinstance(expected, UnionType):
        return " or ".join(type_words(one) for one in get_args(expected) if one is not NoneType)
    kind, items = get_origin(expected), get_args(expected)
    if kind in (tuple, list):
        count = f"length {len(items)}" if kind is tuple and items[-1] is not ... else "any length"
        return f"a list of {count}, each {_WORDS[items[0]]}"
    return _WORDS.get(expected, "a table")


def _nested_problem(value: Any, depth: int = 0) -> str | None:
    """Return what prevents settings from being displayed, compared and written as JSON, or None."""
    if depth == _MAX_DEPTH:  # A hostile file may be nested deeper than Python's stack.
        return f"more than {_MAX_DEPTH} levels"
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return next(filter(None, (_nested_problem(one, depth + 1) for one in inner)), None)
    if isinstance(value, str | bool | None) or is_number(value):
        return None
    return f"{short_repr(value)}, which is too large or not a number"


def is_number(value: object) -> bool:
    """Return whether a value is a finite number that reports can compute with."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -_MAX_VALUE <= value <= _MAX_VALUE  # False for NaN; works for integers of any length.


def short_repr(value: object) -> str:
    """Return a value read from a file, shortened to one line.

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
"""Largest record file: room for 100,000 epochs."""


@dataclass(frozen=True, kw_only=True)
class EpochRow:
    """One epoch of a run. Seconds and bytes are those of this epoch; bytes are per worker."""

    epoch: int
    """Counted from 1."""
    train_loss: float | None
    """Mean loss over the full training set after this epoch; None if not finite."""
    metric: float | None
    """The task's metric on the test set; None if not finite."""
    lr: float
    """Learning rate of this epoch."""
    steps: int
    """Optimizer steps."""
    seconds: float
    """Training time of rank 0, without evaluation."""
    data_seconds: float
    """... waiting for batches."""
    compute_seconds: float
    """... in forward, backward and the optimizer."""
    ordering_seconds: float
    """... reading gradients and computing orders, as far as training waited for it."""
    exchange_seconds: float
    """... selecting and exchanging gradients, as far as training waited for it."""
    saving_seconds: float = 0.0
    """... writing checkpoints."""
    evaluation_seconds: float
    """Time spent on evaluation; not part of `seconds`."""
    bytes: int
    """Bytes that a worker sent, for gradients and for ordering."""
    ordering_bytes: int
    """Bytes that a worker sent for ordering alone."""
    density: float
    """Fraction of the gradient that was sent, mean over steps; 1 for dense runs."""
    padding: float | None = None
    """Workers x largest selection / all selected, mean over steps; None for dense runs."""
    residual_norm: float | None = None
    """Norm of worker 0's residual after this epoch; None if nothing is left for later steps."""
    skipped_steps: int = 0
    """Steps skipped because a gradient was not finite."""
    herding_bound: float | None = None
    """Largest entry of any prefix sum of (gradient - mean gradient of the epoch), summed over
    examples in the order they were visited; None if it was not tracked."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Settings, environment and results of one run."""

    task: str
    """Name of the task."""
    description: str
    """One-line description of the task."""
    order: str
    """Name of the order."""
    sparsify: str
    """Name of the sparsifier; "dense" if the whole gradient is sent."""
    density: float | None
    """The requested density; None if dense."""
    seed: int
    metric_name: str
    higher_is_better: bool
    config: dict[str, Any]
    """All settings of the run, by name."""
    parameters: int
    """Number of model parameters."""
    train_examples: int
    test_examples: int
    versions: dict[str, str]
    """Of gradherd, torch, numpy, python."""
    hardware: dict[str, Any]
    """cpu, cores, memory_bytes, accelerator (or None), system."""
    started: str
    """Start time, UTC, ISO 8601."""
    status: str = "running"
    """running, done, stopped (saved, and can be resumed), interrupted, diverged (the loss became
    non-finite), or failed."""
    start_loss: float | None = None
    """Loss over the full training set before the first step."""
    start_metric: float | None = None
    epochs: list[EpochRow] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        return {"format": RECORD_FORMAT, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "RunRecord":
        """Return the record that `to_json` described; raise ValueError if it is damaged."""
        if not isinstance(content, Mapping) or content.get("format") != RECORD_FORMAT:
            got = content.get("format") if isinstance(content, Mapping) else None
            raise ValueError(
                f"not a record of a run: format is {short_repr(got)}, expected {RECORD_FORMAT}"
            )
        try:
            # Fields are checked below; here only that they can be assigned at all.
            rows = [build_dataclass(EpochRow, row) for row in content["epochs"]]
            record: RunRecord = build_dataclass(cls, {**content, "epochs": rows})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"damaged record: {error}") from None
        problem = find_problem(record)
        if problem is not None:
            raise ValueError(f"damaged record: {problem}")
        return record


def build_dataclass(kind: Any, values: Mapping[str, Any]) -> Any:
    """Build a dataclass; ignore fields that another version has had."""
    known = {f.name for f in dataclasses.fields(kind)}
    return kind(**{key: value for key, value in values.items() if key in known})


def finite(value: float | None) -> float | None:
    """Return the value if it is a finite number, which JSON can represent, else None."""
    return None if value is None or not math.isfinite(value) else float(value)


def write_record(record: RunRecord, folder: Path) -> None:
    """Write `folder/record.json` atomically."""
    write_atomic(
        folder / RECORD_FILE, json.dumps(record.to_json(), allow_nan=False, indent=1) + "\n"
    )


def read_record(path: Path) -> RunRecord:
    """Read a record.json; raise a ValueError that names it if it is damaged."""
    name = printable(path)
    try:
        # JSON has no NaN, and None where a run has diverged; Python's reader would take it.
        content = json.loads(read_bounded(path).decode(), parse_constant=lambda name: None)
    except OSError as error:  # It repeats the path, which the message has already.
        raise ValueError(f"{name}: {error.strerror or error}") from None
    # RecursionError: nested brackets can be deeper than the stack of the parser.
    except (ValueError, RecursionError) as error:
        why: object = error
        if isinstance(error, json.JSONDecodeError):
            why = f"no JSON after line {error.lineno}, column {error.colno}"
        raise ValueError(
            f"{name}: {why}: a damaged record; remove its folder, or train again"
        ) from None
    try:
        return RunRecord.from_json(content)
    except ValueError as error:
        raise ValueError(f"{name}: {error}; remove its folder, or train again") from None


def read_bounded(path: Path, max_bytes: int = _MAX_BYTES) -> bytes:
    """Return a regular file of at most so many bytes; else raise ValueError or OSError."""
    if path.exists() and not path.is_file():  # Reading a named pipe would block forever.
        raise ValueError("it is not a file")
    with path.open("rb") as file:
        # One byte more than allowed tells a large file from one that just fits.
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"it is longer than {max_bytes:,} bytes")
    return content


@contextlib.contextmanager
def locked(folder: Path, *, wait: bool) -> Iterator[None]:
    """Lock a folder inside, or until the process ends.

    The folder itself is locked, not a file in it: nothing is left behind by a process that is
    killed, and a full disk has room for it. Nothing is locked where there are no locks: better to
    go on than to refuse.

    Raises:
        BlockingIOError: Another process has it, and this one is not to wait.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:  # Some network file systems lock no folders.
            pass
        yield
    finally:
        os.close(descriptor)


def write_atomic(path: Path, text: str) -> None:
    """Write a file under a temporary name, then rename it: readers see the old or the new one."""
    # Beside the file, since a rename is atomic only within a file system; with the process id, so
    # that two processes never share a draft.
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            # Without it a crash of the machine may leave the new name with no content.
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        # The user knows the file, not the draft.
        raise OSError(error.errno, error.strerror, str(path)) from None
    # Ctrl-C, too, leaves no draft.
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
