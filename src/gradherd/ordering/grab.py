"""GraB: balance every gradient, centred by the mean of the epoch before.

Lu, Guo, De Sa, "GraB: Finding Provably Better Data Permutations than Random Reshuffling"
(arXiv:2205.10733). With several workers each one balances its own stream (ID-GraB in
arXiv:2302.00845): own mean, own running sum, nothing is exchanged.

Letters: b time steps of a call, M workers, D dimension.
"""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from gradherd.ordering.implicit_rows import ImplicitRows, LinearCombination, balance_implicit
from gradherd.ordering.permute import reorder_all
from gradherd.ordering.seeded_random import SeededRandom
from gradherd.ordering.sign_rules import Greedy, SignRule
from gradherd.ordering.signed import Reduce
from gradherd.ordering.signs import balance, draws_for
from gradherd.ordering.state import BalanceState, Start


@dataclass(frozen=True)
class GraB:
    """Mean balance. The first epoch has no mean yet and balances raw gradients."""

    rule: SignRule = field(default_factory=Greedy)
    """How signs are taken."""

    needs_rows: ClassVar[bool] = True
    start: ClassVar[Start | None] = None

    def begin(self, memory: BalanceState, before: BalanceState | None) -> None:
        """Take over the mean of the rows seen in the epoch before."""
        memory.carry = self.rule.start(len(memory.sizes), len(memory.sides), memory.epoch)
        if before is None:
            return
        memory.mean = before.mean
        if before.total is not None and before.count is not None:
            count = before.count.unsqueeze(1).to(before.total)
            old = torch.zeros_like(before.total) if before.mean is None else before.mean
            memory.mean = torch.where(count > 0, before.total / count.clamp(min=1), old)

    def observe(
        self,
        memory: BalanceState,
        rows: Tensor | ImplicitRows,
        seen: Tensor,
        chance: SeededRandom,
        reduce: Reduce | None = None,
    ) -> None:
        """Give a side to each of the (b, M, D) rows."""
        if not isinstance(rows, Tensor):
            self._observe_linear(memory, rows, chance)
            return
        steps, workers, dim = rows.shape
        if memory.running is None or memory.total is None or memory.count is None:
            memory.running = rows.new_zeros((workers, dim))
            memory.total = rows.new_zeros((workers, dim))
            memory.count = torch.zeros(workers, dtype=torch.int64)
        centred = _masked(rows if memory.mean is None else rows - memory.mean, seen)
        span = slice(memory.steps, memory.steps + steps)
        draws = draws_for(self.rule, chance, memory.epoch, len(memory.sides), workers)[span]
        signed = balance(
            centred.transpose(0, 1),
            memory.running,
            self.rule,
            draws.T,
            memory.carry,
            reduce=reduce,
        )
        sides = signed.signs.T * seen  # 0 where the row was not finite, too
        memory.running, memory.carry = signed.running, signed.carry
        memory.total = memory.total + _masked(rows, sides != 0).sum(0)
        memory.count = memory.count + (sides != 0).sum(0)
        memory.sides[span] = sides
        memory.steps += steps

    def _observe_linear(
        self, memory: BalanceState, rows: ImplicitRows, chance: SeededRandom
    ) -> None:
        """Do the same for one worker whose rows are not formed."""
        count = len(rows)
        total = rows.combine(torch.ones(1, count))
        if memory.running is None or memory.total is None or memory.count is None:
            memory.running, memory.total = torch.zeros_like(total), torch.zeros_like(total)
            memory.count = torch.zeros(1, dtype=torch.int64)
        mean = total.new_zeros(0, total.shape[1]) if memory.mean is None else memory.mean
        vectors = LinearCombination(
            rows, torch.eye(count).to(total), mean, -total.new_ones(count, len(mean))
        )
        span = slice(memory.steps, memory.steps + count)
        draws = draws_for(self.rule, chance, memory.epoch, len(memory.sides), 1)[span]
        signed = balance_implicit(vectors, memory.running, self.rule, draws.T, memory.carry)
        memory.running, memory.carry = signed.running, signed.carry
        if signed.signs.all():  # all or none are taken
            memory.total = memory.total + total
            memory.count = memory.count + count
        memory.sides[span] = signed.signs.T
        memory.steps += count

    def reorder(
        self, orders: list[Tensor], memory: BalanceState, epoch: int, chance: SeededRandom
    ) -> list[Tensor]:
        """Send each unit to its side."""
        return reorder_all(orders, memory.sides)


def _masked(rows: Tensor, mask: Tensor) -> Tensor:
    if mask.all():
        return rows
    return torch.where(mask.to(rows.device).unsqueeze(-1), rows, 0)
