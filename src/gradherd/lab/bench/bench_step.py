"""Time a whole DDP training step: the same step with D-RR and with CD-GraB."""

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

from gradherd.attach.attach import attach
from gradherd.attach.herd import Herd
from gradherd.comm.collectives import all_reduce
from gradherd.comm.world import World
from gradherd.lab.bench.bench_rows import mlp
from gradherd.lab.bench.timing import PeakMemory
from gradherd.ordering.sampler import OrderedSampler

_BATCHES = 32  # per epoch; even, so that each block of steps holds whole pairs
_BLOCK = 4  # steps timed together, for the same reason


class DDPTraining:
    """A DDP training loop with its own model, optimizer, loader and order."""

    def __init__(self, order: str, params: int, batch: int, world: World) -> None:
        # The same data and the same model for both orders, on every rank.
        torch.manual_seed(0)
        x = torch.randn(_BATCHES * batch * world.size, 784)
        data = TensorDataset(x, torch.randint(10, (len(x),)))
        self.model = DDP(mlp(params))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        # Whole batches as units: the gradients that are averaged anyway are the rows.
        self.sampler = OrderedSampler(data, order, batch_size=batch, unit=batch)
        self.loader = DataLoader(data, batch_size=batch, sampler=self.sampler)
        self.herd: Herd = attach(self.model, order=self.sampler)
        self.batches = self._endless_batches()

    def _endless_batches(self) -> Iterator[list[Tensor]]:
        while True:
            # Epochs follow each other, so the end of an epoch is timed as well.
            yield from self.loader

    def steps(self, count: int) -> None:
        """Train for `count` steps."""
        for _ in range(count):
            x, y = next(self.batches)
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()


def bench_step(params: int, batch: int, repeats: int) -> list[dict[str, Any]]:
    """Measure blocks of steps, alternating between the orders so that noise hits both alike.

    Args:
        params: Approximate number of parameters of the MLP.
        batch: Examples per rank and step.
        repeats: Blocks measured of each order; the median counts.

    Returns:
        A row for each order, with seconds and bytes of one step.
    """
    world = World.detect()
    runs: dict[str, DDPTraining] = {}
    peaks: dict[str, int | None] = {}
    for order in ("d-rr", "cd-grab"):
        # The first block also warms up: DDP rebuilds its buckets after the first step.
        with PeakMemory(torch.device("cpu")) as peak:
            runs[order] = DDPTraining(order, params, batch, world)
            runs[order].steps(_BLOCK)
        peaks[order] = peak.bytes
    times: dict[str, list[float]] = {order: [] for order in runs}
    for _ in range(repeats):
        for order, run in runs.items():
            all_reduce(torch.zeros(1), world)  # a barrier: start together
            begin = time.perf_counter()
            run.steps(_BLOCK)
            all_reduce(torch.zeros(1), world)  # time until the slowest rank is done
            times[order].append((time.perf_counter() - begin) / _BLOCK)
    size = sum(p.numel() for p in runs["d-rr"].model.parameters())
    seconds = {order: statistics.median(blocks) for order, blocks in times.items()}
    # Averaging sends the same bytes with both orders; the herd counts what ordering adds.
    averaging = 2 * 4 * size * (world.size - 1) // world.size
    steps = _BLOCK * (repeats + 1)
    return [
        {
            "case": order,
            "workers": world.size,
            "dim": size,
            "batch": batch,
            "seconds": seconds[order],
            "bytes": averaging + run.herd.metrics()["bytes_for_ordering"] // steps,
            "peak_bytes": peaks[order],
            "ratio": seconds[order] / seconds["d-rr"],
        }
        for order, run in runs.items()
    ]
