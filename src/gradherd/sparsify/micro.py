"""MiCRO: exclusive partitions of equal size whose borders never move.

Yoon and Oh, "MiCRO: Near-Zero Cost Gradient Sparsification for Scaling and Accelerating
Distributed DNN Training", HiPC 2023, arXiv:2310.00967. The predecessor of ExDyna, without blocks
and load balancing: the padding factor depends on the gradients alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

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
from gradherd.sparsify.partitions import Blocks, even_cuts
from gradherd.sparsify.selector import (
    Proposal,
    Selection,
    StackedSelection,
    StepContext,
    check_density,
)


@dataclass(frozen=True)
class MicroState:
    """State of `Micro`, the same on all workers."""

    start: SearchStart
    """Where the next step's search starts; None before the first."""


@dataclass(frozen=True)
class Micro:
    """Send the largest coordinates of exclusive partitions of equal size.

    Yoon and Oh, HiPC 2023, arXiv:2310.00967; the paper's rule is `threshold="online"`. Raises
    ValueError if a setting is out of range.
    """

    density: float = 1e-3
    """Share of the coordinates to send."""
    threshold: ThresholdRule = "consensus"
    """"consensus", or the paper's rule: "online", or an `Online` with your own constants."""
    # More than ExDyna's: borders never move, so loads stay unequal, and a tight limit would hold
    # back the largest coordinates of a heavy partition.
    capacity: float = 2.0
    """By consensus, no worker sends more than this many times its fair share; the rest stays in
    its residual."""

    exclusive = True

    def __post_init__(self) -> None:
        check_density(self.density)
        check_threshold_rule(self.threshold, self.capacity)

    def begin(self, dim: int, workers: int, layers: Sequence[int]) -> MicroState:
        """Start without a threshold."""
        return MicroState(None)

    def propose(self, acc: Tensor, k: int, state: MicroState, context: StepContext) -> Proposal:
        """Search this worker's partition."""
        return self._step(acc, k, state, context).propose(acc)

    def settle(
        self,
        acc: Tensor,
        k: int,
        state: MicroState,
        context: StepContext,
        proposal: Proposal,
        headers: Tensor,
    ) -> Script[Selection]:
        """Agree on the selection."""
        step = self._step(acc, k, state, context)
        result: ExclusiveResult = yield from step.settle(acc, proposal, headers)
        new_state = MicroState(result.next_start)
        return Selection(result.indices, result.counts, new_state, result.threshold)

    def select_stacked(
        self, acc: Tensor, k: int, states: Sequence[MicroState], context: StepContext
    ) -> StackedSelection:
        """Select for all workers of (R, D) `acc`."""
        result, sent = self._step(acc[0], k, states[0], context).select_stacked(acc)
        state = MicroState(result.next_start)
        selection = Selection(result.indices, result.counts, state, result.threshold)
        return StackedSelection(selection, [state] * len(acc), sent)

    def _step(self, acc: Tensor, k: int, state: MicroState, context: StepContext) -> ExclusiveStep:
        # In single coordinates: without moving borders there is no need for blocks.
        bounds = even_cuts(len(acc), context.size)
        return ExclusiveStep(self.threshold, self.capacity, state.start, bounds, k, context)

    def device_rule(self, dim: int, state: MicroState) -> DeviceRule | None:
        """Return what a step in fixed shapes needs; None if the rules of this step vary."""
        if self.threshold != "consensus":
            return None
        return DeviceRule(self.capacity, Blocks(dim, 1), [], state.start)

    def after(self, state: MicroState, rule: DeviceRule) -> MicroState:
        """Return the state that a step in fixed shapes has left."""
        return MicroState(rule.start)

    def rescale(self, state: MicroState, factor: float) -> MicroState:
        """Multiply the start of the search by `factor`."""
        return replace(state, start=rescale_start(state.start, factor))
