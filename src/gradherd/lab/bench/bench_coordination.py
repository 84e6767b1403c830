"""Time the gradient exchange of a step, with and without balancing.

Each case is one step of every rank: `all-reduce` only averages. `all-gather` is the published
CD-GraB: every rank gathers all gradients, averages them and computes all signs itself. `sharded` is
gradherd: every rank gets one shard of all gradients, averages it and computes its part of the inner
products (see `comm.sliced_mean`).

Letters: P vectors, D dimension.
"""

import time
from functools import partial

import torch
from torch import Tensor

from gradherd.comm.background_thread import BackgroundThread
from gradherd.comm.collectives import all_gather, all_reduce
from gradherd.comm.script import run
from gradherd.comm.sliced_mean import SlicedMean
from gradherd.comm.world import World
from gradherd.lab.bench.timing import Rows, make_rows, medians_in_turns, peak_memory
from gradherd.ordering.coordination import observe_slices
from gradherd.ordering.ordering import Ordering
from gradherd.ordering.pair_grab import CDGraB

_PAIR = 2  # steps timed together: signs are computed at every second one
_WARMUP_DIM = 1000


def published_loop(vectors: Tensor, running: Tensor) -> list[bool]:
    """Sign vectors one by one, deciding each on the host, as the published code does.

    Args:
        vectors: (P, D) pair differences.
        running: (D,) signed sum of the vectors before these.

    Returns:
        P booleans, True for "+".
    """
    signs = []
    for vector in vectors:
        # bool() copies to the host: on a GPU this wait is what the loop costs.
        plus = bool(torch.inner(running, vector) <= 0)
        running = running + vector if plus else running - vector
        signs.append(plus)
    return signs


class AllReduceCase:
    """Average with an all-reduce; no ordering. Other exchanges replace `step`."""

    def __init__(self, world: World, dim: int, steps: int) -> None:
        self._world = world
        self.bytes = 0
        """Bytes that this rank has sent."""

    def step(self, grad: Tensor) -> None:
        """Average `grad` in place, and learn from it."""
        self.bytes += all_reduce(grad.div_(self._world.size), self._world).bytes

    def wait(self) -> None:
        """Wait for work in the background, if there is any."""


class AllGatherCase(AllReduceCase):
    """Order as published: every rank holds all gradients."""

    def __init__(self, world: World, dim: int, steps: int) -> None:
        super().__init__(world, dim, steps)
        self._running = torch.zeros(dim)
        # Signs are those of pair differences: the first gradient of a pair waits for the second.
        self._first: Tensor | None = None

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


class ShardedCase(AllReduceCase):
    """Order as gradherd does: every rank holds one shard of all gradients."""

    def __init__(self, world: World, dim: int, steps: int) -> None:
        super().__init__(world, dim, steps)
        self._side = world.side_channel()
        # As few units as there are steps: a unit takes 9 bytes on every rank, and the benchmark
        # should measure the exchange, not a data set that grows with the number of workers.
        self._ordering = Ordering(CDGraB(), [steps] * world.size, start="identity")
        self._thread, self._mean = BackgroundThread("bench-signs"), SlicedMean(world)

    def step(self, grad: Tensor) -> None:
        """Exchange shards and means; a thread computes signs at every second step."""
        before = self._mean.bytes
        self._mean.start(grad)
        rows = self._mean.finish()
        sent = self._mean.bytes - before
        # In a thread and on a group of its own, as in training: signs overlap with the next step.
        script = observe_slices(self._ordering, rows, release=self._mean.lend())

        def sign() -> None:  # the only one that counts, so nothing is counted by two threads
            self.bytes += sent + run(script, self._side).bytes

        self._thread.submit(sign)

    def wait(self) -> None:
        """Wait until the signs are computed."""
        self._thread.wait()


CASES: dict[str, type[AllReduceCase]] = {
    "all-reduce": AllReduceCase,
    "all-gather": AllGatherCase,
    "sharded": ShardedCase,
}
# An allocator that keeps freed memory (mimalloc, in PyTorch's ARM wheels) would serve a small case
# from what a large one left behind, and its peak would not show.
_SMALLEST_FIRST = ("all-reduce", "sharded", "all-gather")


def bench_coordination(dim: int, repeats: int) -> Rows:
    """Measure every exchange of `dim` elements on this rank; rows are of one step.

    The median of `repeats` pairs of steps counts.
    """
    world = World.detect()
    # Other values on each rank, as in training: equal ones would make all differences zero.
    grad = torch.randn(dim, generator=torch.Generator().manual_seed(world.rank))
    cases: dict[str, AllReduceCase] = {}
    peaks: dict[str, int | None] = {}
    sent: dict[str, int] = {}

    def first_pair(name: str) -> None:
        # Built inside the measurement: the running sum is part of what ordering costs.
        cases[name] = CASES[name](world, dim, _PAIR * (repeats + 1))
        _time_pair(cases[name], grad, world)

    for name in _SMALLEST_FIRST:
        # Warm up on a small gradient: code loaded on first use must not count as its memory.
        warmup = min(dim, _WARMUP_DIM * world.size)
        _time_pair(CASES[name](world, warmup, _PAIR), grad[:warmup], world)
        peaks[name] = peak_memory(partial(first_pair, name), grad.device)
        sent[name] = cases[name].bytes // _PAIR
    pairs = {name: partial(_time_pair, cases[name], grad, world) for name in CASES}
    seconds = {name: took / _PAIR for name, took in medians_in_turns(pairs, repeats).items()}
    return make_rows(seconds, peaks, workers=world.size, dim=dim, sent=sent)


def _time_pair(case: AllReduceCase, grad: Tensor, world: World) -> float:
    all_reduce(torch.zeros(1), world)  # a barrier: start together
    begin = time.perf_counter()
    for _ in range(_PAIR):
        case.step(grad)
    case.wait()
    all_reduce(torch.zeros(1), world)  # time until the slowest rank is done
    return time.perf_counter() - begin
