"""Hard threshold: every worker selects what reaches a constant threshold.

Sahu et al., "Rethinking gradient sparsification as total error minimization", NeurIPS 2021,
arXiv:2108.00951. The threshold never changes, so the density follows the gradients: everything is
sent while they are large, nothing when they are small. Workers select different coordinates, and
the union is sent.

SAGE and SIDCo, whose workers also select any number of coordinates, use the helpers below.

Letters: D coordinates, R workers, H elements of a header, K coordinates that are sent.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradherd.comm.checks import check_numbers
from gradherd.comm.script import Script
from gradherd.sparsify.exchange import gather_union
from gradherd.sparsify.kernels import indices_above
from gradherd.sparsify.selector import (
    Proposal,
    Selection,
    StepContext,
    check_density,
    target_count,
)


@dataclass(frozen=True)
class ThresholdState:
    """State of `Threshold`, the same on all workers."""

    threshold: float
    """Changes only when the unit of the values changes."""


@dataclass(frozen=True)
class Threshold:
    """Send the union of what reaches a constant threshold on any worker.

    Sahu et al., NeurIPS 2021, arXiv:2108.00951. Raises ValueError if a setting is out of range.
    """

    density: float = 1e-3
    """Density that the default threshold is meant for; the actual density may be anything."""
    value: float | None = None
    """The threshold, in the unit of the first step. None is the paper's 1 / (2 sqrt k), which
    follows a warm-up of the density; a given value does not."""

    exclusive = False

    def __post_init__(self) -> None:
        check_density(self.density)
        if self.value is not None:
            check_numbers(value=self.value)
        if self.value is not None and not 0 < self.value < math.inf:
            raise ValueError(f"value must be a positive number or None, got {self.value}")

    def begin(self, dim: int, workers: int, layers: Sequence[int]) -> ThresholdState:
        """Set the threshold."""
        if self.value is not None:
            return ThresholdState(self.value)
        return ThresholdState(suggested_threshold(target_count(self.density, dim)))

    def propose(self, acc: Tensor, k: int, state: ThresholdState, context: StepContext) -> Proposal:
        """Select what reaches the threshold; the header is the count."""
        threshold = state.threshold
        if self.value is None:
            # During a warm-up of the density k is larger than usual, and the threshold lower.
            usual_k = target_count(self.density, len(acc))
            threshold *= suggested_threshold(k) / suggested_threshold(usual_k)
        threshold = clamp_to_dtype(threshold, acc.dtype)
        selected = indices_above(acc, threshold)
        return Proposal(count_header(selected), (selected, threshold))

    def agree(
        self,
        acc: Tensor,
        k: int,
        state: ThresholdState,
        context: StepContext,
        proposal: Proposal,
        headers: Tensor,
    ) -> Script[Selection]:
        """Gather the union of all selections."""
        selected, threshold = proposal.local
        return (yield from select_union(selected, len(acc), k, context, headers, state, threshold))

    def rescale(self, state: ThresholdState, factor: float) -> ThresholdState:
        """Multiply the threshold by `factor`."""
        return replace(state, threshold=state.threshold * factor)


def suggested_threshold(k: int) -> float:
    """Return the paper's threshold for sending about k coordinates: 1 / (2 sqrt k).

    >>> suggested_threshold(25)
    0.1
    """
    return 1 / (2 * math.sqrt(k))


def clamp_to_dtype(threshold: float, dtype: torch.dtype) -> float:
    """Return the threshold, clamped to the positive normal range of `dtype`."""
    # Zero would select everything, exact zeros included; infinity nothing at all, for ever.
    limits = torch.finfo(dtype)
    return min(max(threshold, limits.tiny), limits.max)


def count_header(selected: Tensor) -> Tensor:
    """Return the header of methods that select any number of coordinates: (1,) int32, the count."""
    return torch.tensor([len(selected)], dtype=torch.int32, device=selected.device)


def select_union(
    selected: Tensor,
    dim: int,
    k: int,
    context: StepContext,
    headers: Tensor,
    state: Any,
    threshold: float | None,
) -> Script[Selection]:
    """Agree on the union of all workers' selections, or on everything if k is D.

    Args:
        selected: (K_r,) ascending indices that this worker selected.
        dim: D.
        k: Number of coordinates to send.
        context: Which worker this is.
        headers: (R, 1) how many coordinates each worker selected.
        state: The method's state for the next step.
        threshold: This worker's threshold.

    Returns:
        The (K,) ascending union; with everything selected, the threshold is 0.
    """
    if k >= dim:
        everything = torch.arange(dim, device=selected.device)
        return Selection(everything, [dim] * context.size, state, 0.0)
    counts = headers[:, 0].tolist()
    union = yield from gather_union(selected, counts, dim, context)
    return Selection(union, counts, state, threshold)
