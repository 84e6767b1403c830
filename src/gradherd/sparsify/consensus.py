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
Sums that all workers must find alike are sums of integers, which are exact in any order. On a host,
where deciding costs nothing, `partitioned` searches the whole partition again if too few
coordinates reach the start of the search. On a GPU the worker then fills up with evenly spaced
coordinates (`make_offers`), and the start falls for the next step.

Letters: D coordinates, R workers, M offers of a worker, k coordinates to send, C candidates at
most, NB blocks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gradherd.sparsify.message_sizes import index_bytes
from gradherd.sparsify.packing import pack_indices, unpack_indices
from gradherd.sparsify.partitions import LOAD_UNIT, Blocks, diffuse, even_cuts, recut, whole_loads

# The sign bit is zero, so dropping 15 bits of a float32 leaves the 16 that are sent.
_DROPPED_BITS = 15
# Of those 16, as many are dropped where magnitudes take 8: steps of 1/16 of a power of two.
_COARSE_BITS = 4
# The search keeps the number of candidates between these multiples of k: fewer may not fill all
# capacities, which costs a search of the whole partition; more take longer to rank.
_MIN_CANDIDATES, _MAX_CANDIDATES = 2, 4
# Where the search starts before the first step, and its ratio to the threshold from then on.
_NO_START = (0.0, 0.9)
# The smallest float32 above zero.
_LEAST_START = 2.0**-149


# --- What a method says, and what it keeps -----------------------------------------------------


