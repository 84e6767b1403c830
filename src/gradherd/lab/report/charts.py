"""The charts of a comparison, as plain data that the page draws with plotly.

A chart is {"kind", "title", "note", "alt", "pieces", "lines", "x", "y", "log"}: `pieces` are those
of `traces.py`, `lines` are horizontal lines, `log` is None for charts without a log switch.
"""

import statistics
from collections.abc import Callable, Sequence

from gradherd.lab.report.arms import ArmSummary, values_at
from gradherd.lab.report.comparison import Comparison
from gradherd.lab.report.stats import mean_std
from gradherd.lab.report.traces import Chart, band_between, curve, plotly_text
from gradherd.lab.text import counted, listed, significant
from gradherd.lab.train.record import EpochRow

TIME_PARTS = ("data", "compute", "ordering", "exchange", "other")
"""Parts that the seconds of an epoch are split into."""
X_AXES = {"epochs": "epochs", "seconds": "seconds of training", "bytes": "bytes sent per worker"}


def charts_of(comparison: Comparison) -> list[Chart]:
    """Return the charts that have data."""
    builders = (_loss, _metric, _herding, _density, _load, _time)
    return [chart for build in builders if (chart := build(comparison)) is not None]


def _loss(comparison: Comparison) -> Chart | None:
    arms, base = comparison.arms, comparison.baseline
    means = [p.mean for arm in arms for p in arm.loss_by_epoch if p.mean is not None]
    if not means:
        return None
    lines = []
    if base.final_loss.mean is not None:
        text = f"{'final' if base.finished else 'last'} loss of {plotly_text(base.label, 20)}"
        lines = [{"y": base.final_loss.mean, "text": text, "arm": 0}]
    finals = [
        f"{a.label} ends at {significant(a.final_loss.mean)}" for a in arms if a.final_loss.mean
    ]
    return {
        "kind": "loss",
        "title": "Train loss",
        "note": _seeds_note(arms, "over the full training set, after each epoch"),
        "alt": f"Train loss by epoch: {listed(finals)}." if finals else "Train loss by epoch.",
        "pieces": [
            piece for i, arm in enumerate(arms) for piece in curve(i, arm, arm.loss_by_epoch)
        ],
        "lines": lines,
        "x": X_AXES,
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
        "note": _seeds_note(arms, f"{better} is better"),
        "alt": f"{comparison.metric_name} by epoch, {better} is better.",
        "pieces": [
            piece for i, arm in enumerate(arms) for piece in curve(i, arm, arm.metric_by_epoch)
        ],
        "lines": [],
        "x": X_AXES,
        "y": plotly_text(comparison.metric_name),
        "log": None,
    }


