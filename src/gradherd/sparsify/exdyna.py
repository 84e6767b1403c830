"""ExDyna: every worker selects the largest coordinates of its own partition.

Yoon and Oh, "Preserving Near-Optimal Gradient Sparsification Cost for Scalable Distributed Deep
Learning", CCGrid 2024, arXiv:2402.13781. Partitions do not overlap, so selections do not build up.
They are runs of blocks whose borders move until all partitions have equal loads, and they rotate,
so that every worker searches every part of the vector in turn. Not from the paper: the threshold
by consensus (`consensus`), and borders that are recut from the loads of single blocks.

Letters: D coordinates, R workers, NB blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from gradherd.comm.checks import check_numbers, check_whole
from gradherd.comm.script import Script
from gradherd.sparsify.device_consensus import DeviceRule
from gradherd.sparsify.exclusive import (
    ExclusiveResult,
    ExclusiveStep,
    SearchStart,
    ThresholdRule,
    check_threshold_rule,
    rescale_start,
)
from gradherd.sparsify.message_sizes import EXDYNA_CAPACITY
from gradherd.sparsify.partitions import Blocks, diffuse, even_cuts, recut
from gradherd.sparsify.selector import (
    Proposal,
    Selection,
    StackedSelection,
    StepContext,
    check_density,
)

Balance = Literal["recut", "diffusive", "none"]


@dataclass(frozen=True)
class ExDynaState:
    """State of `ExDyna`, the same on all workers."""

    start: SearchStart
    """Where the next step's search starts; None before the first."""
    cuts: list[int]
    """R + 1 borders of the partitions, in blocks."""
    loads: Tensor
    """(NB,) selected coordinates of each block, a decaying sum over steps."""


# The last move of borders in this process: the method, D, what was selected, and both states.
_last_moves: list[tuple[Any, int, ExclusiveResult, ExDynaState, ExDynaState]] = []


@dataclass(frozen=True)
class _FixedPartitions(StepContext):
    """A step context in which every worker always has the same partition."""

    @property
    def partitions(self) -> list[int]:
        """The partition of each worker: its own."""
        return list(range(self.size))