@dataclass(frozen=True)
class PartitionRule:
    """How a method cuts a vector into partitions."""

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
        return self.diffusive or self.memory is not None

    def offers(self, k: int, workers: int) -> int:
        """Return M, where partitions are long enough (`fits`)."""
        return capacity(self.capacity, k, [self.blocks.dim] * workers)

    def least(self, k: int, workers: int) -> int:
        """Return how many blocks each partition keeps, so that it has room for M offers."""
        # The last block may be short, and a partition may end with it.
        missing = -self.blocks.dim % self.blocks.size
        return -(-(self.offers(k, workers) + missing) // self.blocks.size)

    def fits(self, k: int, workers: int) -> bool:
        """Return whether every worker can always make its M offers."""
        enough = k < self.blocks.dim and self.least(k, workers) * workers < self.blocks.count
        return enough and not self.diffusive


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
    def first(cls, rule: PartitionRule, workers: int) -> "PartitionState":
        """Return the state before the first step: partitions of equal size."""
        count = rule.blocks.count
        loads = torch.zeros(0 if rule.memory is None else count, dtype=torch.float64)
        start = torch.tensor(_NO_START, dtype=torch.float64)
        return cls(start, torch.tensor(even_cuts(count, workers)), loads)

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


def capacity(factor: float, k: int, lengths: Sequence[int]) -> int:
    """Return how many coordinates a worker may send: `factor` times its fair share of k.

    With infinity one worker may send everything. If some partitions are shorter than a fair share,
    the others may send more, so that there are k offers.

    >>> capacity(1.15, 100, [500, 500]), capacity(1.15, 100, [10, 500])
    (58, 90)
    """
    # Without the small term, rounding could turn an exact share into one more.
    most = k if math.isinf(factor) else math.ceil(factor * k / len(lengths) * (1 - 1e-12))
    # Shortest first: a partition below the level gives all it has, and the rest divides what is
    # left evenly.
    left, others = k, len(lengths)
    for length in sorted(lengths):
        level = -(-left // others)
        if level <= length:
            break
        left, others = left - length, others - 1
    return max(most, level)


# --- Messages ----------------------------------------------------------------------------------


def leading_bits(magnitudes: Tensor) -> Tensor:
    """Return the 16 leading bits of magnitudes: (...) -> (...) int32."""
    # The bits of floats that are not negative sort as the floats do, also when cut short.
    return magnitudes.float().view(torch.int32) >> _DROPPED_BITS


def smallest_magnitude(bits: Tensor) -> Tensor:
    """Return the smallest magnitude with these leading bits: () int32 -> () float32."""
    return (bits << _DROPPED_BITS).view(torch.float32)


def pack(indices: Tensor, magnitudes: Tensor, reach: int, compact: bool = False) -> Tensor:
    """Write offers: (M,) ascending indices below `reach`, then the leading bits of magnitudes.

    If `compact`, magnitudes take 8 bits. Returns int32, whose number follows from M and `reach`.
    """
    packed, leading = pack_indices(indices, reach), leading_bits(magnitudes)
    # Zeros, not `empty`: the padding is sent, and messages should be the same in every run.
    words = F.pad(packed, (0, -len(packed) % 4)).view(torch.int32)
    if compact:
        steps = leading >> _COARSE_BITS
        top = steps.max()
        below = F.pad((top - steps).clamp_(max=255).to(torch.uint8), (0, -len(steps) % 4))
        return torch.cat([words, top.view(1), below.view(torch.int32)])
    pairs = F.pad(leading, (0, len(leading) % 2)).view(-1, 2)
    return torch.cat([words, pairs[:, 0] | (pairs[:, 1] << 16)])


def unpack(
    messages: Tensor, count: int, reach: int, compact: bool = False
) -> tuple[Tensor, Tensor]:
    """Return (R, M) int64 indices and (R, M) int32 leading bits of magnitudes from messages."""
    size = index_bytes(count, reach)
    words = -(-size // 4)
    packed = messages[:, :words].contiguous().view(torch.uint8)
    indices = unpack_indices(packed[:, :size], count, reach)
    rest = messages[:, words:]
    if compact:
        below = rest[:, 1:].contiguous().view(torch.uint8)[:, :count]
        steps = (rest[:, :1] - below.int()).masked_fill_(below == 255, 0).clamp_(min=0)
        return indices, steps << _COARSE_BITS
    magnitudes = torch.stack([rest & 0xFFFF, (rest >> 16) & 0xFFFF], dim=-1)
    return indices, magnitudes.flatten(1)[:, :count]


# --- Offers in fixed shapes --------------------------------------------------------------------


class Offers(NamedTuple):
    """What one worker offers."""

    indices: Tensor
    """(M,) int64 coordinates, ascending."""
    magnitudes: Tensor
    """(M,) their magnitudes."""
    candidates: Tensor
    """() int32 how many reached the start of the search; -1 if there was no room for them, 0 if it
    has no start yet."""


def worker_spans(
    rule: PartitionRule, cuts: Tensor, step: Tensor, workers: int
) -> tuple[Tensor, Tensor]:
    """Return (R,) where each worker's partition begins, and (R,) where it ends."""
    bounds = (cuts * rule.blocks.size).clamp(max=rule.blocks.dim)
    parts = torch.arange(workers, device=bounds.device)
    if rule.rotate:
        parts = (parts + step) % workers
    return bounds[parts], bounds[parts + 1]


def search_start(sample: Tensor, share: float) -> Tensor:
    """Return a () magnitude that about four times the share k / D of (n,) values reach.

    For a step that has no threshold to start from, or one that is far off.
    """
    rank = min(len(sample), int(4 * share * len(sample)) + 16)
    # Above zero, or all zeros would be candidates where fewer values are not: there is no room.
    return sample.abs().topk(rank).values[-1].float().clamp(min=_LEAST_START)


def make_offers(
    candidates: tuple[Tensor, Tensor],
    total: Tensor,
    start: Tensor,
    reserve: tuple[Tensor, Tensor],
    span: tuple[Tensor, Tensor],
    wanted: Tensor,
) -> Offers:
    """Offer the largest candidates of a partition.

    Args:
        candidates: (C,) coordinates, and (C,) magnitudes that reach the start.
        total: () how many there were; the entries from there on mean nothing.
        start: () magnitude from which on a coordinate is a candidate.
        reserve: (M,) different coordinates of the partition, and (M,) their magnitudes. They fill
            up what candidates leave free; those that reach the start are candidates themselves.
        span: () first coordinate of the partition, () its end.
        wanted: () where the search should have started; above `start` if that left too few.
    """
    indices, magnitudes = candidates
    spare, spare_magnitudes = reserve
    overflow = total > len(indices)
    mine = (indices >= span[0]) & (indices < span[1]) & ~overflow
    mine &= torch.arange(len(indices), device=indices.device) < total
    # Below every real magnitude; there are always M that are above: the reserve sees to it.
    key = torch.cat(
        [
            torch.where(mine, magnitudes, -1.0),
            torch.where(overflow | (spare_magnitudes < start), spare_magnitudes, -1.0),
        ]
    )
    # NaN would be the largest, and may leave too few; the step is called off then, whatever is
    # offered. It must only be coordinates.
    top = key.topk(len(spare), sorted=False)
    chosen = torch.cat([indices, spare])[top.indices].clamp_(min=span[0], max=span[1] - 1)
    # Messages store them so; and ties must not depend on the order in which buckets are stored.
    chosen, order = chosen.sort()
    largest = top.values[order]
    count = torch.where(overflow, -1, (mine & (magnitudes >= wanted)).sum()).int()
    count = count * (wanted > 0)  # Without a start, the number says nothing.
    return Offers(chosen, largest, count)


def reserve_of(span: tuple[Tensor, Tensor], count: int) -> Tensor:
    """Return `count` evenly spaced coordinates of a partition that has at least as many."""
    places = torch.arange(count, device=span[0].device)
    return span[0] + places * (span[1] - span[0]) // count


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
    """Return the k largest of at least k offers.

    Args:
        indices: (R, M) int64 of all workers.
        bits: (R, M) int32 leading bits of their magnitudes; -1 where there is no offer.
        k: How many to accept.
    """
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
    rule: PartitionRule,
    state: PartitionState,
    offers: tuple[Tensor, Tensor],
    candidates: Tensor,
    k: int,
    *,
    offered: int | Tensor,
    exact: bool,
    turn: int = 0,
) -> tuple[Accepted, PartitionState]:
    """Accept the largest offers of all workers; every worker finds the same from the same offers.

    Args:
        rule: The method's partitions.
        state: That of this step.
        offers: (R, M) indices and leading bits, as for `accept_largest`.
        candidates: (R,) as in `Offers`.
        k: How many to accept.
        offered: How many offers each worker made: M, or (R,).
        exact: Whether workers have searched all of their partitions, as they do with a host. If
            not, offers may be merely evenly spaced, and partitions keep room for M offers.
        turn: The partition of worker 0.

    Returns:
        What is accepted, and the state of the next step.
    """
    accepted, workers = accept_largest(*offers, k), len(candidates)
    new = _with_next_start(state, accepted, candidates, exact=exact)
    if workers > 1 and rule.moves:
        loads = estimate_loads(accepted.counts, offered, candidates)
        least = 1 if exact else rule.least(k, workers)
        new = moved(rule, new, accepted.indices, accepted.counts, loads, least, turn)
    return accepted, new


def _with_next_start(
    state: PartitionState, accepted: Accepted, candidates: Tensor, *, exact: bool
) -> PartitionState:
    """Return the state with a start that leaves a few times as many candidates as are wanted.

    `candidates` are (R,) as in `Offers`; these are `exact` if no evenly spaced ones are among them.
    """
    threshold, total, k = accepted.threshold.double(), candidates.sum(), len(accepted.indices)
    # A first step had no start; what it searched from says nothing.
    first, ratio = state.start[0] <= 0, state.start[1]
    # Adjusted by a few percent per step, and kept away from 0, where everything is a candidate,
    # and from 1, where the threshold of the next step may be below the start.
    few, many = total < _MIN_CANDIDATES * k, total > _MAX_CANDIDATES * k
    ratio = (ratio * (1 - 0.03 * few + 0.02 * many)).clamp(0.3, 0.995)
    ratio = torch.where(first, _NO_START[1], ratio)
    magnitude = threshold * ratio
    if not exact:
        # Far off, the accepted offers include some that are merely evenly spaced, and their
        # smallest says nothing. Then go up or down until enough, but not too many, reach the start.
        magnitude = torch.where(~first & (total < k), state.start[0] * 0.5, magnitude)
        magnitude = torch.where(~first & (candidates < 0).any(), state.start[0] * 2, magnitude)
    return replace(state, start=torch.stack([magnitude, ratio]))


def moved(
    rule: PartitionRule,
    state: PartitionState,
    indices: Tensor,
    counts: Tensor,
    loads: Tensor,
    least: int = 1,
    turn: int = 0,
) -> PartitionState:
    """Return the state with borders that make loads equal, if borders move at all.

    Computed by every worker from what all of them know: moving borders sends nothing.

    Args:
        rule: The method's partitions.
        state: Its start is that of the next step.
        indices: (K,) what all workers selected, in the order of workers.
        counts: (R,) int64 how many of these each selected.
        loads: (R,) float64 how many each would have selected without a capacity.
        least: Blocks that each partition keeps.
        turn: The partition of worker 0.
    """
    workers = len(counts)
    if rule.diffusive:
        # Loads come by worker, borders belong to partitions: undo the rotation.
        cuts = diffuse(state.cuts.tolist(), loads.roll(turn).tolist())
        return replace(state, cuts=torch.tensor(cuts))
    if rule.memory is None or workers == 1:  # online
        return state
    # Nobody knows where the coordinates beyond a worker's capacity lie; assume that they are
    # distributed over blocks as the selected ones are.
    weights = whole_loads(loads / counts.clamp(min=1))
    owner = torch.repeat_interleave(
        torch.arange(workers, device=counts.device), counts, output_size=len(indices)
    )
    # From all loads at once, not from those of neighbours: after a change, borders are right one
    # step later. The decaying sum smooths the few selections that a block has per step.
    new = torch.zeros(len(state.loads), dtype=torch.int64, device=counts.device)
    new.index_add_(0, indices // rule.blocks.size, weights[owner])
    total = new.double() / LOAD_UNIT + rule.memory * state.loads
    return replace(state, loads=total, cuts=recut(total, workers, least))


def estimate_loads(counts: Tensor, offered: int | Tensor, candidates: Tensor) -> Tensor:
    """Return how many coordinates above the threshold each worker had, capacity or not.

    A worker whose offers were all accepted may have had more. The other workers tell which share
    of candidates is above the threshold; that share of its own candidates is the estimate.

    Args:
        counts: (R,) accepted offers of each worker.
        offered: How many it made.
        candidates: (R,) how many coordinates reached the start of its search.

    Returns:
        (R,) float64.

    >>> estimate_loads(torch.tensor([10, 20, 20]), 20, torch.tensor([30, 60, 90]))
    tensor([10., 20., 30.], dtype=torch.float64)
    """
    had = candidates.clamp(min=0)
    below = (counts < offered) & (had > 0)
    known = (had * below).sum()
    share = (counts * below).sum().double() / known.clamp(min=1)
    return torch.maximum(counts.double(), torch.where(counts == offered, share * had, 0.0))
