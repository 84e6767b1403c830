"""Records below some folders: found, read and checked."""

import math
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from gradherd.report.arms import key_of
from gradherd.train.record import FILE, EpochRow, RunRecord, read_record


def find_records(folders: Sequence[Path]) -> list[tuple[Path, RunRecord]]:
    """Return every record below these folders with its path, in the order the runs were started.

    Raises ValueError that names the folder without a record, the record that is damaged, or the
    two that are of the same arm and seed.
    """
    found: dict[Path, Path] = {}
    for folder in folders:
        if not folder.exists():
            raise ValueError(f"{folder}: no such folder")
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder; give the folder that holds {FILE}")
        paths = sorted(folder.rglob(FILE))
        if not paths:
            raise ValueError(f"{folder}: no {FILE} in it or below; runs of gradherd leave one")
        for path in paths:  # Folders may overlap; a run counts once.
            found.setdefault(path.resolve(), path)
    read = [(path, checked(path, read_record(path))) for path in found.values()]
    _check_once(read)
    return sorted(read, key=lambda one: one[1].started)


def _check_once(found: Sequence[tuple[Path, RunRecord]]) -> None:
    seen: dict[tuple[object, ...], Path] = {}
    for path, record in found:
        other = seen.setdefault((record.task, *key_of(record), record.seed), path)
        if other is not path:
            raise ValueError(
                f"{other} and {path} are of the same task, arm and seed ({record.seed}): a seed "
                "counts once; give folders that hold one of them"
            )


def checked(path: Path, record: RunRecord) -> RunRecord:
    """Return the record, or raise ValueError where a figure or a name is none."""
    problem = problem_of(record)
    if problem is not None:
        raise ValueError(f"{path}: damaged record: {problem}")
    return record


def problem_of(record: RunRecord) -> str | None:
    """Return what is wrong with a record's values, or None."""
    for name in ("task", "description", "order", "sparsify", "metric_name", "started", "status"):
        if not isinstance(value := getattr(record, name), str):
            return f"{name} is {value!r}, not text"
    for name in ("config", "versions", "hardware"):
        if not isinstance(value := getattr(record, name), dict):
            return f"{name} is {value!r}, not a mapping"
    for name in ("seed", "parameters", "train_examples", "test_examples"):
        if not isinstance(value := getattr(record, name), int):
            return f"{name} is {value!r}, not a whole number"
    if record.density is not None and not _is_number(record.density):
        return f"density is {record.density!r}, not a number"
    for position, row in enumerate(record.epochs, 1):
        problem = _row_problem(row, position)
        if problem is not None:
            return f"epoch {position}: {problem}"
    points: Any = record.density_by_step
    if not isinstance(points, list):
        return "density_by_step is not a list"
    for point in points:
        if not isinstance(point, dict) or not all(
            _is_number(point.get(name)) for name in ("step", "mean", "min", "max")
        ):
            return f"density_by_step holds {point!r}"
    return None


_MAY_BE_NONE = ("train_loss", "metric", "padding", "residual_norm", "herding_bound")
_MAY_BE_ANY = ("train_loss", "metric")


def _row_problem(row: EpochRow, position: int) -> str | None:
    if row.epoch != position:
        return f"epoch is {row.epoch!r}"
    for field in fields(EpochRow):
        value = getattr(row, field.name)
        if field.name == "load":
            if value is not None and not (isinstance(value, list) and all(map(_is_number, value))):
                return f"load is {value!r}"
        elif value is None and field.name in _MAY_BE_NONE:
            continue
        elif field.name in _MAY_BE_ANY and isinstance(value, float):
            continue  # Not finite is a finding, not damage.
        elif not _is_number(value):
            return f"{field.name} is {value!r}, not a number"
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
