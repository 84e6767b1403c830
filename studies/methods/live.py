"""CD-GraB against drift: balance gradients as they will be, not as they were. Experimental.

An order is learned in one epoch and used in the next, when every gradient has changed, so the
herding bound climbs back while a model learns quickly. This order remembers the last gradient of
each unit. When a unit is visited again, its gradient g and the one of the epoch before, h, predict
the next one: g + weight (g - h). CD-GraB then balances the predictions, as the epoch goes on. What
all gradients have in common cancels in CD-GraB's pairs already; this is about what they have not.

It takes memory of two rows per unit, so give it rows that are small: sketches of examples, or whole
batches as units.

Shapes: b time steps of a call, M workers, N units of all workers, D columns.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, Self

import torch
from torch import Tensor

from gradherd.comm.checks import check_numbers
from gradherd.comm.script import Script
from gradherd.ordering.pair_grab import CDGraB, PairState
from gradherd.ordering.policy import Rows, ShardedRows
from gradherd.ordering.random import SeededRandom


def rows_of_units(orders: Sequence[Tensor], first: int, steps: int) -> Tensor:
    """Return (steps, M) where the units visited at these time steps are in a list of all units.

    Units of worker 0 come first in that list, then those of worker 1. Where a worker has no unit
    at a step, the place is 0.

    >>> rows_of_units([torch.tensor([2, 0, 1]), torch.tensor([1, 0])], first=1, steps=2)
    tensor([[0, 3],
            [1, 0]])
    """
    places = torch.zeros((steps, len(orders)), dtype=torch.long)
    offsets = accumulate((len(order) for order in orders), initial=0)
    for worker, (order, offset) in enumerate(zip(orders, offsets, strict=False)):
        own = order[first : first + steps]
        places[: len(own), worker] = own + offset
    return places


def predict(rows: Tensor, last: Tensor, weight: float) -> Tensor:
    """Return rows + weight (rows - last); rows themselves where there is no last one.

    Args:
        rows: (..., D) gradients of this epoch.
        last: (..., D) those of the epoch before, infinite where there was none.
        weight: How much of the change to add.
    """
    known = last.isfinite().all(-1, keepdim=True)
    return torch.where(known, rows + weight * (rows - last), rows)


@dataclass
class LiveState(PairState):
    """Signs of pairs, and the last row of every unit."""

    fresh: Tensor | None = None
    """(N, D) this epoch's row of every unit, worker after worker; infinite where there is none."""
    recent: Tensor | None = None
    """(N, D) the same of earlier epochs; outlives the epoch."""

    columns: ClassVar[tuple[str, ...]] = ("running", "pending", "fresh", "recent")

    def adopt(self, other: Self) -> None:
        """Take over the rows of earlier epochs, of as many workers."""
        if self.sizes == other.sizes:
            self.recent = other.recent


@dataclass(frozen=True)
class CDGraBLive(CDGraB):
    """CD-GraB on gradients that are corrected by their last change. Experimental.

    >>> CDGraBLive()
    CDGraBLive(rule=Greedy(), weight=1.0)
    """

    weight: float = 1.0
    """How much of a gradient's last change is added to it; 0 makes this CD-GraB."""

    state: ClassVar[type[PairState]] = LiveState
    # Rows are kept beyond the step, so a broken one is looked for by the host.
    leaves_out_broken_rows: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(weight=self.weight)
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise ValueError(f"weight must be a finite number, at least 0, got {self.weight}")

    def new_state(
        self, sizes: tuple[int, ...], epoch: int, previous: LiveState | None
    ) -> LiveState:
        """Sign from zero, as CD-GraB, and remember the rows of the epoch before."""
        state: LiveState = super().new_state(sizes, epoch, None)
        if previous is None or previous.fresh is None:
            state.recent = None if previous is None else previous.recent
        elif previous.recent is None:
            state.recent = previous.fresh
        else:  # units that were not seen keep the row they had
            state.recent = torch.where(
                previous.fresh.isfinite(), previous.fresh, previous.recent.to(previous.fresh)
            )
        return state

    def observe(
        self, state: LiveState, rows: Rows, seen: Tensor, random: SeededRandom
    ) -> Script[None]:
        """Sign the pairs that the predicted rows complete; arguments as in `Policy.observe`."""
        if isinstance(rows, Tensor):
            rows = self._predicted(state, rows, seen)
        else:  # Predictions are linear, so ranks that hold columns agree on their products.
            rows = ShardedRows((self._predicted(state, rows.columns, seen),))
        return super().observe(state, rows, seen, random)

    def _predicted(self, state: LiveState, rows: Tensor, seen: Tensor) -> Tensor:
        """Return the rows as they will be, and remember them as they are."""
        if state.fresh is None:
            # Not in `recent` itself: an epoch may be started over, and then must find it unchanged.
            state.fresh = rows.new_full((sum(state.sizes), rows.shape[-1]), torch.inf)
        places = rows_of_units(state.orders, state.steps, len(rows)).to(rows.device)
        kept = seen.to(rows.device) & rows.isfinite().all(-1)
        state.fresh[places[kept]] = rows[kept]
        if state.recent is None:
            return rows
        return predict(rows, state.recent[places], self.weight)