def _herding(comparison: Comparison) -> Chart | None:
    pieces = []
    for index, arm in enumerate(comparison.arms):
        bounds = [
            mean_std(values_at(arm.used, epoch, lambda row: row.herding_bound))
            for epoch in range(1, arm.epochs + 1)
        ]
        if any(bound.mean is not None for bound in bounds):
            pieces += curve(index, arm, bounds)
    if not pieces:
        return None
    return {
        "kind": "herding",
        "title": "Herding bound",
        "note": "Largest deviation of prefix sums of gradients in each epoch; lower is better.",
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
    seconds = {part: [_part(arm, part) for arm in arms] for part in TIME_PARTS}
    total = [sum(column) for column in zip(*seconds.values(), strict=True)]
    visible = [
        part
        for part in TIME_PARTS
        if any(value > 0.005 * whole for value, whole in zip(seconds[part], total, strict=True))
    ]
    pieces = [
        {
            "part": TIME_PARTS.index(part),
            "role": "part",
            "trace": {
                "type": "bar",
                "orientation": "h",
                "name": part,
                # Positions, not names: two arms may have the same name once it is shortened.
                "y": list(range(len(arms))),
                "x": seconds[part],
                "hovertemplate": "%{x:.3g} s per epoch",
            },
        }
        for part in visible
    ]
    return {
        "kind": "time",
        "title": "Where time goes",
        "note": "Seconds per epoch on worker 0, mean over epochs and seeds, without evaluation.",
        "alt": "Seconds per epoch by part, for each arm.",
        "pieces": pieces,
        "parts": [{"part": TIME_PARTS.index(part), "name": part} for part in visible],
        "ticks": [plotly_text(arm.label, 22) for arm in arms],
        "lines": [],
        "x": {"seconds": "seconds per epoch"},
        "y": "",
        "log": None,
    }


def _part(arm: ArmSummary, part: str) -> float:
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


def _seeds_note(arms: Sequence[ArmSummary], what: str) -> str:
    counts = {len(arm.seeds) for arm in arms if arm.seeds}
    if counts == {1}:
        return f"One seed; {what}."
    seeds = counted(counts.pop(), "seed") if len(counts) == 1 else "seeds"
    return f"Mean over {seeds}, band ± one standard deviation; {what}."


def _density(comparison: Comparison) -> Chart | None:
    """Return the share of elements sent by step, with its target."""
    pieces, lines = [], []
    for index, arm in enumerate(comparison.arms):
        points = _steps(arm)
        if not points:
            continue
        steps, means, lows, highs = zip(*points, strict=True)
        if len(points) > 1:
            pieces.append(band_between(index, steps, lows, highs))
        pieces.append(
            {
                "arm": index,
                "role": "thin" if len(points) > 1 else "line",
                "trace": {
                    "type": "scatter",
                    "mode": "lines" if len(points) > 1 else "markers",
                    "name": plotly_text(arm.label),
                    "x": list(steps),
                    "y": list(means),
                    "customdata": [list(pair) for pair in zip(lows, highs, strict=True)],
                    "hovertemplate": "%{y:.4g} (%{customdata[0]:.3g} to %{customdata[1]:.3g}) "
                    "from step %{x}",
                },
            }
        )
        if arm.density is not None:
            lines.append({"y": arm.density, "text": "", "arm": index})
    if not pieces:
        return None
    if len({line["y"] for line in lines}) == 1:
        lines = [{**lines[0], "arm": 0, "text": "target"}]
    return {
        "kind": "density",
        "title": "Density over steps",
        "note": "Share of gradient elements sent; band: minimum to maximum, dashed: target.",
        "alt": "Density by step against its target.",
        "pieces": pieces,
        "lines": lines,
        "x": {"steps": "step"},
        "y": "density",
        "log": False,
    }


def _steps(arm: ArmSummary) -> list[tuple[float, float, float, float]]:
    """Return (step, mean, minimum, maximum) over seeds, for the steps that all of them have."""
    by_seed = [
        {point["step"]: point for point in run.density_by_step}
        for run in arm.used
        if run.density_by_step
    ]
    if not by_seed or arm.density is None:
        return []
    common = [step for step in by_seed[0] if all(step in points for points in by_seed)]
    return [
        (
            step,
            statistics.fmean(points[step]["mean"] for points in by_seed),
            min(points[step]["min"] for points in by_seed),
            max(points[step]["max"] for points in by_seed),
        )
        for step in sorted(common)
    ]


def _load(comparison: Comparison) -> Chart | None:
    """Return how many elements each worker selected."""
    pieces = []
    for index, arm in enumerate(comparison.arms):
        loads = [row.load for run in arm.used for row in run.epochs if row.load]
        if not loads or len({len(load) for load in loads}) != 1:
            continue
        means = [statistics.fmean(column) for column in zip(*loads, strict=True)]
        pieces.append(
            {
                "arm": index,
                "role": "bar",
                "trace": {
                    "type": "bar",
                    "name": plotly_text(arm.label),
                    "x": list(range(len(means))),
                    "y": means,
                    "hovertemplate": "%{y:.4g} elements per step from worker %{x}",
                },
            }
        )
    if not pieces:
        return None
    return {
        "kind": "load",
        "title": "Load of each worker",
        "note": "Elements each worker selects per step, mean over steps and seeds; equal is best.",
        "alt": "Elements selected by each worker.",
        "pieces": pieces,
        "lines": [],
        "x": {"workers": "worker"},
        "y": "elements per step",
        "log": None,
    }
