"""Line charts as small SVG, readable on light and dark pages.

Written by hand because the charts are committed, and a test compares them with their records to
the byte: they are 7 kB each and depend on no other package's version. matplotlib would be a new
dependency whose output changes between releases. The HTML report shows the same drawings until its
script has replaced them, and keeps them where scripts are off.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gradherd.lab.report.svg_parts import (
    COLOURS,
    WIDE,
    Layout,
    dashes,
    escaped,
    pixels,
    smaller_font,
    svg_head,
    svg_text,
)
from gradherd.lab.text import printable, significant

_MAX_MARKED = 8
"""Up to this many distinct x values of a logarithmic axis are all marked."""
_LEAST_SPAN = 0.1
"""Least height of a y axis, as a share of its values: less is noise, and must look flat."""


_LEGEND_LINE = 18


@dataclass(frozen=True)
class ChartLine:
    """One line of a chart, with a band around it."""

    name: str
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float, float]] = ()
    """(x, low, high): the range over single runs."""
    style: int | None = None
    """As `svg_parts.line_styles` gives it; None uses the position among the lines."""
    group: str = ""
    """Class of the line's group, by which a page can hide it."""


@dataclass(frozen=True)
class ChartAxis:
    """Maps values to pixel coordinates."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    whole: bool = False
    """Whether only integers are marked, as for epochs."""
    only: tuple[float, ...] = ()
    """Values to mark; empty marks round values."""

    def at(self, value: float) -> float:
        """Return the coordinate of a value."""
        low, high, scaled = (self._scaled(v) for v in (self.low, self.high, value))
        share = (scaled - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)

    def _scaled(self, value: float) -> float:
        # An axis that must include zero may start there, and zero has no logarithm.
        return math.log10(max(value, 1e-300)) if self.log else value

    def ticks(self) -> list[float]:
        """Return the values to mark.

        >>> ChartAxis(0, 30, 0, 1).ticks(), ChartAxis(0.5, 400, 0, 1, log=True).ticks()
        ([0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0], [1.0, 10.0, 100.0])
        """
        if self.only:
            return list(self.only)
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            # Over few decades the powers of ten alone leave the axis almost unmarked.
            marks = (1, 2, 5) if len(powers) < 5 else (1,)
            every = [m * 10.0**power for power in powers[:: 1 + len(powers) // 8] for m in marks]
            inside = [mark for mark in every if self.low <= mark <= self.high]
            if len(inside) > 1:
                return inside
        if self.high <= self.low:
            return [self.low]
        rough = (self.high - self.low) / 6
        size = 10 ** math.floor(math.log10(rough))
        # 0.999: a quotient that should be exactly 1, 2 or 5 may lie just above it.
        step = next(size * m for m in (1, 2, 5, 10) if size * m >= rough * 0.999)
        step = max(step, 1.0) if self.whole else step
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        # 3 * 0.1 is 0.30000000000000004, which would be its label.
        return [round(float(n * step), 12) for n in range(first, last + 1)]


def chart(
    title: str,
    x: str,
    y: str,
    lines: Sequence[ChartLine],
    *,
    log: bool = False,
    log_x: bool = False,
    zero: bool = False,
    least: float | None = None,
    levels: Sequence[tuple[float, str]] = (),
    layout: Layout = WIDE,
) -> str:
    """Return a line chart as SVG.

    Points that a logarithmic axis cannot show are dropped, and lines without points.

    Args:
        title: Title above the chart.
        x: Label of the x axis.
        y: Label of the y axis.
        lines: The lines; the first is drawn on top.
        log: Whether the y axis is logarithmic.
        log_x: Whether the x axis is logarithmic.
        zero: Whether the y axis includes zero, with a stronger line there.
        least: Least span of the y axis; by default a share of its largest value.
        levels: Dashed horizontal lines with a few words.
        layout: Size, and place of the legend.

    Raises:
        ValueError: No line has a point to draw.
    """
    visible = [
        _drawable(replace(line, style=n if line.style is None else line.style), log, log_x)
        for n, line in enumerate(lines)
    ]
    visible = [line for line in visible if line.points]
    if not visible:
        raise ValueError(f"{title}: there is nothing to draw")
    # Axes are fitted to what is drawn, after points without a place are gone.
    xs = [px for line in visible for px, _ in line.points]
    ys = [py for line in visible for _, py in line.points]
    ys += [end for line in visible for _, low, high in line.band for end in (low, high)]
    # A goal that no arm has reached must be in sight, too.
    ys += [level for level, _ in levels if level > 0 or not log]
    low, high = _with_margin(min(ys), max(ys), log, least)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    # Half an epoch does not exist, so it should not be marked.
    whole = all(px == int(px) for px in xs) and not log_x
    few = tuple(sorted(set(xs))) if log_x and len(set(xs)) <= _MAX_MARKED else ()
    end = layout.width - layout.side
    x_axis = ChartAxis(min(xs), max(xs), layout.left, end, log_x, whole=whole, only=few)
    # A legend beside the plot needs a taller chart for many lines, one below it for each row.
    rows = math.ceil(len(visible) / layout.columns) if layout.columns else 0
    beside = layout.top + _LEGEND_LINE * len(visible) if layout.alone and not rows else 0
    height = max(layout.height, beside)
    foot = height - layout.bottom - _LEGEND_LINE * rows
    y_axis = ChartAxis(low, high, foot, layout.top, log)
    parts = [svg_head(title, layout, height, [line.style or 0 for line in visible])]
    parts += _grid(x_axis, y_axis, x, y, zero=zero)
    for number, line in reversed(list(enumerate(visible))):  # The first is drawn last, on top.
        parts += _draw_line(line, x_axis, y_axis)
        if layout.alone:
            hidden = "" if layout.columns else _covered(line, visible[:number], y_axis)
            parts += _legend_entry(
                number, replace(line, name=line.name + hidden), x_axis, foot, layout
            )
    parts += [
        f'<path d="M{x_axis.start:g} {pixels(y_axis.at(level))}H{x_axis.end:g}" '
        f'class="rule" stroke-dasharray="4 4"/>{_label_of(words, x_axis, y_axis.at(level))}'
        for level, words in levels
        if level > 0 or not log
    ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _drawable(line: ChartLine, log: bool, log_x: bool) -> ChartLine:
    def has_place(x: float, low: float, high: float) -> bool:
        return math.isfinite(high) and (low > 0 or not log) and (x > 0 or not log_x)

    points = [(x, y) for x, y in line.points if has_place(x, y, y)]
    band = [one for one in line.band if has_place(*one)]
    return replace(line, points=points, band=band)


def _with_margin(low: float, high: float, log: bool, least: float | None) -> tuple[float, float]:
    """Return the ends of an axis: a margin, and a height that does not magnify noise.

    >>> low, high = _with_margin(0.0099985, 0.01, False, None)
    >>> round(low, 5), round(high, 5)
    (0.0095, 0.0105)
    """
    if log:  # where equal ratios, not equal differences, are equally far apart
        return low / 1.1, high * 1.1
    wanted = _LEAST_SPAN * max(abs(low), abs(high)) if least is None else least
    # A line at zero has no size of its own; its axis still needs a height.
    lacking = max(0.0, (wanted or 1.0) - (high - low)) / 2
    margin = 0.04 * (high - low) + lacking
    return low - margin, high + margin


def _grid(x_axis: ChartAxis, y_axis: ChartAxis, x: str, y: str, *, zero: bool) -> list[str]:
    parts = []
    for value, label in _labelled(y_axis):
        at = pixels(y_axis.at(value))
        # Zero divides better from worse where differences are drawn.
        strength = ".8" if zero and value == 0 else ".25"
        path = f'd="M{x_axis.start:g} {at}H{x_axis.end:g}"'
        parts.append(f'<path {path} class="rule" stroke-opacity="{strength}"/>')
        parts.append(svg_text(x_axis.start - 8, y_axis.at(value) + 4, label, "end"))
    for value, label in _labelled(x_axis):
        parts.append(svg_text(x_axis.at(value), y_axis.start + 18, label, "middle"))
    parts.append(svg_text((x_axis.start + x_axis.end) / 2, y_axis.start + 38, x, "middle"))
    middle = pixels((y_axis.start + y_axis.end) / 2)
    parts.append(
        f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle"'
        f"{smaller_font(y, y_axis.start - y_axis.end, 12)}>{escaped(y)}</text>"
    )
    return parts


def _labelled(axis: ChartAxis) -> list[tuple[float, str]]:
    """Return the marks of an axis with labels of enough digits to be distinct.

    >>> _labelled(ChartAxis(1, 1.0004, 0, 1))[:3]
    [(1.0, '1'), (1.0001, '1.0001'), (1.0002, '1.0002')]
    """
    marks = axis.ticks()
    for digits in range(3, 12):
        labels = [significant(mark, digits) for mark in marks]
        if len(set(labels)) == len(labels):
            break
    return list(zip(marks, labels, strict=True))


def _draw_line(line: ChartLine, x_axis: ChartAxis, y_axis: ChartAxis) -> list[str]:
    number = (line.style or 0) % len(COLOURS)
    parts = []
    if line.band:
        upper = [(x, high) for x, _, high in line.band]
        lower = [(x, low) for x, low, _ in reversed(line.band)]
        # There along the upper ends and back along the lower ones.
        outline = _path([*upper, *lower], x_axis, y_axis)
        parts.append(f'<path d="{outline}Z" class="f{number}" fill-opacity=".1"/>')
    parts.append(f'<path d="{_path(line.points, x_axis, y_axis)}" {_stroke(line)}/>')
    # Few points: a line alone would suggest that everything between them was measured.
    if len(line.points) < 8:
        parts += [
            f'<circle cx="{pixels(x_axis.at(x))}" cy="{pixels(y_axis.at(y))}" '
            f'r="3" class="f{number}"/>'
            for x, y in line.points
        ]
    return [f'<g class="{line.group}">', *parts, "</g>"] if line.group else parts


def _stroke(line: ChartLine) -> str:
    dash = dashes(line.style or 0)
    style = f'class="s{(line.style or 0) % len(COLOURS)}" fill="none" stroke-width="2"'
    return f'{style} stroke-dasharray="{dash}"' if dash else style


def _covered(line: ChartLine, above: Sequence[ChartLine], y_axis: ChartAxis) -> str:
    """Return a note for the legend if a line cannot be seen, because it is under another one."""
    for other in above:
        pairs = list(zip(line.points, other.points, strict=False))
        # Less than a pixel apart at every point.
        same = len(line.points) == len(other.points) and all(
            a[0] == b[0] and abs(y_axis.at(a[1]) - y_axis.at(b[1])) < 1 for a, b in pairs
        )
        if same:
            return f" (under {other.name})"
    return ""


def _legend_entry(
    number: int, line: ChartLine, x_axis: ChartAxis, foot: float, layout: Layout
) -> list[str]:
    if layout.columns:
        room = (layout.width - 20) / layout.columns
        left = 12 + number % layout.columns * room
        at = foot + layout.bottom + 6 + _LEGEND_LINE * (number // layout.columns)
        length, most = 18.0, int((room - 26) / 6)  # names are cut to their column
    else:
        left, at, length, most = x_axis.end + 16, layout.top + 8 + _LEGEND_LINE * number, 22.0, 36
    return [
        f'<path d="M{pixels(left)} {pixels(at)}h{length:g}" {_stroke(line)}/>',
        svg_text(left + length + 6, at + 4, printable(line.name, most), "start"),
    ]


def _label_of(words: str, x_axis: ChartAxis, at: float) -> str:
    return svg_text(x_axis.start + 6, at - 4, words, "start") if words else ""


def _path(points: Sequence[tuple[float, float]], x_axis: ChartAxis, y_axis: ChartAxis) -> str:
    return "M" + "L".join(f"{pixels(x_axis.at(x))} {pixels(y_axis.at(y))}" for x, y in points)
