"""The evidence page: every claim next to our own results, written from those results alone.

The same results give the same bytes. A claim without results has no row.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradherd.lab.report.claims import CONFIRMED, NOT_CONFIRMED, WEAKER, ClaimVerdict, judge
from gradherd.lab.report.evidence_charts import check_reportable, draw_charts, file_name
from gradherd.lab.study.file import read_study
from gradherd.lab.study.results import RunResult, read_arms, same_settings
from gradherd.lab.study.run import kind_of
from gradherd.lab.study.spec import THEMES, Arm, Study
from gradherd.lab.text import counted, listed, printable

STUDIES = Path("studies")
PAGE = Path("docs") / "evidence.md"
IMAGES = Path("docs") / "images" / "evidence"
RESULTS = Path("benchmarks") / "results"
_HEADINGS = {
    "ordering": "Ordering",
    "open": "What the papers left open",
    "sparsifying": "Sparsifying",
    "together": "Both together",
}
_MARKS = {CONFIRMED: "**confirmed**", WEAKER: "*weaker*", NOT_CONFIRMED: "not confirmed"}
_INTRODUCTION = """\
# Evidence

Do the papers' claims hold up? This page repeats the experiments of the two papers and related work
with this library on real data, and adds questions that the papers left open.
`gradherd report --evidence` writes it from `studies/*.toml` and the results in `benchmarks/results`
alone: none of our figures is typed by hand, and a claim without results has no row.
[study.md](study.md) explains how to run a study and how verdicts are reached:

- **confirmed**: the 95 % interval over seeds (paired by seed) is on the claimed side (for claims of
  "no worse": within the tolerance that the row gives), and the effect is at least half of the
  paper's where the paper gives numbers;
- *weaker*: only one of the two, or all seeds agree but the interval includes zero;
- not confirmed: everything else, including runs that diverged or never reached the goal.

A claim with a single seed has no row. "X / Y" in a row means arm X compared with arm Y.

Where our budget is smaller than the paper's (fewer seeds or epochs) or our data differ, the row
says so. Bands in charts show the range over all seeds. In studies that train, all workers share
one process: losses, orders and bytes equal those of real workers, seconds do not.

