"""The evidence pages: every claim next to our own results, written from those results alone.

`docs/evidence.md` is a summary, written from the template `studies/summary.j2` where there is
one; each study has a page in `docs/evidence`. The same results give the same bytes. A claim without
results has no verdict, and the study says why.

The template is Markdown with jinja2's `{{ ... }}`, and calls

- `figure(claim)`: the figure that a verdict rests on, with a link to its study;
- `row(words, claim)`: a row of a table: words, the paper's figure, ours, the verdict;
- `effects(title, x, {claim: name})`: a picture of effects with their intervals;
- `picture(study, number, title)`: a chart of a study;
- `totals`: how many claims were confirmed.
"""

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
from jinja2.sandbox import SandboxedEnvironment

from gradherd.lab.study.file import read_study
from gradherd.lab.text import fixed
from studies.evidence.charts import (
    EffectRow,
    draw_charts,
    effect_chart,
    file_name,
)
from studies.evidence.claims import CONFIRMED, WEAKER, ClaimVerdict, check_measures, judge_study
from studies.evidence.file import page_study
from studies.evidence.pages import (
    StudySection,
    cell,
    check_page,
    index_page,
    mark,
    short_cell,
    study_page,
    totals,
)
from studies.evidence.words import changes_in, interval_of

TEMPLATE = "summary.j2"


