"""How well two-sided rows of LeNet order, by rank and size.

Trains LeNet on CIFAR-10 (GRADHERD_DATA) for a while, then orders the gradients of some examples,
which stay as they are, with CD-GraB. Prints the herding bound of the last epochs (the longest
prefix sum of the exact, centred gradients), relative to orders from exact rows:

    python benchmarks/rows_herding.py [--steps 600] [--workers 64] [--units 128] [--epochs 10]
        [--rows 16:1024,16:4096,64:1024,64:4096] [--seeds 2]
"""

import argparse
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gradherd.lab.tasks.images import Cifar10LeNet
from gradherd.ordering.ordering import Ordering
from gradherd.ordering.registry import make_policy
from gradherd.rows.capture import Capture
from gradherd.rows.settings import ExactRows, TwoSidedRows

TASK = Cifar10LeNet()
BATCH, LAST = 256, 3
"""Examples of a backward, and epochs whose bounds are averaged."""


def train(steps: int, examples: tuple[Tensor, ...]) -> nn.Module:
    """Return a network after some steps."""
    torch.manual_seed(0)
    model = TASK.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-3, momentum=0.9)
    for _ in range(steps):
        which = torch.randint(len(examples[0]), (64,))
        optimizer.zero_grad()
        TASK.loss(model, *(tensor[which] for tensor in examples)).backward()
        optimizer.step()
    return model


def read_rows(
    model: nn.Module, settings: TwoSidedRows | None, examples: Sequence[Tensor]
) -> Tensor:
    """Return the rows of all examples: exact ones without settings."""
    capture = Capture(model, settings or ExactRows())
    parts = []
    for batch in zip(*(tensor.split(BATCH) for tensor in examples), strict=True):
        TASK.loss(model, *batch).backward()
        parts.append(capture.pop_rows(len(batch[0])))
    capture.remove_hooks()
    return torch.cat(parts)


def longest_sum(centred: Tensor, orders: Sequence[Tensor]) -> float:
    """Return the longest prefix sum of (R, n, D) gradients if workers visit theirs in turn."""
    total, longest = torch.zeros(centred.shape[-1]), 0.0
    for visited in zip(*orders, strict=True):
        total += sum(own[unit] for own, unit in zip(centred, visited, strict=True))
        longest = max(longest, float(total.norm()))
    return longest


def bound(rows: Tensor, centred: Tensor, epochs: int, seed: int) -> float:
    """Return the mean bound of the last epochs of orders learned from (R, n, k) rows."""
    workers, units = rows.shape[:2]
    ordering, bounds = Ordering(make_policy("cd-grab"), [units] * workers, seed=seed), []
    for epoch in range(epochs):
        if epoch >= epochs - LAST:
            bounds.append(longest_sum(centred, ordering.orders))
        visited = [own[order] for own, order in zip(rows, ordering.orders, strict=True)]
        ordering.observe(torch.stack(visited, 1))
        ordering.end_epoch()
    return statistics.fmean(bounds)


def main() -> None:
    """Measure every setting."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--units", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--rows", default="16:1024,16:4096,64:1024,64:4096")
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    shape, count = (options.workers, options.units, -1), options.workers * options.units
    examples = tuple(tensor[:count] for tensor in TASK.load(limit=count).train)
    model = train(options.steps, examples)
    exact = read_rows(model, None, examples)
    centred = (exact - exact.mean(0)).view(shape)
    shuffled = [torch.randperm(options.units) for _ in range(options.workers)]
    seeds = range(options.seeds)
    least = statistics.fmean(bound(exact.view(shape), centred, options.epochs, s) for s in seeds)
    print(f"random orders: {longest_sum(centred, shuffled) / least:.2f} times that of exact rows")
    for name in options.rows.split(","):
        rank, size = map(int, name.split(":"))
        rows = read_rows(model, TwoSidedRows(rank=rank, size=size), examples).view(shape)
        found = [bound(rows, centred, options.epochs, seed) / least for seed in seeds]
        print(f"rank {rank}, {size} elements: {', '.join(f'{one:.3f}' for one in found)}")


if __name__ == "__main__":
    main()
