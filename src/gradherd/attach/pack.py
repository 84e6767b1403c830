"""A nested state as bytes and back: safetensors for tensors, JSON for all else, never pickle."""

import json
import struct
from collections.abc import Mapping
from typing import Any

import safetensors.torch
from torch import Tensor

_PLAIN = (type(None), bool, int, float, str)
_TREE = "tree"


def pack(state: Any) -> bytes:
    """Return dicts, lists, tuples, tensors, numbers, strings and None as bytes.

    >>> unpack(pack({"a": [1, 2.5, None], 3: ("x", True)}))
    {'a': [1, 2.5, None], 3: ('x', True)}
    """
    tensors: dict[str, Tensor] = {}
    tree = _walk(state, tensors)
    return safetensors.torch.save(tensors, metadata={_TREE: json.dumps(tree)})


def _walk(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        name = str(len(tensors))
        # A copy of its own: safetensors refuses memory that two tensors share.
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {"tensor": name}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, _PLAIN):
                raise TypeError(f"a state's keys must be numbers or strings, got {key!r}")
        return {"dict": [[key, _walk(item, tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_walk(item, tensors) for item in value]}
    raise TypeError(f"a state cannot hold a {type(value).__name__}")


def unpack(data: bytes) -> Any:
    """Return the state, or raise ValueError if the bytes are not one."""
    try:
        (length,) = struct.unpack("<Q", data[:8])
        tree = json.loads(json.loads(data[8 : 8 + length])["__metadata__"][_TREE])
        return _built(tree, safetensors.torch.load(data))
    except (
        safetensors.SafetensorError,
        struct.error,
        ValueError,
        KeyError,
        TypeError,
        RecursionError,
    ) as error:
        raise ValueError(f"not a saved state: {' '.join(str(error).split())}") from None


def _built(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(tree, _PLAIN):
        return tree
    if not isinstance(tree, dict) or len(tree) != 1:
        raise ValueError(f"unexpected {type(tree).__name__}")
    ((kind, value),) = tree.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "dict":
        return {key: _built(item, tensors) for key, item in value}
    if kind in ("list", "tuple"):
        items = [_built(item, tensors) for item in value]
        return items if kind == "list" else tuple(items)
    raise ValueError(f"unexpected {kind!r}")
