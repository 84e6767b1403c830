"""MiCRO: exclusive partitions of equal size that stay where they are.

Yoon and Oh, "MiCRO: Near-Zero Cost Gradient Sparsification for Scaling and Accelerating
Distributed DNN Training", HiPC 2023. ExDyna without blocks and without balance: the padding
factor is whatever the gradients make it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from gradherd.comm.script import Script
from gradherd.sparsify.exclusive import Exclusive, Pick, Rule, Start, check_rule, rescaled
from gradherd.sparsify.partitions import even_cuts
from gradherd.sparsify.selector import Chosen, Place, Proposal, check_density


@dataclass(frozen=True)
class State:
    """What all workers know alike."""

    start: Start
    """What the next step starts from; None before the first."""


@dataclass(frozen=True)
class Micro:
    """Exclusive partitions of equal size, one threshold for all."""

    density: float = 1e-3
    """Share of the coordinates that travels."""
    threshold: Rule = "consensus"
    """"consensus", or the paper's rule: "online", or `Online` with constants of your own."""
    capacity: float = 2.0
    """By consensus no worker sends more than this many times its fair share; the rest waits."""

    exclusive = True

    def __post_init__(self) -> None:
        check_density(self.density)
        check_rule(self.threshold, self.capacity)

    def begin(self, dim: int, workers: int, layers: Sequence[int]) -> State:
        """Start without a threshold."""
        return State(None)

    def propose(self, acc: Tensor, k: int, state: State, place: Place) -> Proposal:
        """Offer the largest of this worker's partition."""
        return self._step(acc, k, state, place).propose(acc)

    def settle(
        self,
        acc: Tensor,
        k: int,
        state: State,
        place: Place,
        proposal: Proposal,
        headers: Tensor,
    ) -> Script[Chosen]:
        """Agree on what is picked."""
        step = self._step(acc, k, state, place)
        pick: Pick = yield from step.settle(acc, proposal, headers)
        return Chosen(pick.indices, pick.counts, State(pick.following), pick.threshold)

    def _step(self, acc: Tensor, k: int, state: State, place: Place) -> Exclusive:
        bounds = even_cuts(len(acc), place.size)
        return Exclusive(self.threshold, self.capacity, state.start, bounds, k, place)

    def rescale(self, state: State, factor: float) -> State:
        """Follow a change of the unit that values are in."""
        return replace(state, start=rescaled(state.start, factor))
