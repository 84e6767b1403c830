"""Records below some folders: found, read and checked."""

import os
from collections.abc import Sequence
from pathlib import Path

from gradherd.lab.report.arms import key_of
from gradherd.lab.text import printable
from gradherd.lab.train.record import RECORD_FILE, RunRecord, read_record


def find_records(folders: Sequence[Path]) -> list[tuple[Path, RunRecord]]:
    """Return every record below these folders with its path, in the order the runs were started.

    Raises ValueError that names the folder without a record, the record that is damaged, or the
    two that are of the same arm and seed.
    """
    found: dict[Path, Path] = {}
    for folder in folders:
        if not os.path.exists(folder):  # not a question to the path: it raises if it is too long
            raise ValueError(f"{printable(folder)}: no such folder")
        if not folder.is_dir():
            raise ValueError(
                f"{printable(folder)} is not a folder; give the folder that holds {RECORD_FILE}"
            )
        paths = _below(folder)
        if not paths:
            raise ValueError(
                f"{printable(folder)}: no {RECORD_FILE} in it or below; runs of gradherd leave one"
            )
        for path in paths:  # Folders may overlap; a run counts once.
            found.setdefault(Path(os.path.realpath(path)), path)
    read = [(path, checked(path, read_record(path))) for path in found.values()]
    _check_once(read)
    return sorted(read, key=lambda one: one[1].started)


def _check_once(found: Sequence[tuple[Path, RunRecord]]) -> None:
    seen: dict[tuple[object, ...], Path] = {}
    for path, record in found:
        other = seen.setdefault((record.task, *key_of(record), record.seed), path)
        if other is not path:
            raise ValueError(
                f"{printable(other)} and {printable(path)} are of the same task, arm and seed "
                f"({record.seed}): a seed counts once; give folders that hold one of them"
            )


def checked(path: Path, record: RunRecord) -> RunRecord:
    """Return the record, or raise ValueError where a figure that pages show is missing."""
    for point in record.density_by_step:
        if not {"step", "mean", "min", "max"} <= point.keys():
            raise ValueError(
                f"{printable(path)}: damaged record: density_by_step holds {printable(point, 80)}; "
                "remove its folder, or train again"
            )
    return record


def _below(folder: Path) -> list[Path]:
    """Return the records at any depth, without following links to folders.

    With a list of what is left to do: trees may be deeper than Python's stack.
    """
    found, left = [], [folder]
    while left:
        try:
            with os.scandir(left.pop()) as scan:
                entries = list(scan)
        except OSError:  # It may not be looked into, or its name is too long by now.
            continue
        found += [Path(entry.path) for entry in entries if entry.name == RECORD_FILE]
        left += [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    return sorted(found)
