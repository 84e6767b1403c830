"""A herd's state in a checkpoint of torch's own, and on another number of ranks."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Protocol

from gradherd.attach.pack import pack, unpack
from gradherd.sparsify.residuals import merge_residuals


class Saved(Protocol):
    """What has a state on each of several ranks: a `Herd`."""

    @property
    def place(self) -> tuple[int, int]:
        """Which rank this is, and of how many."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        ...


def merge_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one state that any number of ranks can load.

    Args:
        states: What `Herd.state_dict` returned on each rank there was; a generator that reads one
            after the other keeps memory small.
    """
    found: dict[str, Any] = {}

    def sparse() -> Iterator[Mapping[str, Any]]:
        for state in states:
            found.update({key: state[key] for key in ("ordering", "sampler") if key in state})
            if "sparsify" in state:
                yield state["sparsify"]

    pieces = sparse()
    first = next(pieces, None)
    if first is not None:
        found["sparsify"] = merge_residuals(chain([first], pieces))
    return found


class HerdState:
    """A herd as `Stateful` of torch.distributed.checkpoint.

    That one takes what ranks call by the same name for the same thing, and loads no name that a
    fresh herd does not have yet. So each rank's state is one piece, under a name of its own:

        dcp.save({"model": ddp, "herd": herd.stateful()}, checkpoint_id=folder)

    A checkpoint of another number of ranks is loaded with `saved_by`, before anything is saved:

        dcp.load({"model": ddp, "herd": herd.stateful(saved_by=4)}, checkpoint_id=folder)
    """

    def __init__(self, herd: Saved, saved_by: int | None = None) -> None:
        rank, size = herd.place
        self._herd, self._size = herd, size
        self._saved_by = size if saved_by is None else saved_by
        if self._saved_by < 1:
            raise ValueError(f"saved_by must be at least 1, got {saved_by}")
        self._name = _name(rank, size)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state; to load from other ranks, the names of theirs."""
        if self._saved_by != self._size:
            return {_name(rank, self._saved_by): b"" for rank in range(self._saved_by)}
        return {self._name: pack(self._herd.state_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the state was taken. All ranks must call it."""
        if self._saved_by == self._size:
            self._herd.load_state_dict(unpack(self._piece(state, self._name)))
            return
        names = [_name(rank, self._saved_by) for rank in range(self._saved_by)]
        self._herd.load_state_dict(merge_states(unpack(self._piece(state, n)) for n in names))
        self._saved_by = self._size  # What is saved from now on is this rank's own again.

    def _piece(self, state: Mapping[str, Any], name: str) -> Any:
        if name in state and not state[name]:
            raise ValueError(f"state of {name} is empty: it was saved before it was loaded")
        if name not in state:
            known = ", ".join(sorted(map(str, state))) or "none"
            raise ValueError(f"state is not of {name}; it has {known}")
        return state[name]


def _name(rank: int, size: int) -> str:
    return f"rank-{rank}-of-{size}"
