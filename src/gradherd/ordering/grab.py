"""GraB: sign every gradient, centred by the mean of the previous epoch.

Lu, Guo, De Sa, "GraB: Finding Provably Better Data Permutations than Random Reshuffling"
(arXiv:2205.10733). With several workers each one balances its own stream (ID-GraB in
arXiv:2302.00845): its own mean, its own running sum, no communication.

Shapes: b time steps of a call, M workers, D columns.
"""

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from gradherd.comm.script import Script
from gradherd.ordering.device_signs import Sums, sign_on_device
from gradherd.ordering.policy import Rows, ShardedRows, SignPolicy, SignState
from gradherd.ordering.random import SeededRandom


@dataclass
class MeanState(SignState):
    """Signs of rows, their sum, and the mean of the epoch before."""

    total: Tensor | None = None
    """(M, D) sum of the rows seen."""
    count: Tensor | None = None
    """(M,) number of rows in `total`."""
    mean: Tensor | None = None
    """(M, D) mean row of the previous epoch; outlives the epoch."""

    columns: ClassVar[tuple[str, ...]] = ("running", "total", "mean")
    others: ClassVar[tuple[str, ...]] = ("count",)

    def adopt(self, other: Self) -> None:
        """Take over the mean. With other workers units change owner, so one mean serves all."""
        self.mean = other.mean
        if self.mean is not None and len(self.sizes) != len(other.sizes):
            self.mean = self.mean.mean(0, keepdim=True).repeat(len(self.sizes), 1)

    def count_rows(self, sides: Tensor) -> None:
        """Count rows whose (b, M) sides came from the GPU."""
        if self.count is not None:
            self.count = self.count.cpu() + (sides != 0).sum(0)


@dataclass(frozen=True)
class GraB(SignPolicy):
    """Mean balance, each worker on its own (GraB, with several workers ID-GraB).

    The first epoch has no mean yet and signs raw gradients.

    >>> GraB()
    GraB(rule=Greedy())
    """

    def new_state(
        self, sizes: tuple[int, ...], epoch: int, previous: MeanState | None
    ) -> MeanState:
        """Take over the mean of the rows that the previous epoch observed."""
        state = MeanState(sizes, epoch)
        self._begun(state, previous, len(sizes), state.length)
        if previous is None:
            return state
        state.mean = previous.mean
        if previous.total is not None and previous.count is not None:
            count = previous.count.unsqueeze(1).to(previous.total)
            # A worker none of whose rows arrived keeps the mean it had.
            old = torch.zeros_like(previous.total) if previous.mean is None else previous.mean
            state.mean = torch.where(count > 0, previous.total / count.clamp(min=1), old)
        return state

    def observe(
        self, state: MeanState, rows: Rows, seen: Tensor, random: SeededRandom
    ) -> Script[None]:
        """Give a side to each of the (b, M, D) rows; arguments as in `Policy.observe`."""
        own = rows if isinstance(rows, Tensor) else rows.columns
        steps, workers, dim = own.shape
        if state.running is None or state.total is None or state.count is None:
            state.running = own.new_zeros((workers, dim))
            state.total = own.new_zeros((workers, dim))
            state.count = torch.zeros(workers, dtype=torch.int64)
        if isinstance(rows, Tensor) and self._observe_on_device(state, rows, seen):
            return
        centred = _masked(own if state.mean is None else own - state.mean, seen)
        sharded = isinstance(rows, ShardedRows)
        signs = yield from self._sign(state, centred, state.steps, random, sharded=sharded)
        sides = signs * seen  # also 0 where the row was not finite
        state.note_signs(sides, seen, steps)
        # The next mean is that of the raw rows. OrderedSampler of the GraB authors centres in
        # place first; its mean is then the change of the mean, about zero every second epoch.
        state.total = state.total + _masked(own, sides != 0).sum(0)
        state.count = state.count.cpu() + (sides != 0).sum(0)
        state.sides[state.steps : state.steps + steps] = sides
        state.steps += steps

    def _observe_on_device(self, state: MeanState, rows: Tensor, seen: Tensor) -> bool:
        """Sign on the GPU if that can be done without the host waiting; say whether it was."""
        assert state.running is not None and state.total is not None
        if not seen.all():
            return False
        sums = Sums(state.running, state.total, state.mean)
        sides, sums, state.signer = sign_on_device(self.rule, rows, sums, state.signer)
        state.running, state.total, state.mean = sums
        if sides is None:
            return False
        state.late.append((state.steps, sides.clone()))
        state.steps += len(rows)
        return True


def _masked(rows: Tensor, mask: Tensor) -> Tensor:
    """Return the (b, M, D) rows with zeros where the (b, M) mask is false."""
    if mask.all():  # the common case: no copy
        return rows
    return torch.where(mask.to(rows.device).unsqueeze(-1), rows, 0)
