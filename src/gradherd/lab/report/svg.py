"""Lines with bands on fitted axes, as SVG that is readable on light and dark pages.

Written by hand: drawings are 7 kB each, depend on no other package's version (matplotlib's output
changes between releases), and the files of our evidence, which are drawn with these parts, are
committed and compared to the byte.

Every colour has a contrast of at least 4.5:1 on its background, light or dark; a test computes it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from xml.sax.saxutils import escape

from gradherd.lab.text import printable, significant

COLOURS = (
    ("#5f6673", "#a7aeba"), ("#0068a3", "#58b4f0"), ("#b54700", "#ff9660"), ("#00775a", "#3fcba0"),
    ("#9c3f80", "#ee9bcf"), ("#7a6000", "#e0c341"), ("#5f4bb6", "#b5a6ff"), ("#b3261e", "#ff8a80"),
)  # fmt: skip
"""Light and dark variants; the first, a grey, is the baseline's."""
DASHES = ("", "7 3", "2 3", "9 3 2 3")
"""Dashes of lines that share a colour, as `stroke-dasharray`."""
INK, PAPER = ("#4a515c", "#b9c1cc"), ("#ffffff", "#181c22")
"""Text and background of charts, light and dark."""
_LEAST_SPAN = 0.1
"""Least height of a y axis, as a share of its values: less is noise, and must look flat."""
FONT = 'font-family="system-ui, sans-serif" font-size="12"'


def dashes(style: int) -> str:
    """Return the `stroke-dasharray` of a line; empty for a solid one.

    A style is colour `style % 8`, dashes `style // 8`: all that can be told apart, by number.
    """
    return DASHES[style // len(COLOURS) % len(DASHES)]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Size of a chart in pixels, and the room around its plot."""

    width: int
    height: int
    left: int = 64
    top: int = 34
    bottom: int = 46
    side: int = 16
    """Room to the right of the plot."""


PAGE_LAYOUT = Layout(width=460, height=280, left=66, top=12, bottom=52)
"""A part of a page, which has the title, the legend and the colours."""


@dataclass(frozen=True)
class ChartLine:
    """One line of a chart, with a band around it."""

    name: str
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float, float]] = ()
    """(x, low, high): the range over single runs, or a deviation."""
    style: int | None = None
    """Colour and dashes, see `dashes`; None uses the position among the lines."""
    group: str = ""
    """Class of the line's group, by which a page can hide it."""
    runs: Sequence[Sequence[tuple[float, float]]] = ()
    """Single runs, which a page can show instead of the band."""


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


Axes = tuple[ChartAxis, ChartAxis]
"""Across and up."""


def fit_axes(
    lines: Sequence[ChartLine],
    layout: Layout,
    *,
    log: bool = False,
    least: float | None = None,
    levels: Sequence[tuple[float, str]] = (),
) -> tuple[list[ChartLine], Axes]:
    """Return the lines that can be drawn, each with a style, and the axes that they need.

    Points that a logarithmic y axis cannot show are dropped, and lines without points. The y axis
    has at least the span `least`, by default a share of its largest value, and includes `levels`.

    Raises:
        ValueError: No line has a point to draw.
    """
    visible = [
        _drawable(replace(line, style=n if line.style is None else line.style), log)
        for n, line in enumerate(lines)
    ]
    visible = [line for line in visible if line.points]
    if not visible:
        raise ValueError("there is nothing to draw")
    # Axes are fitted to what is drawn, after points without a place are gone.
    xs = [px for line in visible for px, _ in line.points]
    ys = [py for line in visible for _, py in line.points]
    ys += [end for line in visible for _, low, high in line.band for end in (low, high)]
    ys += [py for line in visible for run in line.runs for _, py in run]
    # A goal that no arm has reached must be in sight, too.
    ys += [level for level, _ in levels if level > 0 or not log]
    low, high = _with_margin(min(ys), max(ys), log, least)
    # Half an epoch does not exist, so it should not be marked.
    whole, right = all(px == int(px) for px in xs), layout.width - layout.side
    return visible, (
        ChartAxis(min(xs), max(xs), layout.left, right, whole=whole),
        ChartAxis(low, high, layout.height - layout.bottom, layout.top, log),
    )


def page_chart(
    x: str,
    y: str,
    lines: Sequence[ChartLine],
    *,
    log: bool = False,
    levels: Sequence[tuple[float, str]] = (),
    x_text: Callable[[float], str] | None = None,
) -> str:
    """Return a line chart as SVG that is part of a page; the first line is drawn on top.

    `levels` are dashed horizontal lines with a few words; `x_text` writes a value of the x axis, by
    default as a number with as few digits as it takes. Raises ValueError if nothing can be drawn.
    """
    layout = PAGE_LAYOUT
    visible, axes = fit_axes(lines, layout, log=log, levels=levels)
    parts = [
        f'<svg viewBox="0 0 {layout.width} {layout.height}" class="chart" aria-hidden="true" '
        f"{FONT}>",
        *draw_grid(axes, x, y, x_text=x_text),
        *(part for line in reversed(visible) for part in draw_line(line, axes)),
    ]
    x_axis, y_axis = axes
    for level, words in levels:
        if level > 0 or not log:
            at = y_axis.at(level)
            path = f'd="M{x_axis.start:g} {pixels(at)}H{x_axis.end:g}"'
            label = svg_text(x_axis.start + 6, at - 4, words, "start") if words else ""
            parts.append(f'<path {path} class="rule" stroke-dasharray="4 4"/>{label}')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _drawable(line: ChartLine, log: bool) -> ChartLine:
    def has_place(low: float, high: float) -> bool:
        return math.isfinite(high) and (low > 0 or not log)

    points = [(x, y) for x, y in line.points if has_place(y, y)]
    # A band that reaches below zero ends at the foot of a logarithmic axis.
    band = [(x, low if low > 0 or not log else high / 100, high) for x, low, high in line.band]
    band = [one for one in band if has_place(*one[1:])]
    runs = [[(x, y) for x, y in run if has_place(y, y)] for run in line.runs]
    return replace(line, points=points, band=band, runs=[run for run in runs if run])


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


