"""Find, read and check the run records below folders."""

import os
from collections.abc import Sequence
from pathlib import Path

from gradherd.lab.report.arms import arm_key
from gradherd.lab.text import printable
from gradherd.lab.train.record import RECORD_FILE, RunRecord, read_record


def find_records(folders: Sequence[Path]) -> list[tuple[Path, RunRecord]]:
    """Return every record below these folders with its path, ordered by the runs' start time.

    Raises:
        ValueError: A folder has no record, a record is damaged, or two records are of the same
            task, arm and seed; the message names the paths.
    """
    paths: dict[Path, Path] = {}
    for folder in folders:
        if not os.path.exists(folder):  # Path.exists raises if the name is too long.
            raise ValueError(f"{printable(folder)}: no such folder")
        if not folder.is_dir():
            name = printable(folder)
            raise ValueError(f"{name} is not a folder; give the folder that holds {RECORD_FILE}")
        matches = _record_paths(folder)
        if not matches:
            raise ValueError(
                f"{printable(folder)}: no {RECORD_FILE} in it or below; runs of gradherd write one"
            )
        for path in matches:  # Folders may overlap; a run counts once.
            paths.setdefault(Path(os.path.realpath(path)), path)
    records = [(path, _checked(path, read_record(path))) for path in paths.values()]
    _check_unique(records)
    return sorted(records, key=lambda one: one[1].started)


def _check_unique(records: Sequence[tuple[Path, RunRecord]]) -> None:
    first_paths: dict[tuple[object, ...], Path] = {}
    for path, record in records:
        first = first_paths.setdefault((record.task, *arm_key(record), record.seed), path)
        if first is not path:
            raise ValueError(
                f"{printable(first)} and {printable(path)} are of the same task, arm and seed "
                f"({record.seed}): a seed counts once; give folders that hold one of them"
            )


def _checked(path: Path, record: RunRecord) -> RunRecord:
    """Return the record; raise ValueError if a figure that pages show is missing."""
    for point in record.density_by_step:
        if not {"step", "mean", "min", "max"} <= point.keys():
            raise ValueError(
                f"{printable(path)}: damaged record: density_by_step holds {printable(point, 80)}; "
                "remove its folder, or train again"
            )
    return record


def _record_paths(folder: Path) -> list[Path]:
    """Return the records at any depth, without following links to folders.

    Iterative, because a tree may be deeper than Python's stack.
    """
    paths, pending = [], [folder]
    while pending:
        try:
            with os.scandir(pending.pop()) as scan:
                entries = list(scan)
        except OSError:  # Not readable, or its path is too long by now.
            continue
        paths += [Path(entry.path) for entry in entries if entry.name == RECORD_FILE]
        pending += [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    return sorted(paths)
