"""Line charts as small SVG files: readable on light and dark pages, the same bytes every time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from xml.sax.saxutils import escape

from gradherd.lab.text import printable, significant

WIDE, HIGH = 800, 340
_LEFT, _TOP, _BOTTOM = 64, 34, 46
_LEGEND, _EACH = 280, 18
# Of middling lightness, told apart also by those who see few colours; the first is the baseline's.
COLOURS = ("#8a8f98", "#2f81d6", "#d9731a", "#2e9e5b", "#b0569e", "#c9a20c", "#1fa5a5", "#d0484f")
DASHES = ("", "6 3", "2 2", "8 3 2 3")
_INK = "#80868f"
_FEW = 8
"""So many values of a logarithmic axis are all marked."""


@dataclass(frozen=True)
class Line:
    """One line of a chart, with a band around it."""

    name: str
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float, float]] = ()
    """(x, low, high): where single runs lie."""
    colour: int | None = None
    """Its place in COLOURS, beyond them dashed; None is its place among the lines."""


@dataclass(frozen=True)
class Axis:
    """Values -> places."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    whole: bool = False
    """Whether only whole numbers mean something, as with epochs."""
    only: tuple[float, ...] = ()
    """Values to mark, if it is known which."""

    def at(self, value: float) -> float:
        """Return the place of a value."""
        low, high, here = (self._scaled(v) for v in (self.low, self.high, value))
        share = (here - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)

    def _scaled(self, value: float) -> float:
        return math.log10(max(value, 1e-300)) if self.log else value

    def ticks(self) -> list[float]:
        """Return round values to mark.

        >>> Axis(0, 30, 0, 1).ticks(), Axis(0.5, 400, 0, 1, log=True).ticks()
        ([0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0], [1.0, 10.0, 100.0])
        """
        if self.only:
            return list(self.only)
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            marks = (1, 2, 5) if len(powers) < 5 else (1,)
            every = [m * 10.0**power for power in powers[:: 1 + len(powers) // 8] for m in marks]
            found = [mark for mark in every if self.low <= mark <= self.high]
            if len(found) > 1:
                return found
        if self.high <= self.low:
            return [self.low]
        rough = (self.high - self.low) / 6
        size = 10 ** math.floor(math.log10(rough))
        step = next(size * m for m in (1, 2, 5, 10) if size * m >= rough * 0.999)
        step = max(step, 1.0) if self.whole else step
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [round(float(n * step), 12) for n in range(first, last + 1)]


def chart(
    title: str,
    x: str,
    y: str,
    lines: Sequence[Line],
    *,
    log: bool = False,
    log_x: bool = False,
    zero: bool = False,
) -> str:
    """Return a line chart as SVG; what is not above zero on a log axis drops, and empty lines.

    Args:
        title: Above it.
        x: Below the x axis.
        y: Beside the y axis.
        lines: What is drawn.
        log: Whether the y axis is logarithmic.
        log_x: Whether the x axis is.
        zero: Whether the y axis reaches to zero, which is marked.
    """
    kept = [_kept(line, log, log_x) for line in lines]
    kept = [line for line in kept if line.points]
    if not kept:
        raise ValueError(f"{title}: there is nothing to draw")
    xs = [px for line in kept for px, _ in line.points]
    ys = [py for line in kept for _, py in line.points]
    ys += [end for line in kept for _, low, high in line.band for end in (low, high)]
    low, high = _room(min(ys), max(ys), log)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    whole = all(px == int(px) for px in xs) and not log_x
    few = tuple(sorted(set(xs))) if log_x and len(set(xs)) <= _FEW else ()
    across = Axis(min(xs), max(xs), _LEFT, WIDE - _LEGEND, log_x, whole=whole, only=few)
    tall = max(HIGH, _TOP + _EACH * len(kept))
    up = Axis(low, high, tall - _BOTTOM, _TOP, log)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {tall}" '
        f'width="{WIDE}" height="{tall}" role="img" '
        'font-family="system-ui, sans-serif" font-size="12">',
        f"<title>{_safe(title)}</title>",
        f'<text x="{_LEFT}" y="18" fill="{_INK}" font-size="14" font-weight="600">'
        f"{_safe(title)}</text>",
        *_grid(across, up, x, y, zero=zero),
    ]
    for number, line in reversed(list(enumerate(kept))):  # The first is on top of the others.
        parts += _drawn(number, line, across, up)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _kept(line: Line, log: bool, log_x: bool) -> Line:
    def fits(x: float, low: float, high: float) -> bool:
        return math.isfinite(high) and (low > 0 or not log) and (x > 0 or not log_x)

    points = [(x, y) for x, y in line.points if fits(x, y, y)]
    band = [one for one in line.band if fits(*one)]
    return replace(line, points=points, band=band)


def _room(low: float, high: float, log: bool) -> tuple[float, float]:
    if log:
        return low / 1.1, high * 1.1
    margin = 0.04 * (high - low) or 0.1 * abs(high) or 1.0
    return low - margin, high + margin


def _grid(across: Axis, up: Axis, x: str, y: str, *, zero: bool) -> list[str]:
    parts = []
    for value, label in _labelled(up):
        at = _n(up.at(value))
        rule = f'stroke="{_INK}" stroke-opacity="{".8" if zero and value == 0 else ".25"}"'
        parts.append(f'<path d="M{across.start:g} {at}H{across.end:g}" {rule}/>')
        parts.append(_text(across.start - 8, up.at(value) + 4, label, "end"))
    for value, label in _labelled(across):
        parts.append(_text(across.at(value), up.start + 18, label, "middle"))
    parts.append(_text((across.start + across.end) / 2, up.start + 38, x, "middle"))
    middle = _n((up.start + up.end) / 2)
    parts.append(
        f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle" '
        f'fill="{_INK}"{_small(y, up.start - up.end)}>{_safe(y)}</text>'
    )
    return parts


def _small(words: str, room: float) -> str:
    """Return a smaller font for words that would not fit; letters are about half as wide."""
    size = math.floor(20 * room / max(1, len(words))) / 10
    return f' font-size="{max(size, 7.0)}"' if size < 10.6 else ""


def _labelled(axis: Axis) -> list[tuple[float, str]]:
    """Return what is marked on an axis, with as many digits as tell the marks apart.

    >>> _labelled(Axis(1, 1.0004, 0, 1))[:3]
    [(1.0, '1'), (1.0001, '1.0001'), (1.0002, '1.0002')]
    """
    marks = axis.ticks()
    for digits in range(3, 12):
        labels = [significant(mark, digits) for mark in marks]
        if len(set(labels)) == len(labels):
            break
    return list(zip(marks, labels, strict=True))


def _drawn(number: int, line: Line, across: Axis, up: Axis) -> list[str]:
    place = number if line.colour is None else line.colour
    colour = COLOURS[place % len(COLOURS)]
    dash = DASHES[place // len(COLOURS) % len(DASHES)]
    style = f'fill="none" stroke="{colour}" stroke-width="2"'
    style += f' stroke-dasharray="{dash}"' if dash else ""
    parts = []
    if line.band:
        there = [(x, high) for x, _, high in line.band]
        back = [(x, low) for x, low, _ in reversed(line.band)]
        parts.append(
            f'<path d="{_path([*there, *back], across, up)}Z" fill="{colour}" fill-opacity=".09"/>'
        )
    parts.append(f'<path d="{_path(line.points, across, up)}" {style}/>')
    if len(line.points) < 8:
        parts += [
            f'<circle cx="{_n(across.at(x))}" cy="{_n(up.at(y))}" r="3" fill="{colour}"/>'
            for x, y in line.points
        ]
    at = _TOP + 8 + _EACH * number
    parts.append(f'<path d="M{across.end + 16:g} {at}h22" {style}/>')
    parts.append(_text(across.end + 44, at + 4, printable(line.name, 36), "start"))
    return parts


def _path(points: Sequence[tuple[float, float]], across: Axis, up: Axis) -> str:
    return "M" + "L".join(f"{_n(across.at(x))} {_n(up.at(y))}" for x, y in points)


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return (
        f'<text x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}" fill="{_INK}">{_safe(words)}</text>'
    )


def _safe(words: str) -> str:
    return escape(printable(words, 90), {'"': "&quot;"})


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