def draw_grid(
    axes: Axes,
    x: str,
    y: str,
    *,
    zero: bool = False,
    x_text: Callable[[float], str] | None = None,
) -> list[str]:
    """Return marks, labels and lines of both axes; `zero` has a stronger line there."""
    x_axis, y_axis = axes
    parts = []
    for value, label in _labelled(y_axis):
        at = pixels(y_axis.at(value))
        # Zero divides better from worse where differences are drawn.
        strength = ".8" if zero and value == 0 else ".25"
        path = f'd="M{x_axis.start:g} {at}H{x_axis.end:g}"'
        parts.append(f'<path {path} class="rule" stroke-opacity="{strength}"/>')
        parts.append(svg_text(x_axis.start - 8, y_axis.at(value) + 4, label, "end"))
    for value, label in _labelled(x_axis, x_text):
        parts.append(svg_text(x_axis.at(value), y_axis.start + 18, label, "middle"))
    parts.append(svg_text((x_axis.start + x_axis.end) / 2, y_axis.start + 38, x, "middle"))
    middle = pixels((y_axis.start + y_axis.end) / 2)
    parts.append(
        f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle"'
        f"{smaller_font(y, y_axis.start - y_axis.end, 12)}>{escaped(y)}</text>"
    )
    return parts


def _labelled(
    axis: ChartAxis, text: Callable[[float], str] | None = None
) -> list[tuple[float, str]]:
    """Return the marks of an axis with labels of enough digits to be distinct.

    >>> _labelled(ChartAxis(1, 1.0004, 0, 1))[:3]
    [(1.0, '1'), (1.0001, '1.0001'), (1.0002, '1.0002')]
    """
    marks = axis.ticks()
    if text is not None:
        return [(mark, text(mark)) for mark in marks]
    for digits in range(3, 12):
        labels = [significant(mark, digits) for mark in marks]
        if len(set(labels)) == len(labels):
            break
    return list(zip(marks, labels, strict=True))


def draw_line(line: ChartLine, axes: Axes) -> list[str]:
    """Return a line with its band, its single runs and, if they are few, its points."""
    x_axis, y_axis = axes
    number = (line.style or 0) % len(COLOURS)
    parts = []
    if line.band:
        upper = [(x, high) for x, _, high in line.band]
        lower = [(x, low) for x, low, _ in reversed(line.band)]
        # There along the upper ends and back along the lower ones.
        outline = _path([*upper, *lower], axes)
        parts.append(f'<path d="{outline}Z" class="f{number} band" fill-opacity=".1"/>')
    for run in line.runs:
        path = _path(run, axes)
        parts.append(f'<path d="{path}" class="s{number} run" fill="none" stroke-opacity=".6"/>')
    parts.append(f'<path d="{_path(line.points, axes)}" {stroke(line)}/>')
    # Few points: a line alone would suggest that everything between them was measured.
    if len(line.points) < 8:
        parts += [
            f'<circle cx="{pixels(x_axis.at(x))}" cy="{pixels(y_axis.at(y))}" '
            f'r="3" class="f{number}"/>'
            for x, y in line.points
        ]
    return [f'<g class="{line.group}">', *parts, "</g>"] if line.group else parts


def stroke(line: ChartLine) -> str:
    """Return the attributes of a line's stroke."""
    dash = dashes(line.style or 0)
    style = f'class="s{(line.style or 0) % len(COLOURS)}" fill="none" stroke-width="2"'
    return f'{style} stroke-dasharray="{dash}"' if dash else style


def _path(points: Sequence[tuple[float, float]], axes: Axes) -> str:
    return "M" + "L".join(f"{pixels(axes[0].at(x))} {pixels(axes[1].at(y))}" for x, y in points)


def smaller_font(words: str, room: float, usual: int) -> str:
    """Return a smaller font for text that would not fit; letters are about half as wide as high."""
    size = math.floor(20 * room / max(1, len(words)) * 0.92) / 10
    return f' style="font-size:{max(size, 7.0)}px"' if size < usual - 1.4 else ""


def svg_text(x: float, y: float, words: str, anchor: str) -> str:
    """Return words at a place; anchor is start, middle or end."""
    place = f'x="{pixels(x)}" y="{pixels(y)}" text-anchor="{anchor}"'
    return f"<text {place}>{escaped(words)}</text>"


def escaped(words: str) -> str:
    """Return words that cannot break out of their element."""
    return escape(printable(words, 90), {'"': "&quot;"})


def pixels(value: float) -> str:
    """Return a coordinate in pixels."""
    # A tenth of a pixel: more digits only make committed files larger, and differ more often.
    return f"{value:.1f}".removesuffix(".0")
