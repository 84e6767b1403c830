"""The charts of a comparison, as plain data that the page draws with plotly.

A chart is {"kind", "title", "note", "alt", "pieces", "lines", "x", "y", "log"}: `lines` are
horizontal lines, `log` is None for charts without a log switch. A piece is {"trace", "arm", "role"}
with plotly's own fields under "trace"; a piece whose x axis can be switched has "xs", a list of
values per axis, instead of x. Colours are missing: the style sheet has them, light and dark.
"""

import statistics
from collections.abc import Sequence
from typing import Any

from gradherd.lab.report.arms import (
    TIME_PARTS,
    ArmSummary,
    density_over_steps,
    mean_seconds,
    values_at,
)
from gradherd.lab.report.comparison import Comparison
from gradherd.lab.report.stats import MeanStd, mean_std
from gradherd.lab.text import counted, listed, printable, significant

Piece = dict[str, Any]
Chart = dict[str, Any]

DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "triangle-down", "star")
X_AXES = {"epochs": "epochs", "seconds": "seconds of training", "bytes": "bytes sent per worker"}


def charts_of(comparison: Comparison) -> list[Chart]:
    """Return the charts of a comparison that have data, in page order.

    Args:
        comparison: The arms of one task.

    Returns:
        Plain JSON; arms are named by their position in `comparison.arms`.
    """
    builders = (_loss, _metric, _herding, _density, _load, _time)
    return [chart for build in builders if (chart := build(comparison)) is not None]


def _loss(comparison: Comparison) -> Chart | None:
    arms, base = comparison.arms, comparison.baseline
    means = [p.mean for arm in arms for p in arm.loss_by_epoch if p.mean is not None]
    if not means:
        return None
    lines = []
    # The goal that "epochs to baseline's final loss" in the table refers to.
    if base.final_loss.mean is not None:
        text = f"{'final' if base.finished else 'last'} loss of {plotly_text(base.label, 20)}"
        lines = [{"y": base.final_loss.mean, "text": text, "arm": 0}]
    ends = [(arm.label, arm.final_loss.mean) for arm in arms if arm.final_loss.mean]
    finals = [f"{label} ends at {significant(mean)}" for label, mean in ends]
    return {
        "kind": "loss",
        "title": "Train loss",
        "note": _seeds_note(arms, "over the full training set, after each epoch"),
        "alt": f"Train loss by epoch: {listed(finals)}." if finals else "Train loss by epoch.",
        "pieces": [p for i, arm in enumerate(arms) for p in curve(i, arm, arm.loss_by_epoch)],
        "lines": lines,
        "x": X_AXES,
        "y": "train loss",
        # Over a factor of ten, the later epochs look flat on a linear axis.
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
        "pieces": [p for i, arm in enumerate(arms) for p in curve(i, arm, arm.metric_by_epoch)],
        "lines": [],
        "x": X_AXES,
        "y": plotly_text(comparison.metric_name),
        "log": None,
    }


def _herding(comparison: Comparison) -> Chart | None:
    pieces = []
    for index, arm in enumerate(comparison.arms):
        # Runs whose gradients of an epoch are too many to be stored have no bound.
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
    seconds = {part: [mean_seconds(arm, part) for arm in arms] for part in TIME_PARTS}
    total = [sum(column) for column in zip(*seconds.values(), strict=True)]
    # A part below half a percent in every arm would be an invisible bar with a legend entry.
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
        points = density_over_steps(arm)
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
    # Arms usually share one target: one line, with a word, instead of lines on top of each other.
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


def _load(comparison: Comparison) -> Chart | None:
    """Return how many elements each worker selected."""
    pieces = []
    for index, arm in enumerate(comparison.arms):
        loads = [row.load for run in arm.used for row in run.epochs if row.load]
        # Runs with different numbers of workers have no load per worker in common.
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


def plotly_text(text: str, max_length: int = 40) -> str:
    """Return a name that plotly shows as it is; plotly would interpret tags and templates.

    >>> plotly_text("<b>a</b> & b")
    '&lt;b&gt;a&lt;/b&gt; &amp; b'
    """
    safe = printable(text, max_length)
    # "%{" starts a template, which plotly has no escape for: a zero-width space breaks it up.
    for sign, escaped in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("%{", "%\u200b{")):
        safe = safe.replace(sign, escaped)
    return safe


def curve(index: int, arm: ArmSummary, points: Sequence[MeanStd]) -> list[Piece]:
    """Return an arm's mean over seeds, with a band of one standard deviation for several seeds.

    Args:
        index: Position of the arm, which decides its colour.
        arm: The arm.
        points: Mean and standard deviation after each epoch.
    """
    # All three axes are sent along, so that the page can switch between them without a server.
    xs = {
        "epochs": [float(epoch) for epoch in range(1, arm.epochs + 1)],
        "seconds": list(arm.seconds_by_epoch),
        "bytes": list(arm.bytes_by_epoch),
    }
    line = {
        "arm": index,
        "role": "line",
        "xs": xs,
        "trace": {
            "type": "scatter",
            "mode": "lines+markers",
            "name": plotly_text(arm.label),
            "y": [point.mean for point in points],
            "customdata": [
                [epoch, _hover_std(point, len(arm.seeds))] for epoch, point in enumerate(points, 1)
            ],
            "hovertemplate": "%{y:.4g}%{customdata[1]} after epoch %{customdata[0]}",
            # Symbols tell lines apart without colours; dashes help once symbols repeat.
            "line": {"dash": DASHES[index % len(DASHES)] if index >= len(SYMBOLS) else "solid"},
            "marker": {"symbol": SYMBOLS[index % len(SYMBOLS)]},
        },
    }
    if len(arm.seeds) < 2:  # One seed has no standard deviation: a band would pretend otherwise.
        return [line]
    ends = [
        (i, point.mean - point.std, point.mean + point.std)
        for i, point in enumerate(points)
        if point.mean is not None and point.std is not None
    ]
    places = [i for i, _, _ in ends]
    outline = {name: _forth_and_back([values[i] for i in places]) for name, values in xs.items()}
    # On a log axis nothing at or below zero can be drawn; the band then ends a decade lower.
    floors = [
        0.1 * mean if low <= 0 < (mean := points[i].mean or 0.0) else low for i, low, _ in ends
    ]
    high = [high for _, _, high in ends]
    band = _band(index, high + [low for _, low, _ in reversed(ends)])
    return [{**band, "xs": outline, "log_y": high + floors[::-1]}, line]


def _hover_std(point: MeanStd, seeds: int) -> str:
    return "" if point.std is None or seeds < 2 else f" ± {point.std:.2g}"


def band_between(
    index: int, xs: Sequence[float], low: Sequence[float], high: Sequence[float]
) -> Piece:
    """Return a filled area between two lines."""
    piece = _band(index, [*high, *reversed(low)])
    piece["trace"]["x"] = _forth_and_back(xs)
    return piece


def _band(index: int, y: Sequence[float]) -> Piece:
    # One closed outline: plotly's fill between two traces would need a second, invisible one.
    return {
        "arm": index,
        "role": "band",
        "trace": {
            "type": "scatter",
            "mode": "lines",
            "fill": "toself",
            "y": list(y),
            "hoverinfo": "skip",
            "line": {"width": 0},
        },
    }


def _forth_and_back(values: Sequence[float]) -> list[float]:
    return [*values, *reversed(values)]
