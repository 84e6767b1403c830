"""Charts as files of their own: title, legend, background, and colours for light and dark pages.

Files are committed, and a test compares them with their records to the byte. A method has the same
colour and dashes in all of them.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace

from gradherd.lab.report.svg import (
    COLOURS,
    DASHES,
    FONT,
    INK,
    PAPER,
    ChartAxis,
    ChartLine,
    Layout,
    draw_grid,
    draw_line,
    escaped,
    fit_axes,
    smaller_font,
    stroke,
    svg_text,
)
from gradherd.lab.text import printable

METHODS = (
    ("d-rr", "cd-grab", "id-grab", "id-pair-grab", "shuffle-once", "always-plus", "grab",
     "pair-grab", "flip-flop", "fixed", "block-reshuffling", "curriculum", "stair", "saw",
     "cd-grab-live"),
    ("dense", "exdyna", "micro", "topk", "cltk", "deft", "threshold", "sidco", "gtopk", "randomk",
     "sage", "demo", "powersgd"),
)  # fmt: skip
"""Orders and sparsifiers, in the order of their colours; from the ninth on they are dashed."""
_LAYOUT = Layout(width=800, height=340, side=280)
"""The legend is to the right of the plot."""
_LEGEND_LINE = 18
_MAX_MARKED = 8
"""Up to this many distinct x values of a logarithmic axis are all marked."""


def line_styles(names: Sequence[str]) -> list[int]:
    """Return a style per line: colour `style % 8`, dashes `style // 8`.

    A method has its own style everywhere. Further lines of it keep the colour and get other dashes,
    as long as there are dashes left; lines that name no method get styles that nobody uses.
    A line of exdyna may be called "exdyna 0.01, online".

    >>> line_styles(["d-rr", "always-plus"]), line_styles(["exdyna 0.01", "exdyna 0.01, online"])
    ([0, 5], [1, 9])
    >>> line_styles(["exdyna, a", "exdyna, b", "exdyna, c", "exdyna, d", "exdyna, e"])
    [1, 2, 3, 4, 5]
    """
    methods = [name.split(", ")[0].split(" ")[0] for name in names]
    known = next((one for one in METHODS if any(m in one for m in methods)), ())
    own = {method: known.index(method) for method in methods if method in known}
    # The first colour is the baseline's: no other line gets it where methods are known.
    free = (n for n in itertools.count(1 if own else 0) if n not in own.values())
    enough = max(map(methods.count, methods), default=0) <= len(DASHES)
    styles: list[int] = []
    for at, method in enumerate(methods):
        before = methods[:at].count(method)
        style = own[method] + before * len(COLOURS) if method in own else None
        taken = style is None or (before and (not enough or style in own.values()))
        styles.append(next(n for n in free if n not in styles) if taken or style is None else style)
    return styles


def chart_file(
    title: str,
    x: str,
    y: str,
    lines: Sequence[ChartLine],
    *,
    log: bool = False,
    log_x: bool = False,
    zero: bool = False,
    least: float | None = None,
    name_points: bool = False,
) -> str:
    """Return a line chart as the text of an SVG file.

    Args:
        title: Title above the chart.
        x: Label of the x axis.
        y: Label of the y axis.
        lines: The lines; the first is drawn on top.
        log: Whether the y axis is logarithmic.
        log_x: Whether the x axis is logarithmic.
        zero: Whether the y axis includes zero, with a stronger line there.
        least: Least span of the y axis; by default a share of its largest value.
        name_points: Whether lines of a single point have their names beside it, not in the legend.

    Raises:
        ValueError: No line has a point to draw.
    """
    if log_x:  # which has no place for zero
        lines = [replace(line, points=[p for p in line.points if p[0] > 0]) for line in lines]
        lines = [replace(line, band=[one for one in line.band if one[0] > 0]) for line in lines]
    visible, (across, up) = fit_axes(lines, _LAYOUT, log=log, least=least)
    if log_x:
        xs = tuple(sorted({px for line in visible for px, _ in line.points}))
        few = xs if len(xs) <= _MAX_MARKED else ()
        across = replace(across, log=True, whole=False, only=few)
    if zero:
        up = replace(up, low=min(up.low, 0.0), high=max(up.high, 0.0))
    # A legend beside the plot needs a taller chart for many lines.
    height = max(_LAYOUT.height, _LAYOUT.top + _LEGEND_LINE * len(visible))
    layout, axes = (
        replace(_LAYOUT, height=height),
        (across, replace(up, start=height - _LAYOUT.bottom)),
    )
    right = across.end
    parts = [svg_head(title, layout, [line.style or 0 for line in visible])]
    parts += draw_grid(axes, x, y, zero=zero)
    single = [line for line in visible if name_points and len(line.points) == 1]
    for line in single:
        parts += [*draw_line(line, axes), _beside(line, single, axes)]
    visible = [line for line in visible if line not in single]
    for number, line in reversed(list(enumerate(visible))):  # The first is drawn last, on top.
        parts += draw_line(line, axes)
        name = line.name + _covered(line, visible[:number], axes[1])
        at = layout.top + 8 + _LEGEND_LINE * number
        parts.append(f'<path d="M{right + 16:g} {at}h22" {stroke(line)}/>')
        parts.append(svg_text(right + 44, at + 4, printable(name, 36), "start"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _beside(line: ChartLine, others: Sequence[ChartLine], axes: tuple[ChartAxis, ChartAxis]) -> str:
    """Return the name of a single point, to its left if another one is close on its right."""

    def place(one: ChartLine) -> tuple[float, float]:
        ((x, y),) = one.points
        return axes[0].at(x), axes[1].at(y)

    x, y = place(line)
    taken = [(px - x, abs(py - y)) for px, py in map(place, others)]
    is_close = any(0 < across < 60 and up < 12 for across, up in taken)
    return svg_text(x - 8 if is_close else x + 8, y + 4, line.name, "end" if is_close else "start")


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


def svg_head(title: str, layout: Layout, styles: Sequence[int]) -> str:
    """Return the opening tag of a chart, its colours and its title."""
    words, size = escaped(title), f'width="{layout.width}" height="{layout.height}"'
    # An image cannot know the background of its page, so it brings its own. It follows the system's
    # theme, with the same contrast whatever the page does.
    dark = f"@media(prefers-color-scheme:dark){{{_style_sheet(styles, dark=True)}}}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {layout.width} {layout.height}" '
            f'{size} role="img" {FONT}>',
            f"<style>{_style_sheet(styles)}{dark}</style>",
            f"<title>{words}</title>",
            '<rect class="paper" width="100%" height="100%" rx="6"/>',
            f'<text x="{layout.left}" y="20" font-size="14" font-weight="600"'
            f"{smaller_font(title, layout.width - layout.left - 4, 14)}>{words}</text>",
        ]
    )


def _style_sheet(styles: Sequence[int], dark: bool = False) -> str:
    """Return CSS for the classes of charts: `s1` strokes in colour 1, `f1` fills."""
    colours = sorted({style % len(COLOURS) for style in styles})
    rules = [f".s{n}{{stroke:{COLOURS[n][dark]}}}.f{n}{{fill:{COLOURS[n][dark]}}}" for n in colours]
    ink, paper = INK[dark], PAPER[dark]
    return f"text{{fill:{ink}}}.rule{{stroke:{ink}}}.paper{{fill:{paper}}}" + "".join(rules)
