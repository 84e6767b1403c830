"""Draw the charts of a study from its results, and check beforehand that they can be drawn."""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gradherd.lab.report.stats import mean_std
from gradherd.lab.report.svg import (
    COLOURS,
    ChartAxis,
    ChartLine,
    Layout,
    svg_text,
)
from gradherd.lab.study.kinds import kind_of
from gradherd.lab.study.results import RunResult
from gradherd.lab.text import check_known, printable, significant
from gradherd.lab.train.record import has_type
from studies.evidence.chart_file import chart_file, line_styles, svg_head
from studies.evidence.claims import (
    EPOCH_FIELDS,
    MEASURES,
    in_percent,
    measure,
    relative_change,
)
from studies.evidence.file import PageStudy, from_table
from studies.evidence.words import measure_words

Results = Mapping[str, Sequence[RunResult]]
"""Results by arm."""
Series = tuple[list[float], list[float | None]]
"""x and y values."""
TIMES = ("epoch", "step", "round", "bytes", "seconds")
"""x axes along which a run has a series of values."""
_LOG_X = ("bytes", "lr", "workers")
"""x axes whose values span orders of magnitude."""
_EFFECTS = Layout(width=380, height=236, left=12)
_LEAST_ROW = 20
"""Pixels of a row of effects."""
_SERIES_WORDS = {"bound": "herding_bound"}
"""Measures that mean the last round, but are drawn for every round."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A chart of a study."""

    title: str
    """Title of the chart."""
    y: str
    """A series of the runs, or a measure where x is a setting."""
    x: str = "epoch"
    """epoch, step, round, bytes or seconds; or the name of a setting in which arms differ."""
    arms: tuple[str, ...] = ()
    """Names of the arms to draw; empty draws all of them."""
    lines: str = "arm"
    """What makes a line: each arm, or each value of the named setting."""
    log: bool = False
    """Whether the y axis is logarithmic."""
    zero: bool = False
    """Whether the y axis includes zero."""
    against: str | None = None
    """Name of a reference arm: the others are drawn as differences from it, seed by seed."""


def figures_of(study: PageStudy) -> list[Figure]:
    """Return the charts of a study.

    Raises:
        ValueError: A table of a figure is invalid, or needs something that no run of the study has.
            Runs that are no trainings name their measures themselves: theirs are checked when
            results are read.
    """
    return [_figure(table, study) for table in study.figures]


def _figure(table: Mapping[str, Any], study: PageStudy) -> Figure:
    figure: Figure = from_table(Figure, "figure", table)
    where = f"figure {figure.title}"
    if figure.against is not None:
        # Settings and bytes differ from arm to arm: there would be no common x to subtract at.
        check_known("x of a figure with against", figure.x, ("epoch", "step", "round"))
        if figure.lines != "arm":
            raise ValueError(f"{where}: with against every arm is a line, so lines has no effect")
    # A logarithmic axis has no zero, and differences may be negative.
    if figure.log and (figure.zero or figure.against is not None):
        raise ValueError(f"{where}: log cannot be used with zero or against")
    for name in (*figure.arms, *([] if figure.against is None else [figure.against])):
        check_known(f"arm of {where}", name, tuple(study.arms))
    trains = study.kind == "compare"
    times = [one for one in TIMES if not trains or one != "round"]
    check_known(f"x of {where}", figure.x, (*times, *kind_of(study).keys))
    if trains:
        check_known(f"y of {where}", figure.y, EPOCH_FIELDS if figure.x in times else MEASURES)
    if figure.x not in times:
        _check_setting_axis(study, figure, where)
    return figure


def _arms_in(study: PageStudy, figure: Figure) -> list[str]:
    return [name for name in study.arms if not figure.arms or name in figure.arms]


def _check_setting_axis(study: PageStudy, figure: Figure, where: str) -> None:
    """Check a figure over a setting: every arm has a number there, and lines are known."""
    kind = kind_of(study)
    check_known(f"lines of {where}", figure.lines, ("arm", *kind.keys))
    for name in _arms_in(study, figure):
        value = kind.settings(study, study.arms[name]).get(figure.x)
        if not has_type(value, float):
            raise ValueError(
                f"{where}: {figure.x} is no number in {name!r}, got {value!r}: "
                "list the arms that have one in arms"
            )


def draw_charts(study: PageStudy, results: Results) -> dict[str, str]:
    """Return the charts of a study as SVG by file name; figures without results are left out.

    Args:
        study: The study.
        results: Its runs by arm; arms without results are not drawn.
    """
    charts = {}
    for number, figure in enumerate(figures_of(study), 1):
        # In the order of the study, which decides the colours, not in that of the results.
        names = [name for name in _arms_in(study, figure) if name in results]
        available = {name: results[name] for name in names}
        reference = () if figure.against is None else results.get(figure.against, ())
        if available and (svg := _draw(figure, available, reference)) is not None:
            charts[file_name(study, number)] = svg
    return charts


