"""Predict the time of a training step for each gradient exchange and each order.

A message to the next rank takes `latency + bytes / rate`. For each collective there are two
algorithms, one around a ring and one over a tree; libraries pick the faster one, and so do the
functions here. A step is forward pass and optimizer, backward pass, the part of the exchange that
does not overlap with the backward pass, and what the method itself computes. A dense exchange
starts during the backward pass, bucket by bucket; a sparse one needs the whole gradient first.

The overheads are measurements. CPU: one rank on one core of a Neoverse-N1 (processor times of
`benchmarks/slow_network.py` with torch 2.13 and gloo, which sums half-precision values slowly).
GPU: topk and exdyna are what their hooks add to a DDP step on one H200
(`benchmarks/results/2026-11-16-hook-h200.json`; half a millisecond is added for what one rank
replays and several launch); the others are derived from passes over memory at its bandwidth, as
several GPUs were not available. "local" is what the parts of `benchmarks/one_bit.py` take: on a
core with 2 and 10 M parameters, and on an H200 (`benchmarks/results/2026-11-18-one-bit-h200.json`).
Take all of them as starting points, and measure.

Letters: D parameters, R workers, k = density x D.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from gradherd.comm.checks import check_in
from gradherd.comm.message_sizes import (
    COUNT_BYTES,
    DEFAULT_DENSITY,
    EXDYNA_CAPACITY,
    FLAG_BYTES,
    VALUE_BITS,
    ValueFormat,
    fits_one_round,
    index_bytes,
    magnitude_bytes,
    slice_bytes,
    value_bytes,
)

_VALUE_BYTES = 4
_BUCKET_BYTES = 25 * 2**20  # DDP's default
# What follows belongs to code that needs torch, which predictions do without; tests compare.
_FEW_RANKS = 8
"""Up to this many ranks, an all-gather sums the small tensors of CD-GraB (`comm.collectives`)."""
_SKETCH_SIZE = 512
"""Elements of a row (`rows.SketchRows`)."""
_BATCHES_PER_GATHER = 32
"""Batches whose rows are gathered together (`ordering.coordination`)."""

GOODPUT = 0.94
"""Share of an Ethernet link that carries data: 1,448 of 1,538 bytes, as the rest are headers of
Ethernet, IP and TCP, and gaps between frames."""

DEVICES = ("cpu", "cuda")
OVERHEADS = {
    "fp16": ("converting to half precision and back", (19e-9, 0.0), (6e-12, 0.0)),
    "powersgd": ("matrix products and orthogonalisation", (7e-9, 1e-3), (20e-12, 1e-3)),
    "topk": ("residual, selection and mean", (3.5e-9, 1e-3), (1e-12, 3.6e-3)),
    "exdyna": ("the same, values of few bits included", (2e-9, 1e-3), (8e-12, 0.5e-3)),
    "local": ("an exchange of local steps, once in so many", (15e-9, 6e-3), (34e-12, 0.4e-3)),
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
    # A ring sends the least, a tree waits the least: size and number of ranks decide.
    ring = 2 * (ranks - 1) * link.latency + link.transfer(2 * size * (ranks - 1) / ranks)
    tree = 2 * levels(ranks) * link.latency + link.transfer(2 * size)
    return min(ring, tree)


def all_gather_seconds(size: float, ranks: int, link: NetworkLink) -> float:
    """Return the seconds to gather `size` bytes of each rank on all ranks.

    Every rank receives all bytes either way; only the number of hops differs: R - 1 around a ring,
    log2 R with recursive doubling.
    """
    hops = min(ranks - 1, levels(ranks))
    return hops * link.latency + link.transfer(size * (ranks - 1))


def all_to_all_seconds(size: float, ranks: int, link: NetworkLink) -> float:
    """Return the seconds of an all-to-all in which each rank holds `size` bytes.

    Direct: R - 1 messages with 1/R of the bytes. Bruck's algorithm: log2 R rounds, each with half
    of them.
    """
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
    """Return the seconds per step that each method is expected to spend computing."""
    # A dense exchange sums while it sends.
    overheads = {"dense": 0.0}
    for name, (_, *by_device) in OVERHEADS.items():
        rate, fixed = by_device[DEVICES.index(device)]
        overheads[name] = fixed + rate * params
    return overheads


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model, its workers and their network."""

    params: float
    """D."""
    workers: int
    """R."""
    link: NetworkLink
    backward: float
    """Seconds of a backward pass."""
    forward: float
    """Seconds of everything else in a step: forward pass, optimizer, data."""
    overheads: Mapping[str, float]
    """Seconds per step that each method of `OVERHEADS` computes; those left out take none."""
    density: float = DEFAULT_DENSITY
    """Share of the gradient that a sparse exchange sends."""
    rank: int = 1
    """Rank of PowerSGD."""
    side: float = 1024
    """Typical number of rows and columns of the model's matrices, for PowerSGD."""
    overlap: float = 1.0
    """Share of the backward pass that a dense exchange can overlap with."""

    def __post_init__(self) -> None:
        check_in("[1, inf)", params=self.params, side=self.side)
        check_in("[1, inf)", workers=self.workers, rank=self.rank)
        check_in("[0, inf)", backward=self.backward, forward=self.forward)
        check_in("(0, 1]", density=self.density)
        check_in("[0, 1]", overlap=self.overlap)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The predicted step of one exchange with one order."""

    exchange: str
    order: str
    step_seconds: float
    exchange_seconds: float
    """The part of the step that training waits for the exchange."""
    overhead_seconds: float
    """The part of the step that the method computes."""
    bytes: float
    """Bytes that a worker sends."""

    @property
    def name(self) -> str:
        """The exchange, and the order if it is not random reshuffling."""
        return self.exchange if self.order == "d-rr" else f"{self.exchange} + {self.order}"


@dataclass(frozen=True)
class Traffic:
    """What an exchange takes per step."""

    seconds: float
    """That training waits."""
    bytes: float
    """That a worker sends."""

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.seconds + other.seconds, self.bytes + other.bytes)

    def every(self, steps: int) -> "Traffic":
        """Return what it takes if it happens once in so many steps."""
        return Traffic(self.seconds / steps, self.bytes / steps)


def predict(setting: Setting, exchange: str, order: str = "d-rr") -> Choice:
    """Predict a step with one of `EXCHANGES` and one of `ORDERS`."""
    several, overheads = setting.workers > 1, setting.overheads
    ordered = order == "cd-grab" and several
    method, _, detail = exchange.partition("-")
    # A single worker exchanges nothing, so its gradient is left as it is.
    overhead = overheads.get(method, 0.0) if several else 0.0
    if method == "local":  # what an exchange computes is shared by so many steps
        overhead /= int(detail)
    if exchange == "dense" and ordered:
        # The exchange itself sends the shards that CD-GraB needs: it replaces the all-reduce.
        sent = _sharded_cd_grab(setting)
        overhead = max(overhead, overheads.get("order", 0.0))
    else:
        sent = EXCHANGES[exchange](setting)
    if exchange in ("dense", "fp16"):
        # One bucket is processed while another is sent, a pipeline of two stages: the longer one
        # shows whole, and of the shorter one the bucket that has no other to overlap with.
        pipelined = min(overhead, sent.seconds) / num_buckets(setting)
        overhead = max(0.0, overhead - sent.seconds) + pipelined
    if exchange != "dense" and ordered:
        # No other exchange gives a rank the gradients of all workers, so sketched rows are gathered
        # beside it, many steps at a time; after the backward, so nothing of it overlaps.
        rows = _gathered(setting, _BATCHES_PER_GATHER * _VALUE_BYTES * _SKETCH_SIZE)
        sent += rows.every(_BATCHES_PER_GATHER)
        overhead += overheads.get("sketch", 0.0)
    return Choice(
        exchange=exchange,
        order=order,
        step_seconds=setting.forward + setting.backward + sent.seconds + overhead,
        exchange_seconds=sent.seconds,
        overhead_seconds=overhead,
        bytes=sent.bytes,
    )


def _exposed_seconds(setting: Setting, whole: float, last: float) -> float:
    """Return the seconds that training waits for buckets that are sent one after the other.

    Bucket i of m is ready after i/m of the backward pass. Training waits for the `whole` queue less
    the backward pass after the first bucket, but at least for the `last` bucket.
    """
    # Nothing can be sent before the first bucket is ready, hence 1 - 1/m.
    hidden = setting.overlap * setting.backward * (1 - 1 / num_buckets(setting))
    return max(whole - hidden, last)


def num_buckets(setting: Setting) -> int:
    """Return how many buckets DDP makes of the gradient."""
    return max(1, math.ceil(_VALUE_BYTES * setting.params / _BUCKET_BYTES))


def _gathered(setting: Setting, size: float) -> Traffic:
    """Predict an all-gather of `size` bytes of each worker."""
    ranks = setting.workers
    return Traffic(all_gather_seconds(size, ranks, setting.link), size * (ranks - 1))


def _summed(setting: Setting, size: float) -> Traffic:
    """Predict an all-reduce of `size` bytes."""
    ranks = setting.workers
    seconds = all_reduce_seconds(size, ranks, setting.link)
    return Traffic(seconds, 2 * size * (ranks - 1) / ranks)


def _all_reduced(setting: Setting, width: int) -> Traffic:
    """Predict DDP's all-reduce of values with `width` bytes each."""
    # Buckets follow each other closely, so the latency counts once.
    whole = _summed(setting, width * setting.params)
    last = _summed(setting, width * setting.params / num_buckets(setting))
    return Traffic(_exposed_seconds(setting, whole.seconds, last.seconds), whole.bytes)


