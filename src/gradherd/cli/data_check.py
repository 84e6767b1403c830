"""`gradherd data check`: are the data sets that are there also whole?"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gradherd.cli.data_list import look
from gradherd.cli.progress import steps
from gradherd.cli.usage import print_json
from gradherd.lab.tasks.data_files import data_dirs
from gradherd.lab.tasks.datasets import DATASETS
from gradherd.lab.tasks.download import verify_dataset
from gradherd.lab.tasks.safe_readers import DamagedData

_STYLES = {"ok": "green", "damaged": "bold red", "unchecked": "yellow", "missing": "dim"}


@dataclass(frozen=True, kw_only=True)
class DataCheck:
    """Read every data set that is there and compare sizes and checksums with the published ones.

    Exit code 1 if one is damaged; sets that are not there are no error.

    Example: gradherd data check --json
    """

    data_dir: Path | None = None
    """Folder to look in first."""
    json: bool = False
    """Print {"sets": [{"name", "status", "found", "form", "problem"}]}; status is ok, damaged,
    unchecked (what reads it is not installed) or missing."""

    def run(self) -> None:
        """Check all of them."""
        with steps(len(DATASETS), "sets") as tick:
            sets = [self._entry(name, tick) for name in DATASETS]
        if self.json:
            print_json({"sets": sets})
        else:
            folders = ", ".join(str(folder) for folder in data_dirs(self.data_dir))
            table = Table(title=escape(f"Data sets in {folders}"), title_justify="left")
            for column in ("set", "status", "where"):
                table.add_column(column, overflow="fold", no_wrap=column != "where")
            for entry in sets:
                where = escape(entry["problem"] or entry["found"] or "")
                table.add_row(entry["name"], entry["status"], where, style=_STYLES[entry["status"]])
            Console().print(table)
        if any(entry["status"] == "damaged" for entry in sets):
            raise SystemExit(1)

    def _entry(self, name: str, tick: Callable[[], None]) -> dict[str, Any]:
        found, problem = look(name, self.data_dir), None
        status = "missing" if found is None else "ok"
        try:
            if found is not None:
                verify_dataset(found)
        except DamagedData as error:
            status, problem = "damaged", str(error)
        except ValueError as error:  # What would read it is not installed.
            status, problem = "unchecked", str(error)
        tick()
        return {
            "name": name,
            "status": status,
            "found": None if found is None else str(found.folder),
            "form": None if found is None else found.form.name,
            "problem": problem,
        }
