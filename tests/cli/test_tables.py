"""Tables on narrow and wide terminals, and in files: no digit and no name is lost."""

import re

import pytest
from rich.console import Console
from rich.table import Table

from gradherd.cli import tables
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
    """Return a text without what tables are drawn with, colours and white space."""
    return re.sub(r"\x1b\[[0-9;]*m|[\s│┃─━┏┓┡┩└┘┴┬├┤╇┼╋]", "", text)


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_cell_of_a_comparison_is_printed(capsys, monkeypatch, width, terminal):
    monkeypatch.setenv("COLUMNS", str(width))
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    tables.print_comparison(comparison(), None)
    out = capsys.readouterr().out.partition("epochs to it: until")[
        0
    ]  # the sentences have names, too
    table = tables._comparison_table(comparison(), coloured=True)
    cells = [cell for column in table.columns for cell in column.cells]
    assert len(cells) >= 10
    for cell in cells:
        assert squeezed(re.sub(r"\[[^\]]*\]", "", cell)) in squeezed(out), (cell, out)
    # Without colours, marks say which mean is best.
    assert ("\x1b[" in out) == terminal and ("*" in out) != terminal


@pytest.mark.parametrize("width", WIDTHS)
def test_every_figure_of_a_benchmark_is_printed_in_one_piece(capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    tables.print_bench("coordination", "cpu", BENCH, as_json=False)
    out = capsys.readouterr().out
    for figure in ("1,000,000", "1234.567", "12.35", "123,456,789", "9,876,543", "all-reduce"):
        assert figure in out, out
    assert any("workers" in line and "case" in line for line in out.splitlines()) == (width >= 80)


def test_a_file_is_as_wide_as_its_table(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    table = Table("a", *"bcdefgh")
    table.add_row(*["x" * 30] * 8)
    tables.print_table(table)
    assert capsys.readouterr().out.count("x" * 30) == 8


def test_a_list_has_the_markup_of_its_table(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    table = Table("name", "figure", title="a title that is long", caption="the end")
    table.add_row("[bold green]one[/]", "1" * 30)
    table.add_row("two", "")
    tables.print_table(table, Console(width=20, force_terminal=False))
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "a title that is long",
        "name: one",
        f"  figure: {'1' * 30}",
        "name: two",
        "the end",
    ]


@pytest.mark.parametrize("width", [60, 72, 80])
def test_a_table_breaks_between_words_only(capsys, width):
    table = Table("set", "for tasks", "where it is, or how to get it")
    path = "/home/someone/sets/fashion-mnist"
    table.add_row("fashion-mnist", "fashion-lenet, cifar10-resnet18", f"{path} (idx)")
    tables.print_table(table, Console(width=width, force_terminal=True))
    out = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    for word in ("fashion-lenet,", "cifar10-resnet18", path):
        assert word in out, out


@pytest.mark.parametrize("terminal", [True, False])
def test_sentences_are_broken_between_words_on_a_terminal_only(capsys, terminal):
    sentence = "reaches the final loss of its baseline after half as many epochs " * 2
    tables.print_sentence(sentence.strip(), Console(width=31, force_terminal=terminal))
    lines = capsys.readouterr().out.splitlines()
    assert " ".join(line.strip() for line in lines) == sentence.strip()
    assert (len(lines) > 1) == terminal and (max(map(len, lines)) <= 31) == terminal


def test_a_number_and_its_percent_sign_stay_on_one_line(capsys):
    for width in range(12, 40):
        console = Console(width=width, force_terminal=True, highlight=False)
        tables.print_sentence("lower by a 95 % interval " * 4, console)
        lines = capsys.readouterr().out.splitlines()
        assert sum(line.count("95 %") for line in lines) == 4 and max(map(len, lines)) <= width
