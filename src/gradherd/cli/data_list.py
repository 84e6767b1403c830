"""`gradherd data list`: which data sets are there, and what to do about the others."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gradherd.cli.usage import UsageError, print_json
from gradherd.lab.tasks.data_files import LocalDataSet, MissingData, data_dirs, find_dataset
from gradherd.lab.tasks.datasets import DATASETS
from gradherd.lab.tasks.registry import TASKS


@dataclass(frozen=True, kw_only=True)
class DataList:
    """List every data set, the tasks that need it, and where it was found or how to get it.

    Data is looked for in --data-dir, then in the folder that the environment variable
    GRADHERD_DATA names, then in the cache folder (~/.cache/gradherd).

    Example: gradherd data list --data-dir ~/data
    """

    data_dir: Path | None = None
    """Folder to look in first."""
    json: bool = False
    """Print {"folders", "sets": [{"name", "title", "tasks", "found", "form", "advice"}]}."""

    def run(self) -> None:
        """Look for all of them."""
        sets = [self._entry(name) for name in DATASETS]
        folders = [str(folder) for folder in data_dirs(self.data_dir)]
        if self.json:
            print_json({"folders": folders, "sets": sets})
            return
        table = Table(title=escape(f"Data sets in {', '.join(folders)}"), title_justify="left")
        for column in ("set", "for tasks", "found"):
            table.add_column(column, overflow="fold", no_wrap=column == "set")
        for entry in sets:
            place = f"{entry['found']} ({entry['form']})" if entry["found"] else entry["advice"]
            table.add_row(
                entry["name"],
                ", ".join(entry["tasks"]),
                escape(place),
                style=None if entry["found"] else "dim",
            )
        console = Console()
        console.print(table)
        free = [name for name, make in TASKS.items() if not make().data]
        console.print(f"Nothing but scikit-learn is needed for {', '.join(free)}.")

    def _entry(self, name: str) -> dict[str, Any]:
        found = look(name, self.data_dir)
        return {
            "name": name,
            "title": DATASETS[name].title,
            "tasks": tasks_of(name),
            "found": str(found.folder) if found else None,
            "form": found.form.name if found else None,
            "advice": None if found else advice(name),
        }


def look(name: str, data_dir: Path | None) -> LocalDataSet | None:
    """Return a data set if it is there; raise UsageError if the folder given is none."""
    try:
        return find_dataset(name, data_dir)
    except MissingData:
        return None
    except ValueError as error:
        raise UsageError(f"--data-dir: {error}") from None


def tasks_of(name: str) -> list[str]:
    """Return the tasks that need a data set."""
    return [task for task, make in TASKS.items() if name in make().data]


def advice(name: str) -> str:
    """Say what to do about a data set that is not there."""
    fetch = f"gradherd data get {name}, or " if DATASETS[name].downloads else ""
    return f"{fetch}{DATASETS[name].by_hand} into one of the folders"
