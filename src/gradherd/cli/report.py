"""`gradherd report`: a page from the records of runs."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from gradherd.cli.claims_show import as_claims, print_claims
from gradherd.cli.compare_show import (
    as_json,
    compare_all,
    find_records,
    show,
    write_report,
)
from gradherd.cli.usage import UsageError, print_json


@dataclass(frozen=True, kw_only=True)
class Report:
    """Compare the runs whose records lie below some folders, and write a page about them.

    Runs of one task are one comparison; arms (order, sparsifier, density) come in the order in
    which their first run was started, and the first one is the baseline. The page is one HTML
    file that needs no network.

    With --evidence it writes docs/evidence.md and its charts instead, from studies/*.toml and the
    results in benchmarks/results; DIR is the folder that holds these, by default this one.

    Example: gradherd report runs/ --out report.html

    Example: gradherd report --evidence
    """

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR")] = ()
    """Folders with record.json files, at any depth."""
    out: Path | None = None
    """The HTML file; report.html in the first folder if not given."""
    json: bool = False
    """Print {"comparisons": [as `gradherd compare --json` does], "report"}; with --evidence
    {"claims": [{"id", "verdict", "ours"}], "unmeasured", "files"}."""
    evidence: bool = False
    """Write the page that holds every claim of the papers beside our own records."""

    def run(self) -> None:
        """Find, compare, write, tell."""
        if self.evidence:
            self._evidence()
            return
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

    def _evidence(self) -> None:
        from gradherd.lab.report.evidence import write_evidence

        if self.out is not None or len(self.folders) > 1:
            raise UsageError("--evidence writes docs/evidence.md: it takes one DIR and no --out")
        try:
            made = write_evidence(self.folders[0] if self.folders else Path())
        except ValueError as error:
            raise UsageError(str(error)) from None
        for study, claims in made.unmeasured.items():
            print(f"gradherd: not measured yet: {study}: {', '.join(claims)}", file=sys.stderr)
        files = [str(path) for path in made.files]
        if self.json:
            waits = {study: list(claims) for study, claims in made.unmeasured.items()}
            print_json({"claims": as_claims(made.verdicts), "unmeasured": waits, "files": files})
            return
        print_claims(made.verdicts)
        waiting = sum(len(claims) for claims in made.unmeasured.values())
        print(f"{len(made.verdicts)} claims measured, {waiting} not yet: {files[-1]}")


def _check_out(out: Path) -> None:
    if out.is_dir():
        raise UsageError(f"--out {out} is a folder; name a file in it, as {out / 'report.html'}")
    if out.exists() and not out.is_file():
        raise UsageError(f"--out {out} is no regular file, so it cannot be replaced")
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {out.parent}")
    if not os.access(out.parent, os.W_OK):
        raise UsageError(f"--out {out}: the folder {out.parent} cannot be written to")