@dataclass(frozen=True)
class ExDyna:
    """Send the largest coordinates of exclusive, load-balanced partitions.

    Yoon and Oh, CCGrid 2024, arXiv:2402.13781. The paper's method is `threshold="online",
    balance="diffusive"`, except that its code cannot lower the threshold within the band and its
    borders move by one block at a time. Raises ValueError if a setting is out of range.

    >>> ExDyna(density=0.01, threshold="online").balance
    'recut'
    """

    density: float = 1e-3
    """Share of the coordinates to send."""
    threshold: ThresholdRule = "consensus"
    """"consensus", or the paper's rule: "online", or an `Online` with your own constants."""
    capacity: float = EXDYNA_CAPACITY
    """By consensus, no worker sends more than this many times its fair share; the rest stays in
    its residual."""
    balance: Balance = "recut"
    """How borders move: "recut" from the loads of blocks, "diffusive" between neighbours as in
    the paper, or "none"."""
    blocks: int = 1024
    """Approximate number of blocks, as in the published code; borders move by whole blocks."""
    memory: float = 0.9
    """Decay of the blocks' loads per step ("recut")."""
    rotate: bool = True
    """Whether partitions rotate over workers, as in the paper. False leaves every worker with its
    own partition, for ablations: what only the others find large there is never selected."""

    exclusive = True

    def __post_init__(self) -> None:
        check_density(self.density)
        check_threshold_rule(self.threshold, self.capacity)
        if self.balance not in ("recut", "diffusive", "none"):
            raise ValueError(f"balance must be recut, diffusive or none, got {self.balance!r}")
        check_whole("blocks", self.blocks, 1)
        check_numbers(memory=self.memory)
        if not 0 <= self.memory < 1:
            raise ValueError(f"memory must be in [0, 1), got {self.memory}")
        if not isinstance(self.rotate, bool):
            raise ValueError(f"rotate must be True or False, got {self.rotate!r}")

    def begin(self, dim: int, workers: int, layers: Sequence[int]) -> ExDynaState:
        """Start with partitions of equal size, one for each worker."""
        blocks = Blocks.of(dim, self.blocks)
        # On the CPU and in float64 on all workers: borders follow from these sums, so their bits
        # must be equal everywhere, whatever devices the workers have.
        loads = torch.zeros(blocks.count, dtype=torch.float64)
        return ExDynaState(None, even_cuts(blocks.count, workers), loads)

    def bounds(self, dim: int, state: ExDynaState) -> list[int]:
        """Return the R + 1 coordinates between which partitions lie."""
        return Blocks.of(dim, self.blocks).bounds(state.cuts)

    def propose(self, acc: Tensor, k: int, state: ExDynaState, context: StepContext) -> Proposal:
        """Search this worker's partition."""
        return self._step(acc, k, state, context).propose(acc)

    def settle(
        self,
        acc: Tensor,
        k: int,
        state: ExDynaState,
        context: StepContext,
        proposal: Proposal,
        headers: Tensor,
    ) -> Script[Selection]:
        """Agree on the selection, and move the borders."""
        step = self._step(acc, k, state, context)
        result: ExclusiveResult = yield from step.settle(acc, proposal, headers)
        # Computed by every worker from what all of them know: moving borders sends nothing.
        new_state = self._rebalance(len(acc), state, result, context)
        return Selection(result.indices, result.counts, new_state, result.threshold)

    def select_stacked(
        self, acc: Tensor, k: int, states: Sequence[ExDynaState], context: StepContext
    ) -> StackedSelection:
        """Select for all workers of (R, D) `acc`, and move the borders."""
        result, sent = self._step(acc[0], k, states[0], context).select_stacked(acc)
        state = self._rebalance(acc.shape[1], states[0], result, context)
        selection = Selection(result.indices, result.counts, state, result.threshold)
        return StackedSelection(selection, [state] * len(acc), sent)

    def _step(self, acc: Tensor, k: int, state: ExDynaState, context: StepContext) -> ExclusiveStep:
        bounds, context = self.bounds(len(acc), state), self._rotated(context)
        return ExclusiveStep(self.threshold, self.capacity, state.start, bounds, k, context)

    def _rotated(self, context: StepContext) -> StepContext:
        if self.rotate:
            return context
        return _FixedPartitions(context.step, context.rank, context.size, context.compact)

    def _rebalance(
        self, dim: int, state: ExDynaState, result: ExclusiveResult, context: StepContext
    ) -> ExDynaState:
        cuts, loads = state.cuts, state.loads
        for method, length, before, known, moved in _last_moves:
            # The next worker of one process: results of a step are shared, and so become states.
            alike = before is result and (method, length) == (self, dim)
            if alike and known.cuts == cuts and torch.equal(known.loads, loads):
                return moved
        if self.balance == "recut" and context.size > 1:
            # Nobody knows where the coordinates beyond a worker's capacity lie; assume that they
            # are distributed over blocks as the selected ones are.
            per_index = [
                load / max(1, count)
                for load, count in zip(result.loads, result.counts, strict=True)
            ]
            weights = torch.tensor(per_index).repeat_interleave(torch.tensor(result.counts))
            new_loads = Blocks.of(dim, self.blocks).loads(result.indices, weights)
            loads = new_loads + self.memory * loads
            # From all loads at once, not from those of neighbours: after a change, borders are
            # right one step later. The decaying sum smooths the few selections that a block has per
            # step.
            cuts = recut(loads, context.size)
        elif self.balance == "diffusive":
            # Loads come by worker, borders belong to partitions: undo the rotation.
            partitions = self._rotated(context).partitions
            by_partition = dict(zip(partitions, result.loads, strict=True))
            cuts = diffuse(cuts, [by_partition[part] for part in range(context.size)])
        moved = ExDynaState(result.next_start, cuts, loads)
        _last_moves[:] = [(self, dim, result, state, moved)]
        return moved

    def device_rule(self, dim: int, state: ExDynaState) -> DeviceRule | None:
        """Return what a step in fixed shapes needs; None if the rules of this step vary."""
        if self.threshold != "consensus" or self.balance == "diffusive":
            return None
        loads = state.loads if self.balance == "recut" else None
        blocks = Blocks.of(dim, self.blocks)
        return DeviceRule(
            self.capacity, blocks, state.cuts, state.start, loads, self.memory, self.rotate
        )

    def after(self, state: ExDynaState, rule: DeviceRule) -> ExDynaState:
        """Return the state that a step in fixed shapes has left."""
        loads = state.loads if rule.loads is None else rule.loads
        return ExDynaState(rule.start, rule.cuts, loads)

    def rescale(self, state: ExDynaState, factor: float) -> ExDynaState:
        """Multiply the start of the search by `factor`."""
        return replace(state, start=rescale_start(state.start, factor))
