"""Line charts as small SVG files, readable on light and dark pages.

Written by hand because the charts are committed, and a test compares them with their records to
the byte: they are 7 kB each and depend on no other package's version. matplotlib would be a new
dependency whose output changes between releases, and plotly needs a browser to write SVG.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from xml.sax.saxutils import escape

from gradherd.lab.text import printable, significant

WIDTH, HEIGHT = 800, 340
_LEFT, _TOP, _BOTTOM = 64, 34, 46
_LEGEND, _LEGEND_LINE = 280, 18
# Medium lightness, distinguishable with colour-blindness; the first is the baseline's.
COLOURS = ("#8a8f98", "#2f81d6", "#d9731a", "#2e9e5b", "#b0569e", "#c9a20c", "#1fa5a5", "#d0484f")
DASHES = ("", "6 3", "2 2", "8 3 2 3")
# An image in a markdown page cannot know the page's background: one grey that reads on both.
_INK = "#80868f"
_MAX_MARKED = 8
"""Up to this many distinct x values of a logarithmic axis are all marked."""


@dataclass(frozen=True)
class ChartLine:
    """One line of a chart, with a band around it."""

    name: str
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float, float]] = ()
    """(x, low, high): the range over single runs."""
    colour: int | None = None
    """Index into COLOURS, dashed beyond their number; None uses the position among the lines."""


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

    Raises:
        ValueError: No line has a point to draw.
    """
    visible = [_drawable(line, log, log_x) for line in lines]
    visible = [line for line in visible if line.points]
    if not visible:
        raise ValueError(f"{title}: there is nothing to draw")
    # Axes are fitted to what is drawn, after points without a place are gone.
    xs = [px for line in visible for px, _ in line.points]
    ys = [py for line in visible for _, py in line.points]
    ys += [end for line in visible for _, low, high in line.band for end in (low, high)]
    low, high = _with_margin(min(ys), max(ys), log)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    # Half an epoch does not exist, so it should not be marked.
    whole = all(px == int(px) for px in xs) and not log_x
    few = tuple(sorted(set(xs))) if log_x and len(set(xs)) <= _MAX_MARKED else ()
    x_axis = ChartAxis(min(xs), max(xs), _LEFT, WIDTH - _LEGEND, log_x, whole=whole, only=few)
    # The legend is beside the plot: many lines need a taller chart.
    height = max(HEIGHT, _TOP + _LEGEND_LINE * len(visible))
    y_axis = ChartAxis(low, high, height - _BOTTOM, _TOP, log)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img" '
        'font-family="system-ui, sans-serif" font-size="12">',
        f"<title>{_escape(title)}</title>",
        f'<text x="{_LEFT}" y="18" fill="{_INK}" font-size="14" font-weight="600">'
        f"{_escape(title)}</text>",
        *_grid(x_axis, y_axis, x, y, zero=zero),
    ]
    for number, line in reversed(list(enumerate(visible))):  # The first is drawn last, on top.
        parts += _draw_line(number, line, x_axis, y_axis)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _drawable(line: ChartLine, log: bool, log_x: bool) -> ChartLine:
    def has_place(x: float, low: float, high: float) -> bool:
        return math.isfinite(high) and (low > 0 or not log) and (x > 0 or not log_x)

    points = [(x, y) for x, y in line.points if has_place(x, y, y)]
    band = [one for one in line.band if has_place(*one)]
    return replace(line, points=points, band=band)


def _with_margin(low: float, high: float, log: bool) -> tuple[float, float]:
    if log:
        return low / 1.1, high * 1.1
    # A constant line has no range; its axis still needs a height.
    margin = 0.04 * (high - low) or 0.1 * abs(high) or 1.0
    return low - margin, high + margin


def _grid(x_axis: ChartAxis, y_axis: ChartAxis, x: str, y: str, *, zero: bool) -> list[str]:
    parts = []
    for value, label in _labelled(y_axis):
        at = _number(y_axis.at(value))
        rule = f'stroke="{_INK}" stroke-opacity="{".8" if zero and value == 0 else ".25"}"'
        parts.append(f'<path d="M{x_axis.start:g} {at}H{x_axis.end:g}" {rule}/>')
        parts.append(_text(x_axis.start - 8, y_axis.at(value) + 4, label, "end"))
    for value, label in _labelled(x_axis):
        parts.append(_text(x_axis.at(value), y_axis.start + 18, label, "middle"))
    parts.append(_text((x_axis.start + x_axis.end) / 2, y_axis.start + 38, x, "middle"))
    middle = _number((y_axis.start + y_axis.end) / 2)
    parts.append(
        f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle" '
        f'fill="{_INK}"{_smaller_font(y, y_axis.start - y_axis.end)}>{_escape(y)}</text>'
    )
    return parts


def _smaller_font(words: str, room: float) -> str:
    """Return a smaller font for text that would not fit; letters are about half as wide as high."""
    size = math.floor(20 * room / max(1, len(words))) / 10
    return f' font-size="{max(size, 7.0)}"' if size < 10.6 else ""


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


def _draw_line(number: int, line: ChartLine, x_axis: ChartAxis, y_axis: ChartAxis) -> list[str]:
    index = number if line.colour is None else line.colour
    colour = COLOURS[index % len(COLOURS)]
    dash = DASHES[index // len(COLOURS) % len(DASHES)]
    style = f'fill="none" stroke="{colour}" stroke-width="2"'
    style += f' stroke-dasharray="{dash}"' if dash else ""
    parts = []
    if line.band:
        upper = [(x, high) for x, _, high in line.band]
        lower = [(x, low) for x, low, _ in reversed(line.band)]
        outline = _path([*upper, *lower], x_axis, y_axis)
        parts.append(f'<path d="{outline}Z" fill="{colour}" fill-opacity=".09"/>')
    parts.append(f'<path d="{_path(line.points, x_axis, y_axis)}" {style}/>')
    # Few points: a line alone would suggest that everything between them was measured.
    if len(line.points) < 8:
        parts += [
            f'<circle cx="{_number(x_axis.at(x))}" cy="{_number(y_axis.at(y))}" '
            f'r="3" fill="{colour}"/>'
            for x, y in line.points
        ]
    at = _TOP + 8 + _LEGEND_LINE * number
    parts.append(f'<path d="M{x_axis.end + 16:g} {at}h22" {style}/>')
    parts.append(_text(x_axis.end + 44, at + 4, printable(line.name, 36), "start"))
    return parts


def _path(points: Sequence[tuple[float, float]], x_axis: ChartAxis, y_axis: ChartAxis) -> str:
    return "M" + "L".join(f"{_number(x_axis.at(x))} {_number(y_axis.at(y))}" for x, y in points)


def _text(x: float, y: float, words: str, anchor: str) -> str:
    place = f'x="{_number(x)}" y="{_number(y)}" text-anchor="{anchor}"'
    return f'<text {place} fill="{_INK}">{_escape(words)}</text>'


def _escape(words: str) -> str:
    return escape(printable(words, 90), {'"': "&quot;"})


def _number(value: float) -> str:
    # A tenth of a pixel: more digits only make committed files larger, and differ more often.
    return f"{value:.1f}".removesuffix(".0")
