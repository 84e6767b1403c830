"""`gradherd report`: compare recorded runs and write a page about them.

`gradherd.lab.report` is imported inside functions: it needs optional packages and takes seconds to
load.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from gradherd.cli.parser import Arg, UsageError, usage_errors
from gradherd.cli.terminal import MARKS, print_json, print_table, say

if TYPE_CHECKING:
    from gradherd.lab.report.comparison import Comparison

_SHORT_HEADINGS = {
    "arm": "arm",
    "seeds": "seeds",
    "final loss": "final loss",
    "epochs to baseline's final loss": "epochs to it",
    "total seconds": "seconds",
    "total bytes": "bytes",
}
"""Columns of a comparison that fit a terminal, and their headings there; the page has them all."""


@dataclass(frozen=True, kw_only=True)
class ReportCommand:
    """Compare recorded runs and write a page with their curves.

    It finds every record.json below the folders you name. The runs of one task make one comparison.
    Its arms (order, sparsifier, density) are sorted by when their first run started, and the first
    arm is the baseline. The page is a single HTML file that works offline.

    Example: gradherd report runs/ --out report.html
    """

    folders: Annotated[tuple[Path, ...], Arg(metavar="DIR", positional=True)] = ()
    """Folders with record.json files at any depth."""
    out: Annotated[Path | None, Arg(metavar="FILE")] = None
    """HTML file to write; by default report.html in the first folder."""
    json: bool = False
    """Print {"comparisons": [each as `gradherd compare --json` prints it], "report"}."""

    def run(self) -> None:
        """Find the records, compare them, write the page and print the tables."""
        if not self.folders:
            raise UsageError("name at least one folder with records, e.g. gradherd report runs/")
        out = self.folders[0] / "report.html" if self.out is None else self.out
        if self.out is not None:
            # Now if it was given, since reading many records takes a while. The default is checked
            # after the folders, whose own errors say more.
            _check_out(out)
        from gradherd.lab.report.arms import find_records
        from gradherd.lab.report.comparison import compare_all
        from gradherd.lab.report.comparison_table import comparison_json
        from gradherd.lab.report.page import write_report

        with usage_errors():
            found = find_records(self.folders)
            _check_out(out)
            records = [record for _, record in found]
            write_report(records, out, files=[str(path) for path, _ in found])
            comparisons = compare_all(records)
        if self.json:
            results = [comparison_json(comparison, str(out)) for comparison in comparisons]
            print_json({"comparisons": results, "report": str(out)})
            return
        for comparison in comparisons:
            # The path once, at the end, where it is still on the screen.
            print_comparison(comparison, out if comparison is comparisons[-1] else None)


def _check_out(out: Path) -> None:
    if out.is_dir():
        raise UsageError(f"--out {out} is a folder; name a file in it, e.g. {out / 'report.html'}")
    if out.exists() and not out.is_file():
        raise UsageError(f"--out {out} is not a regular file and cannot be replaced")
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {out.parent}")
    if not os.access(out.parent, os.W_OK):
        raise UsageError(f"--out {out}: the folder {out.parent} cannot be written to")


def print_comparison(comparison: "Comparison", page: Path | None) -> None:
    """Print the table of a comparison, its notes and verdicts, and where the page is."""
    from gradherd.lab.report.comparison_table import comparison_table
    from gradherd.lab.report.verdicts import all_verdicts, multiple_testing_note

    full = comparison_table(comparison)
    # The metric is named by the task, so it cannot be in the table above.
    headings = {**_SHORT_HEADINGS, comparison.metric_name: comparison.metric_name}
    names = [name for name in full if name in headings]
    rows = zip(*(full[name] for name in names), strict=True)
    print_table(
        [[cell.text + "*" * cell.best for cell in row] for row in rows],
        [headings[name] for name in names],
        title=f"{comparison.task}: {comparison.description}",
        caption=f"epochs to it: until the final loss of {comparison.baseline.label}, the baseline; "
        "*: best mean",
    )
    for note in comparison.notes:
        say(note, mark="note:", mark_style="yellow")
    for verdict in all_verdicts(comparison):
        mark, colour = MARKS[verdict.tone]
        say(verdict.headline, mark=mark, mark_style=colour)
    if (warning := multiple_testing_note(comparison)) is not None:
        where = "--json" if page is None else "the report and in --json"
        say(f"{warning} Intervals and p values are in {where}.", "dim")
    if page is not None:
        # A path is copied whole, so the terminal breaks it.
        print(f"report: {page}")
