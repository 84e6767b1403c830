"""CD-GraB: pair balance with one running sum for all workers.

Lu et al., "Coordinating Distributed Example Orders for Provably Accelerated Training"
(arXiv:2302.00845). At each pair of time steps the workers' differences are signed one after the
other against the same sum, so that the gradients of all workers together stay balanced. The bound
on the prefix sums does not grow with the number of workers, where independent balancing (ID-GraB)
grows like its square root.

The paper's order server collects gradients, decides signs and sends out orders. Here, as in the
published code, every rank plays that server and computes the orders of all workers. Unlike there,
no rank needs all gradients for it: inner products of shards are summed (see `gram`).
"""

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from gradherd.comm.script import Script
from gradherd.ordering.balance import ImplicitRows, reorder_all
from gradherd.ordering.pair_grab import sign_pairs
from gradherd.ordering.policy import BalanceState, Start
from gradherd.ordering.seeded_random import SeededRandom
from gradherd.ordering.sign_rules import Greedy, SignRule, check_rule


@dataclass(frozen=True)
class CDGraB:
    """Pair balance, all workers together (CD-GraB). With one worker it is plain pair balance.

    >>> CDGraB()
    CDGraB(rule=Greedy())
    """

    rule: SignRule = field(default_factory=Greedy)
    """How signs are decided."""

    needs_rows: ClassVar[bool] = True
    leaves_out_broken_rows: ClassVar[bool] = True
    start: ClassVar[Start | None] = None

    def __post_init__(self) -> None:
        check_rule(self.rule)

    def begin(self, state: BalanceState, previous: BalanceState | None) -> None:
        """Start from zero: nothing of the previous epoch is used."""
        # One stream, on which the pairs of all workers are signed.
        pairs = sum(size // 2 for size in state.sizes)
        state.carry = self.rule.start(1, pairs, state.epoch)
        state.signer = None if previous is None else previous.signer

    def observe(
        self,
        state: BalanceState,
        rows: Tensor | ImplicitRows,
        seen: Tensor,
        random: SeededRandom,
        *,
        sharded: bool = False,
    ) -> Script[None]:
        """Sign the pairs that the rows complete.

        With `sharded`, the rows are this rank's shard of the columns, and so is the running sum.
        """
        return sign_pairs(state, rows, seen, self.rule, random, shared=True, sharded=sharded)

    def reorder(
        self, orders: list[Tensor], state: BalanceState, epoch: int, random: SeededRandom
    ) -> list[Tensor]:
        """Move each unit to its side."""
        state.settle()
        return reorder_all(orders, state.sides)
