"""What a step of a run costs with all workers in one process: LeNet on random images.

Cases: `plain loop` is what a user writes: batches by index, forward, backward, optimizer; no order
and no gradients of single examples. `turns` is cd-grab with workers one after the other, the others
are the engine of `train.batched`: `one run` of cd-grab, `nine runs` (cd-grab, id-grab and
id-pair-grab with three seeds) and `nine runs, d-rr`, which needs no gradients of single examples.
Seconds are of one step of one run: of runs side by side, each has its share.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradherd.lab.bench.memory import Peak
from gradherd.lab.tasks.cifar10_lenet import Cifar10LeNet
from gradherd.lab.tasks.task import Split, Task
from gradherd.lab.train.batched import BatchedFleet
from gradherd.lab.train.config import RunConfig
from gradherd.lab.train.fleet import Fleet
from gradherd.lab.train.plan import plan
from gradherd.lab.train.virtual import VirtualFleet

CASES = ("plain loop", "turns", "one run", "nine runs", "nine runs, d-rr")
LEAST_STEPS = 2
"""Of an epoch: the first step of a shape is called, the second is captured on a GPU."""
_TURNS = 10  # Workers one after the other are slow: they take so many times fewer steps.
_BALANCED, _SEEDS = ("cd-grab", "id-grab", "id-pair-grab"), 3  # nine runs


def random_images(count: int) -> Split:
    """Return as many examples as asked, in the form of CIFAR-10's."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
    kinds = torch.randint(10, (count,), generator=generator)
    return Split((pixels, kinds), (pixels[:1], kinds[:1]))


class PlainLoop:
    """A training loop of one's own: the same model, loss, data and optimizer."""

    runs = 1

    def __init__(self, config: RunConfig, task: Task, split: Split) -> None:
        device = torch.device(config.device)
        torch.manual_seed(config.seed)
        self._task, self._columns = task, split.to(device).train
        self._batch = config.workers * config.batch_size
        self.model = task.model().to(device)
        self._optimizer = torch.optim.SGD(
            self.model.parameters(),
            lr=config.lr,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
        )

    def epoch(self) -> int:
        """Train; return how many steps."""
        device = self._columns[0].device
        batches = torch.randperm(len(self._columns[0]), device=device).split(self._batch)
        for own in batches:
            self._optimizer.zero_grad()
            self._task.loss(self.model, *(column[own] for column in self._columns)).backward()
            self._optimizer.step()
        return len(batches)


class FleetLoop:
    """Epochs of a fleet, one after the other."""

    def __init__(self, fleet: Fleet, runs: int) -> None:
        self.fleet, self.runs, self._number = fleet, runs, 0

    def epoch(self) -> int:
        """Train all runs; return how many steps each took."""
        self._number += 1
        return self.fleet.epoch(self._number, lambda steps=1: None)[0].steps


def make_case(
    case: str, workers: int, batch: int, steps: int, device: torch.device
) -> PlainLoop | FleetLoop:
    """Return a case, ready to train epochs of so many steps."""
    task = Cifar10LeNet()
    examples = workers * batch

    def runs_of(orders: Sequence[str], seeds: int, rows: str) -> list[RunConfig]:
        return plan(
            task.name,
            task.defaults,
            orders=orders,
            sparsifiers=["dense"],
            density=None,
            seeds=range(seeds),
            workers=workers,
            batch_size=batch,
            unit=1,
            rows=rows,
            virtual=True,
            device=str(device),
        )

    split = random_images(steps * examples)
    if case == "plain loop":
        return PlainLoop(runs_of(["d-rr"], 1, "auto")[0], task, split)
    if case == "turns":
        (config,) = runs_of(["cd-grab"], 1, "exact")
        few = split.first(max(LEAST_STEPS, steps // _TURNS) * examples)
        return FleetLoop(VirtualFleet(config, task, few, capture=False), 1)
    configs = {
        "one run": lambda: runs_of(["cd-grab"], 1, "exact"),
        "nine runs": lambda: runs_of(_BALANCED, _SEEDS, "exact"),
        "nine runs, d-rr": lambda: runs_of(["d-rr"], len(_BALANCED) * _SEEDS, "auto"),
    }[case]()
    return FleetLoop(BatchedFleet(configs, task, split), len(configs))


def bench_virtual(
    workers: int,
    batch: int,
    steps: int,
    repeats: int,
    device: torch.device,
    progress: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Measure epochs of all cases in turn, so that noise meets them alike; the median counts.

    Args:
        workers: Of each run.
        batch: Examples of a worker in a step.
        steps: Of an epoch, at least 2; workers one after the other take a tenth of them.
        repeats: Epochs measured of each case, after one that is not.
        device: Where.
        progress: Is called after each epoch.
    """
    loops: dict[str, PlainLoop | FleetLoop] = {}
    peaks: dict[str, int | None] = {}
    for case in CASES:
        with Peak(device) as peak:
            loops[case] = make_case(case, workers, batch, steps, device)
            loops[case].epoch()
        peaks[case] = peak.bytes
        progress()
    times: dict[str, list[float]] = {case: [] for case in CASES}
    for _ in range(repeats):
        for case, loop in loops.items():
            times[case].append(_seconds(loop, device))
            progress()
    for loop in loops.values():
        if isinstance(loop, FleetLoop):
            loop.fleet.close()
    taken = {case: statistics.median(own) for case, own in times.items()}
    size = sum(p.numel() for p in Cifar10LeNet().model().parameters())
    return [
        {
            "case": case,
            "workers": workers,
            "dim": size,
            "batch": batch,
            "runs": loop.runs,
            "seconds": taken[case],
            "bytes": 0,  # Nothing travels: all workers are in one process.
            "peak_bytes": peaks[case],
            "ratio": taken[case] / taken["plain loop"],
            "steps_per_second": 1 / taken[case],
        }
        for case, loop in loops.items()
    ]


def _seconds(loop: PlainLoop | FleetLoop, device: torch.device) -> float:
    """Return the seconds of a step of one run, from a whole epoch."""
    _wait(device)
    begin = time.perf_counter()
    steps = loop.epoch()
    _wait(device)
    return (time.perf_counter() - begin) / (steps * loop.runs)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
