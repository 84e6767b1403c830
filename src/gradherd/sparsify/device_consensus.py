"""Consensus in fixed shapes: the search, the k largest offers and new borders without a host.

`exclusive` and `consensus` decide on the host how long vectors are. Here every length is known
beforehand, so a GPU never waits: what is not there is masked. The results are those of `exclusive`,
with one exception. Where fewer coordinates than a worker may offer reach the start of the search,
`exclusive` searches the partition again; here the worker fills up with evenly spaced coordinates,
and the start falls for the next step. Exactly k coordinates are sent either way.

Letters: D coordinates, R workers, M offers of a worker, k coordinates to send, C candidates at
most, NB blocks.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from gradherd.sparsify.exclusive import MAX_CANDIDATES, MIN_CANDIDATES, SearchStart
from gradherd.sparsify.partitions import Blocks, even_cuts

# Loads are compared as integers, of which sums are exact in any order: all ranks must move borders
# alike, and a GPU adds floats in an order of its own.
_LOAD_UNIT = 1 << 16


@dataclass(frozen=True)
class DeviceRule:
    """What a method must say for its steps to run in fixed shapes."""

    capacity: float
    """How many times its fair share a worker offers."""
    blocks: Blocks
    """What borders move by."""
    cuts: list[int]
    """R + 1 borders, in blocks; none if they are even."""
    start: SearchStart
    """Where the next step's search starts; None before the first."""
    loads: Tensor | None = None
    """(NB,) loads of the blocks; None if borders never move."""
    memory: float = 0.0
    """Decay of the loads per step."""
    rotate: bool = True
    """Whether partitions rotate over workers."""

    def offers(self, k: int, workers: int) -> int:
        """Return M. A partition never has fewer coordinates (`recut`)."""
        if math.isinf(self.capacity):
            return k
        return max(1, math.ceil(self.capacity * k / workers * (1 - 1e-12)))

    def fits(self, k: int, workers: int) -> bool:
        """Return whether every worker can always make its M offers."""
        least = -(-self.offers(k, workers) // self.blocks.size)
        return k < self.blocks.dim and least * workers < self.blocks.count


class DeviceState(NamedTuple):
    """A method's state in tensors, which a step overwrites in place: CUDA graphs need that."""

    step: Tensor
    """() int64, steps that were not called off."""
    skipped: Tensor
    """() int64, steps that were."""
    start: Tensor
    """(2,) float64: where the search starts (0 before the first step), and its ratio to the last
    threshold."""
    cuts: Tensor
    """(R + 1,) int64 borders, in blocks."""
    loads: Tensor
    """(NB,) float64; empty if borders never move."""

    @classmethod
    def of(
        cls, rule: DeviceRule, workers: int, step: int, skipped: int, device: torch.device
    ) -> "DeviceState":
        """Copy a rule's state to a device."""
        cuts = rule.cuts or even_cuts(rule.blocks.count, workers)
        # Zero before the first step: there is nothing to start from but `search_start`.
        start = rule.start or (0.0, 0.9)
        loads = torch.zeros(0) if rule.loads is None else rule.loads
        return cls(
            torch.tensor(step, device=device),
            torch.tensor(skipped, device=device),
            torch.tensor(start, dtype=torch.float64, device=device),
            torch.tensor(cuts, dtype=torch.int64, device=device),
            loads.to(device, torch.float64, copy=True),
        )

    def read(self, rule: DeviceRule) -> DeviceRule:
        """Return the rule with this state; waits for the device."""
        magnitude, ratio = self.start.tolist()
        return replace(
            rule,
            start=(magnitude, ratio) if magnitude > 0 else None,
            cuts=self.cuts.tolist(),
            loads=None if rule.loads is None else self.loads.cpu(),
        )

    def update(self, ok: Tensor, new: "DeviceState") -> None:
        """Take over the new state, if the () bool says that the step is not called off."""
        for old, fresh in zip(self[2:], new[2:], strict=True):
            if old.numel():
                old.copy_(torch.where(ok, fresh, old))
        self.step.add_(ok)
        self.skipped.add_(~ok)


class Offers(NamedTuple):
    """What one worker offers."""

    indices: Tensor
    """(M,) int64 coordinates, ascending."""
    magnitudes: Tensor
    """(M,) their magnitudes."""
    candidates: Tensor
    """() int32 how many reached the start of the search; -1 if there was no room for them."""


def worker_spans(rule: DeviceRule, state: DeviceState, workers: int) -> tuple[Tensor, Tensor]:
    """Return (R,) where each worker's partition begins, and (R,) where it ends."""
    bounds = (state.cuts * rule.blocks.size).clamp(max=rule.blocks.dim)
    parts = torch.arange(workers, device=bounds.device)
    if rule.rotate:
        parts = (parts + state.step) % workers
    return bounds[parts], bounds[parts + 1]


def search_start(sample: Tensor, share: float) -> Tensor:
    """Return a () magnitude that about four times the wanted share of values reach.

    For a step that has no threshold to start from, or one that is far off.

    Args:
        sample: (n,) values.
        share: k / D.
    """
    rank = min(len(sample), int(4 * share * len(sample)) + 16)
    return sample.abs().topk(rank).values[-1].float()


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
    # NaN would be the largest; the step is called off then, whatever is offered.
    top = key.topk(len(spare), sorted=False)
    chosen = torch.cat([indices, spare])[top.indices]
    # Messages store them so; and ties must not depend on the order in which buckets are stored.
    chosen, order = chosen.sort()
    largest = top.values[order]
    count = torch.where(overflow, -1, (mine & (magnitudes >= wanted)).sum()).int()
    return Offers(chosen, largest, count)


def reserve_of(span: tuple[Tensor, Tensor], count: int) -> Tensor:
    """Return `count` evenly spaced coordinates of a partition that has at least as many."""
    places = torch.arange(count, device=span[0].device)
    return span[0] + places * (span[1] - span[0]) // count


class Accepted(NamedTuple):
    """The k offers that all workers accept."""

    indices: Tensor
    """(k,) int64, in the order of offers."""
    counts: Tensor
    """(R,) int64 accepted offers of each worker."""
    threshold: Tensor
    """() float32 lower bound of the accepted magnitudes."""


def accept_largest(indices: Tensor, bits: Tensor, k: int) -> Accepted:
    """Return the k largest offers: what `consensus.accept_largest` returns, in fixed shapes.

    Args:
        indices: (R, M) int64 of all workers.
        bits: (R, M) int32 leading bits of their magnitudes.
        k: How many to accept.
    """
    flat = bits.reshape(-1)
    kth = flat.topk(k, sorted=False).values.min()
    above, tied = flat > kth, flat == kth
    need, ties = k - above.sum(), tied.sum()
    # Ties are taken evenly spaced: of `ties`, number r is the i-th of `need` where i * ties // need
    # is r, and the only i that can be is the r * need / ties rounded up.
    number = tied.cumsum(0) - 1
    i = (number * need + ties - 1) // ties
    accepted = above | (tied & (i < need) & (i * ties // need == number))
    # One place more than there are: all that is not accepted goes there.
    place = torch.where(accepted, accepted.cumsum(0) - 1, k)
    chosen = indices.new_zeros(k + 1).scatter_(0, place, indices.reshape(-1))[:k]
    threshold = (kth << 15).view(torch.float32)
    return Accepted(chosen, accepted.view(bits.shape).sum(1), threshold)


def next_state(
    rule: DeviceRule,
    state: DeviceState,
    accepted: Accepted,
    candidates: Tensor,
    k: int,
) -> DeviceState:
    """Return where the next step searches, and in which partitions.

    Args:
        rule: The method's settings.
        state: Of this step.
        accepted: What all workers send.
        candidates: (R,) int32, as in `Offers`.
        k: How many coordinates are sent.
    """
    workers = len(candidates)
    # A first step had no start; what it searched from says nothing.
    first = state.start[0] <= 0
    start = _next_start(state.start, accepted.threshold, candidates, k, first)
    if rule.loads is None or workers == 1:
        return state._replace(start=start)
    offered = rule.offers(k, workers)
    loads = _loads(accepted.counts, offered, candidates * ~first)
    # A decaying sum, by block; integers first, which add up alike on all devices.
    weights = (loads / accepted.counts.clamp(min=1) * _LOAD_UNIT).round().long()
    owner = torch.repeat_interleave(
        torch.arange(workers, device=weights.device), accepted.counts, output_size=k
    )
    new = torch.zeros(len(state.loads), dtype=torch.int64, device=weights.device)
    new.index_add_(0, accepted.indices // rule.blocks.size, weights[owner])
    total = new.double() / _LOAD_UNIT + rule.memory * state.loads
    least = -(-offered // rule.blocks.size)
    return state._replace(start=start, loads=total, cuts=recut(total, workers, least))


def recut(loads: Tensor, parts: int, least: int) -> Tensor:
    """Return the borders that come closest to equal loads: what `partitions.recut` returns.

    Args:
        loads: (NB,) float64 loads of the blocks.
        parts: R.
        least: Blocks that each partition has at least; `least` * R must not be above NB.

    Returns:
        (R + 1,) int64 borders, in blocks.
    """
    blocks = len(loads)
    whole = (loads * _LOAD_UNIT).round().long()
    before = torch.cat([whole.new_zeros(1), whole.cumsum(0)])
    number = torch.arange(1, parts, device=loads.device)
    targets = before[-1] * number // parts
    right = torch.searchsorted(before, targets).clamp_(1, blocks)
    nearer = (targets - before[right - 1]) < (before[right] - targets)
    wanted = right - nearer.long()
    # Each at least `least` after the one before: a running maximum of how far they are behind that.
    apart = (wanted - number * least).cummax(0).values.clamp(min=0) + number * least
    inner = torch.minimum(apart, blocks - (parts - number) * least)
    # Without any load yet, equal parts.
    share, more = divmod(blocks, parts)
    even = number * share + number.clamp(max=more)
    inner = torch.where(before[-1] > 0, inner, even)
    return torch.cat([inner.new_zeros(1), inner, inner.new_full((1,), blocks)])


def _next_start(
    start: Tensor, threshold: Tensor, candidates: Tensor, k: int, first: Tensor
) -> Tensor:
    """Return `ExclusiveStep._next_start`, as (2,) float64."""
    threshold = threshold.double()
    total, ratio = candidates.sum(), start[1]
    few, many = total < MIN_CANDIDATES * k, total > MAX_CANDIDATES * k
    ratio = torch.where(few, (ratio * 0.97).clamp(min=0.3), ratio)
    ratio = torch.where(many, (ratio * 1.02).clamp(max=0.995), ratio)
    # Far off, the accepted offers include some that are merely evenly spaced, and their smallest
    # says nothing. Then go up or down until enough, but not too many, reach the start.
    magnitude = torch.where(total < k, start[0] * 0.5, threshold * ratio)
    magnitude = torch.where((candidates < 0).any(), start[0] * 2, magnitude)
    ratio = torch.where(first, 0.9, ratio)
    return torch.stack([torch.where(first, threshold * 0.9, magnitude), ratio])


def _loads(counts: Tensor, offered: int, candidates: Tensor) -> Tensor:
    """Return `estimate_loads`: (R,) float64."""
    had = candidates.clamp(min=0)
    below = (counts < offered) & (had > 0)
    known = (had * below).sum()
    share = (counts * below).sum().double() / known.clamp(min=1)
    return torch.maximum(counts.double(), torch.where(counts == offered, share * had, 0.0))
