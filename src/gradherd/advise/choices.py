"""What a step takes with each way to exchange gradients, and with each order.

A step is forward and optimizer, backward, the part of the exchange that does not hide behind the
backward, and a method's own work. Dense exchanges start while the backward still runs, bucket by
bucket; a sparse one needs the whole gradient first.

Letters: D parameters, R workers, k = density x D.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from gradherd.advise.link import Link, all_gather, all_reduce, all_to_all
from gradherd.advise.overheads import Overheads

_BUCKET = 25 * 2**20  # bytes, DDP's
_PAGE = 1 << 16
_CAPACITY = 1.05  # of ExDyna
# Of the values' exchange: one round or two.
_ONE_ROUND = 1 << 10
_SMALL = 1.25e-3
_FEW_RANKS = 8  # that add up small tensors by a gather
SKETCH, TOGETHER = 512, 32
"""Numbers of a sketched row, and steps whose rows travel together."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model, its workers and their network."""

    params: float
    """D, numbers in the model."""
    workers: int
    """R."""
    link: Link
    backward: float
    """Seconds of a backward pass."""
    forward: float
    """Seconds of all else in a step: forward, optimizer, data."""
    overheads: Overheads
    """Seconds of a step that each method computes."""
    density: float = 1e-3
    """Share of the gradient that a sparse exchange sends."""
    rank: int = 1
    """Of PowerSGD."""
    side: float = 1024
    """Rows and columns of the model's matrices, for PowerSGD."""
    overlap: float = 1.0
    """Share of the backward during which a dense exchange gets on."""

    def __post_init__(self) -> None:
        if not 1 <= self.params < math.inf:
            raise ValueError(f"params must be at least 1 and finite, got {self.params}")
        if self.workers < 1:
            raise ValueError(f"workers must be at least 1, got {self.workers}")
        for name in ("backward", "forward"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if not 0 < self.density <= 1:
            raise ValueError(f"density must be in (0, 1], got {self.density}")
        if self.rank < 1:
            raise ValueError(f"rank must be at least 1, got {self.rank}")
        if not 1 <= self.side < math.inf:
            raise ValueError(f"side must be at least 1 and finite, got {self.side}")
        if not 0 <= self.overlap <= 1:
            raise ValueError(f"overlap must be in [0, 1], got {self.overlap}")

    @property
    def compute(self) -> float:
        """Seconds of a step in which nothing is exchanged."""
        return self.forward + self.backward


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a step takes."""

    exchange: str
    order: str
    step_seconds: float
    exchange_seconds: float
    """Of it: the exchange, as far as training waits for it."""
    overhead_seconds: float
    """Of it: the method's own work."""
    bytes: float
    """What a worker sends."""

    @property
    def name(self) -> str:
        """Exchange, and the order where it is not random."""
        return self.exchange if self.order == "d-rr" else f"{self.exchange} + {self.order}"


def predict(setting: Setting, exchange: str, order: str = "d-rr") -> Choice:
    """Return what a step takes."""
    ordered = order == "cd-grab" and setting.workers > 1
    overheads = setting.overheads
    own = overheads.of(exchange) if setting.workers > 1 else 0.0
    if exchange == "dense" and ordered:
        waited, sent = _ride(setting)
        own = max(own, overheads.ride)
    else:
        waited, sent = EXCHANGES[exchange](setting)
    if exchange in ("dense", "fp16"):
        own = max(0.0, own - waited)  # one bucket is worked on while another travels
    if exchange != "dense" and ordered:
        seconds, size = _sketches(setting)
        waited, sent, own = waited + seconds, sent + size, own + overheads.sketch
    return Choice(
        exchange=exchange,
        order=order,
        step_seconds=setting.compute + waited + own,
        exchange_seconds=waited,
        overhead_seconds=own,
        bytes=sent,
    )


def exposed(setting: Setting, whole: float, last: float, buckets: int) -> float:
    """Return the seconds that training waits for buckets that travel one after the other.

    Bucket i of m is ready at i/m of the backward. What training waits for is either the whole
    queue, less the backward after the first bucket, or the last bucket.
    """
    hidden = setting.overlap * setting.backward * (1 - 1 / buckets)
    return max(whole - hidden, last)


def _buckets(setting: Setting) -> int:
    return max(1, math.ceil(4 * setting.params / _BUCKET))


def _reduced(setting: Setting, width: int) -> tuple[float, float]:
    """Return what torch's all-reduce of numbers with so many bytes takes, in DDP's buckets."""
    size, count, ranks = width * setting.params, _buckets(setting), setting.workers
    # Buckets follow each other closely: only the first one's latency shows.
    whole = all_reduce(size, ranks, setting.link)
    last = all_reduce(size / count, ranks, setting.link)
    return exposed(setting, whole, last, count), 2 * size * (ranks - 1) / ranks


def _dense(setting: Setting) -> tuple[float, float]:
    return _reduced(setting, 4)


def _fp16(setting: Setting) -> tuple[float, float]:
    return _reduced(setting, 2)


def _ride(setting: Setting) -> tuple[float, float]:
    """CD-GraB on the dense exchange: slices go out as buckets are ready, means after the last.

    Every second step the workers add up the products of all pairs, of each with itself and with the
    running sum, R (R + 3) / 2 doubles, beside the step.
    """
    ranks, link, count = setting.workers, setting.link, _buckets(setting)
    size = 4 * setting.params
    whole, last = all_to_all(size, ranks, link), all_to_all(size / count, ranks, link)
    waited = exposed(setting, whole, last, count) + all_gather(size / ranks, ranks, link)
    waited = max(waited, _dense(setting)[0])  # direct messages may save hops, but promise nothing
    products = 2 * ranks * (ranks + 3)  # bytes of a step
    beside = products * (ranks - 1) * (1 if ranks <= _FEW_RANKS else 2 / ranks)
    return waited, 2 * size * (ranks - 1) / ranks + beside


def _powersgd(setting: Setting) -> tuple[float, float]:
    """Two factors, one after the other, and the vectors (biases) whole.

    A matrix of n x n has factors of n r numbers each, and a bias of n.
    """
    ranks = setting.workers
    factor = 4 * setting.rank * setting.params / setting.side
    vectors = 4 * setting.params / setting.side
    seconds = 2 * all_reduce(factor, ranks, setting.link) + all_reduce(vectors, ranks, setting.link)
    return seconds, 2 * (2 * factor + vectors) * (ranks - 1) / ranks


def _topk(setting: Setting) -> tuple[float, float]:
    """Indices of all workers, then values of their union, which builds up.

    Workers are taken to pick independently, which is nearly the worst: R times k.
    """
    ranks, picked = setting.workers, setting.density * setting.params
    if setting.density == 1:
        return _values(setting, setting.params)
    indices = min(4 * picked, 2 * picked + 4 * math.ceil(setting.params / _PAGE))
    union = setting.params * -math.expm1(ranks * math.log1p(-setting.density))
    seconds, sent = _values(setting, union)
    flag = all_gather(4, ranks, setting.link)
    gathered = all_gather(indices, ranks, setting.link)
    return flag + gathered + seconds, sent + (indices + 4) * (ranks - 1)


def _exdyna(setting: Setting) -> tuple[float, float]:
    """Offers of all workers in one message of known length, then values of what is kept."""
    ranks, picked = setting.workers, setting.density * setting.params
    if setting.density == 1:
        return _values(setting, setting.params)
    most = math.ceil(_CAPACITY * picked / ranks)
    pages = math.ceil(setting.params / ranks / _PAGE)
    offers = 2 * most + min(4 * most, 2 * most + 4 * pages) + 8
    seconds, sent = _values(setting, picked)
    return all_gather(offers, ranks, setting.link) + seconds, sent + offers * (ranks - 1)


def _values(setting: Setting, count: float) -> tuple[float, float]:
    """Sum `count` numbers: in one round if they are few, else in two that send less."""
    ranks, link, size = setting.workers, setting.link, 4 * count
    if size <= _ONE_ROUND or (ranks - 2) * size <= _SMALL * 8 * setting.params:
        return all_gather(size, ranks, link), size * (ranks - 1)
    seconds = all_to_all(size, ranks, link) + all_gather(size / ranks, ranks, link)
    return seconds, 2 * size * (ranks - 1) / ranks


def _sketches(setting: Setting) -> tuple[float, float]:
    """Rows for ordering, gathered beside any other exchange; many steps travel together."""
    size = 4.0 * SKETCH
    seconds = all_gather(TOGETHER * size, setting.workers, setting.link) / TOGETHER
    return seconds, size * (setting.workers - 1)


EXCHANGES: dict[str, Callable[[Setting], tuple[float, float]]] = {
    "dense": _dense,
    "fp16": _fp16,
    "powersgd": _powersgd,
    "topk": _topk,
    "exdyna": _exdyna,
}
"""Exchange -> seconds that training waits for it, and bytes that a worker sends."""
SPARSE = ("topk", "exdyna")
ORDERS = ("d-rr", "cd-grab")


def all_choices(setting: Setting) -> list[Choice]:
    """Return what a step takes with every exchange and order."""
    return [predict(setting, exchange, order) for order in ORDERS for exchange in EXCHANGES]
