"""The state of a `Herd`: as bytes, gathered from all ranks, merged for other worlds."""

import json
import math
import struct
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from torch import Tensor

from gradherd.comm.checks import check_state
from gradherd.comm.collectives import gather, gather_objects
from gradherd.comm.world import World

if TYPE_CHECKING:
    from gradherd.hooks.exchange import ModelExchange
    from gradherd.hooks.herd import Herd

# What JSON holds without loss.
_PLAIN = (type(None), bool, int, float, str)
_TREE = "tree"
NOT_FOR_DCP = "dcp_needs_stateful"
"""Key of the `RefuseDCP` in a herd's state. DCP reports it as missing when asked to load."""
EXCHANGES = ("sparsify", "local")
"""Parts of a herd's state that differ between ranks: a herd has at most one of them."""
_MERGED_KEYS = (
    "residual", "owner_error", "velocity", "weights", "buffers", "arrival", "optimizer"
)  # fmt: skip
"""Entries of a worker's state that hold a tensor for each parameter (or buffer) of that worker."""

_COMMON_KEYS = ("shared", "outer_momentum", "arrived")
"""Large entries that are equal on all workers (local steps)."""


def pack(state: Any) -> bytes:
    """Return a nested state as bytes: safetensors for tensors, JSON for the rest.

    Never pickle: loading a checkpoint must not be able to run code.

    Raises:
        TypeError: It holds more than dicts, lists, tuples, tensors, numbers, strings and None.

    >>> unpack(pack({"a": [1, 2.5, None], 3: ("x", True)}))
    {'a': [1, 2.5, None], 3: ('x', True)}
    """
    tensors: dict[str, Tensor] = {}
    tree = _to_tree(state, tensors)
    return safetensors.torch.save(tensors, metadata={_TREE: json.dumps(tree)})


