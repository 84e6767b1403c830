"""Time a step of a virtual run, all workers in one process: LeNet on random images.

Cases: `plain loop` is what a user writes: batches by index, forward, backward, optimizer; no order
and no per-example gradients. `turns` is cd-grab with workers one after the other. The others train
all workers at once: `one run` of cd-grab, `nine runs` (cd-grab, id-grab and id-pair-grab with three
seeds each) and `nine runs, d-rr`, which needs no per-example gradients. Seconds are per step of one
run: with nine runs side by side, each one counts a ninth.

    python benchmarks/virtual_steps.py --device cuda --steps 200

Prints one JSON line per case; `studies/speed.toml` keeps such figures.
"""

import argparse
import json
from collections.abc import Sequence
from functools import partial

import torch

from gradherd.lab.bench.timing import (
    Rows,
    elapsed_seconds,
    make_rows,
    medians_in_turns,
    peak_memory,
)
from gradherd.lab.tasks.images import Cifar10LeNet
from gradherd.lab.tasks.task import Split, Task
from gradherd.lab.train.config import RunConfig, plan_runs
from gradherd.lab.train.stacked_trainer import StackedTrainer
from gradherd.lab.train.trainer import Trainer
from gradherd.lab.train.virtual_trainer import VirtualTrainer

CASES = ("plain loop", "turns", "one run", "nine runs", "nine runs, d-rr")
LEAST_STEPS = 2
"""Fewest steps of an epoch: the first of a shape traces it."""
_TURNS = 10  # `turns` is slow, so its epochs have a tenth of the steps
_BALANCED, _SEEDS = ("cd-grab", "id-grab", "id-pair-grab"), 3  # makes nine runs


def random_images(count: int) -> Split:
    """Return `count` random examples in the shape of CIFAR-10's."""
    # Random pixels: speed does not depend on content, and no data set is needed.
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
    labels = torch.randint(10, (count,), generator=generator)
    return Split((pixels, labels), (pixels[:1], labels[:1]))


class PlainLoop:
    """A hand-written training loop with the same model, loss, data and optimizer."""

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
        """Train one epoch; return the number of steps."""
        device = self._columns[0].device
        # On the device: indices from the host would have to be copied in every step.
        batches = torch.randperm(len(self._columns[0]), device=device).split(self._batch)
        for batch in batches:
            self._optimizer.zero_grad()
            self._task.loss(self.model, *(column[batch] for column in self._columns)).backward()
            self._optimizer.step()
        return len(batches)


class TrainerLoop:
    """Epochs of virtual runs, one after the other."""

    def __init__(self, trainer: Trainer, runs: int) -> None:
        self.trainer, self.runs, self._number = trainer, runs, 0

    def epoch(self) -> int:
        """Train one epoch of all runs; return the number of steps of each."""
        self._number += 1
        return self.trainer.train_epoch(self._number, lambda steps=1: None)[0].steps


def make_case(
    case: str, workers: int, batch: int, steps: int, device: torch.device
) -> PlainLoop | TrainerLoop:
    """Return a case, ready to train epochs.

    Args:
        case: One of CASES.
        workers: Workers of each run.
        batch: Examples per worker and step.
        steps: Steps of an epoch; `turns` takes a tenth of them.
        device: Where to train.
    """
    task = Cifar10LeNet()
    examples = workers * batch

    def runs_of(orders: Sequence[str], seeds: int, rows: str) -> list[RunConfig]:
        return plan_runs(
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
        return TrainerLoop(VirtualTrainer(config, task, few), 1)
    configs = {
        "one run": lambda: runs_of(["cd-grab"], 1, "exact"),
        "nine runs": lambda: runs_of(_BALANCED, _SEEDS, "exact"),
        "nine runs, d-rr": lambda: runs_of(["d-rr"], len(_BALANCED) * _SEEDS, "auto"),
    }[case]()
    return TrainerLoop(StackedTrainer(configs, task, split), len(configs))


def bench_virtual(workers: int, batch: int, steps: int, repeats: int, device: torch.device) -> Rows:
    """Measure epochs, alternating between the cases so that noise hits all alike.

    Args:
        workers: Workers of each run.
        batch: Examples per worker and step.
        steps: Steps of an epoch, at least 2; `turns` takes a tenth of them.
        repeats: Epochs measured of each case, after one to warm up; the median counts.
        device: Where to train.
    """
    loops: dict[str, PlainLoop | TrainerLoop] = {}

    def first_epoch(case: str) -> None:
        # Includes building and tracing.
        loops[case] = make_case(case, workers, batch, steps, device)
        loops[case].epoch()

    peaks = {case: peak_memory(partial(first_epoch, case), device) for case in CASES}
    cases = {case: partial(_step_seconds, loop, device) for case, loop in loops.items()}
    seconds = medians_in_turns(cases, repeats)
    for loop in loops.values():
        if isinstance(loop, TrainerLoop):
            loop.trainer.close()
    size = sum(p.numel() for p in Cifar10LeNet().model().parameters())
    rows = make_rows(seconds, peaks, workers=workers, dim=size, batch=batch)
    for row in rows:
        row |= {"runs": loops[row["case"]].runs, "steps_per_second": 1 / row["seconds"]}
    return rows


def _step_seconds(loop: PlainLoop | TrainerLoop, device: torch.device) -> float:
    """Return the seconds per step of one run, from a whole epoch."""
    steps = 0

    def epoch() -> None:
        nonlocal steps
        # A whole epoch: its end, where the next orders are set, belongs to the cost of a step.
        steps = loop.epoch()

    return elapsed_seconds(epoch, device) / (steps * loop.runs)


def main() -> None:
    """Measure all cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    if given.steps < LEAST_STEPS:
        parser.error(f"--steps must be at least {LEAST_STEPS}, got {given.steps}")
    device = torch.device(given.device)
    for row in bench_virtual(given.workers, given.batch, given.steps, given.repeats, device):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
