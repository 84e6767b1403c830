"""Consensus: workers offer a little more than their fair share, and all keep the k largest offers.

A worker offers the largest coordinates of its partition, as many as its capacity: their indices
and, in 16 or 8 bits each, their magnitudes. The length of that message is known beforehand. All
workers then see the same offers and accept the k largest. So exactly k coordinates are sent, from
the first step on and at any scale of the gradients, and no worker sends more than its capacity.

The 16 bits of a magnitude are the leading bits of its float32 after the sign: the exponent and
eight bits of the mantissa. Magnitudes that agree in them differ by less than 0.4 %. Beside values
of few bits they take 8: how many steps of 6 % they are below the largest of their worker, where 255
stands for zero and all that is that small.

Everything here has fixed shapes, so a GPU never waits for the host: what is not there is masked.
Sums that all workers must find alike are sums of integers, which are exact in any order. How a
worker finds the candidates that it offers the largest of is up to where it runs (`partitioned` with
a host, `gpu_worker` without).

Letters: D coordinates, R workers, M offers of a worker, k coordinates to send, C candidates, NB
blocks.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gradherd.comm.message_sizes import index_bytes
from gradherd.comm.packing import pack_indices, unpack_indices
from gradherd.sparsify.partitions import (
    LOAD_UNIT,
    Blocks,
    apart,
    diffuse,
    even_cuts,
    recut,
    whole_loads,
)

# The sign bit is zero, so dropping 15 bits of a float32 leaves the 16 that are sent.
_DROPPED_BITS = 15
# Of those 16, as many are dropped where magnitudes take 8: steps of 1/16 of a power of two.
_COARSE_BITS = 4
# The search keeps the number of candidates between these multiples of k: fewer may not fill all
# capacities, which costs a search of the whole partition; more take longer to rank.
_MIN_CANDIDATES, _MAX_CANDIDATES = 2, 4
# Where the search starts before the first step, and its ratio to the threshold from then on.
_NO_START = (0.0, 0.9)


# --- What a method says, and what it keeps -----------------------------------------------------


class Spans(NamedTuple):
    """The coordinates from which each worker selects in a step."""

    firsts: Tensor
    """(R,) where its partition begins."""
    ends: Tensor
    """(R,) where it ends."""
    reach: int
    """No partition is longer. All workers know it without waiting: lengths of messages follow."""


@dataclass(frozen=True)
class PartitionRule:
    """How a method cuts a vector into partitions."""

    workers: int
    """R."""
    capacity: float
    """How many times its fair share a worker offers."""
    blocks: Blocks
    """What borders move by."""
    memory: float | None = None
    """Decay of the blocks' loads per step; None if borders are never recut from them."""
    rotate: bool = True
    """Whether partitions rotate over workers."""
    diffusive: bool = False
    """Whether borders move between neighbours instead (`partitions.diffuse`), on the host."""

    @property
    def moves(self) -> bool:
        """Whether borders move."""
        return self.workers > 1 and (self.diffusive or self.memory is not None)

    @property
    def _missing(self) -> int:
        """What the last block is short of; any partition may end with it."""
        return -self.blocks.dim % self.blocks.size

    def offers(self, k: int) -> int:
        """Return M, `capacity` times a fair share of k.

        0 if everything is to be sent: k is D, or so close to it (or D so small) that partitions
        of whole blocks would not have room for k offers.

        >>> rules = [PartitionRule(2, factor, Blocks(1000, 10)) for factor in (1.15, math.inf)]
        >>> [[rule.offers(k) for k in (100, 450, 1000)] for rule in rules]
        [[58, 259, 0], [100, 450, 0]]
        """
        room = self.blocks.count // self.workers * self.blocks.size - self._missing
        if k >= self.blocks.dim or k > room * self.workers:
            return 0
        # Without the small term, rounding could turn an exact share into one more.
        most = math.ceil(min(k, self.capacity * k / self.workers * (1 - 1e-12)))
        return min(most, room)

    def borders(self, cuts: Tensor, count: int) -> Tensor:
        """Return (R + 1,) borders with room for `count` coordinates between any two."""
        least = -(-(count + self._missing) // self.blocks.size)
        return apart(cuts, min(least, self.blocks.count // self.workers))

    def spans(self, cuts: Tensor, step: int | Tensor, count: int) -> Spans:
        """Return from where each worker selects `count` coordinates in a step.

        Cuts are the (R + 1,) borders of the state; `count` is M, or 1 if workers select as many as
        they like.
        """
        bounds = (self.borders(cuts, count) * self.blocks.size).clamp(max=self.blocks.dim)
        parts = torch.arange(self.workers, device=cuts.device)
        if self.rotate:
            # As in the papers: what is large on another worker only waits at most R - 1 steps for
            # that worker to search its partition.
            parts = (parts + step) % self.workers
        firsts, ends = bounds[parts], bounds[parts + 1]
        # Indices are written as offsets in the partition, which is shorter, where that is known.
        reach = int((ends - firsts).max()) if cuts.is_cpu else self.blocks.dim
        return Spans(firsts, ends, reach)


@dataclass(frozen=True)
class PartitionState:
    """State of a method with exclusive partitions, the same on all workers.

    On the CPU, except where a whole step runs on a GPU: that step overwrites it in place.
    """

    start: Tensor
    """(2,) float64: where the search starts (0 before the first step), and its ratio to the last
    threshold. With an online threshold: the threshold, and 1."""
    cuts: Tensor
    """(R + 1,) int64 borders of the partitions, in blocks."""
    loads: Tensor
    """(NB,) float64 selected coordinates of each block, a decaying sum over steps; empty if
    borders never move."""

    @classmethod
    def first(cls, rule: PartitionRule) -> "PartitionState":
        """Return the state before the first step: partitions of equal size."""
        count = rule.blocks.count
        loads = torch.zeros(0 if rule.memory is None else count, dtype=torch.float64)
        start = torch.tensor(_NO_START, dtype=torch.float64)
        return cls(start, torch.tensor(even_cuts(count, rule.workers)), loads)

    def to(self, device: torch.device) -> "PartitionState":
        """Return a copy on a device."""
        fields = (self.start, self.cuts, self.loads)
        return PartitionState(*(field.to(device, copy=True) for field in fields))

    def update(self, ok: Tensor, new: "PartitionState") -> None:
        """Take over a new state in place, if the () bool says that the step is not called off."""
        for name in ("start", "cuts", "loads"):
            old, fresh = getattr(self, name), getattr(new, name)
            if old.numel() and fresh is not old:
                old.copy_(torch.where(ok, fresh, old))


# --- Offers -------------------------------------------------------------------------------------


class Offers(NamedTuple):
    """What one worker offers, or each of R workers."""

    indices: Tensor
    """(M,) int64 ascending places in the worker's partition, or (R, M) coordinates."""
    bits: Tensor
    """(M,) or (R, M) int32 leading bits of their magnitudes."""
    candidates: Tensor
    """() or (R,) int32 how many coordinates reached the start of the search; 0 if nobody knows."""


def make_offers(indices: Tensor, magnitudes: Tensor, candidates: Tensor, count: int) -> Offers:
    """Offer the largest candidates of a partition.

    Args:
        indices: (C,) places in it.
        magnitudes: (C,) their magnitudes; -1 where there is no candidate.
        candidates: As in `Offers`.
        count: M. There are at least as many candidates.
    """
    top = magnitudes.topk(count, sorted=False)
    # Messages store them ascending; and ties must not depend on the order in which they come.
    chosen, order = indices[top.indices].sort()
    return Offers(chosen, leading_bits(top.values[order]), candidates)


def leading_bits(magnitudes: Tensor) -> Tensor:
    """Return the 16 leading bits of magnitudes: (...) -> (...) int32."""
    # The bits of floats that are not negative sort as the floats do, also when cut short.
    return magnitudes.float().view(torch.int32) >> _DROPPED_BITS


def smallest_magnitude(bits: Tensor) -> Tensor:
    """Return the smallest magnitude with these leading bits: () int32 -> () float32."""
    return (bits << _DROPPED_BITS).view(torch.float32)


def pack(offers: Offers, reach: int, compact: bool = False) -> Tensor:
    """Write a worker's offers: candidates, indices below `reach`, leading bits of magnitudes.

    If `compact`, magnitudes take 8 bits. Returns int32, whose number follows from M and `reach`.
    """
    packed, leading = pack_indices(offers.indices, reach), offers.bits
    # Zeros, not `empty`: the padding is sent, and messages should be the same in every run.
    words = F.pad(packed, (0, -len(packed) % 4)).view(torch.int32)
    count = offers.candidates.view(1)
    if compact:
        steps = leading >> _COARSE_BITS
        top = steps.max()
        below = F.pad((top - steps).clamp_(max=255).to(torch.uint8), (0, -len(steps) % 4))
        return torch.cat([count, words, top.view(1), below.view(torch.int32)])
    pairs = F.pad(leading, (0, len(leading) % 2)).view(-1, 2)
    return torch.cat([count, words, pairs[:, 0] | (pairs[:, 1] << 16)])


def unpack(messages: Tensor, count: int, spans: Spans, compact: bool = False) -> Offers:
    """Return the M = `count` offers of each worker from the (R, ...) messages of all."""
    size = index_bytes(count, spans.reach)
    end = 1 + -(-size // 4)
    packed = messages[:, 1:end].contiguous().view(torch.uint8)
    indices = unpack_indices(packed[:, :size], count, spans.reach).add_(spans.firsts.unsqueeze(1))
    rest = messages[:, end:]
    if compact:
        below = rest[:, 1:].contiguous().view(torch.uint8)[:, :count]
        steps = (rest[:, :1] - below.int()).masked_fill_(below == 255, 0).clamp_(min=0)
        bits = steps << _COARSE_BITS
    else:
        pairs = torch.stack([rest & 0xFFFF, (rest >> 16) & 0xFFFF], dim=-1)
        bits = pairs.flatten(1)[:, :count]
    return Offers(indices, bits, messages[:, 0])


# --- What all workers agree on -----------------------------------------------------------------


class Accepted(NamedTuple):
    """The k offers that all workers accept."""

    indices: Tensor
    """(k,) int64, in the order of workers, and of their offers."""
    counts: Tensor
    """(R,) int64 accepted offers of each worker."""
    threshold: Tensor
    """() float32 lower bound of the accepted magnitudes."""


def accept_largest(indices: Tensor, bits: Tensor, k: int) -> Accepted:
    """Accept the k largest of at least k offers: (R, M) int64 indices, int32 leading bits."""
    flat = bits.reshape(-1)
    kth = flat.topk(k, sorted=False).values.min()
    above, tied = flat > kth, flat == kth
    need, ties = k - above.sum(), tied.sum()
    # Sixteen bits leave many ties. Taking them evenly spaced over all workers' offers keeps the
    # loads equal; taking the first ones would favour the first workers. Tie r is accepted if it is
    # i * ties // need for some i below `need`; the only i to try is r * need / ties, rounded up.
    number = tied.cumsum(0) - 1
    i = (number * need + ties - 1) // ties
    accepted = above | (tied & (i < need) & (i * ties // need == number))
    # Place k takes all that is not accepted.
    place = torch.where(accepted, accepted.cumsum(0) - 1, k)
    chosen = indices.new_zeros(k + 1).scatter_(0, place, indices.reshape(-1))[:k]
    return Accepted(chosen, accepted.view(bits.shape).sum(1), smallest_magnitude(kth))


def accept_offers(
    rule: PartitionRule, state: PartitionState, offers: Offers, k: int, step: int | Tensor
) -> tuple[Accepted, PartitionState]:
    """Accept the k largest offers of all workers; return them, and the state of the next step.

    Every worker finds the same from the same offers.
    """
    accepted, count = accept_largest(offers.indices, offers.bits, k), rule.offers(k)
    new = _with_next_start(state, accepted, offers.candidates)
    if rule.moves:
        loads = estimate_loads(accepted.counts, count, offers.candidates)
        new = moved(rule, new, accepted.indices, accepted.counts, loads, step, count)
    return accepted, new


def _with_next_start(
    state: PartitionState, accepted: Accepted, candidates: Tensor
) -> PartitionState:
    """Return the state with a start that leaves a few times as many candidates as are wanted."""
    total, k = candidates.sum(), len(accepted.indices)
    # Adjusted by a few percent per step, and kept away from 0, where everything is a candidate,
    # and from 1, where the threshold of the next step may be below the start.
    few, many = total < _MIN_CANDIDATES * k, total > _MAX_CANDIDATES * k
    ratio = (state.start[1] * (1 - 0.03 * few + 0.02 * many)).clamp(0.3, 0.995)
    # A first step had no start; what it searched from says nothing.
    ratio = torch.where(state.start[0] <= 0, _NO_START[1], ratio)
    return replace(state, start=torch.stack([accepted.threshold.double() * ratio, ratio]))


def moved(
    rule: PartitionRule,
    state: PartitionState,
    indices: Tensor,
    counts: Tensor,
    loads: Tensor,
    step: int | Tensor,
    count: int,
) -> PartitionState:
    """Return the state with borders that make loads equal, if borders move at all.

    Computed by every worker from what all of them know: moving borders sends nothing.

    Args:
        rule: The method's partitions.
        state: Its start is that of the next step.
        indices: (K,) what all workers selected, in the order of workers.
        counts: (R,) int64 how many of these each selected.
        loads: (R,) float64 how many each would have selected without a capacity.
        step: Number of the step.
        count: As in `PartitionRule.spans`.
    """
    if not rule.moves:
        return state
    if rule.memory is None:
        # Loads come by worker, borders belong to partitions: undo the rotation.
        by_part = loads.roll(int(step) % rule.workers if rule.rotate else 0)
        cuts = diffuse(rule.borders(state.cuts, count).tolist(), by_part.tolist())
        return replace(state, cuts=torch.tensor(cuts))
    # Nobody knows where the coordinates beyond a worker's capacity lie; assume that they are
    # distributed over blocks as the selected ones are.
    weights = whole_loads(loads / counts.clamp(min=1))
    owner = torch.repeat_interleave(
        torch.arange(rule.workers, device=counts.device), counts, output_size=len(indices)
    )
    # From all loads at once, not from those of neighbours: after a change, borders are right one
    # step later. The decaying sum smooths the few selections that a block has per step.
    new = torch.zeros(len(state.loads), dtype=torch.int64, device=counts.device)
    new.index_add_(0, indices // rule.blocks.size, weights[owner])
    total = new.double() / LOAD_UNIT + rule.memory * state.loads
    return replace(state, loads=total, cuts=recut(total, rule.workers))


def estimate_loads(counts: Tensor, offered: int, candidates: Tensor) -> Tensor:
    """Return how many coordinates above the threshold each worker had, capacity or not.

    A worker whose offers were all accepted may have had more. The other workers tell which share of
    candidates is above the threshold; that share of its own candidates is the estimate.

    Args:
        counts: (R,) accepted offers of each worker.
        offered: How many each made.
        candidates: (R,) how many coordinates reached the start of its search.

    >>> estimate_loads(torch.tensor([10, 20, 20]), 20, torch.tensor([30, 60, 90]))
    tensor([10., 20., 30.], dtype=torch.float64)
    """
    below = (counts < offered) & (candidates > 0)
    known = (candidates * below).sum()
    share = (counts * below).sum().double() / known.clamp(min=1)
    return torch.maximum(counts.double(), torch.where(counts == offered, share * candidates, 0.0))
