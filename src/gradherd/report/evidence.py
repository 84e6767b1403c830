"""The page of evidence: every claim beside what our own records say, from those records alone.

The same records give the same bytes. A claim without records has no row.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradherd.report.claims import CONFIRMED, NOT, WEAKER, Verdict, judge
from gradherd.report.figures_study import drawn
from gradherd.report.text import counted, listed, plain
from gradherd.study.archive import Result, read_arms, same
from gradherd.study.arms import Arm
from gradherd.study.file import THEMES, Study, read_study
from gradherd.study.run import kind_of

PAGE = Path("docs") / "evidence.md"
IMAGES = Path("docs") / "images" / "evidence"
STUDIES, RESULTS = Path("studies"), Path("benchmarks") / "results"
_HEADINGS = {
    "ordering": "Ordering",
    "open": "What the papers left open",
    "sparsifying": "Sparsifying",
    "together": "Both together",
}
_MARKS = {CONFIRMED: "**confirmed**", WEAKER: "*weaker*", NOT: "not confirmed"}


@dataclass(frozen=True)
class Evidence:
    """The files of the page, and what is not on it."""

    files: Mapping[Path, str]
    """Text by path from the root."""
    verdicts: Sequence[Verdict]
    unmeasured: Mapping[str, Sequence[str]]
    """Claims without records, by study."""


@dataclass(frozen=True)
class Section:
    """A study with its results."""

    study: Study
    results: Mapping[str, Sequence[Result]]
    verdicts: Sequence[Verdict]
    images: Mapping[str, str]


def gather(root: Path) -> Evidence:
    """Read all studies and results below a root, and make the page; ValueError names bad files."""
    folder = root / STUDIES
    paths = sorted(folder.glob("*.toml"))
    if not paths:
        raise ValueError(f"{folder} holds no study; run this where studies/ is")
    sections: list[Section] = []
    unmeasured: dict[str, list[str]] = {}
    seen: dict[str, Path] = {}
    for path in paths:
        study = read_study(path)
        for claim in study.claims:
            if seen.setdefault(claim.id, path) != path:
                raise ValueError(f"{path}: claim {claim.id} is in {seen[claim.id]}, too")
        section = _section(study, root)
        judged = {verdict.claim.id for verdict in section.verdicts}
        if waiting := [claim.id for claim in study.claims if claim.id not in judged]:
            unmeasured[study.name] = waiting
        if section.results:
            sections.append(section)
    files = {IMAGES / name: svg for one in sections for name, svg in one.images.items()}
    files[PAGE] = page(sections, sum(map(len, unmeasured.values())))
    verdicts = [verdict for one in sections for verdict in one.verdicts]
    return Evidence(files, verdicts, unmeasured)


def judged(study: Study, folder: Path) -> tuple[dict[str, list[Result]], list[Verdict]]:
    """Return the results of a study in a folder, by arm, and what they say about its claims."""
    found = read_arms(folder, [arm.name for arm in study.arms], study.kind)
    fitting = {
        arm.name: [one for one in found[arm.name] if fits(study, arm, one)]
        for arm in study.arms
        if arm.name in found
    }
    results = {name: runs for name, runs in fitting.items() if runs}
    return results, [one for claim in study.claims if (one := judge(claim, results)) is not None]


def _section(study: Study, root: Path) -> Section:
    try:
        results, verdicts = judged(study, root / RESULTS / study.name)
        return Section(study, results, verdicts, drawn(study, results))
    except ValueError as error:
        raise ValueError(f"{STUDIES / study.name}.toml: {error}") from None


def fits(study: Study, arm: Arm, result: Result) -> bool:
    """Return whether a result is of what the file says now: it may have changed since."""
    wanted = kind_of(study).settings(study, arm.settings)
    return same(result.settings, wanted) and result.seed in study.seeds


def write_evidence(root: Path) -> Evidence:
    """Write the page and its charts; charts that are no longer made are removed."""
    made = gather(root)
    for path, text in made.files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    for old in (root / IMAGES).glob("*.svg"):
        if old.relative_to(root) not in made.files:
            old.unlink()
    return made


def page(sections: Sequence[Section], unmeasured: int = 0) -> str:
    """Return the page; `unmeasured` claims have no row."""
    lines = [_INTRODUCTION + _score(sections, unmeasured), ""]
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


def _own(verdict: Verdict) -> bool:
    return verdict.claim.source.startswith("ours")


def _told(section: Section) -> list[str]:
    study = section.study
    lines = [f"### {_cell(study.title)}", "", _setup(section), ""]
    for name in section.images:
        lines += [f"![{_cell(study.title)}](images/evidence/{name})", ""]
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
    return plain(text).replace("|", "\\|").replace("<", "&lt;")


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