def _draw(figure: Figure, results: Results, reference: Sequence[RunResult]) -> str | None:
    metric = next(iter(results.values()))[0].about.get("metric_name", "metric")
    words = measure_words(figure.y, metric)
    if figure.against is not None:
        points = in_percent(figure.y, metric)
        lines = lines_against(figure, results, reference, points)
        words = f"{words}, {'points' if points else '%'} from {figure.against}"
    elif figure.x in TIMES:
        lines = lines_over_time(figure, results)
        words = measure_words(_SERIES_WORDS.get(figure.y, figure.y), metric)
    else:
        lines = lines_over_setting(figure, results)
    # All runs diverged, or have no common seed with the reference.
    if not any(line.points for line in lines):
        return None
    # After the lines are known: what they share depends on which arms have results.
    names = short_names([line.name for line in lines])
    styles = line_styles(names)
    x_words = {"bytes": "MB sent per worker"}.get(figure.x, figure.x.replace("_", " "))
    return chart_file(
        figure.title,
        x_words,
        words,
        [
            replace(line, name=name, style=style)
            for line, name, style in zip(lines, names, styles, strict=True)
        ],
        log=figure.log,
        log_x=figure.x in _LOG_X,
        zero=figure.zero or figure.against is not None,
        # Differences of a fraction of a percent are noise in all of these studies.
        least=1.0 if figure.against is not None else None,
    )


def file_name(study: PageStudy, number: int) -> str:
    """Return the file name of a chart, counted from 1."""
    return f"{study.name}.svg" if number == 1 else f"{study.name}-{number}.svg"


def short_names(names: Sequence[str]) -> list[str]:
    """Return names without the parts that all of them share: there is little room in the legend.

    >>> short_names(["d-rr, 64 workers", "cd-grab, 64 workers", "cd-grab, 64 workers, sketch"])
    ['d-rr', 'cd-grab', 'cd-grab, sketch']
    >>> short_names(["cd-grab, a"]), short_names(["a, b", "b, a"])
    (['cd-grab, a'], ['a, b', 'b, a'])
    """
    parts = [name.split(", ") for name in names]
    shared = set.intersection(*map(set, parts)) if len(parts) > 1 else set()
    short = [", ".join(part for part in one if part not in shared) for one in parts]
    # An empty name, or two equal ones, would be worse than long ones.
    return short if all(short) and len(set(short)) == len(short) else list(names)


def lines_over_time(figure: Figure, results: Results) -> list[ChartLine]:
    """Return a line per arm: the mean over seeds, and the range of single seeds."""
    return [
        _mean_line(name, [_series(figure, run) for run in runs]) for name, runs in results.items()
    ]


def lines_against(
    figure: Figure, results: Results, reference: Sequence[RunResult], points: bool
) -> list[ChartLine]:
    """Return a line per arm: its difference from the reference in percent, paired by seed.

    Args:
        figure: The figure.
        results: The arms.
        reference: Results of the reference arm.
        points: Whether values are percentages, which differ by points.
    """
    partners = {run.seed: _series(figure, run) for run in reference}
    lines = []
    for name, runs in results.items():
        # By seed, as in claims: the change is taken within a pair, then averaged over pairs.
        pairs = [(_series(figure, run), partners[run.seed]) for run in runs if run.seed in partners]
        if pairs and name != figure.against:
            lines.append(_mean_line(name, [_change(own, other, points) for own, other in pairs]))
    return lines


def _change(series: Series, reference: Series, points: bool) -> Series:
    """Return the change from one series to another in percent, up to the end of the shorter one."""
    xs: list[float] = []
    changes: list[float | None] = []
    # A run that diverged is shorter than its partner; the line ends with the shorter one.
    for x, value, other_x, other in zip(*series, *reference, strict=False):
        if x != other_x:
            raise ValueError(
                f"against needs arms measured at the same times, got {x} and {other_x}"
            )
        share = None if value is None or other is None else relative_change(value, other, points)
        xs.append(x)
        changes.append(None if share is None else 100 * share)
    return xs, changes


def _mean_line(name: str, runs: Sequence[Series]) -> ChartLine:
    """Return the mean of several series and their range, up to the end of the shortest one."""
    points, band = [], []
    for at in range(min(len(ys) for _, ys in runs)):
        values = [ys[at] for _, ys in runs]
        known = [value for value in values if value is not None]
        # Where a run diverged there is no point: the mean of the others would look too good.
        if known and len(known) == len(values):
            # Bytes differ slightly between seeds; epochs, steps and rounds do not.
            x = statistics.fmean(xs[at] for xs, _ in runs)
            points.append((x, statistics.fmean(known)))
            band.append((x, min(known), max(known)))
    return ChartLine(name, points, band if len(runs) > 1 else ())


