"""CPU time of a training step whose examples are ordered, over that of the plain step.

    python benchmarks/rows_cpu.py mlp sketch
    python benchmarks/rows_cpu.py lenet sketch exact

The two loops take turns, two steps each, and neighbours are compared. CPU time, not wall time: it
says what a step costs on a machine that does other work, too, though it rises somewhat with it.
"""

import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from model_steps import MODELS
from torch.utils.data import DataLoader, TensorDataset

import gradherd as gh

_WARM_UP, _TURNS, _STEPS = 5, 10, 2


def loop(name: str, rows: str | None) -> Callable[[], None]:
    """Return a training step of a model of `model_steps.py`, ordered by these rows or not."""
    torch.manual_seed(0)
    spec = MODELS[name]
    model = spec.make()
    x, y = torch.randn(spec.batch, *spec.inputs), torch.randint(10, (spec.batch,))
    dataset = TensorDataset(torch.arange(spec.batch * 100))
    sampler = gh.OrderedSampler(dataset, "cd-grab", batch_size=spec.batch)
    if rows is not None:
        gh.attach(model, order=sampler, rows=rows)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    # The loader only says which batch it is: reading examples is no part of the comparison.
    batches = iter(DataLoader(dataset, batch_size=spec.batch, sampler=sampler))

    def step() -> None:
        next(batches)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def main(name: str, cases: list[str]) -> None:
    """Print the CPU time of a step and its ratio to the plain one: median and range of turns."""
    steps = {"plain": loop(name, None)} | {rows: loop(name, rows) for rows in cases}
    seconds: dict[str, list[float]] = {case: [] for case in steps}
    for turn in range(_TURNS + 1):
        for case, step in steps.items():
            count = _STEPS if turn else _WARM_UP
            begin = time.process_time()
            for _ in range(count):
                step()
            if turn:
                seconds[case].append((time.process_time() - begin) / count)
    for case, own in seconds.items():
        ratios = [a / b for a, b in zip(own, seconds["plain"], strict=True)]
        middle, ratio = statistics.median(own), statistics.median(ratios)
        print(
            f"{name} {case}: {1e3 * middle:.1f} ms, {ratio:.2f} of plain "
            f"({min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
