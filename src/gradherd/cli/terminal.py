"""What commands print: sentences, tables and JSON, on terminals of any width and in files.

No table loses a digit or a name, however narrow the terminal is: one that does not fit is printed
as a list, a line for each cell. A file or a pipe has no width, so nothing is broken there.
"""

import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, TextIO

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_WORDS = {
    "ok": "green",
    "problem": "bold red",
    "damaged": "bold red",
    "missing": "dim",
    "unchecked": "yellow",
}
"""What a cell says -> its colour."""
MARKS = {
    "gain": ("+", "green"),
    "cost": ("-", "red"),
    "mixed": ("±", "yellow"),
    "open": ("?", "dim"),
}
"""Tone of a verdict -> its mark and its colour."""
_NO_WIDTH = 10_000
_GAP = "  "


def under_torchrun() -> bool:
    """Return whether torchrun started this process."""
    # RANK and WORLD_SIZE prove nothing: other launchers set them, and shells keep them.
    counts = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    return "TORCHELASTIC_RUN_ID" in os.environ and all(map(str.isdecimal, counts))


def torchrun_rank() -> int:
    """Return the rank that torchrun gave this process; 0 without torchrun."""
    return int(os.environ["RANK"]) if under_torchrun() else 0


def terminal_width(file: TextIO | None = None) -> int:
    """Return how wide a line may be: as the terminal; a file or a pipe has no width."""
    known = (file or sys.stdout).isatty() or "COLUMNS" in os.environ
    return max(30, shutil.get_terminal_size().columns) if known else _NO_WIDTH


def can_draw() -> bool:
    """Return whether stdout takes more letters than those of ASCII."""
    return (sys.stdout.encoding or "utf-8").lower().startswith("utf")


def paint(text: str, style: str) -> str:
    """Return text in a style, such as "bold green", if stdout shows colours."""
    shown = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    if not style or "NO_COLOR" in os.environ or not (shown or "FORCE_COLOR" in os.environ):
        return text
    return f"\x1b[{';'.join(_CODES[word] for word in style.split())}m{text}\x1b[0m"


def wrap(text: str, width: int) -> list[str]:
    """Break text between words: all-reduce, --json and 95 % are one word each.

    >>> wrap("an all-reduce in 95 % of them", 15)
    ['an all-reduce', 'in 95 % of them']
    """
    # textwrap takes a no-break space for a letter.
    joined = re.sub(r"(?<=\d) (?=%)", "\xa0", text)
    lines = textwrap.wrap(joined, width, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\xa0", " ") for line in lines]


def say(text: str, style: str = "", *, mark: str = "", mark_style: str = "") -> None:
    """Print a sentence on stdout, broken between words where the terminal ends.

    Args:
        text: The sentence; spaces before it indent it.
        style: Of the sentence.
        mark: What stands before it.
        mark_style: Of the mark.
    """
    indent = text[: len(text) - len(text.lstrip())]
    first, *rest = wrap(f"{mark} {text}".strip(), terminal_width() - len(indent)) or [""]
    before = paint(mark, f"bold {mark_style}") if mark else ""
    print(indent + before + paint(first[len(mark) :], style))
    for line in rest:
        print(indent + paint(line, style))


def print_table(
    rows: Sequence[Sequence[str]],
    headings: Sequence[str] = (),
    *,
    title: str = "",
    caption: str = "",
) -> None:
    """Print a table on stdout; as a list if the terminal is too narrow for its words and numbers.

    Figures stand to the right and are never broken. A cell that ends with a star is green, and so
    is a row whose first cell does.

    Args:
        rows: Cells of each row; an empty row is an empty line.
        headings: Of the columns; none prints no line of them.
        title: Printed before.
        caption: Printed after.
    """
    columns = list(zip(*(row for row in rows if row), strict=True)) or [() for _ in headings]
    headings = list(headings)
    figures = [all(re.match(r"\W?\d", cell) for cell in column if cell) for column in columns]
    words = [[word for cell in column for word in re.split(r"\s", cell)] for column in columns]
    whole = [[line for cell in column for line in cell.split("\n")] for column in columns]
    above = headings or [""] * len(columns)
    widths = [_longest([*cells, top]) for cells, top in zip(whole, above, strict=True)]
    least = [
        _longest([*(cells if is_figure else parts), *top.split()])
        for is_figure, cells, parts, top in zip(figures, whole, words, above, strict=True)
    ]
    room = terminal_width() - len(_GAP) * (len(columns) - 1)
    while sum(widths) > room and widths != least:
        widest = max(
            (at for at, width in enumerate(widths) if width > least[at]), key=widths.__getitem__
        )
        widths[widest] -= 1
    if title:
        say(title, "bold")
    if sum(widths) > room:
        _print_list(rows, headings)
    else:
        if headings:
            print()
            _print_row(headings, widths, figures, "dim", is_heading=True)
            rule = "─" if can_draw() else "-"
            print(rule * (sum(widths) + len(_GAP) * (len(columns) - 1)))
        for row in rows:
            _print_row(row, widths, figures, "bold green" if row and row[0].endswith("*") else "")
        if headings:
            print()
    if caption:
        say(caption, "dim")


def _longest(texts: Sequence[str]) -> int:
    return max(map(len, texts), default=0)


def _print_row(
    cells: Sequence[str],
    widths: Sequence[int],
    figures: Sequence[bool],
    style: str,
    *,
    is_heading: bool = False,
) -> None:
    broken = [
        [line for part in cell.split("\n") for line in wrap(part, width) or [""]]
        for cell, width in zip(cells, widths, strict=False)
    ]
    if is_heading:  # its last line stands above the column
        height = max(map(len, broken))
        broken = [[""] * (height - len(lines)) + lines for lines in broken]
    for lines in zip_longest(*broken, fillvalue="") if broken else [()]:
        parts = []
        for cell, line, width, right in zip(cells, lines, widths, figures, strict=False):
            padded = line.rjust(width) if right else line.ljust(width)
            own = "bold green" if cell.endswith("*") else _WORDS.get(cell, "")
            parts.append(paint(padded, style or own))
        print(_GAP.join(parts).rstrip())


def _print_list(rows: Sequence[Sequence[str]], headings: Sequence[str]) -> None:
    """Print each row as its first cell and, below it, a line for each of the others."""
    for row in rows:
        for index, (cell, heading) in enumerate(
            zip_longest(row, headings if row else (), fillvalue="")
        ):
            if cell or index == 0:
                # Not broken here: the terminal breaks what is longer than a line, and a path or a
                # name can be copied whole.
                text = f"{heading}: {cell}" if heading else cell
                print(paint(text, "bold") if index == 0 else f"  {text}")


def print_json(result: dict[str, Any]) -> None:
    """Print a result as one JSON object on stdout."""
    json.dump(result, sys.stdout)
    print()
