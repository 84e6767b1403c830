"""Picking from partitions that do not overlap: what ExDyna and MiCRO share.

Letters: R workers, K picks of all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradherd.comm.script import Script
from gradherd.sparsify.choice import Place, Proposal
from gradherd.sparsify.exchange import gather_indices
from gradherd.sparsify.kernels import above, largest
from gradherd.sparsify.thresholds import (
    Online,
    bins_of,
    counts_in,
    find,
    floor_of,
    search,
    window,
)

Rule = Literal["consensus", "online"] | Online


@dataclass(frozen=True)
class Pick:
    """What all workers picked together."""

    indices: Tensor
    """(K,) int64, without repeats, in the order of workers."""
    counts: list[int]
    """How many each worker picked."""
    threshold: float
    """That of this step."""
    following: float | None
    """What the next step starts from."""


def check_rule(rule: object) -> None:
    """Raise unless `rule` is a way to find a threshold."""
    if rule not in ("consensus", "online") and not isinstance(rule, Online):
        raise ValueError(f"threshold must be consensus, online or an Online(...), got {rule!r}")


def propose(
    acc: Tensor, k: int, bounds: Sequence[int], rule: Rule, last: float | None, place: Place
) -> Proposal:
    """Find this worker's candidates, as indices into its partition; show how many there are.

    Args:
        acc: (D,) residual + gradient.
        k: How many all workers should pick.
        bounds: R + 1 borders of the partitions.
        rule: How the threshold is found.
        last: What the last step left to start from.
        place: Which worker this is.
    """
    part = acc[bounds[place.part] : bounds[place.part + 1]]
    if rule == "consensus":
        if last is None or k >= len(acc):
            return Proposal(torch.zeros(0, dtype=torch.int32, device=acc.device))
        lowest = window(last)
        found = above(part, floor_of(lowest))
        return Proposal(counts_in(bins_of(part[found]), lowest), (lowest, found))
    online = Online() if rule == "online" else rule
    threshold = online.first(k) if last is None else last
    found = above(part, threshold)
    if not len(found) and len(part):
        found = torch.tensor([place.step % len(part)], device=acc.device)
    count = torch.tensor([len(found)], dtype=torch.int32, device=acc.device)
    return Proposal(count, (threshold, found))


def settle(
    acc: Tensor,
    k: int,
    bounds: Sequence[int],
    rule: Rule,
    place: Place,
    proposal: Proposal,
    headers: Tensor,
) -> Script[Pick]:
    """Agree on a threshold and exchange what lies above it."""
    begin = bounds[place.part]
    part = acc[begin : bounds[place.part + 1]]
    if rule == "consensus":
        if k >= len(acc):
            everything = torch.arange(len(acc), device=acc.device)
            own = [(place.step + rank) % place.size for rank in range(place.size)]
            return Pick(everything, [bounds[p + 1] - bounds[p] for p in own], 0.0, None)
        shares, threshold, found = yield from _agree(part, k, place, proposal, headers)
        following: float | None = threshold
    else:
        threshold, found = proposal.found
        shares = headers[:, 0].tolist()
        online = Online() if rule == "online" else rule
        following = online.following(threshold, sum(shares), k)
    spans = [_span(bounds, (place.step + rank) % place.size) for rank in range(place.size)]
    indices = yield from gather_indices(begin + found, shares, spans, place)
    return Pick(indices, shares, threshold, following)


def _agree(
    part: Tensor, k: int, place: Place, proposal: Proposal, headers: Tensor
) -> Script[tuple[list[int], float, Tensor]]:
    """Return how many each worker picks, the threshold, and this worker's picks."""
    cut = None
    if proposal.found is not None:
        lowest, found = proposal.found
        cut = find(headers, lowest, k)
    if cut is None:  # The first step, or the threshold has jumped.
        cut = yield from search(part, k)
        found = above(part, cut.floor)
    shares = cut.shares(k)
    return shares, cut.floor, found[largest(part[found], shares[place.rank])]


def _span(bounds: Sequence[int], part: int) -> tuple[int, int]:
    return bounds[part], bounds[part + 1]
