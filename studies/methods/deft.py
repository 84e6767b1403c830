"""DEFT: workers share out the layers, and layers with larger norms send more coordinates.

Yoon and Oh, "DEFT: Exploiting Gradient Norm Difference between Model Layers for Scalable Gradient
Sparsification", ICPP 2023, arXiv:2307.03500. Each piece (a tensor, or a part of a large one) gets
a share of k in proportion to its norm. A leader, a different worker at every step, assigns the
pieces to workers so that all have about equal work, and each worker selects the largest
coordinates of its pieces. Pieces that the leader would send whole are sent by everyone, without
indices.

In this implementation all workers gather the norms of all pieces. From these, each of them can
compute the leader's assignment and everyone's counts, so nothing needs to be broadcast.

Letters: D coordinates, R workers, L pieces, K coordinates that are sent.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from gradherd.comm.message_sizes import DEFAULT_DENSITY
from gradherd.comm.script import Script
from gradherd.sparsify.kernels import topk_indices
from gradherd.sparsify.partitions import even_cuts
from gradherd.sparsify.selecting import gather_indices
from gradherd.sparsify.selector import (
    Proposal,
    Selection,
    Selector,
    Step,
    StepContext,
    check_density,
)

# Squares of norms in this range neither overflow nor underflow in float32.
_SAFE_MIN, _SAFE_MAX = 1e-15, 1e15


@dataclass(frozen=True)
class DeftState:
    """State of `Deft`, the same on all workers; it never changes."""

    bounds: list[int]
    """L + 1 borders of the pieces."""


@dataclass(frozen=True)
class Deft(Selector):
    """Send more coordinates of layers with larger norms; workers share out the layers.

    Yoon and Oh, ICPP 2023, arXiv:2307.03500. Raises ValueError if the density is out of range.
    """

    density: float = DEFAULT_DENSITY
    """Share of the coordinates to send, approximately: every piece sends at least one."""

    def __post_init__(self) -> None:
        check_density(self.density)

    def begin(self, dim: int, workers: int, layers: Sequence[int]) -> DeftState:
        """Cut tensors longer than D / R into R pieces of about equal size."""
        if sum(layers) != dim:
            raise ValueError(f"layers must add up to dim ({dim}), got {sum(layers)}")
        sizes: list[int] = []
        for length in layers:
            # Otherwise one large tensor, such as an embedding, would be the work of one worker.
            parts = workers if length * workers > dim else 1
            cuts = even_cuts(length, parts)
            sizes += [end - begin for begin, end in pairwise(cuts) if end > begin]
        return DeftState([0, *accumulate(sizes)])

    def propose(self, step: Step) -> Proposal:
        """Compute the norms of the pieces; the header is their float32 bits."""
        if step.k >= step.dim:
            return Proposal.without_header(step)
        pieces = [step.acc[begin:end] for begin, end in pairwise(step.state.bounds)]
        return Proposal(norms(pieces).view(torch.int32))

    def agree(self, step: Step, own: Any, headers: Tensor) -> Script[Selection]:
        """Compute who selects how many of which pieces, select, and gather the indices.

        Pieces that are sent whole count as selected by the leader, whose norms caused it.
        """
        acc, leader = step.acc, step.number % step.size
        if step.k >= step.dim:
            counts = [step.dim * (rank == leader) for rank in range(step.size)]
            return Selection(step.everything(), counts, step.state)
        spans = list(pairwise(step.state.bounds))
        plan = _LayerPlan.of(headers.view(torch.float32), spans, step.k, step)
        selected = [torch.zeros(0, dtype=torch.int64, device=acc.device)]
        for piece in plan.pieces[step.rank]:
            begin, end = spans[piece]
            selected.append(begin + topk_indices(acc[begin:end], plan.shares[step.rank][piece]))
        gathered = yield from gather_indices(
            torch.cat(selected), plan.counts, plan.reach(spans), step
        )
        common = [torch.arange(*spans[piece], device=acc.device) for piece in plan.whole]
        return Selection(torch.cat([*common, gathered]), plan.totals(spans, leader), step.state)


@dataclass(frozen=True)
class _LayerPlan:
    """Who selects how many coordinates of which pieces: what all workers find from all norms."""

    shares: list[list[int]]
    """Coordinates of each piece, if it is this worker's: R lists of L."""
    whole: list[int]
    """Pieces that everyone sends whole."""
    pieces: list[list[int]]
    """Pieces of each worker, ascending."""

    @classmethod
    def of(
        cls, norms: Tensor, spans: Sequence[tuple[int, int]], k: int, context: StepContext
    ) -> "_LayerPlan":
        """Plan a step, given the (R, L) norms on each worker, on the CPU."""
        sizes = [end - begin for begin, end in spans]
        # The same float32 bits on all workers and arithmetic on the CPU: all of them compute the
        # same shares and bins, and nobody has to broadcast them.
        shares = allocate(norms, sizes, k)
        # Bins follow the leader's norms, but each worker selects by its own shares, as published.
        whole, bins = assign(shares[context.number % context.size], sizes, context.size)
        # Sorted, so that each worker's indices ascend and gather_indices need not sort them.
        turn = context.number % context.size
        return cls(shares, whole, [sorted(own) for own in (*bins[turn:], *bins[:turn])])

    @property
    def counts(self) -> list[int]:
        """Coordinates that each worker selects."""
        both = zip(self.shares, self.pieces, strict=True)
        return [sum(own[piece] for piece in mine) for own, mine in both]

    def totals(self, spans: Sequence[tuple[int, int]], leader: int) -> list[int]:
        """Return the counts with pieces that are sent whole as the leader's."""
        whole = sum(spans[piece][1] - spans[piece][0] for piece in self.whole)
        return [count + whole * (rank == leader) for rank, count in enumerate(self.counts)]

    def reach(self, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the coordinates from each worker's first piece to its last; (0, 0) of none."""
        return [(spans[mine[0]][0], spans[mine[-1]][1]) if mine else (0, 0) for mine in self.pieces]


def norms(pieces: Sequence[Tensor]) -> Tensor:
    """Return the norms of L pieces, clamped to finite values: (L,) float32.

    Args:
        pieces: L flat tensors.
    """
    if pieces[0].device.type != "cpu":
        # A few launches for all of them: a launch each would take longer than the sums.
        result = torch.stack(torch._foreach_norm(list(pieces), 2, dtype=torch.float64))
    else:
        # float64 takes five times as long on a CPU, so it is used there only where squares of norms
        # do not fit float32.
        result = torch.stack([torch.linalg.vector_norm(piece) for piece in pieces]).double()
        for at in ((result < _SAFE_MIN) | ~(result < _SAFE_MAX)).nonzero().view(-1).tolist():
            result[at] = torch.linalg.vector_norm(pieces[at], dtype=torch.float64)
    return result.clamp_(max=torch.finfo(torch.float32).max).float()


def allocate(norms: Tensor, sizes: Sequence[int], k: int) -> list[list[int]]:
    """Divide k among pieces in proportion to their norms.

    In order of falling norms, each piece gets its share of what is left: at least one coordinate,
    and at most all of its own. Ties go by the number of the piece.

    Args:
        norms: (R, L) norms on each worker, on the CPU.
        sizes: Lengths of the L pieces.
        k: Number of coordinates to divide.

    Returns:
        R lists of L counts.

    >>> allocate(torch.tensor([[1.0, 6.0, 1.0]]), [10, 5, 10], 9)
    [[2, 5, 2]]
    """
    order = np.argsort(-norms.T.numpy(), axis=0, kind="stable")  # (L, R)
    ranked = np.take_along_axis(norms.T.double().numpy(), order, axis=0)
    # Norms not yet served, for all workers at once: the loop below is over L pieces, not R x L.
    left = np.cumsum(ranked[::-1], axis=0)[::-1]
    limits = np.array(sizes, dtype=np.float64)[order]
    counts, remaining = np.empty_like(limits), np.full(len(norms), float(k))
    for at, rest in enumerate(np.where(left > 0, left, 1)):
        share = np.maximum(np.floor(remaining * ranked[at] / rest), 1)
        counts[at] = np.minimum(share, limits[at])
        remaining -= counts[at]
    shares = np.empty_like(order)
    np.put_along_axis(shares, order, counts.astype(order.dtype), axis=0)
    return cast(list[list[int]], shares.T.tolist())


def assign(
    counts: Sequence[int], sizes: Sequence[int], workers: int
) -> tuple[list[int], list[list[int]]]:
    """Assign L pieces to workers: the most expensive first, each to the least loaded worker.

    Args:
        counts: How many coordinates are selected from each piece.
        sizes: Lengths of the pieces.
        workers: R.

    Returns:
        The pieces that are sent whole, and R lists of the others.

    >>> assign([2, 2, 4, 2, 5], [10, 30, 4, 12, 15], 2)
    ([2], [[4, 0], [1, 3]])
    """
    whole, costs = [], []
    for piece, (count, size) in enumerate(zip(counts, sizes, strict=True)):
        if count == size:
            whole.append(piece)
        else:
            # The paper's cost of a top-k search; negative, so that sorting puts it first.
            costs.append((-size * math.log2(count) if count > 1 else -size, piece))
    # Ties go by number, of the piece and of the worker, so that all workers compute the same bins.
    bins: list[list[int]] = [[] for _ in range(workers)]
    loads = [(0.0, number) for number in range(workers)]
    for cost, piece in sorted(costs):
        load, number = loads[0]
        heapq.heapreplace(loads, (load - cost, number))
        bins[number].append(piece)
    return whole, bins
