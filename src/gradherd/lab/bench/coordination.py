"""What coordination across workers costs: a gradient of `dim` numbers, averaged and ordered.

Cases, each a step of every rank: `all-reduce` only averages. `all-gather` is the published
CD-GraB: every rank gathers all gradients, averages them and takes all signs by itself.
`sharded` is gradherd: slices of all gradients, see `ordering.shards`.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradherd.comm.collectives import all_gather, all_reduce, all_reduce_small
from gradherd.comm.world import World
from gradherd.lab.bench.memory import Peak
from gradherd.lab.bench.signs import published_loop
from gradherd.ordering.cd_grab import CDGraB
from gradherd.ordering.ordering import Ordering
from gradherd.ordering.shards import Pool, arrive, give_back, rows_of, send, take_back
from gradherd.ordering.sorter import Sorter

# A pair of steps is measured: signs are taken at every second one.
_PAIR = 2
_FEW = 1000


class AllReduce:
    """Averaging alone."""

    def __init__(self, world: World, dim: int, steps: int) -> None:
        self._world = world
        self.bytes = 0

    def step(self, grad: Tensor) -> None:
        """Average `grad` in place."""
        self.bytes += all_reduce(grad.div_(self._world.size), self._world).bytes

    def wait(self) -> None:
        """Nothing runs beside."""


class AllGather:
    """The published scheme: everybody holds everything."""

    def __init__(self, world: World, dim: int, steps: int) -> None:
        self._world = world
        self._running = torch.zeros(dim)
        self._first: Tensor | None = None
        self.bytes = 0

    def step(self, grad: Tensor) -> None:
        """Gather, average, and sign at every second step."""
        rows, sent = all_gather(grad, self._world)
        self.bytes += sent
        torch.mean(rows, 0, out=grad)
        if self._first is None:
            self._first = rows
        else:
            published_loop(self._first - rows, self._running)
            self._first = None

    def wait(self) -> None:
        """Nothing runs beside."""


class Sharded:
    """gradherd's scheme: everybody holds a slice of everything."""

    def __init__(self, world: World, dim: int, steps: int) -> None:
        self._world, self._side = world, world.side_channel()
        # As many units as steps: a unit takes 9 bytes on every rank, and it is the exchange that
        # is measured, not a data set that grows with the workers.
        self._ordering = Ordering(CDGraB(), [steps] * world.size, start="identity")
        self._ordering.borrow_rows(True)
        self._sorter, self._pool = Sorter(), Pool()
        self._lent: list[Tensor] = []
        self.bytes = 0

    def step(self, grad: Tensor) -> None:
        """Exchange slices, give the mean back, sign beside it at every second step."""
        self._sorter.wait()
        self._lent = take_back(self._lent, self._ordering, self._pool)
        size = self._world.size
        bucket = send(grad, self._world, out=self._pool.take(grad, size, len(grad) // size))
        arrived = arrive([bucket], self._world)
        flights = give_back([bucket], arrived, self._world)
        rows = rows_of(arrived, self._world, self._pool)
        self._lent.append(rows)
        self._sorter.submit(lambda: self._ordering.observe(rows[None], reduce=self._reduce))
        for flight in flights:
            flight.wait()
        self.bytes += arrived.bytes + sum(flight.bytes for flight in flights)

    def _reduce(self, products: Tensor) -> Tensor:
        total, sent = all_reduce_small(products, self._side)
        self.bytes += sent
        return total

    def wait(self) -> None:
        """Wait for the signs."""
        self._sorter.wait()


CASES: dict[str, Callable[[World, int, int], AllReduce | AllGather | Sharded]] = {
    "all-reduce": AllReduce,
    "all-gather": AllGather,
    "sharded": Sharded,
}


def bench_coordination(dim: int, repeats: int) -> list[dict[str, Any]]:
    """Measure all cases in turn on this rank, so that noise meets them alike."""
    world = World.detect()
    grad = torch.randn(dim, generator=torch.Generator().manual_seed(world.rank))
    cases: dict[str, AllReduce | AllGather | Sharded] = {}
    peaks: dict[str, int | None] = {}
    sent: dict[str, int] = {}
    for name, make in CASES.items():
        # Once before, on little: code that a first use reads in is no memory of the case.
        few = min(dim, _FEW * world.size)
        _pair(make(world, few, _PAIR), grad[:few], world)
        with Peak(grad.device) as peak:  # of what it keeps and what it takes for a while
            case = cases[name] = make(world, dim, _PAIR * (repeats + 1))
            _pair(case, grad, world)
        peaks[name], sent[name] = peak.bytes, case.bytes // _PAIR
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, case in cases.items():
            times[name].append(_pair(case, grad, world))
    seconds = {name: statistics.median(taken) / _PAIR for name, taken in times.items()}
    return [
        {
            "case": name,
            "workers": world.size,
            "dim": dim,
            "seconds": seconds[name],
            "bytes": sent[name],
            "peak_bytes": peaks[name],
            "ratio": seconds[name] / seconds["all-reduce"],
            "bytes_ratio": sent[name] / max(1, sent["all-reduce"]),
        }
        for name in cases
    ]


def _pair(case: AllReduce | AllGather | Sharded, grad: Tensor, world: World) -> float:
    all_reduce(torch.zeros(1), world)  # start together
    begin = time.perf_counter()
    for _ in range(_PAIR):
        case.step(grad)
    case.wait()
    all_reduce(torch.zeros(1), world)  # the slowest rank counts
    return time.perf_counter() - begin
