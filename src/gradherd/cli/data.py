"""`gradherd data`: list, download and check the data sets that tasks train on.

What reads and downloads files is imported inside functions: it needs torch, which
`gradherd data list` does not.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gradherd.cli.arguments import FolderOption, check_name, print_json
from gradherd.cli.errors import UsageError
from gradherd.cli.parser import Arg
from gradherd.cli.tables import print_sentence, print_table
from gradherd.lab.tasks.data_files import (
    LocalDataSet,
    MissingData,
    cache_dir,
    data_dirs,
    find_dataset,
)
from gradherd.lab.tasks.datasets import DATASETS, TASK_DATA

_STATUS_STYLES = {"ok": "green", "damaged": "bold red", "unchecked": "yellow", "missing": "dim"}


@dataclass(frozen=True, kw_only=True)
class DataListCommand:
    """List every data set, the tasks that need it, and where it is or how to get it.

    Data sets are searched in --data-dir, then in the folder that the environment variable
    GRADHERD_DATA names, then in the cache folder (~/.cache/gradherd).

    Example: gradherd data list --data-dir ~/data
    """

    data_dir: FolderOption = None
    """Folder to search first."""
    json: bool = False
    """Print {"folders", "sets": [{"name", "title", "tasks", "found", "form", "advice"}]}."""

    def run(self) -> None:
        """Search for all data sets and print where they are."""
        sets = [self._entry(name) for name in DATASETS]
        folders = [str(folder) for folder in data_dirs(self.data_dir)]
        if self.json:
            print_json({"folders": folders, "sets": sets})
            return
        table = _sets_table(folders, ("set", "for tasks", "where it is, or how to get it"))
        for entry in sets:
            where = f"{entry['found']} ({entry['form']})" if entry["found"] else entry["advice"]
            table.add_row(
                entry["name"],
                ", ".join(entry["tasks"]),
                escape(where),
                style=None if entry["found"] else "dim",
            )
        console = Console()
        print_table(table, console)
        without_data = [task for task, data in TASK_DATA.items() if not data]
        print_sentence(
            f"Nothing but scikit-learn is needed for {', '.join(without_data)}.", console
        )

    def _entry(self, name: str) -> dict[str, Any]:
        local = find_local(name, self.data_dir)
        return {
            "name": name,
            "title": DATASETS[name].title,
            "tasks": tasks_of(name),
            "found": str(local.folder) if local else None,
            "form": local.form.name if local else None,
            "advice": None if local else _how_to_get(name),
        }


@dataclass(frozen=True, kw_only=True)
class DataGetCommand:
    """Download a data set into the cache folder (~/.cache/gradherd) and check it.

    A data set that is there already and intact is not downloaded again.

    Example: gradherd data get fashion-mnist
    """

    set: Annotated[
        str, Arg(metavar="NAME", help=f"One of: {', '.join(DATASETS)}.", positional=True)
    ]
    data_dir: FolderOption = None
    """Folder to put it into, instead of the cache folder."""
    json: bool = False
    """Print {"name", "folder", "files", "bytes"}."""

    def run(self) -> None:
        """Download the data set."""
        from gradherd.lab.tasks.download import DownloadError

        dataset = DATASETS[check_name("NAME", self.set, DATASETS)]
        # A shell expands ~ only at the start of a word, not in --data-dir=~/data.
        root = (self.data_dir or cache_dir()).expanduser()
        try:
            local = self._fetch(root)
        except DownloadError as error:
            # The call was right and the network failed: exit code 1. What a server answers may have
            # line breaks.
            print(f"gradherd: {' '.join(str(error).split())}", file=sys.stderr)
            raise SystemExit(1) from None
        paths = list(local.paths.values())
        size = sum(path.stat().st_size for path in paths)
        if self.json:
            files = [path.name for path in paths]
            folder = str(local.folder)
            print_json({"name": dataset.name, "folder": folder, "files": files, "bytes": size})
        else:
            print(f"{dataset.name}: {len(paths)} files, {size:,} bytes in {local.folder}, checked")

    def _fetch(self, root: Path) -> LocalDataSet:
        from rich.progress import Progress

        from gradherd.lab.tasks.download import download_dataset

        # One bar per file: not the bar of `progress`, which has one for everything.
        console = Console(stderr=True)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            bars = {}  # Files are known one by one, as their downloads begin.

            def update(file: str, done: int, size: int | None) -> None:
                if file not in bars:
                    bars[file] = progress.add_task(file, total=size)
                progress.update(bars[file], completed=done)

            return download_dataset(DATASETS[self.set], root, update)


@dataclass(frozen=True, kw_only=True)
class DataCheckCommand:
    """Read every data set that is here and compare sizes and checksums with the published ones.

    Exit code 1 if one is damaged. Missing data sets are no error.

    Example: gradherd data check --json
    """

    data_dir: FolderOption = None
    """Folder to search first."""
    json: bool = False
    """Print {"sets": [{"name", "status", "found", "form", "problem"}]}; status is ok, damaged,
    unchecked (the package that reads it is not installed) or missing."""

    def run(self) -> None:
        """Check all data sets."""
        from gradherd.cli.progress import counted_loop

        with counted_loop(len(DATASETS), "sets") as advance:
            sets = [self._entry(name, advance) for name in DATASETS]
        if self.json:
            print_json({"sets": sets})
        else:
            table = _sets_table(map(str, data_dirs(self.data_dir)), ("set", "status", "where"))
            for entry in sets:
                where = escape(entry["problem"] or entry["found"] or "")
                style = _STATUS_STYLES[entry["status"]]
                table.add_row(entry["name"], entry["status"], where, style=style)
            print_table(table)
        # After the table: it says what is damaged.
        if any(entry["status"] == "damaged" for entry in sets):
            raise SystemExit(1)

    def _entry(self, name: str, advance: Callable[[], None]) -> dict[str, Any]:
        from gradherd.lab.tasks.data_files import DamagedData
        from gradherd.lab.tasks.download import verify_dataset

        local, problem = find_local(name, self.data_dir), None
        status = "missing" if local is None else "ok"
        try:
            if local is not None:
                verify_dataset(local)
        except DamagedData as error:
            status, problem = "damaged", str(error)
        except ValueError as error:  # the package that reads it is not installed
            status, problem = "unchecked", str(error)
        advance()
        return {
            "name": name,
            "status": status,
            "found": None if local is None else str(local.folder),
            "form": None if local is None else local.form.name,
            "problem": problem,
        }


def _sets_table(folders: Iterable[str], columns: Sequence[str]) -> Table:
    """Return an empty table about data sets; names and states never wrap."""
    table = Table(title=escape(f"Data sets in {', '.join(folders)}"))
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column in ("set", "status"))
    return table


def find_local(name: str, data_dir: Path | None) -> LocalDataSet | None:
    """Return a data set that is on this machine, or None if it is missing.

    Args:
        name: A key of DATASETS.
        data_dir: Folder to search first.

    Raises:
        UsageError: `data_dir` is not a folder.
    """
    try:
        return find_dataset(name, data_dir)
    # MissingData is a ValueError: it must be caught first.
    except MissingData:
        return None
    except ValueError as error:
        raise UsageError(str(error).replace("data_dir", "--data-dir", 1)) from None


def tasks_of(name: str) -> list[str]:
    """Return the names of the tasks that need a data set."""
    return [task for task, data in TASK_DATA.items() if name in data]


def _how_to_get(name: str) -> str:
    download = f"gradherd data get {name}, or " if DATASETS[name].downloads else ""
    return f"{download}{DATASETS[name].by_hand} into one of the folders"