def _sharded_cd_grab(setting: Setting) -> Traffic:
    """Predict CD-GraB on a dense exchange.

    An all-to-all sends the shards of each bucket once it is ready; the means are all-gathered after
    the last one. At every second step the workers also sum R (R + 3) / 2 float64 inner products (of
    all pairs, of each difference with itself and with the running sum), in the background.
    """
    ranks, link = setting.workers, setting.link
    size = _VALUE_BYTES * setting.params
    whole = all_to_all_seconds(size, ranks, link)
    last = all_to_all_seconds(size / num_buckets(setting), ranks, link)
    means = all_gather_seconds(size / ranks, ranks, link)
    # Direct messages may take fewer hops than a ring, but do not count on it.
    plain = _all_reduced(setting, _VALUE_BYTES)
    seconds = max(_exposed_seconds(setting, whole, last) + means, plain.seconds)
    products = 2 * ranks * (ranks + 3)  # bytes per step
    background = products * (ranks - 1) * (1 if ranks <= _FEW_RANKS else 2 / ranks)
    return Traffic(seconds, plain.bytes + background)


def _powersgd(setting: Setting) -> Traffic:
    """Predict PowerSGD: two all-reduced factors, one after the other, and uncompressed biases.

    An n x n matrix has factors of n x rank elements each, and a bias of n.
    """
    # D parameters in n x n matrices are D / n rows.
    biases = _VALUE_BYTES * setting.params / setting.side
    factor = _summed(setting, setting.rank * biases)
    return factor + factor + _summed(setting, biases)


