"""Are the values of a record such as a run writes them? Files may hold anything."""

import math
import reprlib
from dataclasses import fields
from typing import Any

_TEXTS = ("task", "description", "order", "sparsify", "metric_name", "started", "status")
_COUNTS = ("seed", "parameters", "train_examples", "test_examples")
_MAY_BE_NONE = ("train_loss", "metric", "padding", "residual_norm", "herding_bound")
_MAY_BE_ANY = ("train_loss", "metric")
_LARGEST = 1e100
"""Beyond it, sums and squares of numbers are none any more."""
_DEEPEST = 16
"""Levels of lists and mappings in a setting; ours have two."""


def problem_of(record: Any) -> str | None:
    """Return what is wrong with the values of a RunRecord, or None."""
    for name in _TEXTS:
        if not isinstance(value := getattr(record, name), str):
            return f"{name} is {shown(value)}, not text"
    for name in ("config", "versions", "hardware"):
        if not isinstance(value := getattr(record, name), dict):
            return f"{name} is {shown(value)}, not a mapping"
        if (problem := _nested_problem(value)) is not None:
            return f"{name} holds {problem}"
    for name in _COUNTS:
        value = getattr(record, name)
        if not isinstance(value, int) or abs(value) >= 2**63:
            return f"{name} is {shown(value)}, not a whole number"
    if not isinstance(record.higher_is_better, bool):
        return f"higher_is_better is {shown(record.higher_is_better)}, neither true nor false"
    for name in ("density", "start_loss", "start_metric"):
        value = getattr(record, name)
        if value is not None and not is_number(value):
            return f"{name} is {shown(value)}, not a number"
    for position, row in enumerate(record.epochs, 1):
        if (problem := _row_problem(row, position)) is not None:
            return f"epoch {position}: {problem}"
    if not isinstance(record.density_by_step, list):
        return "density_by_step is not a list"
    for point in record.density_by_step:
        if not isinstance(point, dict) or not all(map(is_number, point.values())):
            return f"density_by_step holds {shown(point)}"
    return None


def _row_problem(row: Any, position: int) -> str | None:
    if row.epoch != position:
        return f"epoch is {shown(row.epoch)}"
    for field in fields(row):
        value = getattr(row, field.name)
        if field.name == "load":
            if value is not None and not (isinstance(value, list) and all(map(is_number, value))):
                return f"load is {shown(value)}"
        elif value is None and field.name in _MAY_BE_NONE:
            continue
        elif field.name in _MAY_BE_ANY and isinstance(value, float) and not math.isfinite(value):
            continue  # Not finite is a finding, not damage.
        elif not is_number(value):
            return f"{field.name} is {shown(value)}, not a number"
    return None


def _nested_problem(value: dict[str, Any]) -> str | None:
    """Return what a setting must not hold: it is shown, compared and written as JSON."""
    level: list[Any] = [value]
    for _ in range(_DEEPEST):
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict | list):
                inner += one.values() if isinstance(one, dict) else one
            elif isinstance(one, int | float) and not isinstance(one, bool) and not is_number(one):
                return f"{shown(one)}, which is too large or no number"
        level = inner
        if not level:
            return None
    return f"more than {_DEEPEST} levels"


def is_number(value: object) -> bool:
    """Return whether a value is a number that figures can be made of."""
    return isinstance(value, int | float) and not isinstance(value, bool) and _in_range(value)


def _in_range(value: float) -> bool:
    return -_LARGEST <= value <= _LARGEST  # False for NaN; whole numbers may be of any length


def shown(value: object) -> str:
    """Return a value out of a file as it can be told: shortened, on one line.

    >>> shown(10**50), shown([[[[[[[1]]]]]]])
    ('1000000000...0000000000', '[[[[[[[...]]]]]]]')
    """
    return _brief.repr(value)


_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = 60
_brief.maxlong = 23
