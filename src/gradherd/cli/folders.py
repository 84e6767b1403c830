"""Output folders: new or resumed, locked while in use, tidied up, and what is left in them."""

import contextlib
import dataclasses
import os
import re
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from gradherd.cli.parser import CommandFailed, UsageError, usage_errors
from gradherd.cli.terminal import torchrun_rank
from gradherd.lab.text import counted, printable, reason_of
from gradherd.lab.train.config import RunConfig
from gradherd.lab.train.record import (
    RECORD_FILE,
    RunRecord,
    locked,
    read_record,
    write_record,
)
from gradherd.lab.train.runner import CHANGEABLE_SETTINGS, CHECKPOINT_FOLDER

PAGE_FILE = "report.html"
"""Name of the page about the runs in a folder."""


@contextlib.contextmanager
def output_folder(
    out: Path | None, name: str, *, resume: bool = False, many: bool = False
) -> Iterator[Path]:
    """Provide a folder that no other command writes to, and remove it again if it stays empty.

    Args:
        out: The folder to use; it must be empty or new. None: a new one in gradherd-runs.
        name: What a new folder is named after; the time is added.
        resume: Also accept a folder that holds what this call would write.
        many: Whether that is many runs, each in a folder of its own; else it is one.

    Raises:
        UsageError: The folder cannot be used, or another command is using it.
    """
    if out is None:
        if resume:
            raise UsageError("--resume needs --out, the folder to continue in")
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", name)  # a user's own task may have any name
        out = Path("gradherd-runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
        if out.exists():  # another run started within the same second
            out = out.with_name(f"{out.name}-{os.getpid()}")
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {str(out)!r} is a file, not a folder")
    # Noted before anything is created: only these may be removed again.
    created = [folder for folder in (out, *out.parents) if not folder.exists()]
    # Ranks share the folder, so one of them locks it and cleans up.
    first = torchrun_rank() == 0
    with contextlib.ExitStack() as stack:
        try:
            out.mkdir(parents=True, exist_ok=True)
            if first:
                stack.enter_context(locked(out, wait=False))
        except BlockingIOError:
            wait = "wait until it ends, or name another folder"
            raise UsageError(f"--out {str(out)!r} is in use by another command: {wait}") from None
        except OSError as error:
            raise UsageError(f"--out {str(out)!r} cannot be used: {error.strerror}") from None
        _check_contents(out, resume=resume, many=many)
        # No error: a script that is started again and again has a first time.
        if resume and many and first and not any(out.iterdir()):
            _tell(f"--resume: {str(out)!r} holds nothing yet, so all runs are trained")
        try:
            yield out
        finally:
            # A call that fails early leaves no trace.
            if first:
                below = sorted((path for path in out.rglob("*") if path.is_dir()), reverse=True)
                for path in [*below, *created]:  # the deepest first
                    if path.is_dir() and not any(path.iterdir()):
                        # Never a tree: rmdir refuses what another process has just written to.
                        path.rmdir()


def _tell(text: str) -> None:
    print(f"gradherd: {printable(text)}", file=sys.stderr)


def _check_contents(out: Path, *, resume: bool, many: bool) -> None:
    """Raise UsageError if a folder holds something that this call would not continue."""
    names = {path.name for path in out.iterdir()}
    if many:
        resumable = RECORD_FILE not in names and any(out.rglob(RECORD_FILE))
        hint = "; --resume keeps its finished runs and trains the others" if resumable else ""
    else:
        # A run may have been stopped before its first record or its first checkpoint.
        resumable = RECORD_FILE in names or CHECKPOINT_FOLDER in names
        hint = "; --resume continues its run" if CHECKPOINT_FOLDER in names else ""
    if names and not (resume and resumable):
        hint = "" if resume else hint
        raise UsageError(f"--out {str(out)!r} is not empty: name a new folder, or remove it{hint}")


def finished_record(
    out: Path, config: RunConfig, *, changeable: Sequence[str] = CHANGEABLE_SETTINGS
) -> RunRecord | None:
    """Return the record in a folder if its run needs no more training: complete or diverged.

    Raises:
        UsageError: It is the record of a run with other settings, or it is damaged.
    """
    if not (out / RECORD_FILE).exists():
        return None
    with usage_errors():
        record = read_record(out / RECORD_FILE)
    # --epochs may have been raised since.
    complete = record.status == "done" and len(record.epochs) >= config.epochs
    if not complete and record.status != "diverged":
        return None
    for key, value in dataclasses.asdict(config).items():
        recorded = record.config.get(key)
        if key not in changeable and recorded != value:
            raise UsageError(
                f"--out {str(out)!r} holds a run with {key} {recorded!r}, not {value!r}: "
                "resume it with its own settings, or name a new folder"
            )
    return record


@contextlib.contextmanager
def telling_survivors(out: Path) -> Iterator[None]:
    """If the work inside is interrupted or fails, also say what is left and how to continue."""
    try:
        yield
    except KeyboardInterrupt:
        if torchrun_rank() == 0 and (left := _survivors(out)):
            _tell(left)
        raise
    except (CommandFailed, OSError) as error:
        left = _survivors(out)
        if not left or os.environ.get("GRADHERD_TRACEBACK"):
            raise
        raise CommandFailed(f"{reason_of(error)}; {left}") from error


def intact_records(out: Path) -> list[tuple[Path, RunRecord]]:
    """Return the records below a folder that can be read, by the time their runs started."""
    found = []
    for path in out.rglob(RECORD_FILE):
        with contextlib.suppress(ValueError):  # damaged: what has stopped the work says more
            found.append((path, read_record(path)))
    return sorted(found, key=lambda one: one[1].started)


def _survivors(out: Path) -> str:
    """Say what an interrupted or failed command has left, and how to continue; "" if nothing."""
    found = [record for _, record in intact_records(out)]
    records = [record for record in found if record.config.get("held_out") is None]
    done = sum(record.status in ("done", "diverged") for record in records)
    epochs = sum(len(record.epochs) for record in records)
    parts = []
    if epochs:
        told = f"{counted(done, 'run')} finished, {counted(epochs, 'epoch')} on record"
        parts.append(f"{told}: gradherd report {out} shows them")
    if done or any((out / CHECKPOINT_FOLDER).glob("step-*")):
        parts.append(f"repeat the command with --out {out} --resume to continue")
    return "; ".join(parts)


def mark_unfinished(out: Path, status: str) -> None:
    """Write into the records of runs that have not ended why they never will.

    A run that has trained nothing yet leaves no record: the same call may then use the folder.
    """
    for path, record in intact_records(out):
        if record.status != "running" or torchrun_rank() != 0:
            continue
        if [path] == [*path.parent.iterdir()]:  # neither an epoch nor a checkpoint
            path.unlink()
        else:
            write_record(dataclasses.replace(record, status=status), path.parent)
