"""Tensors in nested arguments and outputs: tuples, dictionaries, dataclasses."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


def tensor_leaves(tree: Any) -> list[Tensor]:
    """Return the tensors in nested containers, always in the same order.

    Other objects are not searched: what they hold (such as the cache of a decoder) is seldom part
    of a loss.
    """
    tensors: list[Tensor] = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        elif _is_dataclass_instance(leaf):
            # Unless it is registered, torch takes a dataclass for a leaf.
            tensors += tensor_leaves([getattr(leaf, f.name) for f in dataclasses.fields(leaf)])
    return tensors


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Return the same containers with `function` applied to each tensor."""

    def apply(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return function(leaf)
        if _is_dataclass_instance(leaf):
            result = copy.copy(leaf)
            for field in dataclasses.fields(leaf):
                # Not replace(), which would run __post_init__ again; not setattr(), which a
                # frozen dataclass refuses.
                value = tree_map(apply, getattr(leaf, field.name))
                object.__setattr__(result, field.name, value)
            return result
        return leaf

    return tree_map(apply, tree)


def _is_dataclass_instance(leaf: Any) -> bool:
    return dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)


def detach_all(tree: Any) -> Any:
    """Return `tree` with every tensor detached from its graph; nothing is copied."""
    return map_tensors(lambda tensor: tensor.detach(), tree)


def tensor_versions(tree: Any) -> tuple[int, ...]:
    """Return the version counter of every tensor in `tree`, to detect in-place changes."""
    return tuple(tensor._version for tensor in tensor_leaves(tree))
