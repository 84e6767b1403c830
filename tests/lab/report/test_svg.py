import pytest

from gradherd.lab.report.svg import (
    COLOURS,
    INK,
    PAPER,
    ChartAxis,
    ChartLine,
    page_chart,
)


def test_marks_of_an_axis():
    assert ChartAxis(1, 4, 0, 1, whole=True).ticks() == [1, 2, 3, 4]
    assert ChartAxis(2, 2, 0, 1).ticks() == [2] and ChartAxis(2, 2, 0, 1).at(2) == 0.5
    assert ChartAxis(1e-3, 10, 0, 1, log=True).at(0.1) == pytest.approx(0.5)


def test_a_chart_of_a_page_has_single_runs_and_its_own_words_at_the_axis():
    few = ChartLine("<a>", [(1, 0.5), (2, 0.25)], [(1, 0.4, 0.6), (2, 0.2, 0.3)], runs=[[(1, 0.9)]])
    assert page_chart("epoch", "y", [few]).count('class="s0 run"') == 1
    many = [ChartLine("a", [(x, 1.0 + x) for x in range(100)])]
    assert "60 MB" in page_chart("x", "y", many, x_text=lambda x: f"{x:.0f} MB")


def luminance(colour):
    """Return the relative luminance, as WCAG 2.1 defines it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("dark", [0, 1])
def test_lines_and_words_can_be_read(dark):
    for pair in (*COLOURS, INK):
        low, high = sorted(luminance(one[dark]) for one in (pair, PAPER))
        assert (high + 0.05) / (low + 0.05) >= 4.5, pair
