"""Time a whole training step on real ranks, with D-RR and with CD-GraB."""

import statistics
import time
from functools import partial
from itertools import chain, repeat

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

from gradherd.comm.collectives import all_reduce
from gradherd.comm.world import World
from gradherd.hooks.attach import attach
from gradherd.lab.bench.bench_rows import mlp
from gradherd.lab.bench.bench_sparsify import ring_bytes
from gradherd.lab.bench.timing import Rows, make_rows, medians_in_turns, peak_memory
from gradherd.ordering.sampler import OrderedSampler

_ORDERS = ("d-rr", "cd-grab")
_BATCHES = 32  # per epoch; even, so that each block of steps holds whole pairs
_BLOCK = 4  # steps timed together, for the same reason
_PARTS = {
    "exchange": "exchange_seconds",
    "feedback": "ordering_seconds",
    "signs_cpu": "signs_cpu_seconds",
}
"""Metrics of the parts of a step: the hook inside the backward; work at the optimizer's step; the
thread that computes signs."""


class DDPTraining:
    """A training loop with its own model, optimizer, loader and order."""

    def __init__(self, order: str, params: int, batch: int, world: World) -> None:
        # The same data and the same model in all cases, on every rank.
        torch.manual_seed(0)
        x = torch.randn(_BATCHES * batch * world.size, 784)
        data = TensorDataset(x, torch.randint(10, (len(x),)))
        self.model, self._ranks = DDP(mlp(params)), world.size
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        # Whole batches as units: the gradients that are averaged anyway are the rows.
        sampler = OrderedSampler(data, order, batch_size=batch, unit=batch)
        self.herd = attach(self.model, order=sampler)
        loader = DataLoader(data, batch_size=batch, sampler=sampler)
        # Epochs follow each other, so the end of an epoch is timed as well.
        self._batches = chain.from_iterable(repeat(loader))
        self._steps_done = 0

    def steps(self) -> None:
        """Train for a block of steps."""
        self._steps_done += _BLOCK
        for _ in range(_BLOCK):
            x, y = next(self._batches)
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()

    def parts(self) -> dict[str, float]:
        """Return seconds of the parts of a step so far, as far as the herd knows them."""
        metrics = self.herd.metrics()
        return {part: metrics[name] for part, name in _PARTS.items() if name in metrics}

    def bytes_per_step(self) -> int:
        """Return what a rank has sent: counted, or computed for DDP's own exchange."""
        metrics, steps = self.herd.metrics(), self._steps_done
        sent = metrics.get("total_bytes")
        if sent is None:
            sent = steps * ring_bytes("dense", self.model.parameters(), self._ranks)
        return int(metrics["bytes_for_ordering"] + sent) // steps


def bench_step(params: int, batch: int, repeats: int) -> Rows:
    """Measure blocks of steps, alternating between the cases so that noise hits all alike.

    The MLP has about `params` parameters, a rank takes `batch` examples per step. Seconds and bytes
    are of one step.
    """
    world = World.detect()
    runs: dict[str, DDPTraining] = {}

    def first_block(case: str) -> None:
        # It also warms up: DDP rebuilds its buckets after the first step.
        runs[case] = DDPTraining(case, params, batch, world)
        runs[case].steps()

    cpu_memory = partial(peak_memory, device=torch.device("cpu"))
    peaks = {case: cpu_memory(partial(first_block, case)) for case in _ORDERS}
    cpu: dict[str, list[float]] = {case: [] for case in runs}
    before = {case: run.parts() for case, run in runs.items()}

    def measure(case: str) -> float:
        run = runs[case]
        all_reduce(torch.zeros(1), world)  # a barrier: start together
        begin, cpu_begin = time.perf_counter(), time.process_time()
        run.steps()
        # Of all threads of this rank. Where ranks have no cores of their own, this is what makes a
        # step longer, and other work on the machine hardly changes it.
        cpu[case].append((time.process_time() - cpu_begin) / _BLOCK)
        all_reduce(torch.zeros(1), world)  # time until the slowest rank is done
        return (time.perf_counter() - begin) / _BLOCK

    seconds = medians_in_turns({case: partial(measure, case) for case in runs}, repeats)
    sent = {case: run.bytes_per_step() for case, run in runs.items()}
    size = sum(p.numel() for p in runs["d-rr"].model.parameters())
    rows = make_rows(seconds, peaks, workers=world.size, dim=size, sent=sent, batch=batch)
    for row in rows:
        run, earlier = runs[row["case"]], before[row["case"]]
        row["cpu_seconds"] = statistics.median(cpu[row["case"]])
        row["cpu_ratio"] = row["cpu_seconds"] / rows[0]["cpu_seconds"]
        row["parts"] = {
            part: (total - earlier[part]) / (_BLOCK * repeats)
            for part, total in run.parts().items()
        }
    return rows
