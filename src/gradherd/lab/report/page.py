"""Write comparisons as one HTML file that needs no network and no other file."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

from gradherd.lab.report import provenance
from gradherd.lab.report.charts import charts_of
from gradherd.lab.report.comparison import Comparison, compare_all
from gradherd.lab.report.comparison_table import comparison_table
from gradherd.lab.report.verdicts import answer, multiple_testing_note
from gradherd.lab.text import counted, listed, printable
from gradherd.lab.train.record import RunRecord, write_atomic

COLOURS = 8
"""Number of arm colours in page.css.j2; further arms reuse them, dashed."""
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
    """
    write_atomic(path, render(records, title=title, files=files))


def render(
    records: Sequence[RunRecord], *, title: str | None = None, files: Sequence[str] | None = None
) -> str:
    """Return the page as HTML.

    Args:
        records: Runs of one or several tasks.
        title: Title of the page; None builds it from tasks and arms.
        files: The file that each record was read from, to be listed.

    Raises:
        ValueError: Records of one task cannot be compared; see `comparison.compare`.
    """
    comparisons = compare_all(records)
    # By identity: records hold dicts, so they cannot be keys themselves.
    names = {} if files is None else {id(r): f for r, f in zip(records, files, strict=True)}
    sections = [_section(i, comparison, names) for i, comparison in enumerate(comparisons)]
    # plotly.js is part of the page (4 MB), which then opens anywhere, without a network.
    plotly, script = (Markup(text) for text in (get_plotlyjs(), _file("page.js")))
    text = _environment().get_template("page.html.j2").render(
        title=printable(title) if title is not None else title_of(comparisons),
        environment=provenance.environment_line(records),
        sections=sections,
        charts={chart["id"]: chart for section in sections for chart in section.charts},
        plotly=plotly,
        script=script,
        # With hashes no other script can run, whatever a record contains.
        script_hashes=[_hash(plotly), _hash(script)],
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
        {**chart, "id": f"{name}-{chart['kind']}", "group": name} for chart in charts_of(comparison)
    ]
    return PageSection(
        id=name,
        comparison=comparison,
        facts=_facts(comparison),
        verdicts=_verdicts(comparison),
        caution=multiple_testing_note(comparison),
        table=comparison_table(comparison),
        legend=[
            {"index": i, "colour": colour_of(i), "label": arm.label}
            for i, arm in enumerate(comparison.arms)
        ],
        charts=charts,
        settings=provenance.settings_rows(comparison.arms),
        environment=provenance.environment_rows(comparison.arms),
        runs=provenance.run_rows(comparison.arms, files),
        values=provenance.epoch_rows(comparison.arms),
    )


def colour_of(index: int) -> int:
    """Return the colour of an arm; 0, the neutral one, belongs to the baseline.

    Colours go by position, so that any method, also one added later, has one.

    >>> [colour_of(index) for index in (0, 1, 7, 8)]
    [0, 1, 7, 1]
    """
    # Repeats skip the baseline's colour: no arm may look like the baseline.
    return 0 if index == 0 else 1 + (index - 1) % (COLOURS - 1)


def _verdicts(comparison: Comparison) -> list[dict[str, Any]]:
    questions = []
    for question in comparison.questions:
        verdicts = answer(question, comparison)
        lines = [
            {"tone": one.tone, "sign": _TONES[one.tone][0], "means": _TONES[one.tone][1],
             "text": one.text}
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
    # NaN is not JSON: the page's script could not read its data.
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}
    return environment


def _file(name: str) -> str:
    return resources.files("gradherd.lab.report").joinpath("templates", name).read_text("utf-8")


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"
