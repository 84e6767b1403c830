"""The page of each study and the list of all studies, as Markdown for GitHub and MkDocs."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradherd.lab.report.stats import mean_std
from gradherd.lab.study.results import RunResult
from gradherd.lab.text import (
    check_known,
    counted,
    in_bytes,
    listed,
    mean_and_std,
    p_value,
    printable,
)
from studies.evidence.charts import figures_of, file_name
from studies.evidence.claims import (
    CONFIRMED,
    FEW_SEEDS,
    NOT_CONFIRMED,
    WEAKER,
    ClaimVerdict,
    mean_text,
    measure,
)
from studies.evidence.file import Claim, PageStudy
from studies.evidence.words import change_text, changes_in, our_figures, threshold

_MARKS = {
    CONFIRMED: "**confirmed**",
    WEAKER: "*weaker*",
    NOT_CONFIRMED: "not&nbsp;confirmed",
    FEW_SEEDS: "not&nbsp;enough&nbsp;seeds",
}
_HEADINGS = {
    "ordering": "Ordering",
    "open": "What the papers left open",
    "sparsifying": "Sparsifying",
    "together": "Both together",
}
_READING = """\
Each study repeats an experiment of the papers, or asks what they left open, with this library on
real data. `python -m studies.evidence` writes these pages from `studies/*.toml` and the results in
`benchmarks/results` alone: no figure in a row is typed by hand. A row is

- **confirmed** if its effect is shown, by the rule that every report of gradherd follows: at least
  three seeds (paired by seed), the 95 % interval on the claimed side (for claims of "no worse":
  within the tolerance), and a p value below 0.05 after Holm's correction for all claims of the
  study; and if it is at least half of the paper's where the paper gives numbers;
- *weaker* if only one of the two holds, or if all seeds agree; a row that fails by the correction
  alone has its corrected p value beside it;
- not confirmed otherwise, including runs that diverged or never reached the goal;
- without a verdict with fewer than three seeds.

