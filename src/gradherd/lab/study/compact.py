"""Records of runs as columns: what figures and tests need, in a few kilobytes a run.

A column whose values are all equal is kept as one value; seconds are kept as their mean, and what
each worker picked is left out.
"""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from gradherd.lab.train.record import FORMAT, EpochRow, RunRecord

_SINGLE = ("epoch", "load")
_AVERAGED = tuple(
    field.name for field in dataclasses.fields(EpochRow) if field.name.endswith("seconds")
)
_ABOUT = ("task", "description", "metric_name", "higher_is_better", "parameters")
_ABOUT_MORE = ("train_examples", "test_examples", "start_loss", "start_metric")
_MOST = 48
"""Points of a series over steps."""


def rounded(value: Any, digits: int = 7) -> Any:
    """Return plain JSON with so many significant digits.

    >>> rounded({"a": [1 / 3, 2, None], "b": 1e-12 / 3})
    {'a': [0.3333333, 2, None], 'b': 3.333333e-13}
    """
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, Mapping):
        return {
            key: rounded(inner, 4 if str(key).endswith("seconds") else digits)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [rounded(inner, digits) for inner in value]
    return value


def thinned(values: Sequence[float], most: int = _MOST) -> tuple[list[int], list[float]]:
    """Return a series in at most so many points: where each begins, and the mean from there on.

    >>> thinned([1.0, 3.0, 5.0, 7.0, 9.0], most=3)
    ([0, 2, 4], [2.0, 6.0, 9.0])
    """
    width = -(-len(values) // most) if values else 1
    starts = list(range(0, len(values), width))
    return starts, [statistics.fmean(values[at : at + width]) for at in starts]


def about(record: RunRecord) -> dict[str, Any]:
    """Return what is the same in all runs of an arm, or nearly."""
    return {name: getattr(record, name) for name in (*_ABOUT, *_ABOUT_MORE)}


def columns(record: RunRecord) -> dict[str, Any]:
    """Return the epochs of a run, and its densities over steps."""
    rows = [dataclasses.asdict(row) for row in record.epochs]
    names = [f.name for f in dataclasses.fields(EpochRow) if f.name not in _SINGLE]
    found = {name: _column(name, [row[name] for row in rows]) for name in names}
    if record.density_by_step:
        width = -(-len(record.density_by_step) // _MOST)
        bins = [
            record.density_by_step[at : at + width]
            for at in range(0, len(record.density_by_step), width)
        ]
        found["density_by_step"] = {
            "step": [part[0]["step"] for part in bins],
            "mean": [statistics.fmean(one["mean"] for one in part) for part in bins],
            "min": [min(one["min"] for one in part) for part in bins],
            "max": [max(one["max"] for one in part) for part in bins],
        }
    return {"epochs": len(rows), **found}


def _column(name: str, values: list[Any]) -> Any:
    if not values:
        return None
    if name in _AVERAGED:
        return statistics.fmean(values)
    return values[0] if all(value == values[0] for value in values) else values


def record_from(facts: Mapping[str, Any], figures: Mapping[str, Any], **others: Any) -> RunRecord:
    """Return the record that `about` and `columns` were taken from, as far as it was kept."""
    found = dict(figures)
    count, steps = found.pop("epochs"), found.pop("density_by_step", None)
    rows = [
        {
            "epoch": at + 1,
            **{k: v[at] if isinstance(v, list) else v for k, v in found.items()},
        }
        for at in range(count)
    ]
    names = ("step", "mean", "min", "max")
    points = zip(*(steps[name] for name in names), strict=True) if steps else ()
    densities = [dict(zip(names, point, strict=True)) for point in points]
    return RunRecord.from_json(
        {"format": FORMAT, **facts, **others, "epochs": rows, "density_by_step": densities}
    )
