"""Checkpoints: written atomically by all ranks together, and verified when they are read.

A checkpoint is a folder: what all ranks share (written by rank 0), a file for each rank, and a
manifest with the size and digest of each file. It is written under a temporary name, synced to disk
and renamed, so a run that is killed at any moment leaves the previous one; the last two are kept.

All ranks must save at the same step. If steps decide, every rank counts the same. For clocks and
signals the ranks exchange a few integers about once a second, at a step that all of them know.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from gradherd.comm.collectives import Stopwatch, all_gather, all_gather_objects
from gradherd.comm.world import World
from gradherd.hooks.state import pack, unpack
from gradherd.lab.ranks import handling
from gradherd.lab.train.record import read_bounded, short_repr

log = logging.getLogger("gradherd")

# Raised whenever the layout changes: a checkpoint of another format is refused in one sentence.
_FORMAT = 2
_MANIFEST = "manifest.json"
_SHARED = "shared.safetensors"
_KEPT = 2  # the last checkpoints of a run
_MAX_MANIFEST = 1 << 24  # bytes: room for 100,000 ranks
_COST_RATIO = 50
"""If the clock decides, at least this many times the last save's duration passes between saves."""
# Bounds how late SIGTERM is noticed if steps become slow after a time of fast ones.
_MAX_STEPS_AHEAD = 1000