Figures in brackets are 95 % intervals, those after ± one standard deviation over seeds. Bands in
charts show the range over all seeds. In studies that train, all workers share one process: bytes
equal those of real workers, losses do up to rounding, after which orders may differ; seconds do
not.
"""
THEMES = ("ordering", "open", "sparsifying", "together")
"""Sections of the list of studies, in page order."""


def check_page(study: PageStudy) -> None:
    """Raise ValueError if a study cannot have a page.

    Every setting needs a source there: a reader must be able to judge who chose it.
    """
    check_known("theme", study.theme, THEMES)
    used = {*study.settings, *(name for arm in study.arms.values() for name in arm)}
    # These are what a study compares; nobody has to justify them.
    required = used - {"order", "sparsify", "case"}
    missing, unused = sorted(required - set(study.sources)), sorted(set(study.sources) - used)
    if missing:
        raise ValueError(f"[sources] must say where {', '.join(missing)} comes from")
    if unused:
        raise ValueError(f"[sources] names {', '.join(unused)}, which nothing sets")


@dataclass(frozen=True)
class StudySection:
    """A study with its results, verdicts and charts."""

    study: PageStudy
    results: Mapping[str, Sequence[RunResult]]
    verdicts: Sequence[ClaimVerdict]
    images: Mapping[str, str]

    @property
    def pending(self) -> list[Claim]:
        """Claims without a verdict."""
        judged = {verdict.claim.id for verdict in self.verdicts}
        return [claim for claim in self.study.claims if claim.id not in judged]


def index_page(sections: Sequence[StudySection], here: str = "") -> str:
    """Return the list of all studies, with what verdicts mean, and of what was not measured.

    Args:
        sections: The studies; those without a verdict are only in the list of what is left out.
        here: Folder of the studies' pages, seen from this one.
    """
    everything, sections = sections, [one for one in sections if one.verdicts]
    unmeasured = sum(len(one.pending) for one in everything)
    lines = ["# Evidence, study by study", "", _READING, totals(sections, unmeasured), ""]
    for theme in THEMES:
        of_theme = [one for one in sections if one.study.theme == theme]
        if not of_theme:
            continue
        lines += [
            f"## {_HEADINGS[theme]}",
            "",
            "| study | claims of papers: confirmed / weaker / not / too few seeds | our own |",
            "|---|---|---|",
        ]
        for one in of_theme:
            counts = [_counts(one.verdicts, own=own) for own in (False, True)]
            link = f"[{cell(one.study.title)}]({here}{one.study.name}.md)"
            lines.append(f"| {' | '.join([link, *counts])} |")
        lines.append("")
    if waiting := [one for one in everything if one.pending]:
        lines += ["## Not measured", "", "| study | claims | what was left out, and why |"]
        lines.append("|---|---|---|")
        for one in waiting:
            link = f"[{cell(one.study.title)}]({here}{one.study.name}.md)"
            why = cell(one.study.left_out or "not run yet")
            lines.append(f"| {link} | {len(one.pending)} of {len(one.study.claims)} | {why} |")
        lines.append("")
    return "\n".join(lines)


def totals(sections: Sequence[StudySection], unmeasured: int) -> str:
    """Return how many claims were confirmed, those of papers and our own separately."""
    verdicts = [verdict for section in sections for verdict in section.verdicts]
    # Separately: a confirmed claim of our own is no evidence for a paper.
    sentences = []
    for own, whose in ((False, "from papers"), (True, "of our own")):
        words = [one.verdict for one in verdicts if _is_own(one) == own]
        if words:
            named = [f"{words.count(word)} {word}" for word in _MARKS if word != FEW_SEEDS]
            if few := words.count(FEW_SEEDS):
                named.append(f"{few} without enough seeds")
            counts = listed(named)
            sentences.append(f"{counted(len(words), 'claim')} {whose}: {counts}.")
    if unmeasured:
        sentences.append(f"{counted(unmeasured, 'claim')} not measured yet.")
    return " ".join(sentences)


def _counts(verdicts: Sequence[ClaimVerdict], *, own: bool) -> str:
    words = [one.verdict for one in verdicts if _is_own(one) == own]
    return " / ".join(str(words.count(word)) for word in _MARKS) if words else ""


def _is_own(verdict: ClaimVerdict) -> bool:
    return verdict.claim.source.startswith("ours")


def study_page(section: StudySection) -> str:
    """Return the page of a study: verdicts, charts, and everything else in collapsed sections."""
    study = section.study
    up = "[Summary](../evidence.md) · [all studies](README.md)"
    lines = [f"# {cell(study.title)}", "", up, "", _setup(section), ""]
    if study.claims:
        lines += ["| | claim | paper | ours | verdict |", "|---|---|---|---|---|"]
        most = max((len(changes_in(one)) for one in section.verdicts), default=0)
        for number, one in enumerate(section.verdicts, 1):
            ours = short_cell(one)
            # Of other runs than the rows around it: differences do not add up.
            if 0 < len(changes_in(one)) < most:
                ours += f", {len(changes_in(one))} seeds"
            cells = (str(number), cell(one.claim.text), cell(one.claim.paper), ours)
            lines.append(f"| {' | '.join(cells)} | {mark(one)} |")
        why = " [why](#left-out)" if study.left_out else ""
        for claim in section.pending:
            ours = _missing(claim, section)
            words = f"{cell(claim.text)} | {cell(claim.paper)} | {ours} | not measured{why}"
            lines.append(f"|  | {words} |")
        lines.append("")
    for number, figure in enumerate(figures_of(study), 1):
        if (name := file_name(study, number)) in section.images:
            lines += [f"![{cell(figure.title)}](../images/evidence/{name})", ""]
    if section.verdicts:
        rows = enumerate(section.verdicts, 1)
        details = [f"{number}. {_details(one, section)}" for number, one in rows]
        lines += _folded("All figures, sources and commands", details)
    lines += _folded("Every arm", _arms_table(section))
    lines += _folded("What else we saw", list(map(cell, _paragraphs(study.note)[1:])))
    if study.left_out:
        lines += ["## Left out", "", cell(study.left_out), ""]
    return "\n".join(lines)


def _folded(title: str, blocks: Sequence[str]) -> list[str]:
    """Return lines of a collapsed section; none if it is empty."""
    if not blocks:
        return []
    spaced = [line for block in blocks for line in ("", block)]
    # `markdown` is for MkDocs; GitHub reads Markdown after an empty line anyway.
    head = ['<details markdown="1">', f"<summary>{title}</summary>"]
    return [*head, *spaced, "", "</details>", ""]


def _arms_table(section: StudySection) -> list[str]:
    """Return what every arm of a study that trains has reached and sent, as one table."""
    if section.study.kind != "compare" or not section.results:
        return []
    metric = next(iter(section.results.values()))[0].record().metric_name
    lines = [f"| arm | seeds | epochs | {cell(metric)} | train loss | sent per worker |"]
    lines.append("|---|---|---|---|---|---|")
    for name, runs in section.results.items():
        # A run that was stopped has no last epoch: its arm is read where all runs have been.
        stopped = any(run.status == "stopped" for run in runs)
        epochs = (min if stopped else max)(run.figures["epochs"] for run in runs)
        metrics, losses, sent = (
            mean_std(list(measure(one, epochs, runs, None).arm.values()))
            for one in ("metric", "train_loss", "bytes")
        )
        words = [mean_and_std(one.mean, one.std, len(runs)) for one in (metrics, losses)]
        cells = [cell(name), str(len(runs)), str(epochs), *words, in_bytes(sent.mean)]
        lines.append(f"| {' | '.join(cells)} |")
    return ["\n".join(lines)]


def _paragraphs(note: str) -> list[str]:
    return [one.strip() for one in note.split("\n\n") if one.strip()]


def _missing(claim: Claim, section: StudySection) -> str:
    """Return which runs a claim still needs."""
    absent, short = [], []
    for arm in dict.fromkeys(filter(None, (claim.arm, claim.against))):
        runs = section.results.get(arm)
        if not runs:
            absent.append(f"`{cell(arm)}`")
            continue
        wanted = claim.epoch or runs[0].settings.get("epochs") or 0
        # Of the shortest run: a claim is judged where all runs have been.
        ended = min(run.figures.get("epochs", wanted) for run in runs)
        if ended < wanted:
            short.append(f"`{cell(arm)}` was stopped after {ended} of {wanted} epochs")
    words = [f"no run of {listed(absent)}"] if absent else []
    return "; ".join([*words, *short]) or "no figure"


def short_cell(verdict: ClaimVerdict, limit: bool = True) -> str:
    """Return the figure that a verdict rests on, by default with the number it is held against."""
    claim, measured = verdict.claim, verdict.measured
    change = change_text(changes_in(verdict), in_points=measured.in_percent)
    if change and claim.test not in ("at-most", "at-least"):
        words = change.replace("95 % interval ", "").replace(" % to ", " to ")
    else:
        words = mean_text(claim, measured.arm, list(verdict.effects))
        held_against = threshold(claim, measured.in_percent).removeprefix("must be ")
        # Not in brackets: those hold intervals.
        words += f", must be {held_against}" if held_against and limit else ""
    return cell(words).replace(" %", "&nbsp;%")


def lost(verdict: ClaimVerdict) -> str:
    """Return the corrected p value, if a confirmation fails by the correction alone."""
    test, paper = verdict.test, verdict.paper
    if verdict.verdict not in (WEAKER, NOT_CONFIRMED) or test is None or not test.excludes_zero:
        return ""
    if verdict.corrected_p is None or test.mean <= 0:
        return ""
    large = paper is None or test.mean >= paper / 2
    return f"corrected {p_value(verdict.corrected_p)}" if large else ""


def mark(verdict: ClaimVerdict) -> str:
    """Return the verdict, and what it lacks if the correction alone keeps it from being more."""
    lacks = lost(verdict)
    return f"{_MARKS[verdict.verdict]}{f', {lacks}' if lacks else ''}"


def _details(verdict: ClaimVerdict, section: StudySection) -> str:
    """Return everything about a claim, and the command that repeats its runs."""
    claim, study = verdict.claim, section.study
    ours = our_figures(verdict, section.results)
    # Our own claims have no paper's experiment to fall short of.
    if study.budget and not _is_own(verdict):
        ours += f"; {study.budget}"
    if claim.note:
        ours += f". {claim.note}"
    arms = claim.arm if claim.against is None else f"{claim.arm} / {claim.against}"
    text = f"**{cell(claim.text)}** ({cell(claim.source)}). {cell(arms)}: {cell(ours)}"
    return f"{text.removesuffix('.')}. Repeat it: `{cell(_command(verdict, study))}`"


def _command(verdict: ClaimVerdict, study: PageStudy) -> str:
    """Return the command that repeats the runs of a row, into a folder of its own."""
    arms = [arm for arm in (verdict.claim.arm, verdict.claim.against) if arm is not None]
    names = " ".join(shlex.quote(arm) for arm in arms)
    # Into a folder of its own: the committed results stay, and both can be compared.
    file = f"studies/{study.name}.toml"
    return f"gradherd study {file} --only {names} --out again/{study.name}"


def _setup(section: StudySection) -> str:
    """Return what was run: seeds, epochs, machines and versions, from the results."""
    study, runs = section.study, [run for arm in section.results.values() for run in arm]
    budget = f" Compared with the paper: {study.budget}." if study.budget else ""
    note = f" {_paragraphs(study.note)[0]}" if study.note.strip() else ""
    if not runs:
        task = "" if study.task is None else f"task `{study.task}`, "
        planned = f"{counted(len(study.arms), 'arm')} with {counted(len(study.seeds), 'seed')}"
        return cell(f"{task}{planned} planned, none has been run.{budget}{note}")
    # From the results, not from the file: an arm may not have run with all seeds yet.
    seeds = {len({run.seed for run in arm}) for arm in section.results.values()}
    words = [
        f"{len(section.results)} of {counted(len(study.arms), 'arm')}",
        f"{_values(seeds, 'or')} seed{'s' if max(seeds) > 1 else ''} each",
    ]
    if study.task is not None:
        words.insert(0, f"task `{runs[0].about.get('task', study.task)}`")
    for name in ("epochs", "steps", "rounds", "workers"):
        values = {run.settings[name] for run in runs if run.settings.get(name) is not None}
        if values:
            words.append(f"{_values(values)} {name if values != {1} else name[:-1]}")
    # `dict.fromkeys` drops repetitions in order; a set would change the page from run to run.
    machines = dict.fromkeys(_machine(run.hardware) for run in runs)
    torches = dict.fromkeys(f"torch {run.versions.get('torch')}" for run in runs)
    where = listed([*machines, *torches])
    return cell(f"{', '.join(words)}; {where}.{budget}{note}")


def _values(values: set[Any], last: str = "and") -> str:
    return listed([f"{value:,}" for value in sorted(values)], last)


def _machine(hardware: Mapping[str, Any]) -> str:
    gpu = hardware.get("accelerator")
    cores = hardware.get("cores")
    return str(gpu) if gpu else f"{cores} core{'' if cores == 1 else 's'} of {hardware.get('cpu')}"


def cell(text: str) -> str:
    """Return text that cannot break out of its table cell."""
    return printable(text).replace("|", "\\|").replace("<", "&lt;")
