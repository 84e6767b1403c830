"""The page of evidence: every claim beside what our own records say, from those records alone.

The same records give the same bytes. A claim without records has no row.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gradherd.lab.report.claims import Verdict, judge
from gradherd.lab.report.evidence_page import STUDIES, Section, page
from gradherd.lab.report.figures_study import drawn
from gradherd.lab.report.told import check_told
from gradherd.lab.study.file import read_study
from gradherd.lab.study.results import RunResult, read_arms, same_settings
from gradherd.lab.study.run import kind_of
from gradherd.lab.study.spec import Arm, Study

PAGE = Path("docs") / "evidence.md"
IMAGES = Path("docs") / "images" / "evidence"
RESULTS = Path("benchmarks") / "results"


@dataclass(frozen=True)
class Evidence:
    """The files of the page, and what is not on it."""

    files: Mapping[Path, str]
    """Text by path from the root."""
    verdicts: Sequence[Verdict]
    unmeasured: Mapping[str, Sequence[str]]
    """Claims without records, by study."""


def gather(root: Path) -> Evidence:
    """Read all studies and results below a root, and make the page; ValueError names bad files."""
    folder = root / STUDIES
    paths = sorted(folder.glob("*.toml"), key=lambda path: path.stem)
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


def judged(study: Study, folder: Path) -> tuple[dict[str, list[RunResult]], list[Verdict]]:
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
        check_told(study)
        results, verdicts = judged(study, root / RESULTS / study.name)
        return Section(study, results, verdicts, drawn(study, results))
    except ValueError as error:
        raise ValueError(f"{STUDIES / study.name}.toml: {error}") from None


def fits(study: Study, arm: Arm, result: RunResult) -> bool:
    """Return whether a result is of what the file says now: it may have changed since."""
    wanted = kind_of(study).settings(study, arm.settings)
    return same_settings(result.settings, wanted) and result.seed in study.seeds


def write_evidence(root: Path) -> Evidence:
    """Write the page and its charts; charts of these studies that are not made now are removed."""
    made = gather(root)
    names = "|".join(re.escape(path.stem) for path in (root / STUDIES).glob("*.toml"))
    for path, text in made.files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    for old in (root / IMAGES).glob("*.svg"):
        ours = re.fullmatch(rf"({names})(-\d+)?\.svg", old.name)
        if ours and old.relative_to(root) not in made.files:
            old.unlink()
    return made
