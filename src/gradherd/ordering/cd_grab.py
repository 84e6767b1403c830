"""CD-GraB: pair balance with one running sum for all workers.

Lu et al., "Coordinating Distributed Example Orders for Provably Accelerated Training"
(arXiv:2302.00845). At each pair of time steps the workers' differences are signed one after
the other against the same sum, so that the gradients of all workers together stay balanced:
the bound does not grow with the number of workers, where independent balancing grows like its
root.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from gradherd.ordering.implicit_rows import ImplicitRows
from gradherd.ordering.pair_grab import sign_pairs
from gradherd.ordering.permute import reorder_all
from gradherd.ordering.seeded_random import SeededRandom
from gradherd.ordering.sign_rules import Greedy, SignRule
from gradherd.ordering.signed import Reduce
from gradherd.ordering.state import BalanceState, Start


@dataclass(frozen=True)
class CDGraB:
    """Pair balance, all workers together. On one worker it is plain pair balance."""

    rule: SignRule = field(default_factory=Greedy)
    """How signs are taken."""

    needs_rows: ClassVar[bool] = True
    start: ClassVar[Start | None] = None

    def begin(self, memory: BalanceState, before: BalanceState | None) -> None:
        """Forget the epoch before."""
        pairs = sum(size // 2 for size in memory.sizes)
        memory.carry = self.rule.start(1, pairs, memory.epoch)

    def observe(
        self,
        memory: BalanceState,
        rows: Tensor | ImplicitRows,
        seen: Tensor,
        chance: SeededRandom,
        reduce: Reduce | None = None,
    ) -> None:
        """Sign the pairs that the rows complete.

        With `reduce`, the rows are this rank's shard of the columns, and so is the running sum.
        """
        sign_pairs(memory, rows, seen, self.rule, chance, shared=True, reduce=reduce)

    def reorder(
        self, orders: list[Tensor], memory: BalanceState, epoch: int, chance: SeededRandom
    ) -> list[Tensor]:
        """Send each unit to its side."""
        return reorder_all(orders, memory.sides)