class NoUsableCheckpoint(ValueError):
    """There are checkpoints, but none can be used; the message says why."""


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint that was read and verified."""

    step: int
    """Steps done when it was saved."""
    workers: int
    """Number of ranks that saved it."""
    shared: Any
    """State that all ranks share."""
    part: Callable[[int], Any]
    """Returns the state of one rank."""


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, world: World, identity: Mapping[str, Any]) -> None:
        """Open a folder that all ranks see.

        A run must have `identity`, JSON values, in common with one that it resumes.
        """
        self._folder, self._world = folder, world
        # As it comes back from a manifest: tuples become lists.
        self._identity = json.loads(json.dumps(dict(identity)))

    def save(self, step: int, shared: Callable[[], Any], own: Any) -> None:
        """Write this rank's state, and what `shared` returns on rank 0, on all ranks together.

        Raises:
            OSError: This rank could not write; its peers raise RuntimeError. Earlier checkpoints
                are intact.
        """
        # A leading dot: `_list_steps` never takes a draft for a checkpoint.
        draft = self._folder / f".step-{step:09d}.draft"

        def make() -> None:
            if self._world.rank == 0:
                shutil.rmtree(draft, ignore_errors=True)
                draft.mkdir(parents=True)

        def write() -> dict[str, list[int]]:
            parts = {_rank_file(self._world.rank): pack(own)}
            if self._world.rank == 0:
                # A function, not a value: only rank 0 pays for copying model and optimizer.
                parts[_SHARED] = pack(shared())
            for name, data in parts.items():
                _write_synced(draft / name, data)
            # Digests of what was meant to be written, not of the file: a bad disk shows up when
            # reading.
            return {name: _fingerprint(data) for name, data in parts.items()}

        self._on_all_ranks(make, draft)
        written = self._on_all_ranks(write, draft)
        if self._world.rank == 0:
            try:
                self._finish(step, draft, {k: v for files in written for k, v in files.items()})
            except OSError:
                shutil.rmtree(draft, ignore_errors=True)
                raise

    def _on_all_ranks(self, work: Callable[[], Any], draft: Path) -> list[Any]:
        """Return what `work` returns on each rank; raise on all ranks if it fails on one.

        A failed rank cannot just raise: its peers would wait for it in the next collective until
        they time out.
        """
        result, problem = None, None
        try:
            result = work()
        except OSError as error:
            problem = error
        results = all_gather_objects((problem is not None, result), self._world)
        failed = [rank for rank, (has_failed, _) in enumerate(results) if has_failed]
        if failed and self._world.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
        if problem is not None:
            raise OSError(
                problem.errno, f"no checkpoint was written: {problem.strerror}", str(draft)
            )
        if failed:
            raise RuntimeError(f"no checkpoint was written: rank {failed[0]} could not")
        return [one for _, one in results]

    def _finish(self, step: int, draft: Path, files: dict[str, list[int]]) -> None:
        manifest = {
            "format": _FORMAT,
            "step": step,
            "workers": self._world.size,
            "identity": self._identity,
            "files": files,
        }
        # The manifest comes last: it names files that are complete and on disk.
        _write_synced(draft / _MANIFEST, json.dumps(manifest, indent=1).encode())
        final = self._folder / f"step-{step:09d}"
        aside = self._folder / f".{final.name}.old"
        if final.exists():  # The same step again: at any moment one of the two is there.
            final.rename(aside)
        # The commit point: a rename within a folder is atomic.
        draft.rename(final)
        # Until the folder itself is on disk, a power failure could undo the rename.
        _sync_folder(self._folder)
        shutil.rmtree(aside, ignore_errors=True)
        steps = self._list_steps()
        # Later ones were damaged or of another run, so this run resumed from an earlier one.
        later = [other for other in steps if other > step]
        for old in [*later, *steps[len(later) + _KEPT :]]:
            shutil.rmtree(self._folder / f"step-{old:09d}", ignore_errors=True)

    def _clean_up(self) -> None:
        """Remove drafts of a killed run; restore a checkpoint that was about to be replaced."""
        for aside in self._folder.glob(".step-*.old"):
            final = aside.with_name(aside.name[1:].removesuffix(".old"))
            if final.exists():
                shutil.rmtree(aside, ignore_errors=True)
            else:
                aside.rename(final)
        for draft in self._folder.glob(".step-*.draft"):
            shutil.rmtree(draft, ignore_errors=True)

    def _list_steps(self) -> list[int]:
        """Return the steps of the checkpoints in the folder, newest first."""
        names = [path.name for path in self._folder.glob("step-*")] if self._folder.is_dir() else []
        # Exactly the names that `save` writes: other spellings of a number are not ours.
        steps = [int(name[5:]) for name in names if re.fullmatch(r"step-[0-9]{9,18}", name)]
        return sorted((step for step in steps if f"step-{step:09d}" in names), reverse=True)

    def load(self) -> LoadedCheckpoint | None:
        """Read the newest intact checkpoint of this run, on all ranks together.

        Returns:
            The checkpoint; None if there are none at all.

        Raises:
            NoUsableCheckpoint: There are checkpoints, but none can be used.
        """
        if self._world.rank == 0:
            # On rank 0 alone: two ranks that rename the same folder would fail.
            self._clean_up()
        # All ranks try the checkpoints of rank 0's list, so that they agree on one.
        reasons: list[str] = []
        for step in all_gather_objects(self._list_steps(), self._world)[0]:
            loaded, why = None, ""
            try:
                loaded = self._read(step)
            # Whatever is wrong, the other ranks must hear of it: a rank that raised would leave
            # them waiting.
            except (ValueError, OSError, MemoryError) as error:
                why = " ".join(str(error).split()) or type(error).__name__
            # Agreed for each checkpoint: ranks that continued from different steps would never meet
            # again.
            wrong = [one for one in all_gather_objects(why, self._world) if one]
            if loaded is not None and not wrong:
                for reason in reasons if self._world.rank == 0 else ():
                    log.warning("skipping a checkpoint in %s: %s", self._folder, reason)
                return loaded
            reasons.append(f"step {step}: {wrong[0]}")
        if reasons:
            # Not None: starting from scratch over a run that cannot be read would lose it.
            raise NoUsableCheckpoint(
                f"no checkpoint in {self._folder} can be used ({'; '.join(reasons)}): "
                "resume with the settings it was saved with, or start in a new folder"
            )
        return None

    def _read(self, step: int) -> LoadedCheckpoint:
        folder = self._folder / f"step-{step:09d}"
        manifest = _read_manifest(folder / _MANIFEST)
        # Before any large file is read: the manifest is enough to tell whose checkpoint it is.
        for key, ours in self._identity.items():
            theirs = manifest["identity"].get(key)
            if theirs != ours:
                raise ValueError(
                    f"it was saved with {key} {short_repr(theirs)}, this run has {short_repr(ours)}"
                )
        workers, files = manifest["workers"], manifest["files"]

        def part(rank: int) -> Any:
            return unpack(_read_verified(folder / _rank_file(rank), files))

        shared = unpack(_read_verified(folder / _SHARED, files))
        # All parts are verified now, while another checkpoint can still be chosen.
        if workers == self._world.size:
            own = part(self._world.rank)
            return LoadedCheckpoint(step, workers, shared, lambda rank: own)
        for rank in range(workers):
            part(rank)
        return LoadedCheckpoint(step, workers, shared, part)


def _rank_file(rank: int) -> str:
    return f"rank-{rank}.safetensors"


def _fingerprint(data: bytes) -> list[int]:
    """Return the length and 128-bit digest of a file, as a manifest has them."""
    digest = hashlib.blake2b(data, digest_size=16).digest()
    halves = (digest[:8], digest[8:])
    return [len(data), *(int.from_bytes(half, "big", signed=True) for half in halves)]


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(_read(path, _MAX_MANIFEST).decode())
        if manifest["format"] != _FORMAT:
            raise ValueError(f"its format is {short_repr(manifest['format'])}, expected {_FORMAT}")
        # Checked by hand: the file may hold any JSON, and each wrong type would fail elsewhere.
        workers, files = manifest["workers"], manifest["files"]
        types = (workers, int), (manifest["identity"], dict), (files, dict)
        if not all(isinstance(value, kind) for value, kind in types):
            raise ValueError("its manifest is damaged")
        if len(files) != workers + 1:
            raise ValueError(f"its manifest is damaged: {short_repr(workers)} workers")
    except (KeyError, TypeError, RecursionError, UnicodeDecodeError, json.JSONDecodeError):
        raise ValueError(f"{path.name} is damaged") from None
    checked: dict[str, Any] = manifest
    return checked


def _read_verified(path: Path, files: Mapping[str, Any]) -> bytes:
    """Return a file's bytes; raise ValueError unless they are what was written."""
    entry = files.get(path.name)
    size = entry[0] if isinstance(entry, list) and entry else None
    # A file that has grown is not read at all: memory use stays bounded by what was written.
    data = _read(path, size) if isinstance(size, int) and size >= 0 else b""
    if _fingerprint(data) != entry:
        raise ValueError(f"{path.name} is damaged or truncated")
    return data


