"""What all SVG charts have in common: sizes, the opening tag with its colours, text, numbers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from gradherd.lab.report.palette import style_sheet
from gradherd.lab.text import printable


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Size of a chart in pixels, and where its names are."""

    width: int
    height: int
    left: int = 64
    top: int = 34
    bottom: int = 46
    side: int = 16
    """Room to the right of the plot; the legend is there if it is wide enough."""
    columns: int = 0
    """Columns of a legend below the plot; 0 for none."""
    alone: bool = True
    """Whether the chart is a file of its own, with a title, a background and its own colours."""


WIDE = Layout(width=800, height=340, side=280)
"""A file with a legend to the right of the plot."""
SMALL = Layout(width=380, height=236, left=52, columns=3)
"""A file with a legend below the plot; three of them fit side by side."""
INLINE = Layout(width=560, height=300, top=12, alone=False)
"""Part of a page that has the title, the legend and the colours."""
NARROW = Layout(width=460, height=300, top=12, alone=False)
"""As INLINE, for bars, whose figures take room beside them."""


def svg_head(title: str, layout: Layout, height: int, styles: Sequence[int]) -> str:
    """Return the opening tag of a chart; as a file of its own also its colours and its title."""
    size = f'viewBox="0 0 {layout.width} {height}"'
    font = 'font-family="system-ui, sans-serif" font-size="12"'
    if not layout.alone:
        return f'<svg {size} class="chart" aria-hidden="true" {font}>'
    words = escaped(title)
    # An image cannot know the background of its page, so it brings its own. It follows the system's
    # theme, with the same contrast whatever the page does.
    dark = f"@media(prefers-color-scheme:dark){{{style_sheet(styles, dark=True)}}}"
    room = layout.width - layout.left - 4 if layout.columns else layout.width
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} width="{layout.width}" '
            f'height="{height}" role="img" {font}>',
            f"<style>{style_sheet(styles)}{dark}</style>",
            f"<title>{words}</title>",
            '<rect class="paper" width="100%" height="100%" rx="6"/>',
            f'<text x="{12 if layout.columns else layout.left}" y="20" font-size="14" '
            f'font-weight="600"{smaller_font(title, room, 14)}>{words}</text>',
        ]
    )


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
