"""Which examples form a unit, and which worker owns a unit: pure arithmetic.

Unit g holds the examples g*u .. g*u+u-1 of the data set and belongs to worker g mod W as long as
there are W workers: data does not move between workers, and a unit always holds the same examples.
Striping gives every worker a fair share of a data set that is sorted by label.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


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
        return tuple(len(range(worker, self.units, self.workers)) for worker in range(self.workers))

    @property
    def length(self) -> int:
        """Units that every worker visits in an epoch: all ranks take the same number of steps."""
        return min(self.sizes) if self.drop_last else max(self.sizes)

    def indices(self, worker: int, order: Tensor) -> Tensor:
        """Return the examples that `worker` visits in an epoch, in order.

        A worker that is one unit short repeats the first of its order; one without any borrows one.

        Args:
            worker: Number of the worker.
            order: (n,) its units in visiting order, counted from 0 within the worker.

        Returns:
            (length * unit,) indices into the data set.

        >>> sharding = UnitSharding(examples=10, unit=3, workers=3, drop_last=False)
        >>> sharding.indices(0, torch.tensor([1, 0])).tolist()
        [9, 9, 9, 0, 1, 2]
        >>> sharding.indices(1, torch.tensor([0])).tolist()
        [3, 4, 5, 3, 4, 5]
        """
        units = order * self.workers + worker if len(order) else torch.tensor([worker % self.units])
        return self.examples_of(units.repeat(-(-self.length // len(units)))[: self.length])

    def examples_of(self, units: Tensor) -> Tensor:
        """Return the examples of (n,) units of the data set, unit by unit.

        A short unit repeats its own examples, so its gradient keeps their mean.
        """
        filled = (self.examples - units * self.unit).clamp(max=self.unit)
        within = torch.arange(self.unit) % filled.unsqueeze(1)
        return (units.unsqueeze(1) * self.unit + within).flatten()
