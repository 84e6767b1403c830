"""`gradherd report`: compare recorded runs and write a page about them.

`gradherd.lab.report` is imported inside functions: it needs optional packages and takes seconds to
load.
"""

import contextlib
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from gradherd.cli.parser import Arg, UsageError, usage_errors
from gradherd.cli.terminal import MARKS, print_json, print_table, say
from gradherd.lab.text import counted

if TYPE_CHECKING:
    from gradherd.lab.report.comparison import Comparison
    from gradherd.lab.train.record import RunRecord

_SHORT_HEADINGS = {
    "arm": "arm",
    "seeds": "seeds",
    "final loss": "final loss",
    "epochs to baseline's final loss": "epochs to it",
    "total seconds": "seconds",
    "total bytes": "bytes",
}
"""Columns of a comparison that fit a terminal, and their headings there; the page has them all."""
_POLL = 1.0
"""Seconds between two looks at the records."""
_RELOAD = 5
"""Seconds after which a page that follows a training loads itself again."""


@dataclass(frozen=True, kw_only=True)
class ReportCommand:
    """Compare recorded runs and write a page with their curves.

    It finds every record.json below the folders you name. The runs of one task make one comparison.
    Its arms (order, sparsifier, density) are sorted by when their first run started, and the first
    arm is the baseline. The page is a single HTML file that works offline.

    With --watch it follows runs that are training: whenever a record changes it writes the page
    again, which loads itself every few seconds in the browser. Ctrl-C ends it.

    Example: gradherd report runs/ --out report.html

    Example: gradherd report runs/ --watch
    """

    folders: Annotated[tuple[Path, ...], Arg(metavar="DIR", positional=True)] = ()
    """Folders with record.json files at any depth."""
    out: Annotated[Path | None, Arg(metavar="FILE")] = None
    """HTML file to write; by default report.html in the first folder."""
    json: bool = False
    """Print {"comparisons": [each as `gradherd compare --json` prints it], "report"}."""
    watch: bool = False
    """Keep running, and write the page again whenever a record below the folders changes."""

    def run(self) -> None:
        """Find the records, compare them, write the page and print the tables."""
        if not self.folders:
            raise UsageError("name at least one folder with records, e.g. gradherd report runs/")
        if self.watch and self.json:
            raise UsageError("--watch never comes to the end that --json prints at: choose one")
        out = self.folders[0] / "report.html" if self.out is None else self.out
        if self.out is not None:
            # Now if it was given, since reading many records takes a while. The default is checked
            # after the folders, whose own errors say more.
            _check_out(out)
        if self.watch:
            self._watch(out)
            return
        from gradherd.lab.report.comparison import compare_all
        from gradherd.lab.report.comparison_table import comparison_json

        with usage_errors():
            comparisons = compare_all(self._write(out))
        if self.json:
            results = [comparison_json(comparison, str(out)) for comparison in comparisons]
            print_json({"comparisons": results, "report": str(out)})
            return
        for comparison in comparisons:
            # The path once, at the end, where it is still on the screen.
            print_comparison(comparison, out if comparison is comparisons[-1] else None)

    def _write(self, out: Path, reload: int = 0) -> "list[RunRecord]":
        """Write the page, and return the records that it is about."""
        from gradherd.lab.report.arms import find_records
        from gradherd.lab.report.page import write_report

        found = find_records(self.folders)
        _check_out(out)
        records = [record for _, record in found]
        write_report(records, out, files=[str(path) for path, _ in found], reload=reload)
        return records

    def _watch(self, out: Path) -> None:
        """Write the page whenever a record changes, until Ctrl-C; the last page stands still."""
        from gradherd.lab.report.arms import record_files

        for folder in self.folders:
            # The folder may still be empty, but a misspelt one would be watched for ever.
            if not folder.is_dir():
                raise UsageError(f"{folder}: no such folder")
        print(f"watching {', '.join(map(str, self.folders))}; Ctrl-C ends", flush=True)
        seen = None
        try:
            while True:
                # Sizes and times, not contents: most of the time nothing has changed.
                now = record_files(self.folders)
                if now and now != seen:
                    seen = now
                    self._follow(out)
                time.sleep(_POLL)
        finally:
            # A record that cannot be read now was named when it changed.
            with contextlib.suppress(ValueError):
                if seen is not None:
                    self._write(out)

    def _follow(self, out: Path) -> None:
        try:
            records = self._write(out, _RELOAD)
        except UsageError:
            raise
        except ValueError as error:  # a run may be half way: it may be readable in a moment
            print(f"gradherd: not written: {error}", file=sys.stderr)
            return
        training = sum(record.status == "running" for record in records)
        epochs = counted(sum(len(record.epochs) for record in records), "epoch")
        print(f"{counted(len(records), 'run')}, {training} training, {epochs}: {out}", flush=True)


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
    columns = [index for index, name in enumerate(full.columns) if name in headings]
    print_table(
        [[row[at].text + "*" * row[at].best for at in columns] for row in full.rows],
        [headings[full.columns[at]] for at in columns],
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
        say(f"{warning} Intervals and p values are in the report and in --json.", "dim")
    if page is not None:
        # A path is copied whole, so the terminal breaks it.
        print(f"report: {page}")
