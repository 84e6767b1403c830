"""Orders that need no gradients: random reshuffling, flip-flop and controls.

Each is a pure function (orders, epoch, random) -> orders of `epoch`; `Shuffle` turns it into
a policy.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from gradherd.comm.script import Script
from gradherd.ordering.balance import reorder
from gradherd.ordering.policy import EpochState, Policy, Rows, Start
from gradherd.ordering.random import SeededRandom

NextOrders = Callable[[list[Tensor], int, SeededRandom], list[Tensor]]
"""(orders of the epoch before, epoch, random) -> orders of `epoch`."""


class RowlessPolicy(Policy):
    """A policy that ignores gradients, and only counts the steps."""

    needs_rows: ClassVar[bool] = False

    def observe(
        self, state: EpochState, rows: Rows, seen: Tensor, random: SeededRandom
    ) -> Script[None]:
        """Count the steps."""
        state.steps += len(seen)
        yield from ()  # nothing to ask of other ranks


@dataclass(frozen=True)
class Shuffle(RowlessPolicy):
    """Orders that follow from those of the epoch before.

    >>> Shuffle("fixed", unchanged, start="identity")
    Shuffle(name='fixed', start='identity')
    """

    name: str
    """Its name in the registry."""
    # Not in the repr: saved states are compared by it, and it would contain an address.
    next_orders: NextOrders = field(repr=False)
    """Computes an epoch's orders from those of the epoch before."""
    start: Start | None = None
    """The first order, if the method prescribes one."""

    def reorder(
        self, orders: list[Tensor], state: EpochState, epoch: int, random: SeededRandom
    ) -> list[Tensor]:
        """Return the orders of `epoch`."""
        return self.next_orders(orders, epoch, random)


def random_reshuffling(orders: list[Tensor], epoch: int, random: SeededRandom) -> list[Tensor]:
    """Draw a new permutation for every worker (D-RR, the baseline).

    Workers draw independently. The published CD-GraB scripts let all workers use one
    permutation of different data, which is a different (and luckier) baseline.
    """
    return random.permutations([len(order) for order in orders], epoch)


def unchanged(orders: list[Tensor], epoch: int, random: SeededRandom) -> list[Tensor]:
    """Keep the orders: shuffle-once and fixed differ in where they start."""
    return orders


def flip_flop(orders: list[Tensor], epoch: int, random: SeededRandom) -> list[Tensor]:
    """Draw new permutations in even epochs, reverse them in odd ones.

    Rajput, Lee, Papailiopoulos, "Permutation-based SGD: is random optimal?" (2022).
    """
    if epoch % 2:  # `orders` are those of the even epoch before
        return [order.flip(0) for order in orders]
    return random.permutations([len(order) for order in orders], epoch)


def always_plus(orders: list[Tensor], epoch: int, random: SeededRandom) -> list[Tensor]:
    """Pair balance with every sign plus, whatever the gradients: the control arm.

    Even positions ascending, then odd positions descending. This is what a balancing run does when
    a bug makes all its pair differences zero (as in the published LSTM and M4 scripts). So a gain
    that this arm shows as well is not due to balancing.

    >>> always_plus([torch.arange(5)], 1, SeededRandom(0))
    [tensor([0, 2, 4, 3, 1])]
    """
    return [reorder(order, 1 - 2 * (torch.arange(len(order)) % 2)) for order in orders]


# What the registry names.
D_RR = partial(Shuffle, "d-rr", random_reshuffling)
SHUFFLE_ONCE = partial(Shuffle, "shuffle-once", unchanged, start="random")
FIXED = partial(Shuffle, "fixed", unchanged, start="identity")
FLIP_FLOP = partial(Shuffle, "flip-flop", flip_flop)
ALWAYS_PLUS = partial(Shuffle, "always-plus", always_plus)
