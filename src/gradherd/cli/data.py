"""`gradherd data`: list, download and check the data sets that tasks train on.

What reads and downloads files is imported inside functions: it needs torch, which
`gradherd data list` does not.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from gradherd.cli.parser import Arg, CommandFailed, FolderOption, usage_errors
from gradherd.cli.terminal import print_json, print_table, say
from gradherd.lab.tasks.data_files import (
    LocalDataSet,
    MissingData,
    cache_dir,
    data_dirs,
    find_dataset,
)
from gradherd.lab.tasks.datasets import DATASETS, TASK_DATA


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
        if self.json:
            folders = [str(folder) for folder in data_dirs(self.data_dir)]
            print_json({"folders": folders, "sets": sets})
            return
        rows = []
        for one in sets:
            where = f"{one['found']} ({one['form']})" if one["found"] else one["advice"]
            rows.append((one["name"], ", ".join(one["tasks"]), where))
        headings = ("set", "for tasks", "where it is, or how to get it")
        print_table(rows, headings, title=_searched(self.data_dir))
        without_data = [task for task, data in TASK_DATA.items() if not data]
        say(f"Nothing but scikit-learn is needed for {', '.join(without_data)}.")

    def _entry(self, name: str) -> dict[str, Any]:
        local = _find_local(name, self.data_dir)
        download = f"gradherd data get {name}, or " if DATASETS[name].downloads else ""
        advice = f"{download}{DATASETS[name].by_hand} into one of the folders"
        tasks = [task for task, data in TASK_DATA.items() if name in data]
        about = {"name": name, "title": DATASETS[name].title, "tasks": tasks}
        return {**about, **_place(local), "advice": None if local else advice}


@dataclass(frozen=True, kw_only=True)
class DataGetCommand:
    """Download a data set into the cache folder (~/.cache/gradherd) and check it.

    A data set that is there already and intact is not downloaded again.

    Example: gradherd data get fashion-mnist
    """

    set: Annotated[str, Arg(metavar="NAME", positional=True, known=DATASETS)]
    """One of: {known}."""
    data_dir: FolderOption = None
    """Folder to put it into, instead of the cache folder."""
    json: bool = False
    """Print {"name", "folder", "files", "bytes"}."""

    def run(self) -> None:
        """Download the data set."""
        from gradherd.cli.progress import ProgressBar
        from gradherd.lab.tasks.download import DownloadError, download_dataset

        # A shell expands ~ only at the start of a word, not in --data-dir=~/data.
        root = (self.data_dir or cache_dir()).expanduser()
        try:
            with ProgressBar() as bar:
                local = download_dataset(DATASETS[self.set], root, bar.at)
        except DownloadError as error:  # the call was right and the network failed
            raise CommandFailed(str(error)) from None
        paths = list(local.paths.values())
        size = sum(path.stat().st_size for path in paths)
        if self.json:
            files = [path.name for path in paths]
            folder = str(local.folder)
            print_json({"name": self.set, "folder": folder, "files": files, "bytes": size})
        else:
            print(f"{self.set}: {len(paths)} files, {size:,} bytes in {local.folder}, checked")


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
            rows = [(e["name"], e["status"], e["problem"] or e["found"] or "") for e in sets]
            print_table(rows, ("set", "status", "where"), title=_searched(self.data_dir))
        # After the table, which says what is wrong with them.
        if damaged := [entry["name"] for entry in sets if entry["status"] == "damaged"]:
            raise CommandFailed(f"damaged: {', '.join(damaged)}; fetch again what is damaged")

    def _entry(self, name: str, advance: Callable[[], None]) -> dict[str, Any]:
        from gradherd.lab.tasks.data_files import DamagedData
        from gradherd.lab.tasks.download import verify_dataset

        local, problem = _find_local(name, self.data_dir), None
        status = "missing" if local is None else "ok"
        try:
            if local is not None:
                verify_dataset(local)
        except DamagedData as error:
            status, problem = "damaged", str(error)
        except ValueError as error:  # the package that reads it is not installed
            status, problem = "unchecked", str(error)
        advance()
        return {"name": name, "status": status, **_place(local), "problem": problem}


def _searched(data_dir: Path | None) -> str:
    return f"Data sets in {', '.join(map(str, data_dirs(data_dir)))}"


def _find_local(name: str, data_dir: Path | None) -> LocalDataSet | None:
    """Return a data set that is on this machine, or None if it is missing."""
    with usage_errors(["data_dir"]), contextlib.suppress(MissingData):
        return find_dataset(name, data_dir)
    return None


def _place(local: LocalDataSet | None) -> dict[str, str | None]:
    """Return where a data set is, in which form."""
    if local is None:
        return {"found": None, "form": None}
    return {"found": str(local.folder), "form": local.form.name}
