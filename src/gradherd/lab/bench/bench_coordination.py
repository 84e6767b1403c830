"""Time a step's gradient exchange when all workers balance together.

Cases, each one step of every rank on a gradient of `dim` elements: `all-reduce` only averages.
`all-gather` is the published CD-GraB: every rank gathers all gradients, averages them and computes
all signs itself. `sharded` is gradherd: every rank gets one shard of all gradients, averages it and
computes its part of the inner products (see `comm.sliced_mean`).
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradherd.comm.background_thread import BackgroundThread
from gradherd.comm.collectives import all_gather, all_reduce
from gradherd.comm.script import run
from gradherd.comm.sliced_mean import SlicedMean
from gradherd.comm.world import World
from gradherd.lab.bench.bench_signs import published_loop
from gradherd.lab.bench.timing import PeakMemory
from gradherd.ordering.coordination import observe_slices
from gradherd.ordering.ordering import Ordering
from gradherd.ordering.pair_grab import CDGraB

_PAIR = 2  # steps timed together: signs are computed at every second one
_WARMUP_DIM = 1000


# All cases have step and wait, and take the same arguments, used or not.
class AllReduceCase:
    """Average with an all-reduce; no ordering."""

    def __init__(self, world: World, dim: int, steps: int) -> None:
        self._world = world
        self.bytes = 0

    def step(self, grad: Tensor) -> None:
        """Average `grad` in place."""
        self.bytes += all_reduce(grad.div_(self._world.size), self._world).bytes

    def wait(self) -> None:
        """Do nothing: no work runs in the background."""


class AllGatherCase:
    """Order as published: every rank holds all gradients."""

    def __init__(self, world: World, dim: int, steps: int) -> None:
        self._world = world
        self._running = torch.zeros(dim)
        # Signs are those of pair differences: the first gradient of a pair waits for the second.
        self._first: Tensor | None = None
        self.bytes = 0

    def step(self, grad: Tensor) -> None:
        """Gather and average; compute signs at every second step."""
        rows, sent = all_gather(grad, self._world)
        self.bytes += sent
        if self._world.size == 1:
            rows = rows.clone()  # of one rank they are a view of grad, which the mean overwrites
        torch.mean(rows, 0, out=grad)
        if self._first is None:
            self._first = rows
        else:
            published_loop(self._first - rows, self._running)
            self._first = None

    def wait(self) -> None:
        """Do nothing: no work runs in the background."""


class ShardedCase:
    """Order as gradherd does: every rank holds one shard of all gradients."""

    def __init__(self, world: World, dim: int, steps: int) -> None:
        self._world, self._side = world, world.side_channel()
        # As few units as there are steps: a unit takes 9 bytes on every rank, and the benchmark
        # should measure the exchange, not a data set that grows with the number of workers.
        self._ordering = Ordering(CDGraB(), [steps] * world.size, start="identity")
        self._thread, self._mean = BackgroundThread("bench-signs"), SlicedMean(world)
        self._signs_bytes = 0

    @property
    def bytes(self) -> int:
        """Bytes that this rank has sent for gradients and signs."""
        return self._mean.bytes + self._signs_bytes

    def step(self, grad: Tensor) -> None:
        """Exchange shards and means; a thread computes signs at every second step."""
        self._mean.start(grad)
        rows = self._mean.finish(columns=True)
        assert rows is not None
        # In a thread and on a group of its own, as in training: signs overlap with the next step.
        script = observe_slices(self._ordering, rows)

        def sign() -> None:
            self._signs_bytes += run(script, self._side).bytes

        self._thread.submit(sign)

    def wait(self) -> None:
        """Wait until the signs are computed."""
        self._thread.wait()


CASES: dict[str, Callable[[World, int, int], AllReduceCase | AllGatherCase | ShardedCase]] = {
    "all-reduce": AllReduceCase,
    "all-gather": AllGatherCase,
    "sharded": ShardedCase,
}


# An allocator that keeps freed memory (mimalloc, in PyTorch's ARM wheels) would serve a small case
# from what a large one left behind, and its peak would not show.
_SMALLEST_FIRST = ("all-reduce", "sharded", "all-gather")


def bench_coordination(dim: int, repeats: int) -> list[dict[str, Any]]:
    """Measure on this rank, alternating between the cases so that noise hits all alike.

    Args:
        dim: Elements of the gradient.
        repeats: Pairs of steps measured of each case; the median counts.

    Returns:
        A row for each case, with seconds and bytes of one step on this rank.
    """
    world = World.detect()
    # Other values on each rank, as in training: equal ones would make all differences zero.
    grad = torch.randn(dim, generator=torch.Generator().manual_seed(world.rank))
    cases: dict[str, AllReduceCase | AllGatherCase | ShardedCase] = {}
    peaks: dict[str, int | None] = {}
    sent: dict[str, int] = {}
    for name in _SMALLEST_FIRST:
        make = CASES[name]
        # Warm up on a small gradient: code loaded on first use must not count as its memory.
        warmup = min(dim, _WARMUP_DIM * world.size)
        _time_pair(make(world, warmup, _PAIR), grad[:warmup], world)
        with PeakMemory(grad.device) as peak:
            # Built inside: the running sum is part of what ordering costs.
            case = cases[name] = make(world, dim, _PAIR * (repeats + 1))
            _time_pair(case, grad, world)
        peaks[name], sent[name] = peak.bytes, case.bytes // _PAIR
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, case in cases.items():
            times[name].append(_time_pair(case, grad, world))
    seconds = {name: statistics.median(pairs) / _PAIR for name, pairs in times.items()}
    return [
        {
            "case": name,
            "workers": world.size,
            "dim": dim,
            "seconds": seconds[name],
            "bytes": sent[name],
            "peak_bytes": peaks[name],
            "ratio": seconds[name] / seconds["all-reduce"],
            # One worker sends nothing.
            "bytes_ratio": sent[name] / max(1, sent["all-reduce"]),
        }
        for name in CASES
    ]


def _time_pair(
    case: AllReduceCase | AllGatherCase | ShardedCase, grad: Tensor, world: World
) -> float:
    all_reduce(torch.zeros(1), world)  # a barrier: start together
    begin = time.perf_counter()
    for _ in range(_PAIR):
        case.step(grad)
    case.wait()
    all_reduce(torch.zeros(1), world)  # time until the slowest rank is done
    return time.perf_counter() - begin
