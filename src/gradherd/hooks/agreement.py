"""All ranks compare their settings before the first step.

Ranks with different settings would exchange tensors of different sizes: gloo then aborts, or every
rank hangs. So `attach` compares the settings first, through the key-value store of the process
group. Unlike a collective, the store can tell which rank is missing, and a rank that goes on
training without having attached does not interfere.
"""

import json
import re
import secrets
import time
import weakref
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from gradherd.comm.world import World

# Calls of `attach` in each group: every call has keys of its own.
_calls: "weakref.WeakKeyDictionary[dist.Store, int]" = weakref.WeakKeyDictionary()
_POLL_SECONDS = 0.01


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
        values = {name: _readable(value) for name, value in settings.items()}
        ranks = self._exchange({"settings": values})
        for rank, entry in enumerate(ranks):
            if "error" in entry:
                raise RuntimeError(f"attach() failed on rank {rank}: {entry['error']}")
        if differences := _differences([entry["settings"] for entry in ranks]):
            raise ValueError(
                f"ranks differ in {'; in '.join(differences)}: attach with the same settings on "
                "all ranks"
            )

    def refuse(self, error: Exception) -> None:
        """Tell the other ranks that this one has failed, so that they do not wait for it."""
        if self._world.size > 1:
            self._write({"error": " ".join(str(error).split())})

    def _exchange(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the entries of all ranks."""
        timeout = self._world.timeout().total_seconds()
        deadline = time.monotonic() + timeout
        nonces: list[str | None] = []
        while True:
            # With what was read: an entry in the store may be that of a process that died, which
            # answers nobody.
            self._write(own | {"seen": nonces})
            ranks = [self._read(rank) for rank in range(self._world.size)]
            nonces = [None if entry is None else entry["nonce"] for entry in ranks]
            present = [entry for entry in ranks if entry is not None]
            if len(present) == len(ranks) and (
                any("error" in entry for entry in present)
                or all(entry["seen"] == nonces for entry in present)
            ):
                return present
            if time.monotonic() > deadline:
                raise RuntimeError(self._missing(ranks, timeout))
            time.sleep(_POLL_SECONDS)

    def _missing(self, ranks: list[dict[str, Any] | None], timeout: float) -> str:
        absent = [rank for rank, entry in enumerate(ranks) if entry is None]
        # Otherwise some left entries in an earlier life of the store.
        absent = absent or [
            rank for rank, entry in enumerate(ranks) if entry and self._nonce not in entry["seen"]
        ]
        named = f"rank {absent[0]}" if len(absent) == 1 else f"ranks {absent}"
        return (
            f"{named} did not call attach() within {timeout:g} s, the timeout of the process "
            "group: call it on all ranks"
        )

    def _write(self, entry: dict[str, Any]) -> None:
        text = json.dumps(entry | {"nonce": self._nonce})
        self._store.set(f"{self._prefix}/{self._world.rank}", text)

    def _read(self, rank: int) -> dict[str, Any] | None:
        # `get` would block until the key is there, and could not say which rank is missing.
        if not self._store.check([f"{self._prefix}/{rank}"]):
            return None
        entry: dict[str, Any] = json.loads(self._store.get(f"{self._prefix}/{rank}"))
        return entry


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
