"""GraB: sign every gradient, centred by the mean of the previous epoch.

Lu, Guo, De Sa, "GraB: Finding Provably Better Data Permutations than Random Reshuffling"
(arXiv:2205.10733). With several workers each one balances its own stream (ID-GraB in
arXiv:2302.00845): its own mean, its own running sum, no communication.

Shapes: b time steps of a call, M workers, D columns.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from gradherd.comm.script import Script
from gradherd.ordering.implicit import Combined, ImplicitRows
from gradherd.ordering.policy import (
    Rows,
    ShardedRows,
    SignPolicy,
    SignState,
    all_seen,
    masked,
)
from gradherd.ordering.random import SeededRandom


@dataclass
class MeanState(SignState):
    """Signs of rows, their sum, and the mean of the epoch before."""

    total: Tensor | None = None
    """(M, D) sum of the rows seen."""
    mean: Tensor | None = None
    """(M, D) mean row of the previous epoch; outlives the epoch."""

    columns: ClassVar[tuple[str, ...]] = ("running", "total", "mean")

    def adopt(self, other: Self) -> None:
        """Take over the mean. With other workers units change owner, so one mean serves all."""
        self.mean = other.mean
        if self.mean is not None and len(self.sizes) != len(other.sizes):
            self.mean = self.mean.mean(0, keepdim=True).repeat(len(self.sizes), 1)


@dataclass(frozen=True)
class GraB(SignPolicy):
    """Mean balance, each worker on its own (GraB, with several workers ID-GraB).

    The first epoch has no mean yet and signs raw gradients.

    >>> GraB()
    GraB(rule=Greedy())
    """

    state: ClassVar[type[SignState]] = MeanState
    takes_implicit: ClassVar[bool] = True

    def new_state(self, sizes: tuple[int, ...], epoch: int, previous: Any) -> Any:
        """Take over the mean of the rows that the previous epoch observed."""
        state = super().new_state(sizes, epoch, previous)
        if previous is None:
            return state
        state.mean = previous.mean
        if previous.total is not None:
            # Just those rows are in the total that have a side.
            previous.sync_sides()
            count = (previous.sides != 0).sum(0).unsqueeze(1).to(previous.total)
            # A worker none of whose rows arrived keeps the mean it had.
            old = torch.zeros_like(previous.total) if previous.mean is None else previous.mean
            state.mean = torch.where(count > 0, previous.total / count.clamp(min=1), old)
        return state

    def observe(
        self, state: MeanState, rows: Rows | ImplicitRows, seen: Tensor, random: SeededRandom
    ) -> Script[None]:
        """Give a side to each of the (b, M, D) rows; arguments as in `Policy.observe`."""
        if not isinstance(rows, Tensor | ShardedRows):
            self._observe_implicit(state, rows, random)
            return
        own = rows if isinstance(rows, Tensor) else rows.columns
        if state.total is None:
            state.total = own.new_zeros(own.shape[1:])
        sharded = isinstance(rows, ShardedRows)
        signs, late = yield from self._sign(
            state, own, seen, state.steps, random, sharded=sharded, mean=state.mean
        )
        if late:
            state.late.append((state.steps, signs.clone()))
        else:
            sides = state.place(state.steps, signs, seen)
            # The next mean is that of the raw rows. OrderedSampler of the GraB authors centres in
            # place first; its mean is then the change of the mean, about zero every second epoch.
            # A row that is not finite has no sign.
            state.total = state.total + masked(own, sides != 0).sum(0)
        state.steps += len(own)

    def _observe_implicit(self, state: MeanState, rows: ImplicitRows, random: SeededRandom) -> None:
        """Do the same with rows of one worker that are not formed, all of them seen."""
        like, size = rows.gram, rows.shape[-1]
        mean = like.new_zeros(0, size) if state.mean is None else state.mean
        each = torch.eye(len(rows), dtype=like.dtype, device=like.device)
        weights = torch.cat([-like.new_ones(len(rows), len(mean)), each], 1)
        vectors = Combined(weights, mean, rows)
        signs = self._sign_implicit(state, vectors, state.steps, random)
        sides = state.place(state.steps, signs, all_seen(1, 1))
        total = rows.combine((sides != 0).T.to(like))
        state.total = total if state.total is None else state.total + total
        state.steps += len(rows)
