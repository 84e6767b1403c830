"""What commands print for people: tables of benchmarks and comparisons, verdicts on claims.

`gradherd.lab.report` is imported inside functions: it needs optional packages and takes seconds to
load, and most commands print tables without it.

No table loses a digit or a name, however narrow the terminal is: one that does not fit is printed
as a list, one line for each cell.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Column, Table

from gradherd.cli.arguments import print_json

# For annotations only; see above.
if TYPE_CHECKING:
    from gradherd.advise.choices import Setting
    from gradherd.lab.report.claims import ClaimVerdict
    from gradherd.lab.report.comparison import Comparison
    from gradherd.lab.report.comparison_table import TableCell

MARKS = {
    "gain": ("green", "+"),
    "cost": ("red", "-"),
    "mixed": ("yellow", "±"),
    "open": ("dim", "?"),
}
"""Tone of a verdict -> its colour and its mark."""
_JOINT = "\ue000"  # one cell wide, in no text of ours, and no white space
_SHORT_HEADINGS = {
    "arm": "arm",
    "seeds": "seeds",
    "final loss": "final loss",
    "epochs to baseline's final loss": "epochs to it",
    "total seconds": "seconds",
    "total bytes": "bytes",
}
"""Columns of a comparison that fit a terminal, and their headings there; the page has them all."""
_ADVICE_WIDTH = 70
"""Characters that all columns of `gradherd advise` take."""


def plain_table(title: str | None = None, **options: Any) -> Table:
    """Return a table without vertical rules, for rows that need the width of the terminal."""
    return Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, **options)


def print_table(table: Table, console: Console | None = None) -> None:
    """Print a table; as a list if the terminal is too narrow for its words and numbers.

    Args:
        table: The table.
        console: Where to print; by default stdout.
    """
    console = Console() if console is None else console
    for column in table.columns:
        # Rich's default cuts a long word and writes "..." in its place.
        column.overflow = "fold"
    # Apart from the table, since rich would break them at its width.
    title, caption, table.title, table.caption = table.title, table.caption, None, None
    if title:
        print_sentence(f"[italic]{title}[/]", console)
    least = _least_width(table, console)
    if least <= console.width:
        _share_width(table, console, console.width - least)
        console.print(table)
    elif console.is_terminal or "COLUMNS" in os.environ:
        _print_as_list(table, console)
    else:  # A file has no width.
        Console(file=console.file, width=least).print(table)
    if caption:
        print_sentence(f"[italic dim]{caption}[/]", console)


def print_sentence(markup: str, console: Console) -> None:
    """Print a sentence: broken between words on a terminal, one line in a file.

    Args:
        markup: The sentence, with rich's markup.
        console: Where to print.
    """
    if not console.is_terminal:  # A line of a log that rich breaks could not be searched for.
        console.print(markup, soft_wrap=True)
        return
    # Rich breaks at no-break spaces, too, so "95 %" is one word until the lines are known.
    with console.capture() as capture:
        console.print(re.sub(r"(?<=\d) (?=%)", _JOINT, markup))
    console.file.write(capture.get().replace(_JOINT, " "))


def _least_width(table: Table, console: Console) -> int:
    """Return the width that a table needs so that lines break between words only."""
    options = console.options.update(width=10_000)
    width = Measurement.get(console, options, table).maximum
    for column in table.columns:
        # Rich counts the longest word of a column even if that column may not be wrapped.
        if not column.no_wrap:
            size = _cell_size(column, console)
            width -= size.maximum - size.minimum
    return width


def _cell_size(column: Column, console: Console) -> Measurement:
    """Return the widths of the longest word and of the longest line in a column."""
    options = console.options.update(width=10_000)
    sizes = [Measurement.get(console, options, it) for it in (column.header, *column.cells)]
    return Measurement(max(it.minimum for it in sizes), max(it.maximum for it in sizes))


def _share_width(table: Table, console: Console, spare: int) -> None:
    """Give each column the width of its longest word, and the first ones what is left over."""
    # Rich narrows the widest column first, even where that breaks a word of it.
    for column in table.columns:
        if not column.no_wrap:
            size = _cell_size(column, console)
            column.width = min(size.maximum, size.minimum + spare)
            spare -= column.width - size.minimum


def _print_as_list(table: Table, console: Console) -> None:
    """Print each row as its first cell and, below it, a line for each of the others."""
    columns = [list(column.cells) for column in table.columns]
    headings = [str(column.header).replace("\n", " ") for column in table.columns]
    for row in zip(*columns, strict=True):
        for index, (heading, cell) in enumerate(zip(headings, row, strict=True)):
            if cell or index == 0:
                gap = ": " if heading else ""
                line = f"{heading}{gap}[bold]{cell}[/]" if index == 0 else f"  {heading}{gap}{cell}"
                # Soft-wrapped: the terminal breaks what is longer than a line, and nothing is lost.
                # Without rich's colours, which split names and numbers at hyphens and commas.
                console.print(line, soft_wrap=True, highlight=False)


def has_colours(console: Console) -> bool:
    """Return whether colours are seen; without them a mark says what they would."""
    return console.is_terminal and not console.no_color


def print_bench(bench: str, device: str, rows: list[dict[str, Any]], *, as_json: bool) -> None:
    """Print the rows of a benchmark as a table or as JSON.

    Args:
        bench: Name of the benchmark.
        device: Where it ran.
        rows: One dict per case and size, with at least case, workers, dim, seconds, ratio, bytes
            and peak_bytes.
        as_json: Print JSON.
    """
    if as_json:
        print_json({"bench": bench, "device": device, "rows": rows})
        return
    import torch  # here, since other commands print tables without it

    title = f"bench {bench} on {device}, torch {torch.__version__}"
    table = plain_table(title)
    # Leave out columns that would be empty: a terminal has little room.
    sends = any(row["bytes"] for row in rows)
    bounded = not sends and all("ceiling_ratio" in row for row in rows)
    faithful = any(row.get("fidelity") is not None for row in rows)
    headings = ["case", "workers", "dim", "ms", "time ratio", "peak bytes"]
    optional = ["bytes sent"] * sends + ["x ceiling"] * bounded + ["fidelity"] * faithful
    for heading in headings + optional:
        left = heading == "case"
        # Two words in two lines: seven columns of large numbers fit 80 characters.
        heading = heading.replace(" ", "\n")
        table.add_column(heading, justify="left" if left else "right", no_wrap=True)
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        table.add_row(
            row["case"],
            str(row["workers"]),
            f"{row['dim']:,}",
            f"{1e3 * row['seconds']:.3f}",
            f"{row['ratio']:.2f}",
            "" if row["peak_bytes"] is None else f"{row['peak_bytes']:,}",
            *([f"{row['bytes']:,}"] if sends else []),
            *([f"{row['ceiling_ratio']:.2f}"] if bounded else []),
            *([_fidelity(row)] if faithful else []),
            end_section=following is not None and _size(row) != _size(following),
        )
    print_table(table)


def _fidelity(row: dict[str, Any]) -> str:
    return "" if row.get("fidelity") is None else f"{row['fidelity']:.3f}"


def _size(row: dict[str, Any]) -> tuple[int, int]:
    return row["workers"], row["dim"]


def print_comparison(comparison: "Comparison", page: Path | None) -> None:
    """Print the table of a comparison, its notes and verdicts, and where the page is.

    Args:
        comparison: The comparison.
        page: The HTML page about it; None if there is none yet.
    """
    from gradherd.lab.report.verdicts import all_verdicts, multiple_testing_note

    console = Console()
    print_table(_comparison_table(comparison, coloured=has_colours(console)), console)
    for note in comparison.notes:
        print_sentence(f"[yellow]note[/yellow]  {escape(note)}", console)
    for verdict in all_verdicts(comparison):
        colour, mark = MARKS[verdict.tone]
        print_sentence(f"[bold {colour}]{mark}[/] {escape(verdict.headline)}", console)
    warning = multiple_testing_note(comparison)
    if warning is not None:
        told = f"{warning} Intervals and p values are in the report and in --json."
        print_sentence(f"[dim]{escape(told)}[/]", console)
    if page is not None:
        # A path is copied whole, so the terminal breaks it.
        console.print(f"report: {escape(str(page))}", soft_wrap=True)


def _comparison_table(comparison: "Comparison", *, coloured: bool) -> Table:
    from gradherd.lab.report.comparison_table import comparison_table

    full = comparison_table(comparison)
    baseline = escape(comparison.baseline.label)
    table = plain_table(
        f"{escape(comparison.task)}: {escape(comparison.description)}",
        caption=f"epochs to it: until the final loss of {baseline}, the baseline; "
        f"{'green' if coloured else '*'}: best mean",
    )
    # The metric is named by the task, so it cannot be in the table above.
    headings = {**_SHORT_HEADINGS, comparison.metric_name: comparison.metric_name}
    columns = [index for index, name in enumerate(full.columns) if name in headings]
    for index in columns:
        name = full.columns[index]
        # A long heading in two lines costs less width than a wide column of numbers.
        heading = escape(headings[name]).replace(" ", "\n", 1)
        table.add_column(heading, overflow="fold", no_wrap=True)
    for row in full.rows:
        table.add_row(*(_cell_markup(row[index], coloured) for index in columns))
    return table


def _cell_markup(cell: "TableCell", coloured: bool) -> str:
    if not cell.best:
        return escape(cell.text)
    return f"[bold green]{escape(cell.text)}[/]" if coloured else f"{escape(cell.text)}*"


def print_advice(
    setting: "Setting",
    result: Mapping[str, Any],
    notes: Sequence[str],
    sentences: Sequence[str],
) -> None:
    """Print the predicted steps of `gradherd advise`, its advice, and the code to paste.

    Args:
        setting: Model, workers and network.
        result: The predicted steps, what is recommended and its code, as in --json.
        notes: Where the figures come from.
        sentences: The advice; the last one counts.
    """
    from gradherd.advise.units import format_bytes, format_rate, format_seconds

    # Without rich's own colours of numbers: in sentences they distract from what is recommended.
    console = Console(highlight=False)
    coloured = has_colours(console)
    link = setting.link
    about = (
        f"{setting.params:,.0f} parameters, {setting.workers} workers, "
        f"{format_rate(link.bandwidth)}, latency {format_seconds(link.latency)}, "
        f"backward {format_seconds(setting.backward)}"
    )
    for line in (about, *notes):
        # Not as title and caption, which would be broken at the width of the table.
        print_sentence(escape(line), console)
    choices = result["choices"]
    steps = {(one["exchange"], one["order"]): one for one in choices}
    dense = steps["dense", "d-rr"]["step_seconds"]
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "step": lambda one: format_seconds(one["step_seconds"]),
        "step /\ndense": lambda one: f"{one['step_seconds'] / dense:.3g}" if dense else "",
        "sent": lambda one: format_bytes(one["bytes"]),
    }
    if console.width >= _ADVICE_WIDTH:
        columns |= {
            "waits": lambda one: format_seconds(one["exchange_seconds"]),
            "computes": lambda one: format_seconds(one["overhead_seconds"]),
            "with\ncd-grab": lambda one: format_seconds(
                steps[one["exchange"], "cd-grab"]["step_seconds"]
            ),
        }
    table = plain_table()
    table.add_column("exchange", no_wrap=True)
    for heading in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for one in (one for one in choices if one["order"] == "d-rr"):
        chosen = one["exchange"] == result["recommended"]
        name = "fp16, bf16" if one["exchange"] == "fp16" else one["exchange"]
        table.add_row(
            f"{name}{'*' if chosen and not coloured else ''}",
            *(cell(one) for cell in columns.values()),
            style="bold green" if chosen else None,
        )
    print_table(table, console)
    local = "take 4 steps alone, then exchange all of the difference in one bit"
    mark = "green" if coloured else "*"
    print_sentence(f"{mark}: recommended; local-4: {local}", console)
    for sentence in sentences:
        weight = "bold" if sentence is sentences[-1] else "not bold"
        print_sentence(f"[{weight}]{escape(sentence)}[/]", console)
    if result["code"] is not None:
        console.print()
        # As it is: code that is broken anywhere cannot be pasted.
        console.print(result["code"], markup=False, soft_wrap=True)


def print_claims(verdicts: "Sequence[ClaimVerdict]") -> None:
    """Print one line per verdict on a claim."""
    for verdict in verdicts:
        print(f"{verdict.verdict:16}  {verdict.claim.id}: {verdict.ours}")


def claims_json(verdicts: "Sequence[ClaimVerdict]") -> list[dict[str, str]]:
    """Return the verdicts on claims for --json."""
    return [
        {"id": verdict.claim.id, "verdict": verdict.verdict, "ours": verdict.ours}
        for verdict in verdicts
    ]
