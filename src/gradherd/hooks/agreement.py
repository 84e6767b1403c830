"""All ranks compare their settings before the first step.

Ranks with different settings would exchange tensors of different sizes: gloo then aborts, or every
rank hangs. So `attach` compares the settings first, through the key-value store of the process
group. Unlike a collective, the store can tell which rank is missing, and a rank that goes on
training without having attached does not interfere. Rank 0 reads what all have written, and tells
them, so that requests grow with the number of ranks and not with its square.
"""

import json
import re
import secrets
import time
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist

from gradherd.comm.world import World

# Calls of `attach` in each group: every call has keys of its own.
_calls: "weakref.WeakKeyDictionary[dist.Store, int]" = weakref.WeakKeyDictionary()
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5
"""Seconds between two looks into the store."""


class RankAgreement:
    """One call of `attach` on all ranks of a world."""

    def __init__(self, world: World) -> None:
        self._world = world
        if world.size == 1:
            return
        self._store = world.store()
        number = _calls[self._store] = _calls.get(self._store, -1) + 1
        self._prefix = f"gradherd/attach/{number}"
        # A store may outlive its processes (torchrun restarts them), and entries of dead ones look
        # like those of peers. Nobody can have answered a number that was drawn just now.
        self._nonce = secrets.token_hex(8)

    def compare(self, settings: Mapping[str, Any]) -> None:
        """Return when all ranks have called this with the same settings.

        Args:
            settings: What must be equal on all ranks, by name.

        Raises:
            ValueError: A setting differs.
            RuntimeError: A rank did not call it within the timeout of the group, or has failed.
        """
        if self._world.size == 1:
            return
        own = {"settings": {name: _readable(value) for name, value in settings.items()}}
        failed, differs = self._judge(own) if self._world.rank == 0 else self._ask(own)
        if failed:
            raise RuntimeError(failed)
        if differs:
            raise ValueError(differs)

    def refuse(self, error: Exception) -> None:
        """Tell the other ranks that this one has failed, so that they do not wait for it."""
        if self._world.size > 1:
            self._write({"error": " ".join(str(error).split())})

    def _judge(self, own: dict[str, Any]) -> tuple[str, str]:
        """Read the settings of all ranks, on rank 0; return what the others are told."""
        self._write(own)
        ranks: dict[int, dict[str, Any]] = {0: own | {"nonce": self._nonce}}
        for _ in self._polls():
            for rank in range(1, self._world.size):
                entry = None if rank in ranks else self._read(rank)
                # An entry in the store may be that of a process that died, which answers nobody.
                if entry is not None and ("error" in entry or entry["seen"] == self._nonce):
                    ranks[rank] = entry
            if len(ranks) == self._world.size:
                break
        else:
            error = self._missing(self._nonce)
            self.refuse(error)
            raise error
        entries = [ranks[rank] for rank in range(self._world.size)]
        failed = [
            f"attach() failed on rank {rank}: {entry['error']}"
            for rank, entry in enumerate(entries)
            if "error" in entry
        ]
        told = failed[0] if failed else "", "" if failed else _all_differences(entries)
        nonces = [entry["nonce"] for entry in entries]
        self._store.set(f"{self._prefix}/told", json.dumps({"nonces": nonces, "told": told}))
        return told

    def _ask(self, own: dict[str, Any]) -> tuple[str, str]:
        """Send settings to rank 0, and return what it tells all ranks."""
        first, seen = True, None
        for _ in self._polls():
            leader = self._read(0)
            if leader is not None and "error" in leader:
                return f"attach() failed on rank 0: {leader['error']}", ""
            nonce = None if leader is None else leader["nonce"]
            if first or nonce != seen:
                first, seen = False, nonce
                self._write(own | {"seen": seen})
            answer = self._read("told")
            if answer is not None and answer["nonces"][self._world.rank] == self._nonce:
                failed, differs = answer["told"]
                return failed, differs
        raise self._missing(seen)

    def _polls(self) -> Iterator[None]:
        """Yield until the timeout of the group is over, less and less often."""
        deadline = time.monotonic() + self._world.timeout().total_seconds()
        pause = _FIRST_PAUSE
        while True:
            yield
            left = deadline - time.monotonic()
            if left < 0:
                return
            time.sleep(min(pause, left))
            pause = min(1.5 * pause, _LONGEST_PAUSE)

    def _missing(self, leader: str | None) -> RuntimeError:
        """Return the error of a rank whose peers have not come; `leader` is rank 0's nonce."""
        ranks = [self._read(rank) for rank in range(self._world.size)]
        absent = [rank for rank, entry in enumerate(ranks) if entry is None]
        # Otherwise some left entries in an earlier life of the store.
        absent = absent or [
            rank
            for rank, entry in enumerate(ranks)
            if rank and entry and "error" not in entry and entry["seen"] != leader
        ]
        absent = absent or [0]
        named = f"rank {absent[0]}" if len(absent) == 1 else f"ranks {absent}"
        return RuntimeError(
            f"{named} did not call attach() within {self._world.timeout().total_seconds():g} s, "
            "the timeout of the process group: call it on all ranks"
        )

    def _write(self, entry: dict[str, Any]) -> None:
        text = json.dumps(entry | {"nonce": self._nonce})
        self._store.set(f"{self._prefix}/{self._world.rank}", text)

    def _read(self, key: int | str) -> dict[str, Any] | None:
        # `get` would block until the key is there, and could not say which rank is missing.
        if not self._store.check([f"{self._prefix}/{key}"]):
            return None
        entry: dict[str, Any] = json.loads(self._store.get(f"{self._prefix}/{key}"))
        return entry


def _all_differences(ranks: list[dict[str, Any]]) -> str:
    """Return the error of ranks with different settings; "" if they have the same."""
    differences = _differences([entry["settings"] for entry in ranks])
    if not differences:
        return ""
    return f"ranks differ in {'; '.join(differences)}: attach with the same settings on all ranks"


def _differences(ranks: list[dict[str, str]]) -> list[str]:
    """Return each setting that differs, with the ranks of each value."""
    differences = []
    for name in ranks[0]:
        holders: dict[str, list[int]] = {}
        for rank, settings in enumerate(ranks):
            # A rank without local steps does not have their settings at all.
            holders.setdefault(settings.get(name, "none"), []).append(rank)
        if len(holders) > 1:
            values = (
                f"{value} on {'rank' if len(held) == 1 else 'ranks'} {', '.join(map(str, held))}"
                for value, held in holders.items()
            )
            differences.append(f"{name} ({'; '.join(values)})")
    return differences


def _readable(value: Any) -> str:
    """Return a value as text that is the same in all processes: no addresses of objects."""
    # Addresses differ from process to process, and say nothing about the setting.
    return value if isinstance(value, str) else re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
