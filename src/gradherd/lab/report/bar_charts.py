"""Charts of one figure per row, as SVG: effects with their intervals, and bars of several parts."""

from collections.abc import Sequence
from dataclasses import dataclass

from gradherd.lab.report.svg_chart import ChartAxis
from gradherd.lab.report.svg_parts import COLOURS, NARROW, SMALL, Layout, svg_head, svg_text
from gradherd.lab.text import printable, significant

_LEAST_ROW = 20
_LETTER = 6.6
"""Mean width of a letter at 12 pixels, with some room to spare."""


@dataclass(frozen=True, kw_only=True)
class EffectRow:
    """One effect: where it was measured, how large it is, and what it means."""

    name: str
    mean: float
    interval: tuple[float, float] | None
    text: str
    """The effect in words, to the right of the plot."""
    style: int
    """Colour and dashes; see `svg_parts.line_styles`."""


@dataclass(frozen=True, kw_only=True)
class BarRow:
    """One bar, made of parts that follow each other."""

    name: str
    parts: Sequence[tuple[float, str]]
    """Length and CSS class of each part."""
    text: str
    """The figure in words, at the end of the bar."""
    group: str
    """Class of the row, by which a page can hide it."""


def bar_chart(x: str, rows: Sequence[BarRow]) -> str:
    """Return horizontal bars from zero as SVG for a page that has the title and the colours.

    Args:
        x: Label of the x axis.
        rows: The bars.
    """
    # Many bars, such as those of 64 workers, become thin, and lose their figures.
    layout = NARROW
    size = 26 if len(rows) <= 12 else min(16, max(4, 480 // len(rows)))
    longest = max(sum(length for length, _ in row.parts) for row in rows) or 1.0
    # Names and figures get the room they need, and the bars what is left of the width.
    names = 12 + _LETTER * max(len(printable(row.name, 22)) for row in rows)
    figures = 10 + _LETTER * max(len(row.text) for row in rows)
    axis = ChartAxis(0.0, longest, names, max(layout.width - figures, names + 60))
    height = layout.top + size * len(rows) + layout.bottom
    foot = height - layout.bottom
    parts = [svg_head("", layout, height, [])]
    for mark in axis.ticks():
        path = f'd="M{axis.at(mark):.1f} {layout.top}V{foot}"'
        parts.append(f'<path {path} class="rule" stroke-opacity=".25"/>')
        parts.append(svg_text(axis.at(mark), foot + 18, significant(mark, 3), "middle"))
    parts.append(svg_text((axis.start + axis.end) / 2, foot + 38, x, "middle"))
    for number, row in enumerate(rows):
        at, done = layout.top + size * number, 0.0
        parts.append(f'<g class="{row.group}">')
        parts.append(svg_text(names - 8, at + size / 2 + 4, printable(row.name, 22), "end"))
        for length, colour in row.parts:
            left, right = axis.at(done), axis.at(done + length)
            gap = 3 if size > 12 else 0.5
            place = f'x="{left:.1f}" y="{at + gap:g}" width="{right - left:.1f}"'
            place += f' height="{size - 2 * gap:g}"'
            parts.append(f'<rect {place} class="{colour}"/>')
            done += length
        if size > 12:  # thinner bars have no room for a line of text
            parts.append(svg_text(axis.at(done) + 6, at + size / 2 + 4, row.text, "start"))
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def effect_chart(
    title: str, x: str, rows: Sequence[EffectRow], *, names: int = 132, layout: Layout = SMALL
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
    parts = [svg_head(title, layout, height, [row.style for row in rows])]
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
