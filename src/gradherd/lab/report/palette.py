"""Colours and dashes of lines: a method looks the same on all pages and in all charts.

Every colour has a contrast of at least 4.5:1 on its background, light or dark; a test computes it.
"""

import itertools
from collections.abc import Sequence

COLOURS = (
    ("#5f6673", "#a7aeba"), ("#0068a3", "#58b4f0"), ("#b54700", "#ff9660"), ("#00775a", "#3fcba0"),
    ("#9c3f80", "#ee9bcf"), ("#7a6000", "#e0c341"), ("#00727e", "#5fd3de"), ("#b3261e", "#ff8a80"),
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
     "sage"),
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
