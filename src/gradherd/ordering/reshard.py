"""Move orders to another number of workers: pure functions on tables of orders.

Unit u of worker w, of W, is unit u*W + w of the data set (see `sharding`). In these global ids an
epoch is one sequence: the first units of all workers, then the second units of all workers, and so
on. The rest of an interrupted epoch is striped over the new workers in that sequence, and each
worker's new order lists the units that it owns from now on in the order of the sequence.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def is_striped(sizes: Sequence[int]) -> bool:
    """Return whether workers have as many units as striping gives them.

    >>> is_striped((3, 3, 2)), is_striped((3, 2, 3))
    (True, False)
    """
    units, workers = sum(sizes), len(sizes)
    return list(sizes) == [len(range(worker, units, workers)) for worker in range(workers)]


def sequence(orders: Sequence[Tensor], first: int = 0, length: int | None = None) -> Tensor:
    """Return the global ids of the units visited from time step `first` up to `length`.

    >>> sequence([torch.tensor([1, 0, 2]), torch.tensor([0, 1])], first=1)
    tensor([0, 3, 4])
    """
    workers, steps = len(orders), max(len(order) for order in orders)
    table = torch.full((steps, workers), -1)
    for worker, order in enumerate(orders):
        table[: len(order), worker] = order * workers + worker
    units = table[first:length].flatten()
    return units[units >= 0]


def own_units(units: Tensor, workers: int) -> list[Tensor]:
    """Return for each worker its own units in the order of a sequence of global ids.

    >>> own_units(torch.tensor([2, 1, 0, 3, 4]), workers=2)
    [tensor([1, 0, 2]), tensor([0, 1])]
    """
    return [units[units % workers == worker] // workers for worker in range(workers)]


def stripe(units: Tensor, worker: int, workers: int, drop_last: bool) -> Tensor:
    """Return what one worker visits when a sequence is striped over all workers.

    All workers get the same number: the first units are repeated to fill the last round, or that
    round is dropped.

    >>> [stripe(torch.tensor([5, 3, 4]), worker, 2, drop_last=False).tolist() for worker in (0, 1)]
    [[5, 4], [3, 5]]
    """
    spare = -len(units) % workers
    if drop_last:
        return units[: len(units) // workers * workers][worker::workers]
    return torch.cat([units, units.repeat(spare)[:spare]])[worker::workers]
