"""Write comparisons as one HTML file that needs no network and no other file."""

import base64
import csv
import hashlib
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
from markupsafe import Markup

from gradherd.lab.report import provenance
from gradherd.lab.report.charts import charts_of
from gradherd.lab.report.comparison import Comparison, compare_all
from gradherd.lab.report.comparison_table import comparison_table
from gradherd.lab.report.svg_parts import COLOURS, INK, PAPER, dashes, line_styles
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
    reload: int = 0,
) -> None:
    """Write a page about these runs atomically, tasks in order of first appearance.

    Args:
        records: Runs of one or several tasks.
        path: The HTML file.
        title: Title of the page; None builds it from tasks and arms.
        files: The file that each record was read from, to be listed.
        reload: Seconds after which the page loads itself again; 0 for never.
    """
    write_atomic(path, render(records, title=title, files=files, reload=reload))


def render(
    records: Sequence[RunRecord],
    *,
    title: str | None = None,
    files: Sequence[str] | None = None,
    reload: int = 0,
) -> str:
    """Return the page as HTML.

    Args:
        records: Runs of one or several tasks.
        title: Title of the page; None builds it from tasks and arms.
        files: The file that each record was read from, to be listed.
        reload: Seconds after which the page loads itself again; 0 for never.

    Raises:
        ValueError: Records of one task cannot be compared; see `comparison.compare`.
    """
    comparisons = compare_all(records)
    # By identity: records hold dicts, so they cannot be keys themselves.
    names = {} if files is None else {id(r): f for r, f in zip(records, files, strict=True)}
    sections = [_section(i, comparison, names) for i, comparison in enumerate(comparisons)]
    script = Markup(_file("page.js"))
    text = _environment().get_template("page.html.j2").render(
        title=printable(title) if title is not None else title_of(comparisons),
        environment=provenance.environment_line(records),
        sections=sections,
        data={
            # Without the drawings, which are in the page already.
            "charts": [
                {name: value for name, value in chart.items() if name != "svg"}
                for section in sections
                for chart in section.charts
                if "lines" in chart
            ],
            "arms": {section.id: section.legend for section in sections},
            "reload": reload,
        },
        colours=COLOURS, ink=INK, paper=PAPER, reload=reload,
        most_arms=max(len(section.legend) for section in sections),
        script=script,
        # With a hash no other script can run, whatever a record contains.
        script_hash=_hash(script),
    )  # fmt: skip
    # Half a surrogate pair is valid in a JSON string, but cannot be encoded as UTF-8.
    return text.encode("utf-8", "replace").decode("utf-8")


def title_of(comparisons: Sequence[Comparison]) -> str:
    """Return tasks and arms on one line."""
    return "; ".join(
        f"{printable(one.task, 60)}: {listed([printable(arm.label, 40) for arm in one.arms])}"
        for one in comparisons
    )


@dataclass(frozen=True, kw_only=True)
class PageSection:
    """One comparison, as the template needs it."""

    id: str
    comparison: Comparison
    facts: str
    verdicts: list[dict[str, Any]]
    caution: str | None
    table: Any
    legend: list[dict[str, Any]]
    charts: list[dict[str, Any]]
    settings: list[list[str]]
    environment: list[list[str]]
    runs: tuple[list[str], list[list[str]]]
    values: tuple[list[str], list[list[str]]]


def _section(index: int, comparison: Comparison, files: Mapping[int, str]) -> PageSection:
    name = f"c{index}"
    charts = [
        # An id must be unique in the page, and several tasks have charts of the same kind. The
        # drawing is ours, with all names escaped, so it is not escaped again.
        {**chart, "id": f"{name}-{chart['kind']}", "group": name, "svg": Markup(chart["svg"])}
        for chart in charts_of(comparison)
    ]
    styles = line_styles([arm.label for arm in comparison.arms])
    return PageSection(
        id=name,
        comparison=comparison,
        facts=_facts(comparison),
        verdicts=_verdicts(comparison),
        caution=multiple_testing_note(comparison),
        table=comparison_table(comparison),
        legend=[
            {"index": i, "label": arm.label, "style": style % len(COLOURS), "dash": dashes(style)}
            for i, (arm, style) in enumerate(zip(comparison.arms, styles, strict=True))
        ],
        charts=charts,
        settings=provenance.settings_rows(comparison.arms),
        environment=provenance.environment_rows(comparison.arms),
        runs=provenance.run_rows(comparison.arms, files),
        values=provenance.epoch_rows(comparison.arms),
    )


def _verdicts(comparison: Comparison) -> list[dict[str, Any]]:
    questions = []
    for question, verdicts in answers(comparison):
        lines = [
            {"tone": one.tone, "sign": _TONES[one.tone][0], "means": _TONES[one.tone][1],
             "headline": one.headline, "text": one.text}
            for one in verdicts
        ]  # fmt: skip
        questions.append({"question": question.text, "lines": lines})
    return questions


def _facts(comparison: Comparison) -> str:
    record, base = comparison.records[0], comparison.baseline
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
    # "95 %" and "p = 0.03" stay on one line.
    environment.filters["joined"] = lambda text: re.sub(
        r"(?<=\d) (?=%)| (?==)|(?<==) ", "\xa0", text
    )
    # NaN is not JSON: the page's script could not read its data.
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}
    return environment


def _csv_link(table: tuple[Sequence[str], Sequence[Sequence[str]]]) -> str:
    """Return an address that holds a table as CSV: its download needs no script and no file."""
    text = io.StringIO()
    csv.writer(text).writerows([table[0], *table[1]])
    return f"data:text/csv;charset=utf-8,{quote(text.getvalue())}"


def _file(name: str) -> str:
    return resources.files("gradherd.lab.report").joinpath("templates", name).read_text("utf-8")


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"
