"""The seam of the ordering half: what a policy is, and all of them by name."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Protocol

from torch import Tensor

from gradherd.ordering.cd_grab import CDGraB
from gradherd.ordering.grab import GraB
from gradherd.ordering.implicit_rows import ImplicitRows
from gradherd.ordering.pair_grab import PairGraB
from gradherd.ordering.seeded_random import SeededRandom
from gradherd.ordering.shuffles import Shuffle, all_plus, flipped, kept, reshuffled
from gradherd.ordering.sign_rules import SIGN_RULES
from gradherd.ordering.signed import Reduce
from gradherd.ordering.state import BalanceState, Start


class Policy(Protocol):
    """Turns one epoch's gradients into the next epoch's orders.

    A policy is a frozen dataclass: it is its own settings. What it remembers is in the BalanceState
    that is handed to it, what it draws comes from the SeededRandom that is handed to it.
    """

    @property
    def needs_rows(self) -> bool:
        """Whether gradients matter."""
        ...

    @property
    def start(self) -> Start | None:
        """The first order, where the method itself prescribes it."""
        ...

    def begin(self, memory: BalanceState, before: BalanceState | None) -> None:
        """Make a fresh memory ready for its epoch; `before` is that of the last epoch."""
        ...

    def observe(
        self,
        memory: BalanceState,
        rows: Tensor | ImplicitRows,
        seen: Tensor,
        chance: SeededRandom,
        reduce: Reduce | None = None,
    ) -> None:
        """Learn from the next b time steps.

        Args:
            memory: Moved on by b steps.
            rows: (b, M, D) gradient of the unit each worker visited; anything where not seen.
                For one worker also rows that are not formed, all of them seen.
            seen: (b, M) which of them are real.
            chance: For signs that are drawn.
            reduce: Completes inner products where D is one shard of the columns.
        """
        ...

    def reorder(
        self, orders: list[Tensor], memory: BalanceState, epoch: int, chance: SeededRandom
    ) -> list[Tensor]:
        """Return the orders of `epoch` from those of the epoch in `memory`."""
        ...


POLICIES: dict[str, Callable[[], Policy]] = {
    "d-rr": partial(Shuffle, "d-rr", reshuffled),
    "shuffle-once": partial(Shuffle, "shuffle-once", kept, start="random"),
    "fixed": partial(Shuffle, "fixed", kept, start="identity"),
    "flip-flop": partial(Shuffle, "flip-flop", flipped),
    "grab": GraB,
    "pair-grab": PairGraB,
    # GraB and pair balance know one stream; on several workers each one runs its own.
    "id-grab": GraB,
    "id-pair-grab": PairGraB,
    "cd-grab": CDGraB,
    "always-plus": partial(Shuffle, "always-plus", all_plus),
}
"""Policies by name, each with its default settings."""


def make_policy(name: str, signs: str = "greedy") -> Policy:
    """Return the policy of that name, with the sign rule of that name where it has one.

    >>> make_policy("cd-grab", "walk")
    CDGraB(rule=Walk(c=30.0))
    """
    if name not in POLICIES:
        raise ValueError(f"unknown order {name!r}; known are {', '.join(POLICIES)}")
    if signs not in SIGN_RULES:
        raise ValueError(f"unknown sign rule {signs!r}; known are {', '.join(SIGN_RULES)}")
    make = POLICIES[name]
    if make in (GraB, PairGraB, CDGraB):
        return make(rule=SIGN_RULES[signs]())
    if signs != "greedy":
        warnings.warn(f"order {name!r} takes no signs: {signs!r} has no effect", stacklevel=2)
    return make()