def render_summary(
    path: Path, sections: Sequence[StudySection], pending: Sequence[str]
) -> tuple[str, dict[str, str]]:
    """Return the summary as Markdown, and its pictures by file name.

    Args:
        path: The template.
        sections: Studies that have results.
        pending: Claims that have none yet; the template may name them.

    Raises:
        ValueError: The template is invalid, or names a claim or study that is not there.
    """
    summary = _Summary(sections, pending)
    # A sandbox: a template that came with someone's studies must not read other files.
    environment = SandboxedEnvironment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    environment.globals = {
        "figure": summary.figure,
        "row": summary.row,
        "effects": summary.effects,
        "picture": summary.picture,
        "totals": totals(sections, len(pending)),
        # Runs that settle no claim are no evidence.
        "studies": sum(bool(one.verdicts) for one in sections),
    }
    try:
        text = environment.from_string(path.read_text(encoding="utf-8")).render()
    except jinja2.TemplateError as error:
        line = getattr(error, "lineno", None)
        where = path if line is None else f"{path}, line {line}"
        raise ValueError(f"{where}: {error.message}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return text, summary.images


class _Summary:
    """What the template can call; collects pictures on the way."""

    def __init__(self, sections: Sequence[StudySection], pending: Sequence[str]) -> None:
        self.images: dict[str, str] = {}
        self._sections = {one.study.name: one for one in sections}
        self._verdicts = {v.claim.id: (v, one) for one in sections for v in one.verdicts}
        self._pending = pending

    def _find(self, claim: str) -> tuple[ClaimVerdict, StudySection] | None:
        if claim not in self._verdicts and claim not in self._pending:
            raise ValueError(f"there is no claim {claim!r} in the studies")
        return self._verdicts.get(claim)

    def figure(self, claim: str) -> str:
        """Return our figure, with a link to its study."""
        entry = self._find(claim)
        if entry is None:
            return "not measured yet"
        # Without a limit, which is no part of a sentence.
        return self._link(short_cell(entry[0], limit=False), entry[1])

    def _link(self, words: str, section: StudySection) -> str:
        return f"[{words}](evidence/{section.study.name}.md)"

    def row(self, words: str, claim: str) -> str:
        """Return a row of a table: words, the paper's figure, ours, the verdict."""
        entry = self._find(claim)
        if entry is None:
            return f"| {words} | | | not measured yet |"
        verdict, section = entry
        ours = self._link(short_cell(verdict), section)
        return f"| {words} | {cell(verdict.claim.paper)} | {ours} | {mark(verdict)} |"

    def effects(self, title: str, x: str, claims: Mapping[str, str], names: int = 132) -> str:
        """Return a picture of the changes that these claims measured, with their intervals."""
        rows = []
        for claim, name in claims.items():
            entry = self._find(claim)
            changes = [] if entry is None else changes_in(entry[0])
            if entry is None or not changes:
                continue
            verdict = entry[0]
            mean, interval = 100 * statistics.fmean(changes), interval_of(changes)
            ends = None if interval is None else (100 * interval[0], 100 * interval[1])
            # As many digits as in the table.
            text = fixed(mean, 1 if abs(mean) < 9.95 else 0, sign=True)
            text += " pts" if verdict.measured.in_percent else " %"
            # The colours of verdicts: green, ochre, grey.
            style = {CONFIRMED: 3, WEAKER: 5}.get(verdict.verdict, 0)
            rows.append(EffectRow(name=name, mean=mean, interval=ends, text=text, style=style))
        if not rows:
            return ""
        name = f"summary-{len(self.images) + 1}.svg"
        self.images[name] = effect_chart(title, x, rows, names=names)
        return _image(name, title, width=49)

    def picture(self, study: str, number: int, title: str) -> str:
        """Return a chart of a study."""
        if study not in self._sections:
            raise ValueError(f"there is no study {study!r} with results")
        name = file_name(self._sections[study].study, number)
        if name not in self._sections[study].images:
            raise ValueError(f"{study} has no figure {number}")
        return _image(name, title, width=66)


def _image(name: str, title: str, width: int) -> str:
    # HTML, because Markdown has no width: two or three pictures side by side on any page.
    words = cell(title).replace('"', "&quot;")
    return f'<img src="images/evidence/{name}" alt="{words}" width="{width}%">'


STUDIES = Path("studies")
PAGE = Path("docs") / "evidence.md"
PAGES = Path("docs") / "evidence"
IMAGES = Path("docs") / "images" / "evidence"
RESULTS = Path("benchmarks") / "results"
_WRITTEN = "<!-- written by python -m studies.evidence -->\n"
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
    everything: list[StudySection] = []
    unmeasured: dict[str, list[str]] = {}
    first_paths: dict[str, Path] = {}
    for path in paths:
        section = _section(path, root)
        study = section.study
        for claim in study.claims:
            # Across all files: `gradherd study --json` names a claim by its id alone.
            if (first := first_paths.setdefault(claim.id, path)) != path:
                raise ValueError(f"{path}: claim {claim.id} is already in {first}")
        if section.pending:
            unmeasured[study.name] = [claim.id for claim in section.pending]
        everything.append(section)
    sections = [one for one in everything if one.results]
    files = {IMAGES / name: svg for one in sections for name, svg in one.images.items()}
    # Studies without results, too: their pages say what was left out, and why.
    for one in everything:
        files[PAGES / f"{one.study.name}.md"] = study_page(one) + _WRITTEN
    files[PAGES / "README.md"] = index_page(everything) + _WRITTEN
    files |= _summary(root, everything, unmeasured)
    verdicts = [verdict for one in sections for verdict in one.verdicts]
    return EvidencePage(files, verdicts, unmeasured)


def _summary(
    root: Path, sections: Sequence[StudySection], unmeasured: Mapping[str, Sequence[str]]
) -> dict[Path, str]:
    """Return the summary and its pictures."""
    template = root / STUDIES / TEMPLATE
    if not template.exists():
        return {PAGE: index_page(sections, here="evidence/") + _WRITTEN}
    pending = [claim for claims in unmeasured.values() for claim in claims]
    text, images = render_summary(template, [one for one in sections if one.results], pending)
    files = {IMAGES / name: svg for name, svg in images.items()}
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


def _section(path: Path, root: Path) -> StudySection:
    read = read_study(path)  # its errors name the file
    try:
        study = page_study(read)
        check_measures(study)
        check_page(study)
        results, verdicts = judge_study(study, root / RESULTS / study.name)
        return StudySection(study, results, verdicts, draw_charts(study, results))
    except ValueError as error:
        raise ValueError(f"{path.relative_to(root)}: {error}") from None
