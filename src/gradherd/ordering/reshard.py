"""The same units on another number of workers: pure functions on tables of orders.

Unit u of worker w, of W, is unit u*W + w of the data set (see `sharding`). In these global
numbers an
epoch is one sequence: all workers' first units, all workers' second units, and so on. What is left
of it is dealt out again in that sequence, and each worker's new order is the sequence of those
units that are its own from now on.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def is_dealt(sizes: Sequence[int]) -> bool:
    """Return whether workers have as many units as when they are dealt out in turn.

    >>> is_dealt((3, 3, 2)), is_dealt((3, 2, 3))
    (True, False)
    """
    units, workers = sum(sizes), len(sizes)
    return list(sizes) == [len(range(worker, units, workers)) for worker in range(workers)]


def sequence(orders: Sequence[Tensor], first: int = 0, length: int | None = None) -> Tensor:
    """Return the units visited from time step `first` to `length`, by their global numbers.

    >>> sequence([torch.tensor([1, 0, 2]), torch.tensor([0, 1])], first=1)
    tensor([0, 3, 4])
    """
    workers, steps = len(orders), max(len(order) for order in orders)
    table = torch.full((steps, workers), -1)
    for worker, order in enumerate(orders):
        table[: len(order), worker] = order * workers + worker
    units = table[first:length].flatten()
    return units[units >= 0]


def striped(units: Tensor, workers: int) -> list[Tensor]:
    """Return each worker's order of its own units, as they follow each other in a sequence.

    >>> striped(torch.tensor([2, 1, 0, 3, 4]), workers=2)
    [tensor([1, 0, 2]), tensor([0, 1])]
    """
    return [units[units % workers == worker] // workers for worker in range(workers)]


def turns(units: Tensor, worker: int, workers: int, drop_last: bool) -> Tensor:
    """Return what one worker visits when a sequence is dealt out in turn, one unit each.

    Workers get equally many: the first units are repeated to fill the last round, or that round
    is left out.

    >>> [turns(torch.tensor([5, 3, 4]), worker, 2, drop_last=False).tolist() for worker in (0, 1)]
    [[5, 4], [3, 5]]
    """
    spare = -len(units) % workers
    if drop_last:
        return units[: len(units) // workers * workers][worker::workers]
    return torch.cat([units, units.repeat(spare)[:spare]])[worker::workers]
