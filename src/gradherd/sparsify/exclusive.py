"""Selection from exclusive partitions: what ExDyna and MiCRO share.

Each worker selects within a partition of its own, so no coordinate is selected twice. The
threshold is agreed on in each step (`consensus`), or follows the papers' rule (`Online`).

Letters: R workers, K coordinates that all of them select.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from gradherd.comm.script import Script
from gradherd.sparsify import consensus
from gradherd.sparsify.exchange import gather_indices, gathered_bytes
from gradherd.sparsify.kernels import indices_above, topk_indices
from gradherd.sparsify.selector import Proposal, StepContext


@dataclass(frozen=True)
class Online:
    """Move the threshold by a small factor after each step (ExDyna and MiCRO as published).

    The constants are those of the published code (arXiv:2402.13781, arXiv:2310.00967). There
    `slow_down` cannot be reached, because the ratio is compared with 0: within the band the
    threshold only rises. This rule compares with 1.

    >>> rule = Online()
    >>> [round(rule.following(1.0, count, k=100), 5) for count in (120, 105, 95, 50)]
    [1.005, 1.00125, 0.9987, 0.995]
    """

    band: float = 1.1
    """Counts within this factor of the target are near it."""
    fast_up: float = 1.005
    """Factor if far too many were selected."""
    slow_up: float = 1.00125
    """Factor if slightly too many were selected."""
    slow_down: float = 0.9987
    """Factor if slightly too few were selected, or exactly as many as wanted."""
    fast_down: float = 0.995
    """Factor if far too few were selected."""

    def __post_init__(self) -> None:
        if not self.band >= 1:
            raise ValueError(f"band must be at least 1, got {self.band}")
        if not self.fast_up >= self.slow_up >= 1 >= self.slow_down >= self.fast_down > 0:
            raise ValueError(f"factors must fall from fast_up to fast_down around 1, got {self}")

    def first(self, k: int) -> float:
        """Return the threshold of the first step: 1 / (2 sqrt k), regardless of the gradients."""
        # The hard threshold of Sahu et al., arXiv:2108.00951. It ignores the scale of the
        # gradients, which is why settling may take hundreds of steps.
        return 1 / (2 * math.sqrt(k))

    def following(self, threshold: float, selected: int, k: int) -> float:
        """Return the threshold after a step that selected `selected` coordinates."""
        ratio = selected / k
        if ratio > self.band:
            return threshold * self.fast_up
        if ratio > 1:
            return threshold * self.slow_up
        if ratio > 1 / self.band:
            return threshold * self.slow_down
        return threshold * self.fast_down


ThresholdRule = Literal["consensus", "online"] | Online
SearchStart = tuple[float, float] | None
"""Where a step's search starts. By consensus: a magnitude above which to look for candidates, and
its ratio to the last threshold. Online: the threshold, and 1. None before the first step.
A plain tuple, so that checkpoints can hold it."""

# By consensus, the search keeps the number of candidates between these multiples of k: fewer may
# not fill all capacities, which costs a search of the whole partition; more take longer to rank.
MIN_CANDIDATES, MAX_CANDIDATES = 2, 4


@dataclass(frozen=True)
class ExclusiveResult:
    """What all workers selected together."""

    indices: Tensor
    """(K,) int64, without repeats, in the order of workers."""
    counts: list[int]
    """How many coordinates each worker selected."""
    threshold: float
    """Threshold of this step."""
    next_start: SearchStart
    """Where the next step's search starts."""
    loads: list[float]
    """How many coordinates above the threshold each worker had, capacity or not."""


def estimate_loads(
    counts: Sequence[int], offered: Sequence[int], candidates: Sequence[int]
) -> list[float]:
    """Return how many coordinates above the threshold each worker had, capacity or not.

    A worker whose offers were all accepted may have had more. The other workers tell which share
    of candidates is above the threshold; that share of its own candidates is the estimate.

    >>> estimate_loads([10, 20, 20], [20, 20, 20], [30, 60, 90])
    [10.0, 20.0, 30.0]
    """
    below = [r for r, count in enumerate(counts) if count < offered[r] and candidates[r]]
    known = sum(candidates[r] for r in below)
    share = sum(counts[r] for r in below) / known if known else 0.0
    return [
        max(float(count), share * candidates[r] if count == offered[r] else 0.0)
        for r, count in enumerate(counts)
    ]


def rescale_start(start: SearchStart, factor: float) -> SearchStart:
    """Return the start of the search after all values were multiplied by `factor`."""
    return None if start is None else (start[0] * factor, start[1])


def check_threshold_rule(rule: object, capacity: float) -> None:
    """Raise ValueError unless these are a threshold rule and a capacity."""
    if not capacity >= 1:
        raise ValueError(f"capacity must be at least 1, got {capacity}")
    if rule not in ("consensus", "online") and not isinstance(rule, Online):
        raise ValueError(f"threshold must be consensus, online or an Online(...), got {rule!r}")


# What was accepted last in this process, with all that it depends on.
_last_accepted: list[tuple[Any, ExclusiveResult]] = []


