"""Time a whole training step on real ranks, with D-RR, with CD-GraB, and with other exchanges.

Exchanges: torch's hooks fp16 and powersgd (rank 1); exdyna, also with values of 2 bits; local-4,
which is 4 steps alone, then an exchange of the difference in one bit, averaged over these steps.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gradherd.comm.collectives import all_reduce
from gradherd.comm.world import World
from gradherd.hooks.attach import attach
from gradherd.lab.bench.bench_rows import mlp
from gradherd.lab.bench.bench_sparsify import ddp_with_hook, ring_bytes
from gradherd.lab.bench.timing import Rows, make_rows, medians_in_turns, peak_memory
from gradherd.ordering.sampler import OrderedSampler
from gradherd.sparsify.local import LocalSteps
from gradherd.sparsify.settings import make_settings

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
    """A training loop with its own model, optimizer, loader, order and exchange."""

    def __init__(self, order: str, exchange: str, params: int, batch: int, world: World) -> None:
        # The same data and the same model in all cases, on every rank.
        torch.manual_seed(0)
        x = torch.randn(_BATCHES * batch * world.size, 784)
        data = TensorDataset(x, torch.randint(10, (len(x),)))
        method, _, detail = exchange.partition("-")
        net = mlp(params)
        self.exchange, self.block, self.ranks = exchange, _BLOCK, world.size
        self.model: nn.Module = net if method == "local" else ddp_with_hook(net, exchange)
        # Momentum beside a sparse exchange is refused; it costs next to nothing in time.
        momentum = 0.0 if method == "exdyna" else 0.9
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=momentum)
        settings: dict[str, Any] = {}
        if method == "local":
            self.block = int(detail)  # from one exchange to the next
            settings = {"optimizer": self.optimizer, "local": LocalSteps(every=self.block)}
        elif method == "exdyna":
            settings = {"sparsify": make_settings("exdyna", values=detail or "fp32")}
        # Whole batches as units: the gradients that are averaged anyway are the rows.
        sampler = OrderedSampler(data, order, batch_size=batch, unit=batch)
        self.herd = attach(self.model, order=sampler, **settings)
        self._batches = self._endless(DataLoader(data, batch_size=batch, sampler=sampler))
        self._steps_done = 0

    def _endless(self, loader: DataLoader[Any]) -> Iterator[list[Tensor]]:
        while True:
            # Epochs follow each other, so the end of an epoch is timed as well.
            yield from loader

    def steps(self) -> None:
        """Train for a block of steps."""
        self._steps_done += self.block
        for _ in range(self.block):
            x, y = next(self._batches)
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()

    def parts(self) -> dict[str, float]:
        """Return seconds of the parts of a step so far, as far as the herd knows them."""
        metrics = self.herd.metrics()
        return {part: metrics[name] for part, name in _PARTS.items() if name in metrics}

    def bytes_per_step(self) -> int:
        """Return what a rank has sent: counted, or computed for torch's exchanges."""
        metrics, steps = self.herd.metrics(), self._steps_done
        sent = metrics.get("total_bytes")
        if sent is None:
            # Averaging sends the same bytes with both orders; the herd counts what ordering adds.
            sent = steps * ring_bytes(self.exchange, self.model.parameters(), self.ranks)
        return int(metrics["bytes_for_ordering"] + sent) // steps


def bench_step(params: int, batch: int, repeats: int, exchanges: Sequence[str] = ()) -> Rows:
    """Measure blocks of steps, alternating between the cases so that noise hits all alike.

    The MLP has about `params` parameters, a rank takes `batch` examples per step, and `exchanges`
    of `STEP_EXCHANGES` are measured with D-RR. Seconds and bytes are of one step.
    """
    world = World.detect()
    runs: dict[str, DDPTraining] = {}
    cases = {"d-rr": ("d-rr", "dense"), "cd-grab": ("cd-grab", "dense")}
    cases |= {name: ("d-rr", name) for name in exchanges}

    def first_block(case: str) -> None:
        # It also warms up: DDP rebuilds its buckets after the first step.
        runs[case] = DDPTraining(*cases[case], params, batch, world)
        runs[case].steps()

    peaks = {case: peak_memory(partial(first_block, case), torch.device("cpu")) for case in cases}
    cpu: dict[str, list[float]] = {case: [] for case in runs}
    before = {case: run.parts() for case, run in runs.items()}

    def measure(case: str) -> float:
        run = runs[case]
        all_reduce(torch.zeros(1), world)  # a barrier: start together
        begin, cpu_begin = time.perf_counter(), time.process_time()
        run.steps()
        # Of all threads of this rank. Where ranks have no cores of their own, this is what makes a
        # step longer, and other work on the machine hardly changes it.
        cpu[case].append((time.process_time() - cpu_begin) / run.block)
        all_reduce(torch.zeros(1), world)  # time until the slowest rank is done
        return (time.perf_counter() - begin) / run.block

    seconds = medians_in_turns({case: partial(measure, case) for case in runs}, repeats)
    sent = {case: run.bytes_per_step() for case, run in runs.items()}
    size = sum(p.numel() for p in runs["d-rr"].model.parameters())
    rows = make_rows(seconds, peaks, workers=world.size, dim=size, sent=sent, batch=batch)
    for row in rows:
        run, earlier = runs[row["case"]], before[row["case"]]
        row["cpu_seconds"] = statistics.median(cpu[row["case"]])
        row["cpu_ratio"] = row["cpu_seconds"] / rows[0]["cpu_seconds"]
        row["parts"] = {
            part: (total - earlier[part]) / (run.block * repeats)
            for part, total in run.parts().items()
        }
    return rows
