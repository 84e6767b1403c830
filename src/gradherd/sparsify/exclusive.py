"""Picking from partitions that do not overlap: what ExDyna and MiCRO share.

Letters: R workers, K picks of all of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradherd.comm.script import Script
from gradherd.sparsify import consensus as offers
from gradherd.sparsify.exchange import gather_indices
from gradherd.sparsify.kernels import above, largest
from gradherd.sparsify.selector import Place, Proposal


@dataclass(frozen=True)
class Online:
    """Move the threshold by the last step's count (ExDyna and MiCRO).

    The published code can never lower the threshold inside the band; this is the rule it meant.
    """

    band: float = 1.1
    """Counts within this factor of the target are near it."""
    fast_up: float = 1.005
    """Factor if far too many were picked."""
    slow_up: float = 1.00125
    """Factor if a few too many were picked."""
    slow_down: float = 0.9987
    """Factor if a few too few were picked, or as many as wanted."""
    fast_down: float = 0.995
    """Factor if far too few were picked."""

    def __post_init__(self) -> None:
        if not self.band >= 1:
            raise ValueError(f"band must be at least 1, got {self.band}")
        if not self.fast_up >= self.slow_up >= 1 >= self.slow_down >= self.fast_down > 0:
            raise ValueError(f"factors must fall from fast_up to fast_down around 1, got {self}")

    def first(self, k: int) -> float:
        """Return the threshold of the first step: 1 / (2 sqrt k), whatever the gradients are."""
        return 1 / (2 * math.sqrt(k))

    def following(self, threshold: float, picked: int, k: int) -> float:
        """Return the threshold after a step that picked so many."""
        share = picked / k
        if share > self.band:
            return threshold * self.fast_up
        if share > 1:
            return threshold * self.slow_up
        if share > 1 / self.band:
            return threshold * self.slow_down
        return threshold * self.fast_down


Rule = Literal["consensus", "online"] | Online
Start = tuple[float, float] | None
"""What a step starts from: a floor above which candidates are looked for, and what part of the
threshold it is. Online: the threshold, and 1."""

# Candidates to find for each one that is wanted; the floor follows.
_FEW, _MANY = 2, 4


@dataclass(frozen=True)
class Pick:
    """What all workers picked together."""

    indices: Tensor
    """(K,) int64, without repeats, in the order of workers."""
    counts: list[int]
    """How many each worker picked."""
    threshold: float
    """That of this step."""
    following: Start
    """What the next step starts from."""
    loads: list[float]
    """How much each worker had, also beyond its capacity."""


def loads_of(
    counts: Sequence[int], offered: Sequence[int], candidates: Sequence[int]
) -> list[float]:
    """Return how much each worker had above the threshold, also if it could not offer all.

    Those that could tell what part of candidates that is.

    >>> loads_of([10, 20, 20], [20, 20, 20], [30, 60, 90])
    [10.0, 20.0, 30.0]
    """
    free = [r for r, count in enumerate(counts) if count < offered[r] and candidates[r]]
    told = sum(candidates[r] for r in free)
    share = sum(counts[r] for r in free) / told if told else 0.0
    return [
        max(float(count), share * candidates[r] if count == offered[r] else 0.0)
        for r, count in enumerate(counts)
    ]


def rescaled(start: Start, factor: float) -> Start:
    """Follow a change of the unit that values are in."""
    return None if start is None else (start[0] * factor, start[1])


def check_rule(rule: object, spare: float) -> None:
    """Raise unless these say how to find a threshold."""
    if not spare >= 1:
        raise ValueError(f"capacity must be at least 1, got {spare}")
    if rule not in ("consensus", "online") and not isinstance(rule, Online):
        raise ValueError(f"threshold must be consensus, online or an Online(...), got {rule!r}")


@dataclass(frozen=True)
class Exclusive:
    """One step of one worker, with all that everybody knows beforehand."""

    rule: Rule
    """How the threshold is found."""
    spare: float
    """By consensus, how many times its fair share a worker may send."""
    start: Start
    """What the last step left to start from."""
    bounds: Sequence[int]
    """R + 1 borders of the partitions."""
    k: int
    """How many all workers should pick."""
    place: Place
    """Which worker this is."""

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Where each worker picks in this step."""
        return [(self.bounds[part], self.bounds[part + 1]) for part in self.place.parts]

    @property
    def sizes(self) -> list[int]:
        """How much each worker offers."""
        lengths = [end - first for first, end in self.spans]
        most = offers.capacity(self.spare, self.k, lengths)
        return [min(most, length) for length in lengths]

    def _words(self) -> int:
        return max(offers.words(n, s) for n, s in zip(self.sizes, self.spans, strict=True))

    def propose(self, acc: Tensor) -> Proposal:
        """Find this worker's candidates, and offer the largest or tell their number."""
        first, end = self.spans[self.place.rank]
        part = acc[first:end]
        if self.k >= len(acc):
            return Proposal(torch.zeros(0, dtype=torch.int32, device=acc.device))
        if self.rule != "consensus":
            return self._above_threshold(part, first)
        count = self.sizes[self.place.rank]
        found = above(part, self.start[0]) if self.start else None
        load = 0 if found is None else len(found)
        if found is None or load < count:
            found = largest(part, count)
        elif load > count:
            found = found[part[found].abs().topk(count).indices.sort().values]
        message = offers.pack(first + found, part[found].abs(), (first, end), self._words())
        told = torch.tensor([load], dtype=torch.int32, device=acc.device)
        return Proposal(torch.cat([told, message]))

    def _above_threshold(self, part: Tensor, first: int) -> Proposal:
        threshold = self._threshold()
        found = above(part, threshold)
        if not len(found) and len(part):
            found = torch.tensor([self.place.step % len(part)], device=part.device)
        count = torch.tensor([len(found)], dtype=torch.int32, device=part.device)
        return Proposal(count, first + found)

    def _online(self) -> Online:
        return self.rule if isinstance(self.rule, Online) else Online()

    def _threshold(self) -> float:
        return self._online().first(self.k) if self.start is None else self.start[0]

    def settle(self, acc: Tensor, proposal: Proposal, headers: Tensor) -> Script[Pick]:
        """Agree on what is picked, now that everybody's header is known."""
        if self.k >= len(acc):
            everything = torch.arange(len(acc), device=acc.device)
            lengths = [end - first for first, end in self.spans]
            return Pick(everything, lengths, 0.0, self.start, [float(n) for n in lengths])
        if self.rule == "consensus":
            return self._keep(acc, headers)
        counts = headers[:, 0].tolist()
        indices = yield from gather_indices(proposal.found, counts, self.spans, self.place)
        threshold = self._threshold()
        after = self._online().following(threshold, sum(counts), self.k)
        return Pick(indices, counts, threshold, (after, 1.0), [float(n) for n in counts])

    def _keep(self, acc: Tensor, headers: Tensor) -> Pick:
        seen = headers.numpy()
        given = [
            offers.unpack(row[1:], count, span)
            for row, count, span in zip(seen, self.sizes, self.spans, strict=True)
        ]
        kept = offers.keep(given, self.k)
        candidates = seen[:, 0].tolist()
        loads = loads_of(kept.counts, self.sizes, candidates)
        indices = torch.from_numpy(kept.indices).to(acc.device)
        after = self._floor(kept.threshold, sum(candidates))
        return Pick(indices, kept.counts, kept.threshold, after, loads)

    def _floor(self, threshold: float, candidates: int) -> Start:
        """Return a floor that leaves a few times as many candidates as are wanted."""
        share = self.start[1] if self.start else 0.9
        if self.start and candidates < _FEW * self.k:
            share = max(0.3, share * 0.97)
        if candidates > _MANY * self.k:
            share = min(0.995, share * 1.02)
        return threshold * share, share
