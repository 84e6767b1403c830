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
    Cut,
    Online,
    bin_of,
    bins_of,
    capacity,
    counts_in,
    find,
    search,
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
    loads: list[int]
    """How many each worker had above the threshold, also beyond its capacity."""


def check_rule(rule: object, spare: float) -> None:
    """Raise unless these say how to find a threshold."""
    if not spare >= 1:
        raise ValueError(f"capacity must be at least 1, got {spare}")
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
    if k >= len(acc) or (rule == "consensus" and last is None):
        return Proposal(torch.zeros(0, dtype=torch.int32, device=acc.device))
    if rule == "consensus":
        assert last is not None
        found = above(part, last)
        return Proposal(counts_in(bins_of(part[found]), bin_of(last)), found)
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
    spare: float,
    last: float | None,
    place: Place,
    proposal: Proposal,
    headers: Tensor,
) -> Script[Pick]:
    """Agree on a threshold and exchange what lies above it.

    Args:
        acc: (D,) residual + gradient.
        k: How many all workers should pick.
        bounds: R + 1 borders of the partitions.
        rule: How the threshold is found.
        spare: By consensus, how many times its fair share a worker may send.
        last: What the last step left to start from.
        place: Which worker this is.
        proposal: What this worker found by itself.
        headers: (R, H) what all of them showed.
    """
    begin = bounds[place.part]
    part = acc[begin : bounds[place.part + 1]]
    spans = [_span(bounds, (place.step + rank) % place.size) for rank in range(place.size)]
    if k >= len(acc):
        everything = torch.arange(len(acc), device=acc.device)
        lengths = [end - first for first, end in spans]
        return Pick(everything, lengths, 0.0, last, lengths)
    if rule == "consensus":
        most = capacity(spare, k, [end - first for first, end in spans])
        cut, found = yield from _agree(part, k, most, last, proposal, headers)
        shares, threshold = cut.shares(k), cut.floor
        found = found[largest(part[found], shares[place.rank])]
        following: float | None = cut.start
        loads = cut.loads
    else:
        threshold, found = proposal.found
        shares = loads = headers[:, 0].tolist()
        online = Online() if rule == "online" else rule
        following = online.following(threshold, sum(shares), k)
    indices = yield from gather_indices(begin + found, shares, spans, place)
    return Pick(indices, shares, threshold, following, loads)


def _agree(
    part: Tensor, k: int, most: int, last: float | None, proposal: Proposal, headers: Tensor
) -> Script[tuple[Cut, Tensor]]:
    """Return where the line is drawn, and this worker's candidates."""
    if last is not None:
        cut = find(headers, bin_of(last), k, most)
        if cut is not None:
            return cut, proposal.found
    # The first step, or the threshold has jumped.
    return (yield from search(part, k, most))


def _span(bounds: Sequence[int], part: int) -> tuple[int, int]:
    return bounds[part], bounds[part + 1]