def _topk(setting: Setting) -> Traffic:
    """Predict top-k: all workers' indices are gathered, then the values of their union summed.

    Workers are assumed to select independently. That is nearly the worst case: a union of R k.
    """
    if setting.density == 1:
        return _values(setting, setting.params)
    indices = index_bytes(math.ceil(setting.density * setting.params), math.ceil(setting.params))
    # 1 - (1 - density) ** R, without losing the digits of a small density.
    union = setting.params * -math.expm1(setting.workers * math.log1p(-setting.density))
    headers = _gathered(setting, FLAG_BYTES) + _gathered(setting, indices)
    return headers + _values(setting, union)


def _exdyna(setting: Setting, form: ValueFormat = "fp32") -> Traffic:
    """Predict ExDyna: all workers' offers in one all-gather, then the values of the selection."""
    ranks, k = setting.workers, setting.density * setting.params
    if setting.density == 1:
        return _values(setting, setting.params, form)
    # Each rank offers a few more than its share, from which all choose the same threshold.
    count, compact = math.ceil(EXDYNA_CAPACITY * k / ranks), form in VALUE_BITS
    offers = index_bytes(count, math.ceil(setting.params / ranks))
    # Every offer has its magnitude beside it; a flag says whether the gradient was finite.
    offers += magnitude_bytes(count, compact) + FLAG_BYTES + COUNT_BYTES
    return _gathered(setting, offers) + _values(setting, k, form)


def _local(setting: Setting, every: int) -> Traffic:
    """Predict local steps: after every `every` steps, one bit for each coordinate, each way."""
    ranks, share = setting.workers, slice_bytes(math.ceil(setting.params), setting.workers)
    seconds = all_to_all_seconds(share * ranks, ranks, setting.link)
    return (Traffic(seconds, share * (ranks - 1)) + _gathered(setting, share)).every(every)


def _values(setting: Setting, count: float, form: ValueFormat = "fp32") -> Traffic:
    """Predict the sum of `count` values: one round if they are few, else two that send less."""

    def size_of(values: float) -> float:
        bits = VALUE_BITS.get(form)
        return _VALUE_BYTES * values if bits is None else value_bytes(math.ceil(values), bits)

    ranks, size = setting.workers, size_of(count)
    if fits_one_round(size, ranks):
        return _gathered(setting, size)
    # Few-bit values have levels for every slice, so a slice is rounded up on its own.
    share = size_of(count / ranks)
    seconds = all_to_all_seconds(share * ranks, ranks, setting.link)
    return Traffic(seconds, share * (ranks - 1)) + _gathered(setting, share)


EXCHANGES: dict[str, Callable[[Setting], Traffic]] = {
    "dense": partial(_all_reduced, width=_VALUE_BYTES),
    "fp16": partial(_all_reduced, width=2),
    "powersgd": _powersgd,
    "topk": _topk,
    "exdyna": _exdyna,
    "exdyna-int4": partial(_exdyna, form="int4"),
    "exdyna-int2": partial(_exdyna, form="int2"),
    "local-2": partial(_local, every=2),
    "local-4": partial(_local, every=4),
    "local-8": partial(_local, every=8),
    "local-16": partial(_local, every=16),
}
"""Exchange -> a function that predicts what it takes. local-4: 4 steps on one's own, then all of
the difference in one bit; int2: values of 2 bits."""
SPARSE = ("topk", "exdyna")
ORDERS = ("d-rr", "cd-grab")
