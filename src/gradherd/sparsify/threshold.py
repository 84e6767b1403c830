"""Hard threshold: every worker picks what reaches a line that does not move.

Sahu et al., "Rethinking gradient sparsification as total error minimization", NeurIPS 2021. The
line is the same at every step, so how much travels follows the gradients: all of it where they
are large, nothing at all where they are small. Workers pick differently; what travels is the
union of their picks.

Letters: D coordinates, R workers, H numbers of a header, K coordinates that travel.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradherd.comm.script import Script
from gradherd.sparsify.exchange import gather_union
from gradherd.sparsify.kernels import above
from gradherd.sparsify.selector import Chosen, Place, Proposal, check_density, target


@dataclass(frozen=True)
class State:
    """What all workers know alike."""

    threshold: float
    """It changes with the unit of values, never otherwise."""


@dataclass(frozen=True)
class Threshold:
    """What reaches a constant, united."""

    density: float = 1e-3
    """Share of the coordinates that the default threshold is meant for; what travels may be any."""
    value: float | None = None
    """The threshold, in the unit of the first step; None is 1 / (2 sqrt k). Then a density that
    falls over the first steps is followed; a value of your own is kept."""

    exclusive = False

    def __post_init__(self) -> None:
        check_density(self.density)
        if self.value is not None and not 0 < self.value < math.inf:
            raise ValueError(f"value must be a positive number or None, got {self.value}")

    def begin(self, dim: int, workers: int, layers: Sequence[int]) -> State:
        """Set the threshold for good."""
        return State(suggested(target(self.density, dim)) if self.value is None else self.value)

    def propose(self, acc: Tensor, k: int, state: State, place: Place) -> Proposal:
        """Pick, and show how many."""
        threshold = state.threshold
        if self.value is None:
            threshold *= suggested(k) / suggested(target(self.density, len(acc)))
        threshold = within(threshold, acc.dtype)
        picks = above(acc, threshold)
        return Proposal(count_of(picks), (picks, threshold))

    def settle(
        self, acc: Tensor, k: int, state: State, place: Place, proposal: Proposal, headers: Tensor
    ) -> Script[Chosen]:
        """Unite everybody's picks."""
        picks, threshold = proposal.found
        return (yield from unite(picks, len(acc), k, place, headers, state, threshold))

    def rescale(self, state: State, factor: float) -> State:
        """Follow a change of the unit that values are in."""
        return replace(state, threshold=state.threshold * factor)


def suggested(k: int) -> float:
    """Return the threshold that the paper suggests where about k coordinates should travel.

    >>> suggested(25)
    0.1
    """
    return 1 / (2 * math.sqrt(k))


def within(threshold: float, dtype: torch.dtype) -> float:
    """Return the threshold, or the nearest that can be multiplied and compared with in `dtype`."""
    limits = torch.finfo(dtype)
    return min(max(threshold, limits.tiny), limits.max)


def count_of(picks: Tensor) -> Tensor:
    """Return the header of methods whose workers pick as many as they like: (1,) int32."""
    return torch.tensor([len(picks)], dtype=torch.int32, device=picks.device)


def unite(
    picks: Tensor,
    dim: int,
    k: int,
    place: Place,
    headers: Tensor,
    state: Any,
    threshold: float | None,
) -> Script[Chosen]:
    """Choose what anybody picked; everything where k says so.

    Args:
        picks: (K_r,) ascending indices of this worker.
        dim: D.
        k: How many coordinates should travel.
        place: Which worker this is.
        headers: (R, 1) how many each worker picked.
        state: What the method remembers for the next step.
        threshold: Of this worker.
    """
    if k >= dim:
        everything = torch.arange(dim, device=picks.device)
        return Chosen(everything, [dim] * place.size, state, 0.0)
    counts = headers[:, 0].tolist()
    union = yield from gather_union(picks, counts, dim, place)
    return Chosen(union, counts, state, threshold)
