"""What ordering costs a whole DDP training step: the same step with D-RR and with CD-GraB."""

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
from gradherd.lab.bench.memory import Peak
from gradherd.lab.bench.rows import mlp
from gradherd.ordering.sampler import OrderedSampler

_BATCHES = 32  # of an epoch; even, so that each block of steps holds whole pairs


class Training:
    """A loop of its own: model, optimizer, loader, order."""

    def __init__(self, order: str, params: int, batch: int, world: World) -> None:
        torch.manual_seed(0)
        x = torch.randn(_BATCHES * batch * world.size, 784)
        data = TensorDataset(x, torch.randint(10, (len(x),)))
        self.model = DDP(mlp(params))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.sampler = OrderedSampler(data, order, batch_size=batch, unit=batch)
        self.loader = DataLoader(data, batch_size=batch, sampler=self.sampler)
        self.herd: Herd = attach(self.model, order=self.sampler)
        self.batches = self._forever()

    def _forever(self) -> Iterator[list[Tensor]]:
        while True:
            yield from self.loader

    def steps(self, count: int) -> None:
        """Train."""
        for _ in range(count):
            x, y = next(self.batches)
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()


def bench_step(params: int, batch: int, repeats: int) -> list[dict[str, Any]]:
    """Measure blocks of steps of both orders in turn, so that noise meets them alike."""
    world, block = World.detect(), 4
    runs: dict[str, Training] = {}
    peaks: dict[str, int | None] = {}
    for order in ("d-rr", "cd-grab"):
        with Peak(torch.device("cpu")) as peak:
            runs[order] = Training(order, params, batch, world)
            runs[order].steps(block)
        peaks[order] = peak.bytes
    times: dict[str, list[float]] = {order: [] for order in runs}
    for _ in range(repeats):
        for order, run in runs.items():
            all_reduce(torch.zeros(1), world)
            begin = time.perf_counter()
            run.steps(block)
            all_reduce(torch.zeros(1), world)
            times[order].append((time.perf_counter() - begin) / block)
    size = sum(p.numel() for p in runs["d-rr"].model.parameters())
    middle = {order: statistics.median(taken) for order, taken in times.items()}
    # Averaging sends the same bytes in both; what ordering adds is told by the herd.
    averaging = 2 * 4 * size * (world.size - 1) // world.size
    done = block * (repeats + 1)
    return [
        {
            "case": order,
            "workers": world.size,
            "dim": size,
            "batch": batch,
            "seconds": middle[order],
            "bytes": averaging + run.herd.metrics()["bytes_for_ordering"] // done,
            "peak_bytes": peaks[order],
            "ratio": middle[order] / middle["d-rr"],
        }
        for order, run in runs.items()
    ]
