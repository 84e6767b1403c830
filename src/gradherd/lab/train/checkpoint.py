"""Checkpoints that are whole or not there, checked when read, written by all ranks together.

A checkpoint is a folder: what all ranks share (written by rank 0), a file for each rank, and a
manifest with the size and digest of each file. It is written under another name, synced to disk and
renamed, so a run that is killed at any moment leaves the one before; the last two are kept.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gradherd.attach.pack import pack, unpack
from gradherd.comm.collectives import all_gather
from gradherd.comm.world import World
from gradherd.lab.train.record import short_repr

log = logging.getLogger("gradherd")

_FORMAT = 1
_MANIFEST = "manifest.json"
_SHARED = "shared.safetensors"
_MAX_LISTED = 64  # checkpoints that are looked at
_LARGEST_MANIFEST = 1 << 24  # bytes: room for 100,000 ranks


class NoUsableCheckpoint(ValueError):
    """There are checkpoints, but none that can be used; the message says why."""


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint that was read."""

    step: int
    """Steps that were done."""
    workers: int
    """How many ranks have saved it."""
    shared: Any
    """What all ranks share."""
    part: Callable[[int], Any]
    """Reads what a rank had for itself."""


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(
        self,
        folder: Path,
        world: World,
        identity: Mapping[str, Any],
        *,
        device: str = "cpu",
        keep: int = 2,
    ) -> None:
        """Look after a folder.

        Args:
            folder: Where they lie; all ranks must see the same.
            world: Who writes and reads.
            identity: What a run must have in common with one that it continues, as JSON values.
            device: Where the ranks' group works.
            keep: How many are kept.
        """
        self._folder, self._world, self._keep = folder, world, keep
        self._identity = json.loads(json.dumps(dict(identity)))
        self._device = torch.device(device)

    def save(self, step: int, shared: Callable[[], Any], own: Any) -> None:
        """Write a checkpoint, on all ranks together. `shared` is asked for on rank 0 alone.

        Raises:
            OSError: This rank could not write; its peers raise RuntimeError. What was there before
                is still there.
        """
        draft = self._folder / f".step-{step:09d}.draft"
        problem: OSError | None = None
        if self._world.rank == 0:
            try:
                shutil.rmtree(draft, ignore_errors=True)
                draft.mkdir(parents=True)
            except OSError as error:
                problem = error
        self._agree(problem, draft)
        parts = {_rank_file(self._world.rank): pack(own)}
        if self._world.rank == 0:
            parts[_SHARED] = pack(shared())
        try:
            for name, data in parts.items():
                _write_synced(draft / name, data)
        except OSError as error:
            problem = error
        table = self._agree(problem, draft, *(_fingerprint(data) for data in parts.values()))
        if self._world.rank == 0:
            try:
                self._finish(step, draft, table)
            except OSError:
                shutil.rmtree(draft, ignore_errors=True)
                raise

    def _agree(self, problem: OSError | None, draft: Path, *entries: list[int]) -> list[list[int]]:
        """Tell all ranks this one's files and problems; raise on all if there is one anywhere."""
        mine = [int(problem is not None), *(number for entry in entries for number in entry)]
        mine += [0] * (7 - len(mine))
        told = torch.tensor(mine, dtype=torch.int64, device=self._device)
        table: list[list[int]] = all_gather(told, self._world).value.tolist()
        failed = [rank for rank, row in enumerate(table) if row[0]]
        if failed and self._world.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
        if problem is not None:
            raise OSError(
                problem.errno, f"no checkpoint was written: {problem.strerror}", str(draft)
            )
        if failed:
            raise RuntimeError(f"no checkpoint was written: rank {failed[0]} could not")
        return table

    def _finish(self, step: int, draft: Path, table: list[list[int]]) -> None:
        files = {_rank_file(rank): row[1:4] for rank, row in enumerate(table)}
        files[_SHARED] = table[0][4:7]
        manifest = {
            "format": _FORMAT,
            "step": step,
            "workers": self._world.size,
            "identity": self._identity,
            "files": files,
        }
        _write_synced(draft / _MANIFEST, json.dumps(manifest, indent=1).encode())
        final = self._folder / f"step-{step:09d}"
        aside = self._folder / f".{final.name}.old"
        if final.exists():  # The same step again: one of both is there at any moment.
            final.rename(aside)
        draft.rename(final)
        _sync_folder(self._folder)
        shutil.rmtree(aside, ignore_errors=True)
        found = self._found()
        # Later ones are of a run that went on from an older one: damaged, or not this run's.
        later = [other for other in found if other > step]
        for old in [*later, *found[len(later) + self._keep :]]:
            shutil.rmtree(self._folder / f"step-{old:09d}", ignore_errors=True)

    def _clear_away(self) -> None:
        """Remove what a run that was killed has left half done; keep what is whole."""
        for aside in self._folder.glob(".step-*.old"):
            final = aside.with_name(aside.name[1:].removesuffix(".old"))
            if final.exists():
                shutil.rmtree(aside, ignore_errors=True)
            else:
                aside.rename(final)
        for draft in self._folder.glob(".step-*.draft"):
            shutil.rmtree(draft, ignore_errors=True)

    def _found(self) -> list[int]:
        """Return the steps of the checkpoints that are there, newest first."""
        names = [path.name for path in self._folder.glob("step-*")] if self._folder.is_dir() else []
        # As we write them: other digits, or more of them, are not ours.
        steps = [int(name[5:]) for name in names if re.fullmatch(r"step-[0-9]{9,18}", name)]
        return sorted((step for step in steps if f"step-{step:09d}" in names), reverse=True)

    def load(self) -> LoadedCheckpoint | None:
        """Read the newest checkpoint that is whole and of this run, on all ranks together.

        Returns:
            None if there is none at all.

        Raises:
            NoCheckpoint: There are some, but none can be used.
        """
        if self._world.rank == 0:
            self._clear_away()
        mine = [*self._found()[:_MAX_LISTED], *[-1] * _MAX_LISTED][:_MAX_LISTED]
        told = torch.tensor(mine, dtype=torch.int64, device=self._device)
        steps = [step for step in all_gather(told, self._world).value[0].tolist() if step >= 0]
        reasons: list[str] = []
        for step in steps:
            loaded, why = None, ""
            try:
                loaded = self._read(step)
            except (ValueError, OSError, MemoryError) as error:
                why = " ".join(str(error).split()) or type(error).__name__
            flag = torch.tensor([int(loaded is None)], device=self._device)
            bad = all_gather(flag, self._world).value.flatten().nonzero().flatten().tolist()
            if loaded is not None and not bad:
                for reason in reasons if self._world.rank == 0 else ():
                    log.warning("passing over a checkpoint in %s: %s", self._folder, reason)
                return loaded
            reasons.append(f"step {step}: {why or f'rank {bad[0]} cannot use its part'}")
        if reasons:
            raise NoUsableCheckpoint(
                f"no checkpoint in {self._folder} can be used ({'; '.join(reasons)}): "
                "go on with the settings it was saved with, or start in a new folder"
            )
        return None

    def _read(self, step: int) -> LoadedCheckpoint:
        folder = self._folder / f"step-{step:09d}"
        manifest = _read_manifest(folder / _MANIFEST)
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
        # Read and checked now: after a look at all of it another checkpoint cannot be taken.
        if workers == self._world.size:
            own = part(self._world.rank)
            return LoadedCheckpoint(step, workers, shared, lambda rank: own)
        for rank in range(workers):
            part(rank)
        return LoadedCheckpoint(step, workers, shared, part)


