"""The folder that a command trains into: ours alone, and nothing empty or unfinished left in it."""

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from gradherd.cli.usage import UsageError
from gradherd.comm.world import World
from gradherd.lab.train.record import RECORD_FILE, read_record, write_record
from gradherd.lab.train.runner import CHECKPOINT_FOLDER


@contextlib.contextmanager
def new_folder(out: Path | None, what: str, *, resume: bool = False) -> Iterator[Path]:
    """Give a folder that is ours alone: the one that was named, or a new one.

    To resume, it may be one that a run was written to. If nothing was written in the end, no folder
    is left that was not there before.
    """
    if out is None:
        what = re.sub(r"[^A-Za-z0-9._-]+", "-", what)  # a task of one's own may be called anything
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        out = Path("gradherd-runs") / f"{what}-{stamp}"
        if out.exists():  # two in one second
            out = out.with_name(f"{out.name}-{os.getpid()}")
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {str(out)!r} is a file, not a folder")
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        ours = resume and ((out / RECORD_FILE).exists() or (out / CHECKPOINT_FOLDER).exists())
        if out.exists() and any(out.iterdir()) and not ours:
            saved = not resume and (out / CHECKPOINT_FOLDER).exists()
            more = "; --resume goes on with its run" if saved else ""
            raise UsageError(
                f"--out {str(out)!r} is not empty: name a new folder, or remove it{more}"
            )
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {str(out)!r} cannot be used: {error.strerror}") from None
    try:
        yield out
    finally:
        if World.detect().rank == 0:
            remove_empty(out, made)


def mark_unfinished(out: Path, status: str) -> None:
    """Say in the records that were still written to how their runs ended."""
    if World.detect().rank > 0:
        return
    for path in out.rglob(RECORD_FILE):
        record = read_record(path)
        if record.status == "running":
            write_record(dataclasses.replace(record, status=status), path.parent)


def remove_empty(folder: Path, made: Sequence[Path]) -> None:
    """Remove folders without a file: all below `folder`, and those that were made for it."""
    below = sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True)
    for path in [*below, *made]:  # the deepest first
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
