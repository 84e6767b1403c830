"""The Policy protocol: what an order must provide."""

from typing import Protocol

from torch import Tensor

from gradherd.comm.script import Script
from gradherd.ordering.implicit_rows import ImplicitRows
from gradherd.ordering.seeded_random import SeededRandom
from gradherd.ordering.state import BalanceState, Start


class Policy(Protocol):
    """Turns one epoch's gradients into the next epoch's orders.

    A policy is a frozen dataclass whose fields are its settings. It has no state of its own: what
    it carries through an epoch is in the `BalanceState` it is given, and what it draws comes from
    the `SeededRandom` it is given. So every rank that is given the same computes the same.
    """

    @property
    def needs_rows(self) -> bool:
        """Whether the policy looks at gradients."""
        ...

    @property
    def start(self) -> Start | None:
        """The first order, if the method prescribes one."""
        ...

    def begin(self, state: BalanceState, previous: BalanceState | None) -> None:
        """Prepare the empty state of an epoch; `previous` is that of the epoch before."""
        ...

    def observe(
        self,
        state: BalanceState,
        rows: Tensor | ImplicitRows,
        seen: Tensor,
        random: SeededRandom,
        *,
        sharded: bool = False,
    ) -> Script[None]:
        """Learn from the next b time steps.

        A generator: it yields a collective of `comm.script` where ranks must exchange something,
        which is the case only with `sharded`.

        Args:
            state: Advanced by b steps.
            rows: (b, M, D) gradient of the unit each worker visited; arbitrary where not seen.
                With one worker also rows that are not formed, all of them seen.
            seen: (b, M) which of them are real.
            random: For signs that are drawn.
            sharded: D is this rank's shard of the columns, so inner products are partial sums.
        """
        ...

    def reorder(
        self, orders: list[Tensor], state: BalanceState, epoch: int, random: SeededRandom
    ) -> list[Tensor]:
        """Return the orders of `epoch`, given those of the epoch that `state` describes."""
        ...
