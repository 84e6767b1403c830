"""What collectives cost on a link: latency per hop, and bytes per second.

Two algorithms are known for each, one that goes round a ring and one over a tree; libraries take
the better one, and so does this. A message to the next rank takes `latency + bytes / rate`.

Letters: R ranks.
"""

import math
from dataclasses import dataclass

GOODPUT = 0.94
"""Share of an Ethernet link that arrives as data: 1,448 of 1,538 bytes are neither headers of
Ethernet, IP and TCP nor gaps."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """The network as one rank sees it, the same for all."""

    bandwidth: float
    """Bits per second, of a rank to all others together, in each direction."""
    latency: float
    """Seconds that a short message takes to another rank."""
    goodput: float = GOODPUT
    """Share of the bandwidth that is data."""
    deal: float = 1.0
    """Share of that which an all-to-all reaches: gloo's does not fill a slow link."""

    def __post_init__(self) -> None:
        if not self.bandwidth > 0:
            raise ValueError(f"bandwidth must be positive, got {self.bandwidth}")
        if not 0 <= self.latency < math.inf:
            raise ValueError(f"latency must be 0 or more and finite, got {self.latency}")
        for name in ("goodput", "deal"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in (0, 1], got {getattr(self, name)}")

    def transfer(self, size: float) -> float:
        """Return the seconds that `size` bytes take to leave, or to arrive."""
        return 8 * size / (self.bandwidth * self.goodput)


def all_reduce(size: float, ranks: int, link: Link) -> float:
    """Return the seconds to sum `size` bytes over all ranks.

    Ring: 2 (R - 1) hops of 1/R of it each. Tree: up and down two trees of log2 R levels, each with
    half of it, in a pipeline.

    >>> link = Link(bandwidth=8e6, latency=0.01, goodput=1)  # a megabyte per second
    >>> round(all_reduce(1e6, 4, link), 3)  # ring: 6 x 0.01 + 1.5
    1.56
    >>> round(all_reduce(4, 1024, link), 3)  # tree: 20 x 0.01
    0.2
    """
    if ranks == 1:
        return 0.0
    ring = 2 * (ranks - 1) * link.latency + link.transfer(2 * size * (ranks - 1) / ranks)
    tree = 2 * levels(ranks) * link.latency + link.transfer(2 * size)
    return min(ring, tree)


def all_gather(size: float, ranks: int, link: Link) -> float:
    """Return the seconds to show `size` bytes of each rank to all others.

    All of it has to arrive, whatever the way: only the hops differ. Ring: R - 1. Tree (each round
    doubles what a rank knows): log2 R.
    """
    if ranks == 1:
        return 0.0
    hops = min(ranks - 1, levels(ranks))
    return hops * link.latency + link.transfer(size * (ranks - 1))


def all_to_all(size: float, ranks: int, link: Link) -> float:
    """Return the seconds to deal `size` bytes of each rank to all ranks.

    Directly: R - 1 messages of 1/R. In log2 R rounds: each moves half of what there is.
    """
    if ranks == 1:
        return 0.0
    moved = size / link.deal
    direct = (ranks - 1) * link.latency + link.transfer(moved * (ranks - 1) / ranks)
    rounds = levels(ranks) * (link.latency + link.transfer(moved / 2))
    return min(direct, rounds)


def levels(ranks: int) -> int:
    """Return the levels of a tree over so many ranks.

    >>> [levels(ranks) for ranks in (1, 2, 3, 4, 5)]
    [0, 1, 2, 2, 3]
    """
    return (ranks - 1).bit_length()
