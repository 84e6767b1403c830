"""The charts of a comparison, as plain data, and as the drawings that need no script.

A chart of curves is {"kind", "title", "note", "alt", "x", "y", "log", "lines", "levels"}: `x` maps
the axes that can be chosen to their labels, `log` is None for charts without a log switch, `levels`
are horizontal lines. A line is {"arm", "xs", "mean", "low", "high", "runs"}, where `runs` are
the single seeds. A chart of bars has only its drawing. Colours are missing: `svg_parts` has them.
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
from gradherd.lab.report.bar_charts import BarRow, bar_chart
from gradherd.lab.report.comparison import Comparison
from gradherd.lab.report.stats import MeanStd, finite, mean_std
from gradherd.lab.report.svg_chart import ChartLine, chart
from gradherd.lab.report.svg_parts import INLINE, line_styles
from gradherd.lab.text import counted, in_seconds, listed, printable, significant
from gradherd.lab.train.record import EpochRow

Chart = dict[str, Any]

X_AXES = {"epochs": "epochs", "seconds": "seconds of training", "bytes": "bytes sent per worker"}


def charts_of(comparison: Comparison) -> list[Chart]:
    """Return the charts of a comparison that have data, in page order.

    Args:
        comparison: The arms of one task.

    Returns:
        Plain JSON; arms are named by their position in `comparison.arms`. Each has its drawing
        under "svg".
    """
    styles = line_styles([arm.label for arm in comparison.arms])
    # Only charts that have data: an empty frame would look like a failure.
    curves = [one for build in (_loss, _metric, _herding, _density) if (one := build(comparison))]
    bars = [one for draw in (_load, _time) if (one := draw(comparison, styles)) is not None]
    return [{**one, "svg": drawing(one, comparison, styles)} for one in curves] + bars


def drawing(one: Chart, comparison: Comparison, styles: Sequence[int]) -> str:
    """Return a chart of curves as SVG, over its first x axis."""
    axis, log = next(iter(one["x"])), bool(one["log"])
    lines = []
    for line in one["lines"]:
        columns = zip(line["xs"][axis], line["mean"], line["low"], line["high"], strict=False)
        known = [row for row in columns if row[1] is not None]
        band = [(x, low, high) for x, _, low, high in known if low is not None]
        lines.append(
            ChartLine(
                comparison.arms[line["arm"]].label,
                [(x, mean) for x, mean, _, _ in known],
                # A band that reaches below zero has no place on a log axis.
                [(x, low if low > 0 or not log else high / 100, high) for x, low, high in band],
                styles[line["arm"]],
                f"a{line['arm']}",
            )
        )
    levels = [(level["y"], level["text"]) for level in one["levels"]]
    label = one["x"][axis]
    return chart(one["title"], label, one["y"], lines, log=log, levels=levels, layout=INLINE)


def _loss(comparison: Comparison) -> Chart | None:
    arms, base = comparison.arms, comparison.baseline
    means = [p.mean for arm in arms for p in arm.loss_by_epoch if p.mean is not None]
    if not means:
        return None
    levels = []
    # The goal that "epochs to baseline's final loss" in the table refers to.
    if base.final_loss.mean is not None:
        text = f"{'final' if base.finished else 'last'} loss of {printable(base.label, 20)}"
        levels = [{"y": base.final_loss.mean, "text": text, "arm": 0}]
    ends = [(arm.label, arm.final_loss.mean) for arm in arms if arm.final_loss.mean]
    finals = [f"{label} ends at {significant(mean)}" for label, mean in ends]
    return {
        "kind": "loss",
        "title": "Train loss",
        "note": _seeds_note(arms, "over the full training set, after each epoch"),
        "alt": f"Train loss by epoch: {listed(finals)}." if finals else "Train loss by epoch.",
        "lines": [curve(i, arm, arm.loss_by_epoch, "train_loss") for i, arm in enumerate(arms)],
        "levels": levels,
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
        "lines": [curve(i, arm, arm.metric_by_epoch, "metric") for i, arm in enumerate(arms)],
        "levels": [],
        "x": X_AXES,
        "y": comparison.metric_name,
        "log": None,  # no switch: accuracies lie close together, and a logarithm changes nothing
    }


def _herding(comparison: Comparison) -> Chart | None:
    lines = []
    for index, arm in enumerate(comparison.arms):
        # Runs whose gradients of an epoch are too many to be stored have no bound.
        bounds = [
            mean_std(values_at(arm.used, epoch, lambda row: row.herding_bound))
            for epoch in range(1, arm.epochs + 1)
        ]
        if any(bound.mean is not None for bound in bounds):
            lines.append(curve(index, arm, bounds, "herding_bound"))
    if not lines:
        return None
    return {
        "kind": "herding",
        "title": "Herding bound",
        "note": "Largest deviation of prefix sums of gradients in each epoch; lower is better.",
        "alt": "Herding bound by epoch, lower is better.",
        "lines": lines,
        "levels": [],
        "x": {"epochs": "epochs"},
        "y": "herding bound",
        "log": False,
    }


def _density(comparison: Comparison) -> Chart | None:
    """Return the share of elements sent by step, with its target."""
    lines, levels = [], []
    for index, arm in enumerate(comparison.arms):
        points = density_over_steps(arm)
        if not points:
            continue
        steps, means, lows, highs = (list(column) for column in zip(*points, strict=True))
        ends = {"mean": means, "low": lows, "high": highs}
        lines.append({"arm": index, "xs": {"steps": steps}, **ends, "runs": []})
        if arm.density is not None:
            levels.append({"y": arm.density, "text": "", "arm": index})
    if not lines:
        return None
    # Arms usually share one target: one line, with a word, instead of lines on top of each other.
    if len({level["y"] for level in levels}) == 1:
        levels = [{**levels[0], "text": "target"}]
    return {
        "kind": "density",
        "title": "Density over steps",
        "note": "Share of gradient elements sent; band: minimum to maximum, dashed: target.",
        "alt": "Density by step against its target.",
        "lines": lines,
        "levels": levels,
        "x": {"steps": "step"},
        "y": "density",
        "log": False,
    }


def _load(comparison: Comparison, styles: Sequence[int]) -> Chart | None:
    """Return how many elements each worker selected."""
    rows = []
    for index, arm in enumerate(comparison.arms):
        loads = [row.load for run in arm.used for row in run.epochs if row.load]
        # Runs with different numbers of workers have no load per worker in common.
        if not loads or len({len(load) for load in loads}) != 1:
            continue
        means = [statistics.fmean(column) for column in zip(*loads, strict=True)]
        rows += [
            BarRow(
                # One name for all bars of an arm: a name per bar would repeat itself.
                name=arm.label if worker == 0 else "",
                parts=[(mean, f"f{styles[index] % 8}")],
                text=f"{significant(mean)} (worker {worker})",
                group=f"a{index}",
            )
            for worker, mean in enumerate(means)
        ]
    if not rows:
        return None
    return {
        "kind": "load",
        "title": "Load of each worker",
        "note": "Elements each worker selects per step, mean over steps and seeds; equal is best.",
        "alt": "Elements selected by each worker.",
        "log": None,
        "svg": bar_chart("elements per step", rows),
    }


def _time(comparison: Comparison, styles: Sequence[int]) -> Chart | None:
    arms = [(index, arm) for index, arm in enumerate(comparison.arms) if arm.seconds]
    if not arms:
        return None
    seconds = {part: [mean_seconds(arm, part) for _, arm in arms] for part in TIME_PARTS}
    # Not the measured seconds: parts are clamped at zero, and a bar must be as long as its parts.
    total = [sum(column) for column in zip(*seconds.values(), strict=True)]
    # A part below half a percent in every arm would be an invisible bar with a legend entry.
    visible = [
        part
        for part in TIME_PARTS
        if any(value > 0.005 * whole for value, whole in zip(seconds[part], total, strict=True))
    ]
    rows = [
        BarRow(
            name=arm.label,
            parts=[(seconds[part][at], f"part-{TIME_PARTS.index(part)}") for part in visible],
            text=in_seconds(total[at]),
            group=f"a{index}",
        )
        for at, (index, arm) in enumerate(arms)
    ]
    return {
        "kind": "time",
        "title": "Where time goes",
        "note": "Seconds per epoch on worker 0, mean over epochs and seeds, without evaluation.",
        "alt": "Seconds per epoch by part, for each arm.",
        "parts": [{"part": TIME_PARTS.index(part), "name": part} for part in visible],
        "log": None,
        "svg": bar_chart("seconds per epoch", rows),
    }


def _seeds_note(arms: Sequence[ArmSummary], what: str) -> str:
    # Arms may differ in seeds; then the note names no number rather than a wrong one.
    counts = {len(arm.seeds) for arm in arms if arm.seeds}
    if counts == {1}:
        return f"One seed; {what}."
    seeds = counted(counts.pop(), "seed") if len(counts) == 1 else "seeds"
    return f"Mean over {seeds}, band ± one standard deviation; {what}."


def curve(index: int, arm: ArmSummary, points: Sequence[MeanStd], field: str) -> dict[str, Any]:
    """Return an arm's mean over seeds, a band of one standard deviation, and its single seeds.

    Args:
        index: Position of the arm, which decides its colour.
        arm: The arm.
        points: Mean and standard deviation after each epoch.
        field: The field of an epoch's row that they are of.
    """
    # One seed has no standard deviation: a band would pretend otherwise.
    several = len(arm.seeds) > 1
    ends = [
        (p.mean - p.std, p.mean + p.std)
        if several and p.mean is not None and p.std is not None
        else (None, None)
        for p in points
    ]
    runs = [
        {"seed": run.seed, "y": [_value(row, field) for row in run.epochs[: arm.epochs]]}
        for run in arm.used
    ]
    return {
        "arm": index,
        # All three axes are sent along, so that the page can switch between them without a server.
        "xs": {
            "epochs": list(range(1, arm.epochs + 1)),
            "seconds": [_rounded(second) for second in arm.seconds_by_epoch],
            "bytes": [round(count) for count in arm.bytes_by_epoch],
        },
        "mean": [_rounded(point.mean) for point in points],
        "low": [_rounded(low) for low, _ in ends],
        "high": [_rounded(high) for _, high in ends],
        "runs": runs if several else [],
    }


def _value(row: EpochRow, field: str) -> float | None:
    return _rounded(finite(getattr(row, field)))


def _rounded(value: float | None) -> float | None:
    # Seven digits are more than a screen shows, and half the size of a double's seventeen.
    return None if value is None else float(f"{value:.7g}")
