"""Which examples form a unit and which worker owns it, also when the number of workers changes.

Unit g of the data set holds the examples g*u .. g*u+u-1 and belongs to worker g mod W as long as
there are W workers: data does not move between workers, and a unit always holds the same examples.
(Most published CD-GraB scripts give each worker a contiguous block of the file. Striping
gives every worker a fair share of a data set that is sorted by label.)

Unit j of worker w is thus unit j*W + w of the data set. In these global ids an epoch is one
sequence: the first units of all workers, then the second units of all workers, and so on. When W
changes, the rest of an interrupted epoch is striped over the new workers in that sequence, and each
worker's new order lists the units that it owns from now on in the order of the sequence.

Shapes: n units. All functions are pure.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradherd.comm.checks import check_choice


@dataclass(frozen=True)
class UnitSharding:
    """A data set cut into units and striped over workers."""

    examples: int
    """Examples in the data set."""
    unit: int
    """Examples in a unit."""
    workers: int
    """Number of workers."""
    drop_last: bool
    """Drop units that do not fill a round of all workers, instead of repeating some."""

    def __post_init__(self) -> None:
        if self.examples < 1:
            raise ValueError(f"the data set must hold at least one example, got {self.examples}")
        check_choice("drop_last", self.drop_last, True, False)
        if self.drop_last and self.length == 0:
            raise ValueError(
                f"drop_last=True leaves nothing of {self.examples} examples for {self.workers} "
                f"workers with units of {self.unit}; use drop_last=False or a smaller unit"
            )

    @property
    def units(self) -> int:
        """Number of units; the last one may be short, or is dropped with `drop_last`."""
        return self.examples // self.unit if self.drop_last else -(-self.examples // self.unit)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of units of each worker; they differ by at most one.

        >>> UnitSharding(examples=10, unit=3, workers=3, drop_last=False).sizes
        (2, 1, 1)
        """
        return _striped(self.units, self.workers)

    @property
    def length(self) -> int:
        """Units that every worker visits in an epoch."""
        # Equal on all workers: a rank with one step more would wait for the others' gradients
        # forever.
        return min(self.sizes) if self.drop_last else max(self.sizes)

    def indices(self, worker: int, order: Tensor) -> Tensor:
        """Return the (length * unit,) examples that `worker` visits in the order of its (n,) units.

        Its units count from 0. A worker that is one short repeats the first of its order; one
        without any borrows one.

        >>> sharding = UnitSharding(examples=10, unit=3, workers=3, drop_last=False)
        >>> sharding.indices(0, torch.tensor([1, 0])).tolist()
        [9, 9, 9, 0, 1, 2]
        >>> sharding.indices(1, torch.tensor([0])).tolist()
        [3, 4, 5, 3, 4, 5]
        """
        units = order * self.workers + worker if len(order) else torch.tensor([worker % self.units])
        return self.examples_of(units.repeat(-(-self.length // len(units)))[: self.length])

    def examples_of(self, units: Tensor) -> Tensor:
        """Return the (n * unit,) examples of (n,) global units; a short one repeats its own."""
        filled = (self.examples - units * self.unit).clamp(max=self.unit)
        # Repeating, not padding with other examples: the unit's gradient stays (nearly) the mean
        # of its own ones, and every batch is full.
        within = torch.arange(self.unit) % filled.unsqueeze(1)
        return (units.unsqueeze(1) * self.unit + within).flatten()


def _striped(units: int, workers: int) -> tuple[int, ...]:
    return tuple(len(range(worker, units, workers)) for worker in range(workers))


def can_reshard(old: Sequence[int], new: Sequence[int]) -> bool:
    """Return whether orders of workers with `old` units each can be moved to another number.

    That takes units that are striped over both: only striping says which unit of the data set a
    worker's unit is.

    >>> can_reshard((3, 3), (2, 2, 2)), can_reshard((3, 3), (3, 3)), can_reshard((8,), (3, 2, 3))
    (True, False, False)
    """
    striped = all(tuple(sizes) == _striped(sum(sizes), len(sizes)) for sizes in (old, new))
    return striped and len(old) != len(new)


def sequence(orders: Sequence[Tensor], first: int = 0, length: int | None = None) -> Tensor:
    """Return the (n,) global ids of the units visited from time step `first` up to `length`.

    Time step by time step, and within one by worker. `orders` are of each worker's own units.

    >>> sequence([torch.tensor([1, 0, 2]), torch.tensor([0, 1])], first=1)
    tensor([0, 3, 4])
    """
    workers, steps = len(orders), max(len(order) for order in orders)
    table = torch.full((steps, workers), -1)  # -1: the worker has no unit at that step
    for worker, order in enumerate(orders):
        table[: len(order), worker] = order * workers + worker
    units = table[first:length].flatten()
    return units[units >= 0]


def own_units(units: Tensor, workers: int) -> list[Tensor]:
    """Return for each worker its (n_i,) own units in the order of (n,) global ones.

    >>> own_units(torch.tensor([2, 1, 0, 3, 4]), workers=2)
    [tensor([1, 0, 2]), tensor([0, 1])]
    """
    return [units[units % workers == worker] // workers for worker in range(workers)]


def stripe(units: Tensor, worker: int, workers: int, drop_last: bool) -> Tensor:
    """Return what one worker visits when (n,) global units are striped over all workers.

    All workers get the same number: the first units are repeated to fill the last round, or that
    round is dropped.

    >>> [stripe(torch.tensor([5, 3, 4]), worker, 2, drop_last=False).tolist() for worker in (0, 1)]
    [[5, 4], [3, 5]]
    """
    # In turn, not by owner: the units that are left may belong to a few of the new workers, and
    # all workers must take the same number of steps.
    spare = -len(units) % workers
    if drop_last:
        return units[: len(units) // workers * workers][worker::workers]
    # `repeat`, since there may be fewer units than workers.
    return torch.cat([units, units.repeat(spare)[:spare]])[worker::workers]


def is_permutation(order: Tensor) -> bool:
    """Return whether (n,) int64 `order` has each of 0 to n - 1 once."""
    return torch.equal(order.sort().values, torch.arange(len(order)))


def check_reordered(orders: object, sizes: Sequence[int], policy: object) -> list[Tensor]:
    """Return the orders that a policy's `reorder` returned, as a list.

    Raises:
        ValueError: They are not one permutation for each worker.
    """
    found: list[Any] = list(orders) if isinstance(orders, Iterable) else [orders]
    if len(found) != len(sizes):
        raise ValueError(f"{policy}.reorder must return {len(sizes)} orders, got {len(found)}")
    for worker, (order, size) in enumerate(zip(found, sizes, strict=True)):
        if isinstance(order, Tensor):
            good = order.dtype == torch.int64 and order.is_cpu and order.shape == (size,)
            if good and is_permutation(order):
                continue
            kind = f"{order.dtype} on {order.device.type}, {len(order.unique())} different ones"
        else:
            kind = type(order).__name__
        raise ValueError(
            f"{policy}.reorder must return a permutation of the {size} units of worker {worker}, "
            f"torch.int64 on cpu, got {kind}"
        )
    return found


def check_orders(orders: Sequence[Tensor], rest: Tensor | None) -> None:
    """Raise ValueError unless loaded orders are permutations, and their rest a set of units."""
    # A damaged order would train on some units twice and on others never, without an error.
    for worker, order in enumerate(orders):
        if not is_permutation(order):
            raise ValueError(f"state is damaged: worker {worker}'s order is not a permutation")
    if rest is None:
        return
    within = bool(((rest >= 0) & (rest < sum(map(len, orders)))).all())
    if rest.ndim != 1 or not within or len(rest.unique()) != len(rest):
        raise ValueError(
            "state is damaged: the rest of its epoch names units that this run does not have"
        )
