"""DEFT: every worker searches some of the layers, and layers with larger norms send more.

Yoon and Oh, "DEFT: Exploiting Gradient Norm Difference between Model Layers for Scalable Gradient
Sparsification", ICPP 2023, arXiv:2307.03500. Each piece (a tensor, or a part of a large one) gets
a share of k that goes with its norm. A leader, who changes with every step, shares out the pieces
so that all workers have about equal work; each takes the largest coordinates of its pieces. What
the leader would send whole, everybody sends, and its indices do not travel.

Here all workers show the norms of their pieces, so everybody works out the leader's decision,
and how many the others pick, alone: nothing is broadcast, and no counts are exchanged.

Letters: D coordinates, R workers, L pieces, K coordinates that travel.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import cast

import numpy as np
import torch
from torch import Tensor

from gradherd.comm.script import Script
from gradherd.sparsify.exchange import gather_indices
from gradherd.sparsify.kernels import largest
from gradherd.sparsify.partitions import even_cuts
from gradherd.sparsify.selector import Chosen, Place, Proposal, check_density

# Squares of norms between these are far from the ends of float32.
_TINY, _HUGE = 1e-15, 1e15


@dataclass(frozen=True)
class State:
    """What all workers know alike; it stays as it is."""

    bounds: list[int]
    """L + 1 borders of the pieces."""


@dataclass(frozen=True)
class Deft:
    """Shares of k by the norms of layers, layers shared out among workers."""

    density: float = 1e-3
    """Share of the coordinates that travels, about: every piece sends at least one."""

    exclusive = True
    uses_layers = True

    def __post_init__(self) -> None:
        check_density(self.density)

    def begin(self, dim: int, workers: int, layers: Sequence[int]) -> State:
        """Cut tensors longer than D / R into R pieces of about equal size."""
        if sum(layers) != dim:
            raise ValueError(f"layers must add up to dim ({dim}), got {sum(layers)}")
        sizes: list[int] = []
        for length in layers:
            parts = workers if length * workers > dim else 1
            cuts = even_cuts(length, parts)
            sizes += [end - begin for begin, end in pairwise(cuts) if end > begin]
        return State([0, *accumulate(sizes)])

    def propose(self, acc: Tensor, k: int, state: State, place: Place) -> Proposal:
        """Show the norms of the pieces, as the bits of float32."""
        if k >= len(acc):
            return Proposal(torch.zeros(0, dtype=torch.int32, device=acc.device))
        found = norms([acc[begin:end] for begin, end in pairwise(state.bounds)])
        return Proposal(found.view(torch.int32))

    def settle(
        self, acc: Tensor, k: int, state: State, place: Place, proposal: Proposal, headers: Tensor
    ) -> Script[Chosen]:
        """Work out who picks how many of what, and exchange picks.

        Pieces that travel whole count as picked by the leader: it is for its norms that they do.
        """
        leader = place.step % place.size
        if k >= len(acc):
            counts = [len(acc) * (rank == leader) for rank in range(place.size)]
            return Chosen(torch.arange(len(acc), device=acc.device), counts, state)
        spans = list(pairwise(state.bounds))
        sizes = [end - begin for begin, end in spans]
        shares = allot(headers.view(torch.float32), sizes, k)
        whole, bins = pack(shares[leader], sizes, place.size)

        # Ascending within each worker, as its picks must be.
        pieces = [sorted(bins[part]) for part in place.parts]
        counts = [sum(own[p] for p in mine) for own, mine in zip(shares, pieces, strict=True)]
        picks = [torch.zeros(0, dtype=torch.int64, device=acc.device)]
        for piece in pieces[place.rank]:
            begin, end = spans[piece]
            picks.append(begin + largest(acc[begin:end], shares[place.rank][piece]))
        reach = [(spans[mine[0]][0], spans[mine[-1]][1]) if mine else (0, 0) for mine in pieces]
        picked = yield from gather_indices(torch.cat(picks), counts, reach, place)

        counts[leader] += sum(sizes[piece] for piece in whole)
        common = [torch.arange(*spans[piece], device=acc.device) for piece in whole]
        return Chosen(torch.cat([*common, picked]), counts, state)

    def rescale(self, state: State, factor: float) -> State:
        """Nothing has a unit."""
        return state


def norms(pieces: Sequence[Tensor]) -> Tensor:
    """Return the finite norms of L pieces: (L,) float32."""
    # On a CPU float64 takes five times as long, so only where squares may not fit float32.
    kind = None if pieces[0].device.type == "cpu" else torch.float64
    found = torch.stack([torch.linalg.vector_norm(p, dtype=kind) for p in pieces]).double()
    if kind is None:
        for at in ((found < _TINY) | ~(found < _HUGE)).nonzero().view(-1).tolist():
            found[at] = torch.linalg.vector_norm(pieces[at], dtype=torch.float64)
    return found.clamp_(max=torch.finfo(torch.float32).max).float()


def allot(norms: Tensor, sizes: Sequence[int], k: int) -> list[list[int]]:
    """Share out k over pieces by their norms: R lists of L counts.

    The largest norm first, each gets its part of what is left, but at least one and at most all
    of its coordinates. Equal norms go by the number of the piece; zeros get one.

    Args:
        norms: (R, L) of each worker, on the CPU.
        sizes: Lengths of the L pieces.
        k: How many are wanted.

    >>> allot(torch.tensor([[1.0, 6.0, 1.0]]), [10, 5, 10], 9)
    [[2, 5, 2]]
    """
    order = np.argsort(-norms.T.numpy(), axis=0, kind="stable")  # (L, R)
    ranked = np.take_along_axis(norms.T.double().numpy(), order, axis=0)
    left = np.cumsum(ranked[::-1], axis=0)[::-1]
    limits = np.array(sizes, dtype=np.float64)[order]
    counts, wanted = np.empty_like(limits), np.full(len(norms), float(k))
    for at, rest in enumerate(np.where(left > 0, left, 1)):
        share = np.maximum(np.floor(wanted * ranked[at] / rest), 1)
        counts[at] = np.minimum(share, limits[at])
        wanted -= counts[at]
    shares = np.empty_like(order)
    np.put_along_axis(shares, order, counts.astype(order.dtype), axis=0)
    return cast(list[list[int]], shares.T.tolist())


def pack(
    counts: Sequence[int], sizes: Sequence[int], workers: int
) -> tuple[list[int], list[list[int]]]:
    """Share out L pieces among workers: those that travel whole, and R bins of the others.

    The most expensive piece first, each goes to the bin with the least work.

    >>> pack([2, 2, 4, 2, 5], [10, 30, 4, 12, 15], 2)
    ([2], [[4, 0], [1, 3]])
    """
    whole, costs = [], []
    for piece, (count, size) in enumerate(zip(counts, sizes, strict=True)):
        if count == size:
            whole.append(piece)
        else:
            costs.append((-size * math.log2(count) if count > 1 else -size, piece))
    bins: list[list[int]] = [[] for _ in range(workers)]
    loads = [(0.0, number) for number in range(workers)]
    for cost, piece in sorted(costs):
        load, number = loads[0]
        heapq.heapreplace(loads, (load - cost, number))
        bins[number].append(piece)
    return whole, bins
