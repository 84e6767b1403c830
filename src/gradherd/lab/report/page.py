"""Write comparisons as one HTML file that needs no network and no other file, and has no script."""

import csv
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
from markupsafe import Markup

from gradherd.lab.report import provenance
from gradherd.lab.report.charts import X_AXES, charts_of
from gradherd.lab.report.comparison import Comparison, compare_all
from gradherd.lab.report.comparison_table import comparison_table
from gradherd.lab.report.svg import COLOURS, INK, PAPER, dashes
from gradherd.lab.report.verdicts import answers, multiple_testing_note
from gradherd.lab.text import counted, listed, printable
from gradherd.lab.train.record import RunRecord, write_atomic

_TONES = {
    "gain": ("+", "gain shown"),
    "cost": ("\N{MINUS SIGN}", "cost shown"),
    "mixed": ("±", "gain and cost"),
    "open": ("?", "nothing shown"),
}


def write_report(
    records: Sequence[RunRecord],
    path: Path,
    *,
    title: str | None = None,
    files: Sequence[str] | None = None,
) -> None:
    """Write a page about these runs atomically, tasks in order of first appearance.

    Args:
        records: Runs of one or several tasks.
        path: The HTML file.
        title: Title of the page; None builds it from tasks and arms.
        files: The file that each record was read from, to be listed.

    Raises:
        ValueError: Records of one task cannot be compared; see `comparison.compare`.
    """
    write_atomic(path, render(records, title=title, files=files))


def render(
    records: Sequence[RunRecord], *, title: str | None = None, files: Sequence[str] | None = None
) -> str:
    """Return the page as HTML; see `write_report`."""
    comparisons = compare_all(records)
    # By identity: records hold dicts, so they cannot be keys themselves.
    names = {} if files is None else {id(r): f for r, f in zip(records, files, strict=True)}
    arms = "; ".join(
        f"{printable(one.task, 60)}: {listed([printable(arm.label, 40) for arm in one.arms])}"
        for one in comparisons
    )
    text = _environment().get_template("page.html.j2").render(
        title=arms if title is None else printable(title),
        sections=[_section(f"c{i}", one, names) for i, one in enumerate(comparisons)],
        axes=list(X_AXES), tones=_TONES, colours=COLOURS, ink=INK, paper=PAPER,
        most_arms=max(len(comparison.arms) for comparison in comparisons),
    )  # fmt: skip
    # Half a surrogate pair is valid in a JSON string, but cannot be encoded as UTF-8.
    return text.encode("utf-8", "replace").decode("utf-8")


def _section(name: str, comparison: Comparison, files: Mapping[int, str]) -> dict[str, Any]:
    """Return one comparison as the template needs it; ids start with its name."""
    return {
        "id": name,
        "comparison": comparison,
        "facts": _facts(comparison),
        "answers": answers(comparison),
        "caution": multiple_testing_note(comparison),
        "table": comparison_table(comparison),
        "legend": [
            {"label": arm.label, "style": at % len(COLOURS), "dash": dashes(at)}
            for at, arm in enumerate(comparison.arms)
        ],
        "charts": charts_of(comparison),
        "settings": provenance.merged_rows(comparison.arms, "config"),
        "environment": provenance.merged_rows(comparison.arms, "versions")
        + provenance.merged_rows(comparison.arms, "hardware"),
        "runs": provenance.run_rows(comparison.arms, files),
        "by_epoch": provenance.epoch_rows(comparison.arms),
    }


def _facts(comparison: Comparison) -> str:
    record, base = comparison.baseline.runs[0], comparison.baseline
    workers = record.config.get("workers")
    size = f"{record.parameters:,} parameters"
    parts = [
        comparison.description,
        # Some tasks name their size in the description already.
        "" if size in comparison.description else size,
        f"{record.train_examples:,} examples",
        counted(workers, "worker") if isinstance(workers, int) else "",
        counted(base.planned, "epoch"),
    ]
    return " · ".join(part for part in parts if part)


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("gradherd.lab.report"),
        autoescape=True,
        # A misspelt field must fail, not render as nothing.
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["csv_link"] = _csv_link
    # Drawings are ours, with all names escaped, so they are not escaped again.
    environment.filters["drawn"] = Markup
    # "95 %" and "p = 0.03" stay on one line.
    environment.filters["joined"] = lambda text: re.sub(
        r"(?<=\d) (?=%)| (?==)|(?<==) ", "\xa0", text
    )
    return environment


def _csv_link(table: tuple[Sequence[str], Sequence[Sequence[str]]]) -> str:
    """Return an address that holds a table as CSV: its download needs no script and no file."""
    text = io.StringIO()
    csv.writer(text).writerows([table[0], *table[1]])
    return f"data:text/csv;charset=utf-8,{quote(text.getvalue())}"