def _series(figure: Figure, result: RunResult) -> Series:
    if "summary" in result.figures:
        series = result.figures.get("series", {})
        for name in (figure.x, figure.y):
            if name not in series:
                known = ", ".join(series) or "none"
                raise ValueError(f"{figure.title}: no series {name!r}; known are {known}")
        return list(series[figure.x]), list(series[figure.y])
    record = result.record()
    # Older results also have densities within epochs, where a controller that overshoots shows.
    points = result.figures.get("density_by_step")
    if figure.x == "step" and figure.y == "density" and points:
        return points["step"], points["mean"]
    values = [getattr(row, figure.y) for row in record.epochs]
    sizes = {
        "epoch": (1.0 for _ in record.epochs),
        "step": (float(row.steps) for row in record.epochs),
        "bytes": (row.bytes / 1e6 for row in record.epochs),
    }
    return list(itertools.accumulate(sizes[figure.x])), values


def lines_over_setting(figure: Figure, results: Results) -> list[ChartLine]:
    """Return a line per arm or per value of a setting, over another setting."""
    points: dict[str, list[tuple[float, float]]] = {}
    bands: dict[str, list[tuple[float, float, float]]] = {}
    for name, runs in results.items():
        settings = runs[0].settings
        x = float(settings[figure.x])
        values = measure(figure.y, None, runs, None).arm
        mean = mean_std(list(values.values())).mean
        known = [value for value in values.values() if value is not None]
        line = name if figure.lines == "arm" else str(settings.get(figure.lines))
        # Also without a point: dropping the line would change the colours of those that follow.
        points.setdefault(line, [])
        if mean is not None:
            points[line].append((x, mean))
            bands.setdefault(line, []).append((x, min(known), max(known)))
    return [
        ChartLine(name, sorted(some), sorted(bands.get(name, ()))) for name, some in points.items()
    ]


@dataclass(frozen=True, kw_only=True)
class EffectRow:
    """One effect: where it was measured, how large it is, and what it means."""

    name: str
    mean: float
    interval: tuple[float, float] | None
    text: str
    """The effect in words, to the right of the plot."""
    style: int
    """Colour and dashes; see `line_styles`."""


def effect_chart(
    title: str, x: str, rows: Sequence[EffectRow], *, names: int = 132, layout: Layout = _EFFECTS
) -> str:
    """Return effects as dots with their 95 % intervals, one row each, around zero.

    Args:
        title: Title above the chart.
        x: Label of the x axis.
        rows: The effects.
        names: Pixels for the names of rows.
        layout: Gives the width.
    """
    ends = [end for row in rows for end in (row.mean, *(row.interval or ()))]
    low, high = min(0.0, *ends), max(0.0, *ends)
    # An axis of at least one percent, or one point: less must look like nothing.
    lacking = max(0.0, 1.0 - (high - low)) / 2
    margin = 0.05 * (high - low) + lacking
    # As high as other charts of this layout, so that they can stand side by side.
    size = max(_LEAST_ROW, (layout.height - layout.top - layout.bottom) / len(rows))
    height = round(layout.top + size * len(rows) + layout.bottom)
    axis = ChartAxis(low - margin, high + margin, names + 12, layout.width - 62)
    foot = height - layout.bottom
    parts = [svg_head(title, replace(layout, height=height), [row.style for row in rows])]
    for mark in axis.ticks():
        at = axis.at(mark)
        # Zero stands out: which side of it an interval lies on is the answer.
        strength = ".8" if mark == 0 else ".25"
        parts.append(
            f'<path d="M{at:.1f} {layout.top}V{foot}" class="rule" stroke-opacity="{strength}"/>'
        )
        parts.append(svg_text(at, foot + 16, significant(mark, 3), "middle"))
    parts.append(svg_text((axis.start + axis.end) / 2, foot + 34, x, "middle"))
    for number, row in enumerate(rows):
        at = layout.top + size * number + size / 2
        colour = row.style % len(COLOURS)
        parts.append(svg_text(names + 4, at + 4, printable(row.name, names // 6), "end"))
        if row.interval is not None:
            left, right = (axis.at(end) for end in row.interval)
            path = f"M{left:.1f} {at:.1f}H{right:.1f}"
            parts.append(f'<path d="{path}" class="s{colour}" stroke-width="2"/>')
        parts.append(
            f'<circle cx="{axis.at(row.mean):.1f}" cy="{at:.1f}" r="4" class="f{colour}"/>'
        )
        parts.append(svg_text(layout.width - 6, at + 4, row.text, "end"))
    return "\n".join([*parts, "</svg>"]) + "\n"
