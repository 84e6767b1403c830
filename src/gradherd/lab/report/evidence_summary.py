"""The summary of all studies: words from a template, figures and verdicts from the results.

The template is Markdown with jinja2's `{{ ... }}`, and calls

- `figure(claim)`: the figure that a verdict rests on, with a link to its study;
- `row(words, claim)`: a row of a table: words, the paper's figure, ours, the verdict;
- `effects(title, x, {claim: name})`: a picture of effects with their intervals;
- `picture(study, number, title)`: a chart of a study, smaller;
- `totals`: how many claims were confirmed.

The part between `<!-- quote -->` and `<!-- /quote -->` is repeated in README.md between the same
marks, so that the two cannot differ.
"""

import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2
from jinja2.sandbox import SandboxedEnvironment

from gradherd.lab.report.bar_charts import EffectRow, effect_chart
from gradherd.lab.report.claims import CONFIRMED, WEAKER, ClaimVerdict, interval_of
from gradherd.lab.report.evidence_charts import draw_figure
from gradherd.lab.report.evidence_pages import MARKS, StudySection, cell, short_cell, totals
from gradherd.lab.report.svg_parts import SMALL
from gradherd.lab.text import fixed

TEMPLATE = "summary.j2"
_QUOTE = re.compile(r"(<!-- quote -->\n)(.*?)(<!-- /quote -->)", re.S)


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
        "studies": len(sections),
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


def quoted(summary: str, readme: str) -> str | None:
    """Return the README with the quoted part of the summary; None if either has no such part."""
    part = _QUOTE.search(summary)
    if part is None or _QUOTE.search(readme) is None:
        return None
    # The README is one folder up: links and pictures lead through docs.
    text = re.sub(r"(\]\(|src=\")(?!https?:|#)", r"\1docs/", part.group(2))
    return _QUOTE.sub(lambda old: old.group(1) + text + old.group(3), readme)


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
        found = self._find(claim)
        if found is None:
            return "not measured yet"
        # Without a limit, which is no part of a sentence.
        return self._link(short_cell(found[0], limit=False), found[1])

    def _link(self, words: str, section: StudySection) -> str:
        return f"[{words}](evidence/{section.study.name}.md)"

    def row(self, words: str, claim: str) -> str:
        """Return a row of a table: words, the paper's figure, ours, the verdict."""
        found = self._find(claim)
        if found is None:
            return f"| {words} | | | not measured yet |"
        verdict, section = found
        ours = self._link(short_cell(verdict), section)
        return f"| {words} | {cell(verdict.claim.paper)} | {ours} | {MARKS[verdict.verdict]} |"

    def effects(self, title: str, x: str, claims: Mapping[str, str], names: int = 132) -> str:
        """Return a picture of the changes that these claims measured, with their intervals."""
        rows = []
        for claim, name in claims.items():
            found = self._find(claim)
            if found is None or not found[0].changes:
                continue
            verdict = found[0]
            mean, interval = 100 * statistics.fmean(verdict.changes), interval_of(verdict.changes)
            ends = None if interval is None else (100 * interval[0], 100 * interval[1])
            text = fixed(mean, 1, sign=True) + (" pts" if verdict.in_points else " %")
            # The colours of verdicts: green, ochre, grey.
            style = {CONFIRMED: 3, WEAKER: 5}.get(verdict.verdict, 0)
            rows.append(EffectRow(name=name, mean=mean, interval=ends, text=text, style=style))
        if not rows:
            return ""
        return self._image(title, effect_chart(title, x, rows, names=names))

    def picture(self, study: str, number: int, title: str) -> str:
        """Return a chart of a study, smaller and with another title."""
        if study not in self._sections:
            raise ValueError(f"there is no study {study!r} with results")
        section = self._sections[study]
        if not 1 <= number <= len(section.study.figures):
            raise ValueError(f"{study} has no figure {number}")
        figure = section.study.figures[number - 1]
        svg = draw_figure(section.study, figure, section.results, SMALL, title)
        return "" if svg is None else self._image(title, svg)

    def _image(self, title: str, svg: str) -> str:
        name = f"summary-{len(self.images) + 1}.svg"
        self.images[name] = svg
        # HTML, because Markdown has no width: three pictures side by side on any page.
        words = cell(title).replace('"', "&quot;")
        return f'<img src="images/evidence/{name}" alt="{words}" width="32%">'