def _rank_file(rank: int) -> str:
    return f"rank-{rank}.safetensors"


def _fingerprint(data: bytes) -> list[int]:
    """Return the length and digest of a file, as numbers that a collective can carry."""
    digest = hashlib.blake2b(data, digest_size=16).digest()
    halves = (digest[:8], digest[8:])
    return [len(data), *(int.from_bytes(half, "big", signed=True) for half in halves)]


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_read_bounded(path, _LARGEST_MANIFEST).decode("utf-8"))
        if found["format"] != _FORMAT:
            raise ValueError(f"its format is {short_repr(found['format'])}, expected {_FORMAT}")
        shapes = (found["workers"], int), (found["identity"], dict), (found["files"], dict)
        if not all(isinstance(value, kind) for value, kind in shapes):
            raise ValueError("its manifest is damaged")
        if len(found["files"]) != found["workers"] + 1:
            raise ValueError(f"its manifest is damaged: {short_repr(found['workers'])} workers")
    except (KeyError, TypeError, RecursionError, UnicodeDecodeError, json.JSONDecodeError):
        raise ValueError(f"{path.name} is damaged") from None
    manifest: dict[str, Any] = found
    return manifest


def _read_verified(path: Path, files: Mapping[str, Any]) -> bytes:
    """Return a file's bytes if they are those that were written."""
    entry = files.get(path.name)
    size = entry[0] if isinstance(entry, list) and entry else None
    # What is longer than it was is not read: only as much memory is taken as was written.
    data = _read_bounded(path, size) if isinstance(size, int) and size >= 0 else b""
    if _fingerprint(data) != entry:
        raise ValueError(f"{path.name} is damaged or cut short")
    return data


def _read_bounded(path: Path, most: int) -> bytes:
    """Return a file's bytes, if it is one and has no more than it may."""
    if path.exists() and not path.is_file():  # A pipe would never end.
        raise ValueError(f"{path.name} is not a file")
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size > most:
            raise ValueError(f"{path.name} is damaged: it is longer than {most:,} bytes")
        return file.read()


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Make a rename last, where the system can sync a folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
