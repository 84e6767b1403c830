"""ExDyna: every worker picks the largest coordinates of a partition of its own.

Yoon and Oh, "Preserving Near-Optimal Gradient Sparsification Cost for Scalable Distributed Deep
Learning", CCGrid 2024, arXiv:2402.13781. Partitions do not overlap, so what workers pick does not
build up; they are runs of blocks whose borders move until all have equal loads; they rotate, so
that every worker looks at every part of the vector. Ours are the consensus (`offers`) and borders
that are cut anew from the loads of single blocks.

Letters: D coordinates, R workers, K picks of all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from gradherd.comm.script import Script
from gradherd.sparsify.exclusive import Exclusive, Pick, Rule, Start, check_rule, rescaled
from gradherd.sparsify.partitions import Blocks, diffuse, even_cuts, recut
from gradherd.sparsify.selector import Chosen, Place, Proposal, check_density

Balance = Literal["recut", "diffusive", "none"]


@dataclass(frozen=True)
class State:
    """What all workers know alike."""

    start: Start
    """What the next step starts from; None before the first."""
    cuts: list[int]
    """R + 1 borders of the partitions, in blocks."""
    loads: Tensor
    """(NB,) picks of each block, older steps weigh less."""


@dataclass(frozen=True)
class _Still(Place):
    """A place whose partition does not depend on the step."""

    @property
    def parts(self) -> list[int]:
        """The partition of each worker: its own."""
        return list(range(self.size))


@dataclass(frozen=True)
class ExDyna:
    """Exclusive partitions of equal loads, one threshold for all.

    >>> ExDyna(density=0.01, threshold="online").balance
    'recut'
    """

    density: float = 1e-3
    """Share of the coordinates that travels."""
    threshold: Rule = "consensus"
    """"consensus", or the paper's rule: "online", or `Online` with constants of your own."""
    capacity: float = 1.05
    """By consensus no worker sends more than this many times its fair share; the rest waits."""
    balance: Balance = "recut"
    """"recut" from the loads of blocks, "diffusive" between neighbours, or "none"."""
    blocks: int = 1024
    """About how many blocks borders move by."""
    memory: float = 0.9
    """Weight of the loads of a step before the last against the last one's ("recut")."""
    rotate: bool = True
    """Partitions go round, one worker further at every step, as in the paper. False lets every
    worker keep its own for ever, to see what rotation is worth: what only the others find large
    there is never looked for."""

    exclusive = True

    def __post_init__(self) -> None:
        check_density(self.density)
        check_rule(self.threshold, self.capacity)
        if self.balance not in ("recut", "diffusive", "none"):
            raise ValueError(f"balance must be recut, diffusive or none, got {self.balance!r}")
        if self.blocks < 1:
            raise ValueError(f"blocks must be at least 1, got {self.blocks}")
        if not 0 <= self.memory < 1:
            raise ValueError(f"memory must be in [0, 1), got {self.memory}")
        if not isinstance(self.rotate, bool):
            raise ValueError(f"rotate must be True or False, got {self.rotate!r}")

    def begin(self, dim: int, workers: int, layers: Sequence[int]) -> State:
        """Cut the vector into as many partitions of equal size as there are workers."""
        blocks = Blocks.of(dim, self.blocks)
        loads = torch.zeros(blocks.count, dtype=torch.float64)
        return State(None, even_cuts(blocks.count, workers), loads)

    def bounds(self, dim: int, state: State) -> list[int]:
        """Return the R + 1 coordinates between which partitions lie."""
        return Blocks.of(dim, self.blocks).bounds(state.cuts)

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
        """Agree on what is picked, and move the borders."""
        step = self._step(acc, k, state, place)
        pick: Pick = yield from step.settle(acc, proposal, headers)
        after = self._learn(len(acc), state, pick, place)
        return Chosen(pick.indices, pick.counts, after, pick.threshold)

    def _step(self, acc: Tensor, k: int, state: State, place: Place) -> Exclusive:
        bounds, here = self.bounds(len(acc), state), self._place(place)
        return Exclusive(self.threshold, self.capacity, state.start, bounds, k, here)

    def _place(self, place: Place) -> Place:
        return place if self.rotate else _Still(place.step, place.rank, place.size)

    def _learn(self, dim: int, state: State, pick: Pick, place: Place) -> State:
        cuts, loads = state.cuts, state.loads
        if self.balance == "recut" and place.size > 1:
            # What a worker had beyond its capacity lies, most likely, where its picks do.
            share = [
                load / max(1, count) for load, count in zip(pick.loads, pick.counts, strict=True)
            ]
            weights = torch.tensor(share).repeat_interleave(torch.tensor(pick.counts))
            found = Blocks.of(dim, self.blocks).loads(pick.indices, weights)
            loads = found + self.memory * loads
            cuts = recut(loads, place.size)
        elif self.balance == "diffusive":
            by_part = dict(zip(self._place(place).parts, pick.loads, strict=True))
            cuts = diffuse(cuts, [by_part[part] for part in range(place.size)])
        return State(pick.following, cuts, loads)

    def rescale(self, state: State, factor: float) -> State:
        """Follow a change of the unit that values are in."""
        return replace(state, start=rescaled(state.start, factor))