def _read(path: Path, max_bytes: int) -> bytes:
    try:
        return read_bounded(path, max_bytes)
    except ValueError as error:
        raise ValueError(f"{path.name} is damaged: {error}") from None


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        # flush only hands the bytes to the kernel.
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Make a rename in the folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class RunStopped(Exception):
    """The run received SIGTERM and has saved itself."""


class Checkpointer:
    """Saves a run on schedule."""

    def __init__(
        self,
        store: CheckpointStore,
        world: World,
        *,
        every: int | None,
        seconds: float = 60.0,
        poll_seconds: float = 1.0,
        device: str = "cpu",
    ) -> None:
        """Save after every so many steps, or, if `every` is None, seconds.

        Ranks exchange their clocks and signals about once in `poll_seconds`.
        """
        self._store, self._world = store, world
        self._every, self._seconds, self._poll_seconds = every, seconds, poll_seconds
        self._device = torch.device(device)
        self._stop_requested = False
        self.step = self._next_poll = 0
        """Steps that are done."""
        self.stopwatch = Stopwatch()
        """Time that saving has cost the training."""
        # Monotonic: the wall clock can jump.
        self._saved_at = self._polled_at = time.monotonic()
        self._polled_step = 0
        self._save_seconds = 0.0  # duration of the last save

    def handle_sigterm(self) -> AbstractContextManager[None]:
        """Take SIGTERM as a request to save and stop."""

        def request_stop(number: int, frame: FrameType | None) -> None:
            # Only a flag: the handler may run in the middle of a step, or of writing a checkpoint.
            self._stop_requested = True

        return handling((signal.SIGTERM,), request_stop)

    def start_at(self, step: int) -> None:
        """Start counting after `step` steps."""
        self.step = self._next_poll = self._polled_step = step
        self._saved_at = self._polled_at = time.monotonic()

    def after_step(self, state: Callable[[], tuple[Callable[[], Any], Any]]) -> None:
        """Count a step and save if it is time.

        Raises:
            RunStopped: A rank received SIGTERM; the run is saved.
        """
        self.step += 1
        due = self._every is not None and self.step % self._every == 0
        stop = False
        # All ranks compare the same two numbers, so they enter the collective together.
        if self.step > self._next_poll:
            stop, late = self._poll()
            due = due or stop or (late and self._every is None)
        if due:
            begin = time.monotonic()
            # Counted on its own, so that saving does not pass for compute.
            with self.stopwatch:
                self._store.save(self.step, *state())
            # Counted from the end: a save that takes a minute must not be due again at once.
            self._saved_at = time.monotonic()
            self._save_seconds = self._saved_at - begin
        if stop:
            raise RunStopped(f"stopped after {self.step} steps")

    def _poll(self) -> tuple[bool, bool]:
        """Ask all ranks whether one of them should stop, and rank 0 whether a save is due."""
        now = time.monotonic()
        steps = max(1, self.step - self._polled_step)
        step_seconds = (now - self._polled_at) / steps
        # A few fast steps say little about later ones: look ahead at most twice as far.
        ahead = round(self._poll_seconds / max(step_seconds, 1e-6))
        ahead = max(1, min(_MAX_STEPS_AHEAD, 2 * steps, ahead))
        late = now - self._saved_at >= max(self._seconds, _COST_RATIO * self._save_seconds)
        own = torch.tensor([int(self._stop_requested), int(late), ahead], device=self._device)
        all_ranks = all_gather(own, self._world).value.tolist()
        self._polled_at, self._polled_step = time.monotonic(), self.step
        # Rank 0's clock decides for all: other clocks would pick other steps.
        _, rank0_late, rank0_ahead = all_ranks[0]
        self._next_poll = self.step + rank0_ahead
        # A scheduler may signal only some of the processes.
        return any(stop for stop, _, _ in all_ranks), bool(rank0_late)
