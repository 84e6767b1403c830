"""What all charts have in common: colours, sizes, the opening tag of an SVG, text, numbers.

A method has the same colour and dashes on all pages and in all charts. Every colour has a contrast
of at least 4.5:1 on its background, light or dark; a test computes it.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from gradherd.lab.text import printable

COLOURS = (
    ("#5f6673", "#a7aeba"), ("#0068a3", "#58b4f0"), ("#b54700", "#ff9660"), ("#00775a", "#3fcba0"),
    ("#9c3f80", "#ee9bcf"), ("#7a6000", "#e0c341"), ("#5f4bb6", "#b5a6ff"), ("#b3261e", "#ff8a80"),
)  # fmt: skip
"""Light and dark variants; the first, a grey, is the baseline's."""
DASHES = ("", "7 3", "2 3", "9 3 2 3")
"""Dashes of lines that share a colour, as `stroke-dasharray`."""
INK, PAPER = ("#4a515c", "#b9c1cc"), ("#ffffff", "#181c22")
"""Text and background of charts, light and dark."""
METHODS = (
    ("d-rr", "cd-grab", "id-grab", "id-pair-grab", "shuffle-once", "always-plus", "grab",
     "pair-grab", "flip-flop", "fixed", "block-reshuffling", "curriculum", "stair", "saw"),
    ("dense", "exdyna", "micro", "topk", "cltk", "deft", "threshold", "sidco", "gtopk", "randomk",
     "sage", "demo", "powersgd"),
)  # fmt: skip
"""Orders and sparsifiers, in the order of their colours; from the ninth on they are dashed."""


def line_styles(names: Sequence[str], registered: Sequence[Sequence[str]] = ()) -> list[int]:
    """Return a style per line: colour `style % 8`, dashes `style // 8`.

    A method has its own style everywhere. Further lines of it keep the colour and get other dashes,
    as long as there are dashes left; lines that name no method get styles that nobody uses.

    Args:
        names: Names of lines, such as "exdyna 0.01, online" for a line of exdyna.
        registered: Orders and sparsifiers added since; their styles follow those of `METHODS`.

    >>> line_styles(["d-rr", "always-plus"]), line_styles(["exdyna 0.01", "exdyna 0.01, online"])
    ([0, 5], [1, 9])
    >>> line_styles(["exdyna, a", "exdyna, b", "exdyna, c", "exdyna, d", "exdyna, e"])
    [1, 2, 3, 4, 5]
    """
    methods = [name.split(", ")[0].split(" ")[0] for name in names]
    families = [
        tuple(dict.fromkeys((*first, *more)))
        for first, more in itertools.zip_longest(METHODS, registered, fillvalue=())
    ]
    known = next((one for one in families if any(m in one for m in methods)), ())
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


def dashes(style: int) -> str:
    """Return the `stroke-dasharray` of a style; empty for a solid line."""
    return DASHES[style // len(COLOURS) % len(DASHES)]


def style_sheet(styles: Sequence[int], dark: bool = False) -> str:
    """Return CSS for the classes of charts: `s1` strokes in colour 1, `f1` fills.

    Args:
        styles: Styles that the chart uses.
        dark: Whether to return the dark variants.
    """
    colours = sorted({style % len(COLOURS) for style in styles})
    rules = [f".s{n}{{stroke:{COLOURS[n][dark]}}}.f{n}{{fill:{COLOURS[n][dark]}}}" for n in colours]
    ink, paper = INK[dark], PAPER[dark]
    return f"text{{fill:{ink}}}.rule{{stroke:{ink}}}.paper{{fill:{paper}}}" + "".join(rules)


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
NARROW = Layout(width=360, height=300, top=12, alone=False)
"""As INLINE, for bars: so narrow that a phone need not shrink their names."""


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
