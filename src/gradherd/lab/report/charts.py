"""The charts of a comparison, as plain data that the page draws with plotly.

A chart is {"kind", "title", "note", "alt", "pieces", "lines", "x", "y", "log"}: `pieces` are those
of `traces.py`, `lines` are level ones across the chart, `log` is None where there is no switch.
"""

import statistics
from collections.abc import Callable, Sequence

from gradherd.lab.report.arms import values_at
from gradherd.lab.report.charts_sparse import density, load
from gradherd.lab.report.model import Arm, Comparison
from gradherd.lab.report.stats import spread
from gradherd.lab.report.traces import Chart, curve, label
from gradherd.lab.text import counted, listed, significant
from gradherd.lab.train.record import EpochRow

PARTS = ("data", "compute", "ordering", "exchange", "other")
"""Where the time of an epoch goes."""
AGAINST = {"epochs": "epochs", "seconds": "seconds of training", "bytes": "bytes sent per worker"}


def charts_of(comparison: Comparison) -> list[Chart]:
    """Return the charts that there are figures for."""
    makers = (_loss, _metric, _herding, density, load, _time)
    return [chart for maker in makers if (chart := maker(comparison)) is not None]


def _loss(comparison: Comparison) -> Chart | None:
    arms, base = comparison.arms, comparison.baseline
    means = [p.mean for arm in arms for p in arm.loss_by_epoch if p.mean is not None]
    if not means:
        return None
    lines = []
    if base.final_loss.mean is not None:
        text = f"{'final' if base.finished else 'last'} loss of {label(base.label, 20)}"
        lines = [{"y": base.final_loss.mean, "text": text, "arm": 0}]
    ends = [
        f"{a.label} ends at {significant(a.final_loss.mean)}" for a in arms if a.final_loss.mean
    ]
    return {
        "kind": "loss",
        "title": "Train loss",
        "note": _over_seeds(arms, "over the full training set, after each epoch"),
        "alt": f"Train loss by epoch: {listed(ends)}." if ends else "Train loss by epoch.",
        "pieces": [
            piece for i, arm in enumerate(arms) for piece in curve(i, arm, arm.loss_by_epoch)
        ],
        "lines": lines,
        "x": AGAINST,
        "y": "train loss",
        "log": min(means) > 0 and max(means) > 10 * min(means) if min(means) > 0 else None,
    }


def _metric(comparison: Comparison) -> Chart | None:
    arms = comparison.arms
    if not any(point.mean is not None for arm in arms for point in arm.metric_by_epoch):
        return None
    better = "higher" if comparison.higher_is_better else "lower"
    return {
        "kind": "metric",
        "title": comparison.metric_name,
        "note": _over_seeds(arms, f"{better} is better"),
        "alt": f"{comparison.metric_name} by epoch, {better} is better.",
        "pieces": [
            piece for i, arm in enumerate(arms) for piece in curve(i, arm, arm.metric_by_epoch)
        ],
        "lines": [],
        "x": AGAINST,
        "y": label(comparison.metric_name),
        "log": None,
    }


def _herding(comparison: Comparison) -> Chart | None:
    pieces = []
    for index, arm in enumerate(comparison.arms):
        bounds = [
            spread(values_at(arm.used, epoch, lambda row: row.herding_bound))
            for epoch in range(1, arm.epochs + 1)
        ]
        if any(bound.mean is not None for bound in bounds):
            pieces += curve(index, arm, bounds)
    if not pieces:
        return None
    return {
        "kind": "herding",
        "title": "Herding bound",
        "note": "How far prefix sums of gradients strayed in each epoch; lower is a better order.",
        "alt": "Herding bound by epoch, lower is better.",
        "pieces": pieces,
        "lines": [],
        "x": {"epochs": "epochs"},
        "y": "herding bound",
        "log": False,
    }


def _time(comparison: Comparison) -> Chart | None:
    arms = [arm for arm in comparison.arms if arm.seconds]
    if not arms:
        return None
    seconds = {part: [_part(arm, part) for arm in arms] for part in PARTS}
    total = [sum(column) for column in zip(*seconds.values(), strict=True)]
    shown = [
        part
        for part in PARTS
        if any(value > 0.005 * whole for value, whole in zip(seconds[part], total, strict=True))
    ]
    pieces = [
        {
            "part": PARTS.index(part),
            "role": "part",
            "trace": {
                "type": "bar",
                "orientation": "h",
                "name": part,
                # Positions, not names: two arms may have the same name once it is shortened.
                "y": list(range(len(arms))),
                "x": seconds[part],
                "hovertemplate": "%{x:.3g} s an epoch",
            },
        }
        for part in shown
    ]
    return {
        "kind": "time",
        "title": "Where time goes",
        "note": "Seconds of an epoch on worker 0, mean over epochs and seeds; evaluation apart.",
        "alt": "Seconds of an epoch by part, for each arm.",
        "pieces": pieces,
        "parts": [{"part": PARTS.index(part), "name": part} for part in shown],
        "ticks": [label(arm.label, 22) for arm in arms],
        "lines": [],
        "x": {"seconds": "seconds an epoch"},
        "y": "",
        "log": None,
    }


def _part(arm: Arm, part: str) -> float:
    rows = [row for run in arm.used for row in run.epochs[: arm.epochs]]
    return statistics.fmean(_SECONDS[part](row) for row in rows)


def _other(row: EpochRow) -> float:
    known = (row.data_seconds, row.compute_seconds, row.ordering_seconds, row.exchange_seconds)
    return max(0.0, row.seconds - sum(known))


_SECONDS: dict[str, Callable[[EpochRow], float]] = {
    "data": lambda row: row.data_seconds,
    "compute": lambda row: row.compute_seconds,
    "ordering": lambda row: row.ordering_seconds,
    "exchange": lambda row: row.exchange_seconds,
    "other": _other,
}


def _over_seeds(arms: Sequence[Arm], what: str) -> str:
    counts = {len(arm.seeds) for arm in arms if arm.seeds}
    if counts == {1}:
        return f"One seed; {what}."
    seeds = counted(counts.pop(), "seed") if len(counts) == 1 else "seeds"
    return f"Mean over {seeds}, band ± one standard deviation; {what}."
