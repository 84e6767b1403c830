"""The evidence pages: every claim next to our own results, written from those results alone.

`docs/evidence.md` is a summary, written from the template `studies/summary.j2` where there is
one; each study has a page in `docs/evidence`. The same results give the same bytes. A claim without
results has no row.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gradherd.lab.report.claims import ClaimVerdict, judge
from gradherd.lab.report.evidence_charts import check_reportable, draw_charts
from gradherd.lab.report.evidence_pages import StudySection, index_page, study_page
from gradherd.lab.report.evidence_summary import TEMPLATE, quoted, render_summary
from gradherd.lab.study.file import read_study
from gradherd.lab.study.results import RunResult, read_arms, same_settings
from gradherd.lab.study.run import kind_of
from gradherd.lab.study.spec import Arm, Study

STUDIES = Path("studies")
PAGE = Path("docs") / "evidence.md"
PAGES = Path("docs") / "evidence"
IMAGES = Path("docs") / "images" / "evidence"
RESULTS = Path("benchmarks") / "results"
README = Path("README.md")
_WRITTEN = "<!-- written by gradherd report --evidence -->\n"
"""Last line of every page: only pages that end with it are ever removed."""


@dataclass(frozen=True)
class EvidencePage:
    """All files, the verdicts in them, and the claims that are not."""

    files: Mapping[Path, str]
    """Text by path relative to the root; the summary comes last."""
    verdicts: Sequence[ClaimVerdict]
    unmeasured: Mapping[str, Sequence[str]]
    """Claims without results, by study."""


def build_evidence(root: Path) -> EvidencePage:
    """Read all studies and results below a root and build the pages, without writing them.

    Args:
        root: The folder that holds `studies` and `benchmarks/results`.

    Raises:
        ValueError: A file is invalid or damaged; the message names it.
    """
    folder = root / STUDIES
    # Sorted: the order of glob depends on the file system, and the pages must not.
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
    for one in sections:
        files[PAGES / f"{one.study.name}.md"] = study_page(one) + _WRITTEN
    files[PAGES / "README.md"] = index_page(sections, sum(map(len, unmeasured.values()))) + _WRITTEN
    files |= _summary(root, sections, unmeasured)
    verdicts = [verdict for one in sections for verdict in one.verdicts]
    return EvidencePage(files, verdicts, unmeasured)


def _summary(
    root: Path, sections: Sequence[StudySection], unmeasured: Mapping[str, Sequence[str]]
) -> dict[Path, str]:
    """Return the summary, its pictures, and the README that quotes it."""
    waiting = sum(map(len, unmeasured.values()))
    template = root / STUDIES / TEMPLATE
    if not template.exists():
        return {PAGE: index_page(sections, waiting, here="evidence/") + _WRITTEN}
    pending = [claim for claims in unmeasured.values() for claim in claims]
    text, images = render_summary(template, sections, pending)
    files = {IMAGES / name: svg for name, svg in images.items()}
    readme = root / README
    if readme.exists():
        old = readme.read_text(encoding="utf-8")
        if (new := quoted(text, old)) is not None:
            files[README] = new
    return {**files, PAGE: text + _WRITTEN}


def write_evidence(root: Path) -> EvidencePage:
    """Write the pages and their charts; remove those of studies that no longer exist.

    Args:
        root: The folder that holds `studies` and `benchmarks/results`.

    Raises:
        ValueError: As in `build_evidence`; nothing has been written then.
    """
    evidence = build_evidence(root)
    for path, text in evidence.files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    names = "|".join(re.escape(path.stem) for path in (root / STUDIES).glob("*.toml"))
    for old in (root / IMAGES).glob("*.svg"):
        # Only names that a study could have produced: the folder may hold other images.
        ours = re.fullmatch(rf"({names}|summary)(-\d+)?\.svg", old.name)
        if ours and old.relative_to(root) not in evidence.files:
            old.unlink()
    for old in (root / PAGES).glob("*.md"):
        ours_too = old.read_text(encoding="utf-8").endswith(_WRITTEN)
        if ours_too and old.relative_to(root) not in evidence.files:
            old.unlink()
    return evidence


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
