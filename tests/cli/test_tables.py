"""Tables on narrow and wide terminals, and in files: no digit and no name is lost."""

import re

import pytest

from gradherd.cli import bench, report, terminal
from gradherd.lab.report.comparison import compare
from tests.lab.report.sample_records import record

WIDTHS = (30, 50, 60, 80, 160)
BENCH = [
    {"case": case, "workers": 64, "dim": 1_000_000, "seconds": 1.234567, "ratio": 12.345,
     "peak_bytes": 123_456_789, "bytes": 9_876_543}
    for case in ("all-reduce", "sharded and more")
]  # fmt: skip


def comparison():
    return compare(
        [
            record(order, "dense", None, seed, losses=[0.6 + 0.001234 * seed] * 3)
            for order in ("d-rr", "id-pair-grab")
            for seed in range(3)
        ]
    )


def squeezed(text: str) -> str:
    """Return a text without colours and white space."""
    return re.sub(r"\x1b\[[0-9;]*m|\s", "", text)


@pytest.mark.parametrize("terminal_is", [True, False])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_cell_of_a_comparison_is_printed(capsys, monkeypatch, width, terminal_is):
    monkeypatch.setenv("COLUMNS", str(width))
    if terminal_is:
        monkeypatch.setenv("FORCE_COLOR", "1")
    seen = []
    table = report.print_table
    monkeypatch.setattr(
        report, "print_table", lambda rows, *more, **words: seen.extend(rows) or table(rows, *more)
    )
    report.print_comparison(comparison(), None)
    out = capsys.readouterr().out
    cells = [cell for row in seen for cell in row]
    assert len(cells) >= 10 and any(cell.endswith("*") for cell in cells)
    for cell in cells:
        assert squeezed(cell) in squeezed(out), (cell, out)
    assert ("\x1b[" in out) == terminal_is


@pytest.mark.parametrize("width", WIDTHS)
def test_every_figure_of_a_benchmark_is_printed_in_one_piece(capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    bench.print_rows(BENCH, "bench coordination")
    out = capsys.readouterr().out
    for figure in ("1,000,000", "1234.567", "12.35", "123,456,789", "9,876,543", "all-reduce"):
        assert figure in out, out
    assert any("workers" in line and "case" in line for line in out.splitlines()) == (width >= 80)


def test_a_file_is_as_wide_as_its_table(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    terminal.print_table([["x" * 30] * 8], "abcdefgh")
    assert capsys.readouterr().out.count("x" * 30) == 8


def test_figures_stand_to_the_right_and_texts_are_broken(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    rows = [("one", "9", "a text of some words"), (), ("two", "1,000", "short")]
    terminal.print_table(rows, ("name", "n", "what it is"))
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "",
        "name      n  what it is",
        "─" * 30,
        "one       9  a text of some",
        "             words",
        "",
        "two   1,000  short",
        "",
    ]


def test_a_table_that_does_not_fit_is_a_list(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    rows = [("one", "1" * 40), ("two", "")]
    terminal.print_table(rows, ("name", "figure"), title="a title", caption="the end")
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["a title", "name: one", f"  figure: {'1' * 40}", "name: two", "the end"]


@pytest.mark.parametrize("width", [60, 72, 80])
def test_a_table_breaks_between_words_only(capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    path = "/home/someone/sets/fashion-mnist"
    row = ("fashion-mnist", "fashion-lenet, another-task", f"{path} (idx)")
    terminal.print_table([row], ("set", "for tasks", "where it is, or how to get it"))
    out = capsys.readouterr().out
    for word in ("fashion-lenet,", "another-task", path):
        assert word in out, out


@pytest.mark.parametrize("columns", [31, None])
def test_sentences_are_broken_between_words_on_a_terminal_only(capsys, monkeypatch, columns):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", str(columns))
    sentence = ("reaches the final loss of its baseline after half as many epochs " * 2).strip()
    terminal.say(sentence)
    lines = capsys.readouterr().out.splitlines()
    assert " ".join(lines) == sentence
    assert (len(lines) > 1) == bool(columns) and (max(map(len, lines)) <= 31) == bool(columns)


def test_a_number_and_its_percent_sign_stay_on_one_line():
    for width in range(12, 40):
        lines = terminal.wrap("lower by a 95 % interval " * 4, width)
        assert sum(line.count("95 %") for line in lines) == 4 and max(map(len, lines)) <= width
