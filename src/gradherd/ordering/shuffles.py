"""Orders that need no gradients: random reshuffling, shuffle once, fixed, flip-flop, always-plus.

Each is a pure function (orders, sizes, epoch, chance) -> orders of `epoch`; `Shuffle` makes it
a policy.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from gradherd.ordering.implicit_rows import ImplicitRows
from gradherd.ordering.permute import reorder
from gradherd.ordering.seeded_random import SeededRandom
from gradherd.ordering.signed import Reduce
from gradherd.ordering.state import BalanceState, Start

Following = Callable[[list[Tensor], Sequence[int], int, SeededRandom], list[Tensor]]


@dataclass(frozen=True)
class Shuffle:
    """A policy that ignores gradients."""

    name: str
    """What it is called."""
    following: Following = field(repr=False)
    """Makes an epoch's orders from those of the epoch before."""
    start: Start | None = None
    """The first order, where the method itself prescribes it."""

    needs_rows: ClassVar[bool] = False

    def begin(self, memory: BalanceState, before: BalanceState | None) -> None:
        """Remember nothing."""

    def observe(
        self,
        memory: BalanceState,
        rows: Tensor | ImplicitRows,
        seen: Tensor,
        chance: SeededRandom,
        reduce: Reduce | None = None,
    ) -> None:
        """Learn nothing; time passes."""
        memory.steps += len(seen)

    def reorder(
        self, orders: list[Tensor], memory: BalanceState, epoch: int, chance: SeededRandom
    ) -> list[Tensor]:
        """Return the orders of `epoch`."""
        return self.following(orders, memory.sizes, epoch, chance)


def reshuffled(
    orders: list[Tensor], sizes: Sequence[int], epoch: int, chance: SeededRandom
) -> list[Tensor]:
    """Draw a new permutation for every worker (D-RR, the baseline).

    Workers draw independently. The published CD-GraB scripts let all workers use one
    permutation of different data, which is a different (and luckier) baseline.
    """
    return chance.permutations(sizes, epoch)


def kept(
    orders: list[Tensor], sizes: Sequence[int], epoch: int, chance: SeededRandom
) -> list[Tensor]:
    """Keep the orders: shuffle-once and fixed differ in where they start."""
    return orders


def flipped(
    orders: list[Tensor], sizes: Sequence[int], epoch: int, chance: SeededRandom
) -> list[Tensor]:
    """Draw before even epochs, walk back before odd ones (flip-flop).

    Rajput, Lee, Papailiopoulos, "Permutation-based SGD: is random optimal?" (2022).
    """
    if epoch % 2:
        return [order.flip(0) for order in orders]
    return chance.permutations(sizes, epoch)


def all_plus(
    orders: list[Tensor], sizes: Sequence[int], epoch: int, chance: SeededRandom
) -> list[Tensor]:
    """Pair balance with every sign plus, whatever the gradients: the control arm.

    Evens ascending, then odds descending, of the orders before. This is what a balancing run
    does when a bug makes all its pair differences zero (the published LSTM and M4 scripts do),
    so a gain that this arm shows as well is not due to balancing.

    >>> all_plus([torch.arange(5)], [5], 1, SeededRandom(0))
    [tensor([0, 2, 4, 3, 1])]
    """
    return [reorder(order, 1 - 2 * (torch.arange(len(order)) % 2)) for order in orders]
