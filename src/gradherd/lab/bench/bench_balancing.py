"""Time what balancing costs: the signs of a step, and its gradient exchange.

Signs: `sequential` is the loop of the published CD-GraB code (one inner product, one host sync and
one update per vector), `block-gram` takes all signs from one Gram matrix, `balance` is the form
that gradherd chooses for this device and size. The ceiling is one read of all vectors (their sum).

Exchange, each case one step of every rank: `all-reduce` only averages. `all-gather` is the
published CD-GraB: every rank gathers all gradients, averages them and computes all signs itself.
`sharded` is gradherd: every rank gets one shard of all gradients, averages it and computes its part
of the inner products (see `comm.sliced_mean`).

Letters: P vectors, D dimension.
"""

import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradherd.comm.background_thread import BackgroundThread
from gradherd.comm.collectives import all_gather, all_reduce
from gradherd.comm.script import run
from gradherd.comm.sliced_mean import SlicedMean
from gradherd.comm.world import World
from gradherd.lab.bench.timing import (
    PeakMemory,
    ceiling_keys,
    make_rows,
    median_seconds,
    medians_in_turns,
)
from gradherd.ordering.balance import Unsigned, balance, block_gram
from gradherd.ordering.coordination import observe_slices
from gradherd.ordering.ordering import Ordering
from gradherd.ordering.pair_grab import CDGraB
from gradherd.ordering.sign_rules import Greedy

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


def bench_signs(
    workers: Sequence[int],
    dims: Sequence[int],
    device: torch.device,
    progress: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Measure every case of signs at every size; each worker contributes one pair difference.

    Args:
        workers: Numbers of vectors, P.
        dims: Sizes of a vector, D.
        device: Where to compute.
        progress: Called after each size.

    Returns:
        A row for each size and case.
    """
    rows: list[dict[str, Any]] = []
    for dim in dims:
        for count in workers:
            generator = torch.Generator(device).manual_seed(0)
            vectors = torch.randn(1, count, dim, generator=generator, device=device)
            rows += _sign_rows(vectors, device)
            progress()
    return rows


def _sign_rows(vectors: Tensor, device: torch.device) -> list[dict[str, Any]]:
    _, count, dim = vectors.shape
    # The time of a sign does not depend on values, so the sum may start at zero.
    running = torch.zeros_like(vectors[:, 0])
    given = Unsigned(vectors, running, Greedy(), np.zeros((1, count)), np.empty((0, 1)))
    cases: dict[str, Callable[[], object]] = {
        "sequential": lambda: published_loop(vectors[0], running[0]),
        "block-gram": lambda: block_gram(given, count),
        "balance": lambda: balance(given),
    }
    seconds: dict[str, float] = {}
    peaks: dict[str, int | None] = {}
    for case, fn in cases.items():
        with PeakMemory(device) as peak:
            fn()
        peaks[case], seconds[case] = peak.bytes, median_seconds(fn, device)
    # No method can sign vectors without reading them once.
    ceiling = median_seconds(vectors.sum, device)
    rows = make_rows(seconds, peaks, workers=count, dim=dim)
    for row in rows:
        row["signs_per_second"] = count / row["seconds"]
        row |= ceiling_keys(ceiling, row["seconds"])
    return rows


class ExchangeCase(ABC):
    """One way to exchange the gradients of a step."""

    bytes = 0
    """Bytes that this rank has sent."""

    def __init__(self, world: World, dim: int, steps: int) -> None:
        """Start with nothing learned.

        Args:
            world: The ranks.
            dim: Elements of a gradient.
            steps: Steps that there will be.
        """
        self._world = world

    @abstractmethod
    def step(self, grad: Tensor) -> None:
        """Average `grad` in place, and learn from it."""

    def wait(self) -> None:
        """Wait for work in the background, if there is any."""


class AllReduceCase(ExchangeCase):
    """Average with an all-reduce; no ordering."""

    def step(self, grad: Tensor) -> None:
        """Average `grad` in place."""
        self.bytes += all_reduce(grad.div_(self._world.size), self._world).bytes


class AllGatherCase(ExchangeCase):
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


class ShardedCase(ExchangeCase):
    """Order as gradherd does: every rank holds one shard of all gradients."""

    def __init__(self, world: World, dim: int, steps: int) -> None:
        super().__init__(world, dim, steps)
        self._side = world.side_channel()
        # As few units as there are steps: a unit takes 9 bytes on every rank, and the benchmark
        # should measure the exchange, not a data set that grows with the number of workers.
        self._ordering = Ordering(CDGraB(), [steps] * world.size, start="identity")
        self._thread, self._mean = BackgroundThread("bench-signs"), SlicedMean(world)
        self._signs_bytes = 0

    def step(self, grad: Tensor) -> None:
        """Exchange shards and means; a thread computes signs at every second step."""
        before = self._mean.bytes
        self._mean.start(grad)
        rows = self._mean.finish(columns=True)
        assert rows is not None
        self.bytes += self._mean.bytes - before
        # In a thread and on a group of its own, as in training: signs overlap with the next step.
        script = observe_slices(self._ordering, rows, release=self._mean.lend())

        def sign() -> None:
            self._signs_bytes += run(script, self._side).bytes

        self._thread.submit(sign)

    def wait(self) -> None:
        """Wait until the signs are computed, and count what they took."""
        self._thread.wait()
        self.bytes += self._signs_bytes
        self._signs_bytes = 0


CASES: dict[str, type[ExchangeCase]] = {
    "all-reduce": AllReduceCase,
    "all-gather": AllGatherCase,
    "sharded": ShardedCase,
}
# An allocator that keeps freed memory (mimalloc, in PyTorch's ARM wheels) would serve a small case
# from what a large one left behind, and its peak would not show.
_SMALLEST_FIRST = ("all-reduce", "sharded", "all-gather")


def bench_coordination(dim: int, repeats: int) -> list[dict[str, Any]]:
    """Measure every exchange on this rank.

    Args:
        dim: Elements of the gradient.
        repeats: Pairs of steps measured of each case; the median counts.

    Returns:
        A row for each case, with seconds and bytes of one step on this rank.
    """
    world = World.detect()
    # Other values on each rank, as in training: equal ones would make all differences zero.
    grad = torch.randn(dim, generator=torch.Generator().manual_seed(world.rank))
    cases: dict[str, ExchangeCase] = {}
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
    pairs = {name: functools.partial(_time_pair, cases[name], grad, world) for name in CASES}
    medians = medians_in_turns(pairs, repeats)
    seconds = {name: medians[name] / _PAIR for name in CASES}
    return make_rows(seconds, peaks, workers=world.size, dim=dim, sent=sent)


def _time_pair(case: ExchangeCase, grad: Tensor, world: World) -> float:
    all_reduce(torch.zeros(1), world)  # a barrier: start together
    begin = time.perf_counter()
    for _ in range(_PAIR):
        case.step(grad)
    case.wait()
    all_reduce(torch.zeros(1), world)  # time until the slowest rank is done
    return time.perf_counter() - begin
