"""Time a whole training step on real ranks, with D-RR, with CD-GraB, and with other exchanges.

Exchanges: torch's hooks fp16 and powersgd (rank 1); exdyna, also with values of 2 bits; local-4,
which is 4 steps alone, then an exchange of the difference in one bit, averaged over these steps.
"""

import functools
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

from gradherd.comm.collectives import all_reduce
from gradherd.comm.world import World
from gradherd.hooks.attach import attach
from gradherd.hooks.herd import Herd
from gradherd.lab.bench.bench_rows import mlp
from gradherd.lab.bench.timing import PeakMemory, make_rows, medians_in_turns
from gradherd.ordering.sampler import OrderedSampler
from gradherd.sparsify.local import LocalSteps
from gradherd.sparsify.settings import make_settings

_BATCHES = 32  # per epoch; even, so that each block of steps holds whole pairs
_BLOCK = 4  # steps timed together, for the same reason


class DDPTraining:
    """A training loop with its own model, optimizer, loader, order and exchange."""

    def __init__(
        self, order: str, params: int, batch: int, world: World, exchange: str = "dense"
    ) -> None:
        # The same data and the same model in all cases, on every rank.
        torch.manual_seed(0)
        x = torch.randn(_BATCHES * batch * world.size, 784)
        data = TensorDataset(x, torch.randint(10, (len(x),)))
        method, _, detail = exchange.partition("-")
        net = mlp(params)
        # One bucket for PowerSGD: the order of its second all-reduces of several ones differs
        # between ranks, and gloo would hang.
        cap = {"bucket_cap_mb": 1 + 4 * params // 2**20} if method == "powersgd" else {}
        self.model: nn.Module = net if method == "local" else DDP(net, **cap)  # type: ignore[arg-type]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        # Whole batches as units: the gradients that are averaged anyway are the rows.
        self.sampler = OrderedSampler(data, order, batch_size=batch, unit=batch)
        self.loader = DataLoader(data, batch_size=batch, sampler=self.sampler)
        self.block = _BLOCK
        settings: dict[str, Any] = {}
        if method == "local":
            local = LocalSteps(every=int(detail))
            settings = {"optimizer": self.optimizer, "local": local}
            self.block = local.every  # from one exchange to the next
        elif method == "exdyna":
            # Momentum beside a sparse exchange is refused; it costs next to nothing in time.
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
            settings = {"sparsify": make_settings("exdyna", values=detail or "fp32")}
        elif isinstance(self.model, DDP) and exchange != "dense":
            _register_hook(self.model, exchange)
        self.herd: Herd = attach(self.model, order=self.sampler, **settings)
        self.batches = self._endless_batches()
        self.steps_done = 0

    def _endless_batches(self) -> Iterator[list[Tensor]]:
        while True:
            # Epochs follow each other, so the end of an epoch is timed as well.
            yield from self.loader

    def steps(self, count: int) -> None:
        """Train for `count` steps."""
        self.steps_done += count
        for _ in range(count):
            x, y = next(self.batches)
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()


def _register_hook(model: DDP, exchange: str) -> None:
    if exchange == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    else:
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=1, start_powerSGD_iter=2
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def bench_step(
    params: int, batch: int, repeats: int, exchanges: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Measure blocks of steps, alternating between the cases so that noise hits all alike.

    Args:
        params: Approximate number of parameters of the MLP.
        batch: Examples per rank and step.
        repeats: Blocks measured of each case; the median counts.
        exchanges: Other exchanges to measure with D-RR, of `STEP_EXCHANGES`.

    Returns:
        A row for each case, with seconds and bytes of one step.
    """
    world = World.detect()
    runs: dict[str, DDPTraining] = {}
    peaks: dict[str, int | None] = {}
    cases = {"d-rr": ("d-rr", "dense"), "cd-grab": ("cd-grab", "dense")}
    for case, (order, exchange) in (cases | {name: ("d-rr", name) for name in exchanges}).items():
        # The first block also warms up: DDP rebuilds its buckets after the first step.
        with PeakMemory(torch.device("cpu")) as peak:
            runs[case] = DDPTraining(order, params, batch, world, exchange)
            runs[case].steps(runs[case].block)
        peaks[case] = peak.bytes
    cpu: dict[str, list[float]] = {case: [] for case in runs}
    before = {case: _parts(run) for case, run in runs.items()}

    def measure(case: str) -> float:
        run = runs[case]
        all_reduce(torch.zeros(1), world)  # a barrier: start together
        begin, cpu_begin = time.perf_counter(), time.process_time()
        run.steps(run.block)
        # Of all threads of this rank. Where ranks have no cores of their own, this is what makes a
        # step longer, and other work on the machine hardly changes it.
        cpu[case].append((time.process_time() - cpu_begin) / run.block)
        all_reduce(torch.zeros(1), world)  # time until the slowest rank is done
        return (time.perf_counter() - begin) / run.block

    seconds = medians_in_turns({case: functools.partial(measure, case) for case in runs}, repeats)
    size = sum(p.numel() for p in runs["d-rr"].model.parameters())
    sent = {
        case: _bytes_sent(case, run, size, world.size) // (run.block * (repeats + 1))
        for case, run in runs.items()
    }
    rows = make_rows(seconds, peaks, workers=world.size, dim=size, sent=sent, batch=batch)
    for row in rows:
        run, earlier = runs[row["case"]], before[row["case"]]
        row["cpu_seconds"] = statistics.median(cpu[row["case"]])
        row["cpu_ratio"] = row["cpu_seconds"] / rows[0]["cpu_seconds"]
        row["parts"] = {
            part: (total - earlier[part]) / (run.block * repeats)
            for part, total in _parts(run).items()
        }
    return rows


def _parts(run: DDPTraining) -> dict[str, float]:
    """Return seconds of the parts of a step so far, as far as the herd knows them."""
    metrics = run.herd.metrics()
    # The hook inside the backward; work at the optimizer's step; the thread that computes signs.
    names = {
        "exchange": "exchange_seconds",
        "feedback": "ordering_seconds",
        "signs_cpu": "signs_cpu_seconds",
    }
    return {part: metrics[name] for part, name in names.items() if name in metrics}


def _bytes_sent(case: str, run: DDPTraining, size: int, ranks: int) -> int:
    """Return what a rank has sent since the start: counted, or computed for torch's exchanges."""
    metrics, steps = run.herd.metrics(), run.steps_done
    ordering = int(metrics["bytes_for_ordering"])
    if "total_bytes" in metrics:
        return ordering + int(metrics["total_bytes"])
    # Averaging sends the same bytes with both orders; the herd counts what ordering adds.
    elements = size
    if case == "powersgd":  # two factors of each matrix, and biases as they are
        elements = sum(sum(p.shape) for p in run.model.parameters())
    width = 2 if case == "fp16" else 4
    return ordering + steps * (2 * width * elements * (ranks - 1) // ranks)
