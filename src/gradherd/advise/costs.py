"""What communication and computation cost: collectives on a network link, and method overheads.

A message to the next rank takes `latency + bytes / rate`. For each collective there are two
algorithms, one around a ring and one over a tree; libraries pick the faster one, and so do the
functions here.

The overheads are measurements. CPU: one rank on one core of a Neoverse-N1 (processor times of
`benchmarks/slow_network.py` with torch 2.13 and gloo, which sums half-precision values slowly).
GPU: topk and exdyna are what their hooks add to a DDP step on one H200
(`benchmarks/results/2026-11-16-hook-h200.json`; half a millisecond is added for what one rank
replays and several launch); the others are derived from passes over memory at its bandwidth, as
several GPUs were not available. "local" is what the parts of `benchmarks/one_bit.py` take: on a
core with 2 and 10 M parameters, and on an H200 (`benchmarks/results/2026-11-18-one-bit-h200.json`).
Take all of them as starting points, and measure.

Letters: R ranks.
"""

from dataclasses import dataclass

from gradherd.comm.checks import check_in

GOODPUT = 0.94
"""Share of an Ethernet link that carries data: 1,448 of 1,538 bytes, as the rest are headers of
Ethernet, IP and TCP, and gaps between frames."""

DEVICES = ("cpu", "cuda")
OVERHEADS = {
    "fp16": ("converting to half precision and back", (19e-9, 0.0), (6e-12, 0.0)),
    "powersgd": ("matrix products and orthogonalisation", (7e-9, 1e-3), (20e-12, 1e-3)),
    "topk": ("residual, selection and mean", (3.5e-9, 1e-3), (1e-12, 3.6e-3)),
    "exdyna": ("the same, values of few bits included", (2e-9, 1e-3), (8e-12, 0.5e-3)),
    "local": ("an exchange of local steps, once in so many", (15e-9, 6e-3), (20e-12, 1e-3)),
    "order": ("cd-grab on top of a dense exchange", (1.4e-9, 0.2e-3), (16e-12, 0.2e-3)),
    "sketch": ("cd-grab beside any other exchange", (2.4e-9, 0.2e-3), (16e-12, 0.2e-3)),
}
"""Method -> what it computes; and on each of `DEVICES` its seconds per parameter, and its seconds
per step (local: per exchange) whatever the size of the model."""


@dataclass(frozen=True, kw_only=True)
class NetworkLink:
    """The network as one rank sees it; the same for all ranks."""

    bandwidth: float
    """Bits per second from one rank to all others together, in each direction."""
    latency: float
    """Seconds of a short message to another rank."""
    goodput: float = GOODPUT
    """Share of the bandwidth that carries data."""
    all_to_all_share: float = 1.0
    """Share of the goodput that an all-to-all reaches: gloo's does not fill a slow link."""

    def __post_init__(self) -> None:
        check_in("(0, inf]", bandwidth=self.bandwidth)
        check_in("[0, inf)", latency=self.latency)
        check_in("(0, 1]", goodput=self.goodput, all_to_all_share=self.all_to_all_share)

    def transfer(self, size: float) -> float:
        """Return the seconds to send, or to receive, `size` bytes."""
        return 8 * size / (self.bandwidth * self.goodput)


def all_reduce_seconds(size: float, ranks: int, link: NetworkLink) -> float:
    """Return the seconds to sum `size` bytes over all ranks.

    Ring: 2 (R - 1) hops with 1/R of the bytes each. Tree: up and down two pipelined trees of
    log2 R levels, each with half of the bytes.

    >>> link = NetworkLink(bandwidth=8e6, latency=0.01, goodput=1)  # a megabyte per second
    >>> round(all_reduce_seconds(1e6, 4, link), 3)  # ring: 6 x 0.01 + 1.5
    1.56
    >>> round(all_reduce_seconds(4, 1024, link), 3)  # tree: 20 x 0.01
    0.2
    """
    if ranks == 1:
        return 0.0
    # A ring sends the least, a tree waits the least: size and number of ranks decide.
    ring = 2 * (ranks - 1) * link.latency + link.transfer(2 * size * (ranks - 1) / ranks)
    tree = 2 * levels(ranks) * link.latency + link.transfer(2 * size)
    return min(ring, tree)


def all_gather_seconds(size: float, ranks: int, link: NetworkLink) -> float:
    """Return the seconds to gather `size` bytes of each rank on all ranks.

    Every rank receives all bytes either way; only the number of hops differs: R - 1 around a ring,
    log2 R with recursive doubling.
    """
    if ranks == 1:
        return 0.0
    hops = min(ranks - 1, levels(ranks))
    return hops * link.latency + link.transfer(size * (ranks - 1))


def all_to_all_seconds(size: float, ranks: int, link: NetworkLink) -> float:
    """Return the seconds of an all-to-all in which each rank holds `size` bytes.

    Direct: R - 1 messages with 1/R of the bytes. Bruck's algorithm: log2 R rounds, each with half
    of them.
    """
    if ranks == 1:
        return 0.0
    # A link that is only partly filled takes as long as a full one with more bytes.
    moved = size / link.all_to_all_share
    direct = (ranks - 1) * link.latency + link.transfer(moved * (ranks - 1) / ranks)
    bruck = levels(ranks) * (link.latency + link.transfer(moved / 2))
    return min(direct, bruck)


def levels(ranks: int) -> int:
    """Return the number of levels of a binary tree over `ranks` ranks.

    >>> [levels(ranks) for ranks in (1, 2, 3, 4, 5)]
    [0, 1, 2, 2, 3]
    """
    return (ranks - 1).bit_length()


def typical_overheads(device: str, params: float) -> dict[str, float]:
    """Return the seconds per step that each method is expected to spend computing.

    >>> round(1e3 * typical_overheads("cpu", 10e6)["exdyna"])  # milliseconds
    21
    """
    # A dense exchange sums while it sends.
    overheads = {"dense": 0.0}
    for name, (_, *by_device) in OVERHEADS.items():
        rate, fixed = by_device[DEVICES.index(device)]
        overheads[name] = fixed + rate * params
    return overheads
