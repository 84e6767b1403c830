"""Charts of sparsified arms: how much travelled, and who picked it."""

import statistics

from gradherd.lab.report.model import Arm, Comparison
from gradherd.lab.report.traces import Chart, band_between, label


def density(comparison: Comparison) -> Chart | None:
    """Return the share that travelled by step, against its target."""
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
                    "name": label(arm.label),
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
        "note": "Share of the gradient that travelled; band: least and most, dashed: target.",
        "alt": "Density by step against its target.",
        "pieces": pieces,
        "lines": lines,
        "x": {"steps": "step"},
        "y": "density",
        "log": False,
    }


def _steps(arm: Arm) -> list[tuple[float, float, float, float]]:
    """Return (step, mean, least, most) over an arm's seeds, for the steps that all of them have."""
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


def load(comparison: Comparison) -> Chart | None:
    """Return how much each worker picked."""
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
                    "name": label(arm.label),
                    "x": list(range(len(means))),
                    "y": means,
                    "hovertemplate": "%{y:.4g} numbers a step from worker %{x}",
                },
            }
        )
    if not pieces:
        return None
    return {
        "kind": "load",
        "title": "Load of each worker",
        "note": "Numbers each worker picked in a step, mean over steps and seeds; level is best.",
        "alt": "Numbers picked by each worker.",
        "pieces": pieces,
        "lines": [],
        "x": {"workers": "worker"},
        "y": "numbers a step",
        "log": None,
    }
