"""Studies with their results -> the page, as Markdown."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradherd.lab.report.claims import CONFIRMED, NOT, WEAKER, Verdict
from gradherd.lab.report.figures_study import file_name
from gradherd.lab.study.results import RunResult
from gradherd.lab.study.spec import THEMES, Study
from gradherd.lab.text import counted, listed, printable

STUDIES = Path("studies")
_HEADINGS = {
    "ordering": "Ordering",
    "open": "What the papers left open",
    "sparsifying": "Sparsifying",
    "together": "Both together",
}
_MARKS = {CONFIRMED: "**confirmed**", WEAKER: "*weaker*", NOT: "not confirmed"}

_INTRODUCTION = """\
# Evidence

What the two papers and their peers claim, and what they left open, measured again with this library
on real data.
`gradherd report --evidence` writes this page from `studies/*.toml` and the records in
`benchmarks/results` alone: no figure of ours is typed by hand, a claim without records has no row.
[study.md](study.md) tells how to run a study and how verdicts are made:

- **confirmed**: the 95 % interval over seeds (paired by seed) is on the claimed side (where
  something is to be no worse: within what is allowed, which the row tells), and the effect is at
  least half of the paper's where the paper gives numbers;
- *weaker*: only one of the two, or all seeds agree but the interval reaches zero;
- not confirmed: all else, also where a run diverged or never got there.

A claim with a single seed has no row. In rows "X / Y" are the arm and what it is held against.

Where our budget is smaller than the paper's (fewer seeds or epochs) or the data are others, the row
says so. Bands in charts span all seeds. Workers of studies that train are in
one process: losses, orders and bytes are those of real workers, seconds are not.

"""


@dataclass(frozen=True)
class Section:
    """A study with its results."""

    study: Study
    results: Mapping[str, Sequence[RunResult]]
    verdicts: Sequence[Verdict]
    images: Mapping[str, str]


def page(sections: Sequence[Section], unmeasured: int = 0) -> str:
    """Return the page; `unmeasured` claims have no row."""
    lines = [_INTRODUCTION + _score(sections, unmeasured), "", *_overview(sections)]
    for theme in THEMES:
        these = [section for section in sections if section.study.theme == theme]
        if these:
            lines += [f"## {_HEADINGS[theme]}", ""]
        for section in these:
            lines += _told(section)
    return "\n".join(lines)


def _score(sections: Sequence[Section], unmeasured: int) -> str:
    """Return how many claims were borne out, those of the papers and ours apart."""
    verdicts = [verdict for section in sections for verdict in section.verdicts]
    lines = []
    for own, whose in ((False, "of papers"), (True, "of our own")):
        words = [verdict.word for verdict in verdicts if _own(verdict) == own]
        if words:
            counts = listed([f"{words.count(word)} {word}" for word in _MARKS])
            lines.append(f"{counted(len(words), 'claim')} {whose}: {counts}.")
    if unmeasured:
        lines.append(f"{counted(unmeasured, 'claim')} of `studies/*.toml` not measured yet.")
    return " ".join(lines)


def _overview(sections: Sequence[Section]) -> list[str]:
    """Return a table of all studies, with how many of their claims were borne out."""
    lines = [
        "| study | claims of papers: confirmed / weaker / not | our own |",
        "|---|---|---|",
    ]
    for theme in THEMES:
        for one in sections:
            if one.study.theme == theme:
                counts = [_counts(one.verdicts, own=own) for own in (False, True)]
                link = f"[{_cell(one.study.title)}](#{_anchor(one.study.title)})"
                lines.append(f"| {' | '.join([link, *counts])} |")
    return [*lines, ""]


def _counts(verdicts: Sequence[Verdict], *, own: bool) -> str:
    words = [verdict.word for verdict in verdicts if _own(verdict) == own]
    return " / ".join(str(words.count(word)) for word in _MARKS) if words else ""


def _anchor(title: str) -> str:
    """Return what a heading is linked by.

    >>> _anchor("HMDA: logistic regression, 4 workers")
    'hmda-logistic-regression-4-workers'
    """
    return re.sub(r"[^\w -]", "", printable(title).lower()).replace(" ", "-")


def _own(verdict: Verdict) -> bool:
    return verdict.claim.source.startswith("ours")


def _told(section: Section) -> list[str]:
    study = section.study
    lines = [f"### {_cell(study.title)}", "", _setup(section), ""]
    for number, figure in enumerate(study.figures, 1):
        if (name := file_name(study, number)) in section.images:
            lines += [f"![{_cell(figure.title)}](images/evidence/{name})", ""]
    if section.verdicts:
        lines += ["| claim | paper | ours | verdict | again |", "|---|---|---|---|---|"]
        lines += [_row(verdict, study) for verdict in section.verdicts]
        lines.append("")
    return lines


def _row(verdict: Verdict, study: Study) -> str:
    claim = verdict.claim
    ours = verdict.ours
    if study.budget and not _own(verdict):
        ours += f"; {study.budget}"
    if claim.note:
        ours += f". {claim.note}"
    arms = claim.arm if claim.against is None else f"{claim.arm} / {claim.against}"
    cells = (
        f"{claim.text} ({claim.source})",
        claim.paper,
        f"{arms}: {ours}",
        _MARKS[verdict.word],
        f"`{_again(verdict, study)}`",
    )
    return f"| {' | '.join(map(_cell, cells))} |"


def _again(verdict: Verdict, study: Study) -> str:
    """Return the command that runs what a row is made of, beside the results that are there."""
    arms = [arm for arm in (verdict.claim.arm, verdict.claim.against) if arm is not None]
    named = " ".join(shlex.quote(arm) for arm in arms)
    file = f"{(STUDIES / study.name).as_posix()}.toml"
    return f"gradherd study {file} --only {named} --out again/{study.name}"


def _setup(section: Section) -> str:
    """Return what was run: seeds, epochs, machines and versions as the records tell them."""
    study, runs = section.study, [run for arm in section.results.values() for run in arm]
    seeds = {len({run.seed for run in arm}) for arm in section.results.values()}
    words = [
        f"{counted(len(section.results), 'arm')} of {len(study.arms)}",
        f"{_span(seeds)} seed{'s' if max(seeds) > 1 else ''} each",
    ]
    if study.task is not None:
        words.insert(0, f"task `{runs[0].about.get('task', study.task)}`")
    for name in ("epochs", "steps", "rounds", "workers"):
        values = {run.settings[name] for run in runs if run.settings.get(name) is not None}
        if values:
            words.append(f"{_span(values)} {name}")
    machines = dict.fromkeys(_machine(run.hardware) for run in runs)
    torches = dict.fromkeys(f"torch {run.versions.get('torch')}" for run in runs)
    where = listed([*machines, *torches])
    budget = f" Against the paper: {study.budget}." if study.budget else ""
    note = f" {study.note}" if study.note else ""
    return _cell(f"{', '.join(words)}; {where}.{budget}{note}")


def _span(values: set[Any]) -> str:
    return listed([f"{value:,}" for value in sorted(values)])


def _machine(hardware: Mapping[str, Any]) -> str:
    gpu = hardware.get("accelerator")
    return str(gpu) if gpu else f"{hardware.get('cores')} cores of {hardware.get('cpu')}"


def _cell(text: str) -> str:
    """Return text that stays in its cell."""
    return printable(text).replace("|", "\\|").replace("<", "&lt;")
