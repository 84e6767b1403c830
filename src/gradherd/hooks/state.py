"""The state of a `Herd`: as bytes, gathered from all ranks, merged for other worlds."""

import json
import struct
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import safetensors.torch
from torch import Tensor

from gradherd.comm.checks import check_state
from gradherd.comm.collectives import gather, gather_objects
from gradherd.comm.world import World
from gradherd.sparsify.worker import COMMON_KEYS, MERGED_KEYS, merge_residuals

# What JSON holds without loss.
_PLAIN = (type(None), bool, int, float, str)
_TREE = "tree"
NOT_FOR_DCP = "dcp_needs_stateful"
"""Key of the `RefuseDCP` in a herd's state. DCP reports it as missing when asked to load."""
EXCHANGES = ("sparsify", "local")
"""Parts of a herd's state that differ between ranks: a herd has at most one of them."""


def pack(state: Any) -> bytes:
    """Return a nested state as bytes: safetensors for tensors, JSON for the rest.

    Never pickle: loading a checkpoint must not be able to run code.

    Args:
        state: Dicts, lists, tuples, tensors, numbers, strings and None.

    Returns:
        The bytes, which `unpack` reads.

    Raises:
        TypeError: The state holds something else.

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

    Args:
        data: What `pack` returned.

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

    Args:
        state: This rank's own. All ranks have parameters of the same names and shapes.
        world: The ranks.
    """
    # What is equal on all ranks is taken from rank 0's own state, by `all_parts`.
    skipped = (*MERGED_KEYS, *COMMON_KEYS)
    rest = {key: value for key, value in state.items() if key not in skipped}
    states = gather_objects(rest, world)
    for key in MERGED_KEYS:
        # One parameter after the other: a GPU need not hold the residuals of all ranks.
        for name, own in state.get(key, {}).items():
            for one, piece in zip(states, gather(own, world), strict=True):
                one.setdefault(key, {})[name] = piece.cpu()
    return states


def part_of_rank(state: Mapping[str, Any], world: World) -> Mapping[str, Any]:
    """Return what a rank continues with: its own part of a gathered state, or all parts merged.

    Args:
        state: The exchange's state of a rank, of all ranks ("other_ranks"), or merged.
        world: The ranks that load it.

    Raises:
        ValueError: It is the state of another rank alone.
    """
    # One rank alone has no others, and its state is that of all ranks.
    alone = (state.get("rank"), state.get("workers")) == (0, 1)
    if "other_ranks" in state or (alone and world.size > 1):
        # On another number of ranks nobody has a part of its own, so all are merged.
        parts = all_parts(state)
        return parts[world.rank] if len(parts) == world.size else merge_residuals(parts)
    saved, size = state.get("rank"), state.get("workers")
    if saved is not None and size == world.size and saved != world.rank and saved < world.size:
        raise ValueError(
            f"sparsify state has rank {saved} alone, expected {world.rank}: save what "
            "state_dict() returns on rank 0, which holds all ranks, or what it returns on each rank"
        )
    return state


def check_row_length(state: Mapping[str, Any], columns: Iterable[str], length: int) -> None:
    """Raise unless what an ordering has summed up are rows of this many elements.

    Args:
        state: What `Ordering.state_dict` returned.
        columns: Its tensors with a column for each element of a row.
        length: Elements of a row.
    """
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
    common = {key: own[key] for key in COMMON_KEYS if key in own}
    return [own, *({**other, **common} for other in state.get("other_ranks", []))]


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
    state: dict[str, Any] = {}

    def exchange_states() -> Iterator[tuple[str, Mapping[str, Any]]]:
        for one in states:
            check_state(one)
            # Equal on all ranks, so any rank's will do.
            state.update({key: one[key] for key in ("ordering", "sampler") if key in one})
            for key in EXCHANGES:
                if "other_ranks" in one.get(key, {}):
                    yield from ((key, part) for part in all_parts(one[key]))
                    return  # Rank 0 has saved those of the other ranks with its own.
                if key in one:
                    yield key, one[key]

    if isinstance(states, Mapping):
        states = [states]
    if not isinstance(states, Iterable):
        raise ValueError(f"states must be a list of states, got {type(states).__name__}")
    # A generator again, so that only one rank's residuals are in memory beside their sum.
    pieces = exchange_states()
    first = next(pieces, None)
    if not state and first is None:
        raise ValueError("states must be what Herd.state_dict() returned on every rank, got none")
    if first is not None:
        parts = (part for _, part in chain([first], pieces))
        state[first[0]] = merge_residuals(parts)
    return state


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
