"""A comparison on the terminal: a table, what it shows, and where the page is.

Commands take what they need of `gradherd.lab.report` from here: where a package that it uses is
missing, they end with one sentence.
"""

from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gradherd.cli.usage import UsageError

try:
    from gradherd.lab.report.compare import as_json as as_json
    from gradherd.lab.report.compare import compare as compare
    from gradherd.lab.report.compare import compare_all as compare_all
    from gradherd.lab.report.find import find_records as find_records
    from gradherd.lab.report.model import Comparison
    from gradherd.lab.report.page import write_report as write_report
    from gradherd.lab.report.tables import Cell, table_of
    from gradherd.lab.report.verdict import caution, verdicts_of
except ModuleNotFoundError as error:
    if (error.name or "").split(".")[0] == "gradherd":
        raise
    raise UsageError(
        f"reports need {error.name}, which is not installed: pip install 'gradherd[report]'"
    ) from None

_TONES = {"gain": "green", "cost": "red", "mixed": "yellow", "open": "dim"}
_SHORT = {
    "arm": "arm",
    "seeds": "seeds",
    "final loss": "final loss",
    "epochs to baseline's final loss": "epochs to it",
    "seconds in all": "seconds",
    "bytes in all": "bytes",
}
"""Columns that a terminal has room for, and their names there; the page has all of them."""


def show(comparison: Comparison, report_path: Path | None) -> None:
    """Print a comparison for people."""
    console = Console()
    console.print(_table(comparison))
    for note in comparison.notes:
        console.print(f"[yellow]note[/yellow]  {escape(note)}", soft_wrap=True)
    for verdict in verdicts_of(comparison):
        style = _TONES[verdict.tone]
        mark = {"gain": "+", "cost": "-", "mixed": "±", "open": "?"}[verdict.tone]
        console.print(f"[bold {style}]{mark}[/] {escape(verdict.text)}", soft_wrap=True)
    said = caution(comparison)
    if said is not None:
        console.print(f"[dim]{escape(said)}[/]", soft_wrap=True)
    if report_path is not None:
        console.print(f"report: {escape(str(report_path))}", soft_wrap=True)


def _table(comparison: Comparison) -> Table:
    found = table_of(comparison)
    base = escape(comparison.baseline.label)
    table = Table(
        title=f"{escape(comparison.task)}: {escape(comparison.description)}",
        caption=f"epochs to it: to the final loss of {base}, the baseline; green: best mean",
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,  # Bars between columns would not leave room for the figures.
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    names = {**_SHORT, comparison.metric_name: comparison.metric_name}
    kept = [index for index, name in enumerate(found.columns) if name in names]
    for index in kept:
        name = found.columns[index]
        header = escape(names[name]).replace(" ", "\n", 1)
        table.add_column(header, overflow="fold", no_wrap=name != "arm")
    for row in found.rows:
        table.add_row(*(_field(row[index]) for index in kept))
    return table


def _field(cell: Cell) -> str:
    return f"[bold green]{escape(cell.text)}[/]" if cell.best else escape(cell.text)