@dataclass(frozen=True)
class ExclusiveStep:
    """One step of one worker, with everything that all workers know beforehand."""

    rule: ThresholdRule
    """How the threshold is determined."""
    capacity: float
    """By consensus, how many times its fair share a worker may send."""
    start: SearchStart
    """Where the search starts."""
    bounds: Sequence[int]
    """R + 1 borders of the partitions."""
    k: int
    """How many coordinates all workers should select together."""
    context: StepContext
    """Which worker this is."""

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The coordinates [first, end) from which each worker selects in this step."""
        return [(self.bounds[part], self.bounds[part + 1]) for part in self.context.partitions]

    @property
    def offer_counts(self) -> list[int]:
        """How many coordinates each worker offers (consensus)."""
        lengths = [end - first for first, end in self.spans]
        most = consensus.capacity(self.capacity, self.k, lengths)
        return [min(most, length) for length in lengths]

    def _message_length(self) -> int:
        """Return the length of the longest message."""
        # Headers are all-gathered, so they must have the same length everywhere.
        offers = zip(self.offer_counts, self.spans, strict=True)
        compact = self.context.compact
        return max(consensus.message_length(count, span, compact) for count, span in offers)

    def propose(self, acc: Tensor) -> Proposal:
        """Search this worker's partition of (D,) `acc`.

        By consensus, the header holds the number of candidates and the offers; online, it holds
        the number of selected coordinates.
        """
        first, end = self.spans[self.context.rank]
        part = acc[first:end]
        # Nothing to choose. All workers have the same k and D, so all headers are empty.
        if self.k >= len(acc):
            return Proposal(torch.zeros(0, dtype=torch.int32, device=acc.device))
        if self.rule != "consensus":
            return self._propose_online(part, first)
        count = self.offer_counts[self.context.rank]
        offers = indices_above(part, self.start[0]) if self.start else None
        candidates = 0 if offers is None else len(offers)
        # The first step, or the start was too high for this partition: search all of it.
        if offers is None or candidates < count:
            offers = topk_indices(part, count)
        elif candidates > count:
            # In ascending order again: messages store offers page by page.
            offers = offers[part[offers].abs().topk(count).indices.sort().values]
        message = consensus.pack(
            first + offers,
            part[offers].abs(),
            (first, end),
            self._message_length(),
            self.context.compact,
        )
        load = torch.tensor([candidates], dtype=torch.int32, device=acc.device)
        return Proposal(torch.cat([load, message]))

    def _propose_online(self, part: Tensor, first: int) -> Proposal:
        selected = indices_above(part, self._online_threshold())
        if not len(selected) and len(part):
            # As published: every worker selects at least one coordinate, whichever it is.
            selected = torch.tensor([self.context.step % len(part)], device=part.device)
        count = torch.tensor([len(selected)], dtype=torch.int32, device=part.device)
        return Proposal(count, first + selected)

    def _online_rule(self) -> Online:
        return self.rule if isinstance(self.rule, Online) else Online()

    def _online_threshold(self) -> float:
        return self._online_rule().first(self.k) if self.start is None else self.start[0]

    def settle(self, acc: Tensor, proposal: Proposal, headers: Tensor) -> Script[ExclusiveResult]:
        """Agree on the selection, given the (R, H) headers of all workers."""
        if self.k >= len(acc):
            # The start stays: a step of a warm-up from density 1 says nothing about a threshold.
            everything = torch.arange(len(acc), device=acc.device)
            lengths = [end - first for first, end in self.spans]
            loads = [float(length) for length in lengths]
            return ExclusiveResult(everything, lengths, 0.0, self.start, loads)
        if self.rule == "consensus":
            return self._accept_offers(acc, headers)
        counts = headers[:, 0].tolist()
        indices = yield from gather_indices(proposal.local, counts, self.spans, self.context)
        return self._online_result(indices, counts)

    def _online_result(self, indices: Tensor, counts: list[int]) -> ExclusiveResult:
        threshold = self._online_threshold()
        following = self._online_rule().following(threshold, sum(counts), self.k)
        loads = [float(count) for count in counts]
        return ExclusiveResult(indices, counts, threshold, (following, 1.0), loads)

    def _accept_offers(self, acc: Tensor, headers: Tensor) -> ExclusiveResult:
        rows = headers.numpy()
        # Workers in one process come here one after the other with the same headers, and unpacking
        # them is most of a simulated step.
        known = (rows.tobytes(), self.bounds, self.k, self.capacity, self.start, acc.device)
        key = (*known, self.context.partitions, self.context.compact)
        if _last_accepted and _last_accepted[0][0] == key:
            return _last_accepted[0][1]
        offers = [
            consensus.unpack(row[1:], count, span, self.context.compact)
            for row, count, span in zip(rows, self.offer_counts, self.spans, strict=True)
        ]
        result = self._accept(offers, rows[:, 0].tolist(), acc.device)
        _last_accepted[:] = [(key, result)]
        return result

    def _accept(
        self, offers: Sequence[consensus.Offer], candidates: list[int], device: torch.device
    ) -> ExclusiveResult:
        # On the CPU in numpy: headers are there anyway, and integers give all workers the same
        # result.
        accepted = consensus.accept_largest(offers, self.k)
        loads = estimate_loads(accepted.counts, self.offer_counts, candidates)
        indices = torch.from_numpy(accepted.indices).to(device, non_blocking=True)
        start = self._next_start(accepted.threshold, sum(candidates))
        return ExclusiveResult(indices, accepted.counts, accepted.threshold, start, loads)

    def select_stacked(self, acc: Tensor) -> tuple[ExclusiveResult, list[int]]:
        """Do `propose` and `settle` for all workers.

        Args:
            acc: (R, D) residual + gradient of every worker, with D above k.

        Returns:
            What they agree on, and how many bytes each would send for it.
        """
        spans, partitions, workers = self.spans, self.context.partitions, len(acc)
        # Partitions do not overlap: what all workers search is one vector, read once.
        owners = sorted(range(workers), key=lambda rank: partitions[rank])
        searched = torch.cat([acc[rank, slice(*spans[rank])] for rank in owners])
        start = self.start[0] if self.start else 0.0
        threshold = start if self.rule == "consensus" else self._online_threshold()
        found = searched.new_zeros(0, dtype=torch.int64)
        if self.start or self.rule != "consensus":
            found = indices_above(searched, threshold)
        edges = [0] * len(self.bounds)
        if len(found):
            edges = torch.searchsorted(found, _on(found, self.bounds)).tolist()
        ranges = [(edges[part], edges[part + 1]) for part in partitions]
        counts = [end - begin for begin, end in ranges]
        if self.rule == "consensus":
            result = self._accept(self._offers(searched, found, ranges), counts, acc.device)
            # The message of each worker: how many candidates it has, and its offers.
            return result, [4 * (1 + self._message_length()) * (workers - 1)] * workers
        own = [found[begin:end] for begin, end in ranges]
        for rank, (first, end) in enumerate(spans):
            if not counts[rank] and end > first:  # As in `_propose_online`.
                counts[rank] = 1
                own[rank] = _on(found, [first + self.context.step % (end - first)])
        sent = [4 * (workers - 1) + one for one in gathered_bytes(counts, spans, self.context)]
        return self._online_result(torch.cat(own), counts), sent

    def _offers(
        self, searched: Tensor, found: Tensor, ranges: Sequence[tuple[int, int]]
    ) -> list[consensus.Offer]:
        """Return the offers of all workers.

        Args:
            searched: (D,) the partition of each worker, from that worker.
            found: Candidates of all workers, ascending.
            ranges: Which of them are each worker's: [begin, end).
        """
        counts, spans = self.offer_counts, self.spans
        enough = [rank for rank, (b, e) in enumerate(ranges) if e - b >= counts[rank]]
        rows: dict[int, Tensor] = {}
        if enough:
            # A row for each worker, as long as the longest. Places without a candidate are below
            # all others, and come last once the chosen ones are in ascending order again.
            chosen = [(*ranges[rank], counts[rank]) for rank in enough]
            width, most = max(e - b for b, e, _ in chosen), max(count for *_, count in chosen)
            begin, end, count = _on(found, chosen).T.unsqueeze(-1)
            place = begin + torch.arange(width, device=found.device)
            magnitudes = searched[found[place.clamp(max=len(found) - 1)]].abs()
            top = magnitudes.masked_fill(place >= end, -1).topk(most).indices
            ranking = torch.arange(most, device=found.device)
            top = top.masked_fill(ranking >= count, width).sort().values
            places = (begin + top).clamp(max=len(found) - 1)
            rows = dict(zip(enough, found[places], strict=True))
        for rank, (first, end) in enumerate(spans):
            if rank not in rows:  # The first step, or the start was too high, as in `propose`.
                rows[rank] = first + topk_indices(searched[first:end], counts[rank])
        indices = torch.cat([rows[rank][:count] for rank, count in enumerate(counts)])
        bits = consensus.leading_bits(searched[indices].abs())
        # Both in one number: a single copy to the host.
        joined = np.split(((indices << 16) | bits).cpu().numpy(), np.cumsum(counts)[:-1])
        return [(one >> 16, (one & 0xFFFF).astype(np.uint16)) for one in joined]

    def _next_start(self, threshold: float, candidates: int) -> SearchStart:
        """Return a start that leaves a few times as many candidates as are wanted."""
        # Adjusted by a few percent per step, and kept away from 0, where everything is a candidate,
        # and from 1, where the threshold of the next step may be below the start.
        ratio = self.start[1] if self.start else 0.9
        if self.start and candidates < MIN_CANDIDATES * self.k:
            ratio = max(0.3, ratio * 0.97)
        if candidates > MAX_CANDIDATES * self.k:
            ratio = min(0.995, ratio * 1.02)
        return threshold * ratio, ratio


def _on(like: Tensor, numbers: Sequence[Any]) -> Tensor:
    """Return integers as a tensor on the device of `like`, without waiting for it."""
    return torch.tensor(numbers).to(like.device, non_blocking=True)
