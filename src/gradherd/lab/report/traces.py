"""Lines, bands and bars of the page's charts, without colours: the page adds those, light or dark.

A piece is {"trace", "arm", "role"} with plotly's own fields under "trace"; a piece whose x axis can
be switched has "xs", a list of values per axis, instead of x.
"""

from collections.abc import Sequence
from typing import Any

from gradherd.lab.report.arms import ArmSummary
from gradherd.lab.report.stats import MeanStd
from gradherd.lab.text import printable

Piece = dict[str, Any]
Chart = dict[str, Any]

DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "triangle-down", "star")


def plotly_text(text: str, max_length: int = 40) -> str:
    """Return a name that plotly shows as it is; plotly would interpret tags and templates.

    >>> plotly_text("<b>a</b> & b")
    '&lt;b&gt;a&lt;/b&gt; &amp; b'
    """
    safe = printable(text, max_length)
    # "%{" starts a template, which plotly has no escape for: a zero-width space breaks it up.
    for sign, escaped in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("%{", "%\u200b{")):
        safe = safe.replace(sign, escaped)
    return safe


def curve(index: int, arm: ArmSummary, points: Sequence[MeanStd]) -> list[Piece]:
    """Return an arm's mean over seeds, with a band of one standard deviation for several seeds."""
    xs = {
        "epochs": [float(epoch) for epoch in range(1, arm.epochs + 1)],
        "seconds": list(arm.seconds_by_epoch),
        "bytes": list(arm.bytes_by_epoch),
    }
    line = {
        "arm": index,
        "role": "line",
        "xs": xs,
        "trace": {
            "type": "scatter",
            "mode": "lines+markers",
            "name": plotly_text(arm.label),
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
    outline = {name: _forth_and_back([values[i] for i in places]) for name, values in xs.items()}
    # On a log axis nothing at or below zero can be drawn; the band then ends a decade lower.
    floors = [
        0.1 * mean if low <= 0 < (mean := points[i].mean or 0.0) else low for i, low, _ in ends
    ]
    high = [high for _, _, high in ends]
    band = _band(index, high + [low for _, low, _ in reversed(ends)])
    return [{**band, "xs": outline, "log_y": high + floors[::-1]}, line]


def _hover_std(point: MeanStd, seeds: int) -> str:
    return "" if point.std is None or seeds < 2 else f" ± {point.std:.2g}"


def band_between(
    index: int, xs: Sequence[float], low: Sequence[float], high: Sequence[float]
) -> Piece:
    """Return a filled area between two lines."""
    piece = _band(index, [*high, *reversed(low)])
    piece["trace"]["x"] = _forth_and_back(xs)
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


def _forth_and_back(values: Sequence[float]) -> list[float]:
    return [*values, *reversed(values)]