"""


@dataclass(frozen=True)
class EvidencePage:
    """The files of the page, the verdicts on it, and the claims that are not."""

    files: Mapping[Path, str]
    """Text by path relative to the root."""
    verdicts: Sequence[ClaimVerdict]
    unmeasured: Mapping[str, Sequence[str]]
    """Claims without results, by study."""


@dataclass(frozen=True)
class StudySection:
    """A study with its results, verdicts and charts."""

    study: Study
    results: Mapping[str, Sequence[RunResult]]
    verdicts: Sequence[ClaimVerdict]
    images: Mapping[str, str]


def build_evidence(root: Path) -> EvidencePage:
    """Read all studies and results below a root and build the page, without writing it.

    Args:
        root: The folder that holds `studies` and `benchmarks/results`.

    Raises:
        ValueError: A file is invalid or damaged; the message names it.
    """
    folder = root / STUDIES
    # Sorted: the order of glob depends on the file system, and the page must not.
    paths = sorted(folder.glob("*.toml"), key=lambda path: path.stem)
    if not paths:
        raise ValueError(f"{folder} holds no study; run this in the folder that holds studies/")
    sections: list[StudySection] = []
    unmeasured: dict[str, list[str]] = {}
    first_paths: dict[str, Path] = {}
    for path in paths:
        study = read_study(path)
        for claim in study.claims:
            # Across all files: `gradherd study --json` names a claim by its id alone.
            if (first := first_paths.setdefault(claim.id, path)) != path:
                raise ValueError(f"{path}: claim {claim.id} is already in {first}")
        section = _section(study, root)
        judged = {verdict.claim.id for verdict in section.verdicts}
        if pending := [claim.id for claim in study.claims if claim.id not in judged]:
            unmeasured[study.name] = pending
        if section.results:
            sections.append(section)
    files = {IMAGES / name: svg for one in sections for name, svg in one.images.items()}
    files[PAGE] = _page(sections, sum(map(len, unmeasured.values())))
    verdicts = [verdict for one in sections for verdict in one.verdicts]
    return EvidencePage(files, verdicts, unmeasured)


def write_evidence(root: Path) -> EvidencePage:
    """Write the page and its charts; remove charts of these studies that no longer exist.

    Args:
        root: The folder that holds `studies` and `benchmarks/results`.

    Raises:
        ValueError: As in `build_evidence`; nothing has been written then.
    """
    page = build_evidence(root)
    for path, text in page.files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    names = "|".join(re.escape(path.stem) for path in (root / STUDIES).glob("*.toml"))
    for old in (root / IMAGES).glob("*.svg"):
        # Only names that a study could have produced: the folder may hold other images.
        ours = re.fullmatch(rf"({names})(-\d+)?\.svg", old.name)
        if ours and old.relative_to(root) not in page.files:
            old.unlink()
    return page


def judge_study(
    study: Study, folder: Path
) -> tuple[dict[str, list[RunResult]], list[ClaimVerdict]]:
    """Judge the claims of a study by its results.

    Args:
        study: The study.
        folder: The folder of its results.

    Returns:
        Results by arm, and the verdicts on claims that have been measured.

    Raises:
        ValueError: A file of results is damaged.
    """
    stored = read_arms(folder, [arm.name for arm in study.arms], study.kind)
    # Results of earlier settings stay on disk until the arm runs again; they say nothing about the
    # arm as the file defines it now.
    current = {
        arm.name: [one for one in stored[arm.name] if is_current(study, arm, one)]
        for arm in study.arms
        if arm.name in stored
    }
    results = {name: runs for name, runs in current.items() if runs}
    return results, [one for claim in study.claims if (one := judge(claim, results)) is not None]


def is_current(study: Study, arm: Arm, result: RunResult) -> bool:
    """Return whether a result has the settings in the study file, which may have changed since."""
    settings = kind_of(study).settings(study, arm.settings)
    return same_settings(result.settings, settings) and result.seed in study.seeds


def _section(study: Study, root: Path) -> StudySection:
    try:
        check_reportable(study)
        results, verdicts = judge_study(study, root / RESULTS / study.name)
        return StudySection(study, results, verdicts, draw_charts(study, results))
    except ValueError as error:
        raise ValueError(f"{STUDIES / study.name}.toml: {error}") from None


def _page(sections: Sequence[StudySection], unmeasured: int) -> str:
    lines = [_INTRODUCTION + _totals(sections, unmeasured), "", *_overview(sections)]
    for theme in THEMES:
        of_theme = [section for section in sections if section.study.theme == theme]
        if of_theme:
            lines += [f"## {_HEADINGS[theme]}", ""]
        for section in of_theme:
            lines += _section_lines(section)
    return "\n".join(lines)


def _totals(sections: Sequence[StudySection], unmeasured: int) -> str:
    """Return how many claims were confirmed, those of papers and our own separately."""
    verdicts = [verdict for section in sections for verdict in section.verdicts]
    # Separately: a confirmed claim of our own is no evidence for a paper.
    sentences = []
    for own, whose in ((False, "of papers"), (True, "of our own")):
        words = [one.verdict for one in verdicts if _is_own(one) == own]
        if words:
            counts = listed([f"{words.count(word)} {word}" for word in _MARKS])
            sentences.append(f"{counted(len(words), 'claim')} {whose}: {counts}.")
    if unmeasured:
        sentences.append(f"{counted(unmeasured, 'claim')} of `studies/*.toml` not measured yet.")
    return " ".join(sentences)


def _overview(sections: Sequence[StudySection]) -> list[str]:
    """Return a table of all studies with their counts of verdicts."""
    lines = [
        "| study | claims of papers: confirmed / weaker / not | our own |",
        "|---|---|---|",
    ]
    for theme in THEMES:
        for one in sections:
            if one.study.theme == theme:
                counts = [_counts(one.verdicts, own=own) for own in (False, True)]
                # The headings below, so that the table is also the table of contents.
                link = f"[{_cell(one.study.title)}](#{_anchor(one.study.title)})"
                lines.append(f"| {' | '.join([link, *counts])} |")
    return [*lines, ""]


def _counts(verdicts: Sequence[ClaimVerdict], *, own: bool) -> str:
    words = [one.verdict for one in verdicts if _is_own(one) == own]
    return " / ".join(str(words.count(word)) for word in _MARKS) if words else ""


def _anchor(title: str) -> str:
    """Return the anchor of a heading, as GitHub forms it.

    >>> _anchor("HMDA: logistic regression, 4 workers")
    'hmda-logistic-regression-4-workers'
    """
    return re.sub(r"[^\w -]", "", printable(title).lower()).replace(" ", "-")


def _is_own(verdict: ClaimVerdict) -> bool:
    return verdict.claim.source.startswith("ours")


def _section_lines(section: StudySection) -> list[str]:
    study = section.study
    lines = [f"### {_cell(study.title)}", "", _setup(section), ""]
    for number, figure in enumerate(study.figures, 1):
        if (name := file_name(study, number)) in section.images:
            lines += [f"![{_cell(figure.title)}](images/evidence/{name})", ""]
    if section.verdicts:
        lines += ["| claim | paper | ours | verdict | reproduce |", "|---|---|---|---|---|"]
        lines += [_row(verdict, study) for verdict in section.verdicts]
        lines.append("")
    return lines


def _row(verdict: ClaimVerdict, study: Study) -> str:
    claim = verdict.claim
    ours = verdict.ours
    # Our own claims have no paper's experiment to fall short of.
    if study.budget and not _is_own(verdict):
        ours += f"; {study.budget}"
    if claim.note:
        ours += f". {claim.note}"
    arms = claim.arm if claim.against is None else f"{claim.arm} / {claim.against}"
    cells = (
        f"{claim.text} ({claim.source})",
        claim.paper,
        f"{arms}: {ours}",
        _MARKS[verdict.verdict],
        f"`{_command(verdict, study)}`",
    )
    return f"| {' | '.join(map(_cell, cells))} |"


def _command(verdict: ClaimVerdict, study: Study) -> str:
    """Return the command that repeats the runs of a row, into a folder of its own."""
    arms = [arm for arm in (verdict.claim.arm, verdict.claim.against) if arm is not None]
    names = " ".join(shlex.quote(arm) for arm in arms)
    # Into a folder of its own: the committed results stay, and both can be compared.
    file = f"{(STUDIES / study.name).as_posix()}.toml"
    return f"gradherd study {file} --only {names} --out again/{study.name}"


def _setup(section: StudySection) -> str:
    """Return what was run: seeds, epochs, machines and versions, from the results."""
    study, runs = section.study, [run for arm in section.results.values() for run in arm]
    # From the results, not from the file: an arm may not have run with all seeds yet.
    seeds = {len({run.seed for run in arm}) for arm in section.results.values()}
    words = [
        f"{len(section.results)} of {counted(len(study.arms), 'arm')}",
        f"{_values(seeds)} seed{'s' if max(seeds) > 1 else ''} each",
    ]
    if study.task is not None:
        words.insert(0, f"task `{runs[0].about.get('task', study.task)}`")
    for name in ("epochs", "steps", "rounds", "workers"):
        values = {run.settings[name] for run in runs if run.settings.get(name) is not None}
        if values:
            words.append(f"{_values(values)} {name}")
    # `dict.fromkeys` drops repetitions in order; a set would change the page from run to run.
    machines = dict.fromkeys(_machine(run.hardware) for run in runs)
    torches = dict.fromkeys(f"torch {run.versions.get('torch')}" for run in runs)
    where = listed([*machines, *torches])
    budget = f" Compared with the paper: {study.budget}." if study.budget else ""
    note = f" {study.note}" if study.note else ""
    return _cell(f"{', '.join(words)}; {where}.{budget}{note}")


def _values(values: set[Any]) -> str:
    return listed([f"{value:,}" for value in sorted(values)])


def _machine(hardware: Mapping[str, Any]) -> str:
    gpu = hardware.get("accelerator")
    return str(gpu) if gpu else f"{hardware.get('cores')} cores of {hardware.get('cpu')}"


def _cell(text: str) -> str:
    """Return text that cannot break out of its table cell."""
    return printable(text).replace("|", "\\|").replace("<", "&lt;")
