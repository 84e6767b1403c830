"""Lines, bands and bars of a chart, without colours: the page paints them, light or dark.

A piece is {"trace", "arm", "role"} with plotly's own fields under "trace"; a piece whose x can be
switched has "xs" instead of x.
"""

from collections.abc import Sequence
from typing import Any

from gradherd.lab.report.model import Arm, Spread
from gradherd.lab.text import printable

Piece = dict[str, Any]
Chart = dict[str, Any]

DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "triangle-down", "star")


def label(text: str, most: int = 40) -> str:
    """Return a name that plotly shows as it is: it would obey tags and templates.

    >>> label("<b>a</b> & b")
    '&lt;b&gt;a&lt;/b&gt; &amp; b'
    """
    short = printable(text, most)
    for sign, shown in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("%{", "%\u200b{")):
        short = short.replace(sign, shown)
    return short


def axes_of(arm: Arm) -> dict[str, list[float]]:
    """Return what an arm's epochs can be drawn against."""
    return {
        "epochs": [float(epoch) for epoch in range(1, arm.epochs + 1)],
        "seconds": list(arm.seconds_by_epoch),
        "bytes": list(arm.bytes_by_epoch),
    }


def curve(index: int, arm: Arm, points: Sequence[Spread]) -> list[Piece]:
    """Return an arm's mean over seeds and, if there are several, a band of one std around it."""
    xs = axes_of(arm)
    line = {
        "arm": index,
        "role": "line",
        "xs": xs,
        "trace": {
            "type": "scatter",
            "mode": "lines+markers",
            "name": label(arm.label),
            "y": [point.mean for point in points],
            "customdata": [
                [epoch, _hover_std(point, len(arm.seeds))] for epoch, point in enumerate(points, 1)
            ],
            "hovertemplate": "%{y:.4g}%{customdata[1]} after epoch %{customdata[0]}",
            "line": {"dash": DASHES[index % len(DASHES)] if index >= len(SYMBOLS) else "solid"},
            "marker": {"symbol": SYMBOLS[index % len(SYMBOLS)]},
        },
    }
    if len(arm.seeds) < 2:
        return [line]
    ends = [
        (i, point.mean - point.std, point.mean + point.std)
        for i, point in enumerate(points)
        if point.mean is not None and point.std is not None
    ]
    places = [i for i, _, _ in ends]
    around = {name: _there_and_back([values[i] for i in places]) for name, values in xs.items()}
    # On a log axis nothing at or below zero can be drawn; the band then ends a decade lower.
    floors = [
        0.1 * mean if low <= 0 < (mean := points[i].mean or 0.0) else low for i, low, _ in ends
    ]
    high = [high for _, _, high in ends]
    band = _band(index, high + [low for _, low, _ in reversed(ends)])
    return [{**band, "xs": around, "log_y": high + floors[::-1]}, line]


def _hover_std(point: Spread, seeds: int) -> str:
    return "" if point.std is None or seeds < 2 else f" ± {point.std:.2g}"


def band_between(
    index: int, xs: Sequence[float], low: Sequence[float], high: Sequence[float]
) -> Piece:
    """Return a filled area between two lines."""
    piece = _band(index, [*high, *reversed(low)])
    piece["trace"]["x"] = _there_and_back(xs)
    return piece


def _band(index: int, y: Sequence[float]) -> Piece:
    return {
        "arm": index,
        "role": "band",
        "trace": {
            "type": "scatter",
            "mode": "lines",
            "fill": "toself",
            "y": list(y),
            "hoverinfo": "skip",
            "line": {"width": 0},
        },
    }


def _there_and_back(values: Sequence[float]) -> list[float]:
    return [*values, *reversed(values)]