def _to_tree(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, RefuseDCP):
        value = {}  # as in a file of torch.save
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        name = str(len(tensors))
        # A copy, because safetensors refuses tensors that share memory; on the CPU, because the
        # state may be loaded where there is no such device.
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {"tensor": name}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, _PLAIN):
                raise TypeError(f"keys of a state must be numbers or strings, got {key!r}")
        # As pairs: keys of a JSON object would all become strings.
        return {"dict": [[key, _to_tree(item, tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        # JSON has no tuples, and a state must come back as it was.
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_to_tree(item, tensors) for item in value]}
    raise TypeError(f"a state cannot hold a {type(value).__name__}")


def unpack(data: bytes) -> Any:
    """Return the state that `pack` was given.

    Raises:
        ValueError: The bytes are not a packed state.
    """
    try:
        # safetensors loads tensors from bytes but not their metadata. Its header is JSON behind
        # eight bytes of length.
        (length,) = struct.unpack("<Q", data[:8])
        tree = json.loads(json.loads(data[8 : 8 + length])["__metadata__"][_TREE])
        return _from_tree(tree, safetensors.torch.load(data))
    except (
        # Whatever is wrong with the bytes is one thing to the caller: a file that is damaged, or
        # something else altogether.
        safetensors.SafetensorError,
        struct.error,
        ValueError,
        KeyError,
        TypeError,
        RecursionError,
    ) as error:
        raise ValueError(f"not a saved state: {' '.join(str(error).split())}") from None


def _from_tree(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(tree, _PLAIN):
        return tree
    if not isinstance(tree, dict) or len(tree) != 1:
        raise ValueError(f"unexpected {type(tree).__name__}")
    ((kind, value),) = tree.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "dict":
        return {key: _from_tree(item, tensors) for key, item in value}
    if kind in ("list", "tuple"):
        items = [_from_tree(item, tensors) for item in value]
        return items if kind == "list" else tuple(items)
    raise ValueError(f"unexpected {kind!r}")


def gather_states(state: dict[str, Any], world: World) -> list[dict[str, Any]]:
    """Return the states of all ranks' exchange on rank 0, in CPU memory; elsewhere [].

    All ranks have parameters of the same names and shapes.
    """
    # What is equal on all ranks is taken from rank 0's own state, by `all_parts`.
    skipped = (*_MERGED_KEYS, *_COMMON_KEYS)
    rest = {key: value for key, value in state.items() if key not in skipped}
    states = gather_objects(rest, world)
    for key in _MERGED_KEYS:
        # One parameter after the other: a GPU need not hold the residuals of all ranks.
        for name, own in state.get(key, {}).items():
            for one, piece in zip(states, gather(own, world), strict=True):
                one.setdefault(key, {})[name] = piece.cpu()
    return states


def part_of_rank(state: Mapping[str, Any], world: World, part: str) -> Mapping[str, Any]:
    """Return what a rank continues with: its own part of a gathered state, or all parts merged.

    Raises:
        ValueError: It is the state of another rank alone.
    """
    # One rank alone has no others, and its state is that of all ranks.
    alone = (state.get("rank"), state.get("workers")) == (0, 1)
    if "other_ranks" in state or (alone and world.size > 1):
        # On another number of ranks nobody has a part of its own, so all are merged.
        parts = all_parts(state)
        return parts[world.rank] if len(parts) == world.size else merge_parts(parts)
    saved, size = state.get("rank"), state.get("workers")
    if saved is not None and size == world.size and saved != world.rank and saved < world.size:
        raise ValueError(
            f"{part} state has rank {saved} alone, expected {world.rank}: save what "
            "state_dict() returns on rank 0, which holds all ranks, or what it returns on each rank"
        )
    return state


def check_row_length(state: Mapping[str, Any], columns: Iterable[str], length: int) -> None:
    """Raise ValueError unless what an ordering has summed up are rows of this many elements."""
    for name in columns:
        saved = state["balance"].get(name)
        if isinstance(saved, Tensor) and saved.shape[-1] != length:
            raise ValueError(
                f"ordering state has {name} of {saved.shape[-1]} elements, expected {length}: was "
                "it saved with rows of another kind (give attach() that one: rows='batch', "
                "'exact', 'sketch' or 'two-sided'; 'auto' depends on the number of ranks) or of "
                "another model?"
            )


def all_parts(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the states of all ranks in a gathered state, by rank."""
    own = {key: value for key, value in state.items() if key != "other_ranks"}
    common = {key: own[key] for key in _COMMON_KEYS if key in own}
    return [own, *({**other, **common} for other in state.get("other_ranks", []))]


def merge_parts(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the states of all workers into one that any number of workers can load.

    A step applies the mean over workers, so the mean of the residuals is what must not change:
    every new worker gets that mean. The state of the method (thresholds, partitions) belongs to the
    old number of workers and is dropped; it settles again within a few steps. A generator that
    loads one state after the other keeps memory small.

    Raises:
        ValueError: These are not the states of all workers after the same step.
    """
    first: Mapping[str, Any] | None = None
    sums: dict[str, dict[str, Tensor]] = {}
    ranks: list[Any] = []
    for state in states:
        first = state if first is None else first
        for key in ("kind", "workers", "dim", "step", "taken"):
            if state.get(key) != first.get(key):
                raise ValueError(
                    f"states to merge differ in {key}: {first.get(key)!r} and {state.get(key)!r}"
                )
        ranks.append(state.get("rank"))
        for key in _MERGED_KEYS:
            for name, own in state.get(key, {}).items():
                # Summed in float64, to round once and not at every rank.
                sums.setdefault(key, {}).setdefault(name, torch.zeros_like(own).double()).add_(own)
    if first is None or set(ranks) != set(range(first["workers"])) or len(ranks) > len(set(ranks)):
        of_all = "" if first is None else f" of {first['workers']}"
        raise ValueError(f"states must be of all ranks{of_all}, each once, got ranks {ranks}")
    means = {
        key: {name: (total / len(ranks)).to(first[key][name]) for name, total in named.items()}
        for key, named in sums.items()
    }
    return {**first, **means, "rank": None, "method": None}


def merge_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one state that any number of ranks can load.

    Args:
        states: What `Herd.state_dict` returned on every rank, or just on rank 0. A generator that
            reads one after the other keeps memory small.

    Returns:
        A state for `Herd.load_state_dict`, the same for all ranks.

    Raises:
        ValueError: These are not the states of all ranks after the same step.
    """
    if isinstance(states, Mapping):
        states = [states]
    if not isinstance(states, Iterable):
        raise ValueError(f"states must be a list of states, got {type(states).__name__}")
    merged: dict[str, Any] = {}

    # A generator, so that only one rank's residuals are in memory beside their sum.
    def parts() -> Iterator[Mapping[str, Any]]:
        for state in states:
            check_state(state)
            # These are equal on all ranks, so any rank's will do.
            shared = ("ordering", "sampler", "rows")
            merged.update({key: state[key] for key in shared if key in state})
            for key in EXCHANGES:
                if key in state:
                    merged[key] = None  # below
                    yield from all_parts(state[key])
                if "other_ranks" in state.get(key, {}):
                    return  # Rank 0 has saved those of the other ranks with its own.

    pieces = parts()
    first = next(pieces, None)
    if not merged:
        raise ValueError("states must be what Herd.state_dict() returned on every rank, got none")
    for key in merged.keys() & set(EXCHANGES):  # at most one
        assert first is not None
        merged[key] = merge_parts(chain([first], pieces))
    return merged


class RefuseDCP:
    """An entry of a state that torch.distributed.checkpoint (DCP) cannot save.

    DCP drops what a fresh herd's state does not have, and takes entries of the same name on
    different ranks for copies of one. A herd's own state would lose the residuals of all ranks but
    one, without an error. torch.save writes this entry as an empty dict, which loads anywhere.
    """

    def __create_write_items__(self, fqn: str, value: object) -> list[Any]:
        """Raise RuntimeError: DCP calls this when it plans how to save an object."""
        raise RuntimeError(
            f"torch.distributed.checkpoint cannot save the state of a Herd itself ({fqn}): give it "
            "herd.stateful(), or return herd.stateful().state_dict() from your own Stateful"
        )

    def __reduce__(self) -> tuple[type, tuple[()]]:
        # One of the few types that torch.load(weights_only=True) accepts.
        return OrderedDict, ()


class HerdState:
    """A herd as `Stateful` of torch.distributed.checkpoint (DCP).

    DCP treats entries of the same name on different ranks as the same, and loads only names that
    a fresh herd has already. So each rank's state is one entry, under a name of its own:

        dcp.save({"model": ddp, "herd": herd.stateful()}, checkpoint_id=folder)

    A checkpoint of another number of ranks is loaded with `saved_by`, before anything is saved:

        dcp.load({"model": ddp, "herd": herd.stateful(saved_by=4)}, checkpoint_id=folder)

    What belongs to the parameters of a sharded model is saved beside it, as DTensors, one for each
    parameter and replica: so DCP cuts them anew for another number of shards. Another number of
    replicas gets the mean of all of them: a step applies the mean over replicas, so the mean must
    not change. `saved_by` is then the shape of the mesh, (replicas, shards).
    """

    def __init__(
        self,
        herd: "Herd",
        saved_by: tuple[int, int] | int | None = None,
        exchange: "ModelExchange | None" = None,
    ) -> None:
        """Wrap a herd; `saved_by` ranks, by default as many as now, saved what is to be loaded."""
        self._herd, world = herd, herd.world
        self._sharded = sharded = exchange if exchange is not None and exchange.sharded else None
        self._mesh = (world.size, 1) if exchange is None else exchange.mesh
        self._place = (world.rank, 0) if exchange is None else exchange.place
        if saved_by is None:
            saved_by = self._mesh
        elif sharded is None:
            saved_by = (math.prod(saved_by) if isinstance(saved_by, tuple) else saved_by, 1)
            if saved_by[0] < 1:
                raise ValueError(f"saved_by must be at least 1, got {saved_by[0]}")
        elif isinstance(saved_by, int) or len(saved_by) != 2 or min(saved_by) < 1:
            raise ValueError(
                f"saved_by must be (replicas, shards) of a sharded model's mesh, got {saved_by!r}"
            )
        self._saved_by = tuple(saved_by)

    @property
    def _names(self) -> list[str]:
        """Entries to save or load: this rank's own, or those that others have saved."""
        size, ranks = math.prod(self._saved_by), range(1)
        if self._saved_by == self._mesh:
            own = self._place[0] * self._mesh[1] + self._place[1]
            ranks = range(own, own + 1)
        elif self._sharded is None:  # else what is beside the tensors is equal, or starts again
            ranks = range(size)
        return [f"rank-{rank}-of-{size}" for rank in ranks]

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state; to load what others saved, what of it to read."""
        # DCP asks for a state before it loads, to learn which names to read.
        if self._saved_by != self._mesh:
            return dict.fromkeys(self._names, b"") | dict(self._tensors())
        herd = self._herd.state_dict(gather=False)
        if self._sharded is not None:
            # Not in this rank's entry: every rank writes its own shards, which is what DCP is for.
            own, kept = herd[self._sharded.key], self._sharded.vectors()
            herd[self._sharded.key] = {key: own[key] for key in own.keys() - kept.keys()}
        return {self._names[0]: pack(herd)} | dict(self._tensors())

    def _replicas(self) -> range:
        """Return the saved replicas whose vectors this rank continues with."""
        (saved, _), (now, _), (own, _) = self._saved_by, self._mesh, self._place
        # As many replicas as before: each keeps its own residuals, in other shards.
        return range(own, own + 1) if saved == now else range(saved)

    def _tensors(self) -> Iterator[tuple[str, Any]]:
        """Yield each vector of a sharded model as DTensors, under the names of its replicas."""
        if self._sharded is None:
            return
        from torch.distributed.tensor import DTensor  # takes seconds, and is there by now

        for replica in self._replicas():
            for key, by_name in self._sharded.vectors().items():  # copies: DCP reads into them
                for name, local in by_name.items():
                    like: Any = self._sharded.parameters[name]
                    yield (
                        f"{key}.{replica}-of-{self._saved_by[0]}.{name}",
                        DTensor.from_local(
                            local,
                            like.device_mesh,
                            like.placements,
                            run_check=False,
                            shape=like.shape,
                            stride=like.stride(),
                        ),
                    )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the state was saved. All ranks must call it.

        Raises:
            ValueError: It is of another model or method, or an entry is missing, empty or damaged.
        """
        entries = (_unpacked(state, name) for name in self._names)
        same, exchange = self._saved_by == self._mesh, self._sharded
        whole = next(entries) if same or exchange is not None else merge_states(entries)
        if exchange is not None and (own := whole.get(exchange.key)) is not None:
            if not same:
                # As merged states are: the method starts again, and buffers stay what they are.
                own.pop("buffers", None)
                own |= {"rank": None, "method": None, "dim": exchange.layout.sparse}
                own |= {"workers": self._mesh[0], "mesh": list(self._mesh)}
                own |= {"place": list(exchange.place)}
            for key, by_name in exchange.vectors().items():
                own[key] = {name: self._mean(state, key, name) for name in by_name}
        self._herd.load_state_dict(whole)
        self._saved_by = self._mesh  # What is saved from now on is this rank's own again.

    def _mean(self, state: Mapping[str, Any], key: str, name: str) -> Tensor:
        """Return this rank's shard of the mean over the saved replicas, summed in float64."""
        parts: list[Tensor] = [
            state[f"{key}.{replica}-of-{self._saved_by[0]}.{name}"].to_local()
            for replica in self._replicas()
        ]
        if len(parts) == 1:
            return parts[0]
        total = torch.stack([part.double() for part in parts]).sum(0)
        return (total / len(parts)).to(parts[0].dtype)


def _unpacked(state: Mapping[str, Any], name: str) -> Any:
    """Return an entry of what DCP has loaded."""
    if not state.get(name):  # empty: a placeholder, which DCP has saved instead of loading it
        raise ValueError(
            f"state of {name} is {'empty' if name in state else 'missing'}: was it saved by "
            "another number of ranks, which stateful(saved_by=...) takes, or before it was loaded?"
        )
    return unpack(state[name])
