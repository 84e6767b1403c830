"""`gradherd report`: a page from the records of runs."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from gradherd.commands.compare_show import (
    as_json,
    compare_all,
    find_records,
    show,
    write_report,
)
from gradherd.commands.usage import UsageError, print_json


@dataclass(frozen=True, kw_only=True)
class Report:
    """Compare the runs whose records lie below some folders, and write a page about them.

    Runs of one task are one comparison; arms (order, sparsifier, density) come in the order in
    which their first run was started, and the first one is the baseline. The page is one HTML
    file that needs no network.

    Example: gradherd report runs/ --out report.html
    """

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """Folders with record.json files, at any depth."""
    out: Path | None = None
    """The HTML file; report.html in the first folder if not given."""
    json: bool = False
    """Print {"comparisons": [as `gradherd compare --json` does], "report"}."""

    def run(self) -> None:
        """Find, compare, write, tell."""
        if not self.folders:
            raise UsageError("name at least one folder with records, as in: gradherd report runs/")
        out = self.folders[0] / "report.html" if self.out is None else self.out
        if self.out is not None:
            _check_out(out)
        try:
            found = find_records(self.folders)
            records = [record for _, record in found]
            comparisons = compare_all(records)
        except ValueError as error:
            raise UsageError(str(error)) from None
        _check_out(out)
        write_report(records, out, files=[str(path) for path, _ in found])
        if self.json:
            told = [as_json(one, str(out)) for one in comparisons]
            print_json({"comparisons": told, "report": str(out)})
            return
        for one in comparisons:
            show(one, out if one is comparisons[-1] else None)


def _check_out(out: Path) -> None:
    if out.is_dir():
        raise UsageError(f"--out {out} is a folder; name a file in it, as {out / 'report.html'}")
    if out.exists() and not out.is_file():
        raise UsageError(f"--out {out} is no regular file, so it cannot be replaced")
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {out.parent}")
    if not os.access(out.parent, os.W_OK):
        raise UsageError(f"--out {out}: the folder {out.parent} cannot be written to")
