"""The residuals of some workers, for another number of workers.

A step applies the mean of what all workers hold, so that mean is what must not change: each new
worker gets it whole. What a method remembers (thresholds, partitions) is of the old partitions and
begins anew; it settles within a step or a few.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

_KEPT = ("residual", "velocity")


def merged(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state that any number of workers can load, from those of all workers there were.

    Args:
        states: What `SparseHook.state_dict` returned on each rank; one after the other is enough.

    Raises:
        ValueError: They are not the states of all workers of one step.
    """
    first: Mapping[str, Any] | None = None
    sums: dict[str, dict[str, Tensor]] = {}
    ranks: list[Any] = []
    for state in states:
        first = state if first is None else first
        for key in ("kind", "workers", "dim", "step"):
            if state.get(key) != first.get(key):
                raise ValueError(
                    f"states to merge differ in {key}: {first.get(key)!r} and {state.get(key)!r}"
                )
        ranks.append(state.get("rank"))
        for key in _KEPT:
            for name, own in state.get(key, {}).items():
                sums.setdefault(key, {}).setdefault(name, torch.zeros_like(own).double()).add_(own)
    if first is None or set(ranks) != set(range(first["workers"])) or len(ranks) > len(set(ranks)):
        wanted = "" if first is None else f" of {first['workers']}"
        raise ValueError(f"states must be of all ranks{wanted}, each once, got ranks {ranks}")
    means = {
        key: {name: (total / len(ranks)).to(first[key][name]) for name, total in named.items()}
        for key, named in sums.items()
    }
    return {**first, **means, "rank": None, "method": None}
