"""Simple methods: dense, top-k, CLT-k, random-k and a hard threshold.

Dense sends everything and keeps no residual: the baseline.

Top-k: Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017,
arXiv:1704.05021. Workers select different coordinates, and the union of their selections is sent.
It grows with the number of workers, up to R times k (gradient build-up). All workers send their
values of the whole union and clear them from their residuals.

CLT-k: Chen et al., "ScaleCom: Scalable Sparsified Gradient Compression for Communication-Efficient
Distributed Training", NeurIPS 2020, arXiv:2104.11125. Residuals of different workers are similar,
so what is large on the leader is mostly large on the others. Only the leader searches, and it
broadcasts its indices. With large learning rates residuals drift apart; a low-pass filter on the
residuals keeps them similar.

Random-k: Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018, arXiv:1809.07599.
All workers draw from the same seed and step, so no indices are sent and gradients are not even
read. A baseline: a method that reads gradients should do better with the same k.

Hard threshold: Sahu et al., "Rethinking gradient sparsification as total error minimization",
NeurIPS 2021, arXiv:2108.00951. The threshold never changes, so the density follows the gradients:
everything is sent while they are large, nothing when they are small.

Letters: D coordinates, R workers, k coordinates that a worker selects, K that are sent.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradherd.comm.checks import check_numbers
from gradherd.comm.script import Broadcast, Script
from gradherd.sparsify.exchange import gather_union
from gradherd.sparsify.kernels import indices_above, topk_indices
from gradherd.sparsify.message_sizes import DEFAULT_DENSITY
from gradherd.sparsify.partitions import even_cuts
from gradherd.sparsify.selector import (
    Proposal,
    Selection,
    Selector,
    StepContext,
    check_density,
    target_count,
)


@dataclass(frozen=True)
class Dense(Selector):
    """Send all coordinates.

    Uses the same hook, header and sums as the sparse methods, so that bytes and results compare
    directly. It does not overlap with the backward; to train densely, leave `sparsify` out.
    """

    density: float = 1.0
    """Must be 1; the field exists because every sparsifier has a density."""

    exclusive = True
    sends_all = True

    def __post_init__(self) -> None:
        if self.density != 1:
            raise ValueError(f"density of dense must be 1, got {self.density}")

    def agree(
        self,
        acc: Tensor,
        k: int,
        state: None,
        context: StepContext,
        proposal: Proposal,
        headers: Tensor,
    ) -> Script[Selection]:
        """Select every coordinate."""
        yield from ()  # A generator like all scripts, although nothing is exchanged.
        # No worker selects anything here; equal shares keep the padding metric at 1.
        cuts = even_cuts(len(acc), context.size)
        counts = [end - begin for begin, end in pairwise(cuts)]
        return Selection(None, counts, None, selected=len(acc))


@dataclass(frozen=True)
class TopK(Selector):
    """Send the union of each worker's k largest coordinates.

    Aji and Heafield, EMNLP 2017, arXiv:1704.05021. Raises ValueError if the density is out of
    range.
    """

    density: float = DEFAULT_DENSITY
    """Share of the coordinates that each worker selects."""

    def __post_init__(self) -> None:
        check_density(self.density)

    def propose(self, acc: Tensor, k: int, state: None, context: StepContext) -> Proposal:
        """Select the k largest; the header is empty, as every worker selects k."""
        return Proposal.without_header(acc, topk_indices(acc, k))

    def agree(
        self,
        acc: Tensor,
        k: int,
        state: None,
        context: StepContext,
        proposal: Proposal,
        headers: Tensor,
    ) -> Script[Selection]:
        """Gather the union of all selections."""
        counts = [k] * context.size
        if k >= len(acc):
            return Selection(proposal.local, counts, None)
        # Indices are united before values are sent, so that every worker sends its values of all of
        # them. Sending (index, value) of its own selection only would leave the others' parts
        # waiting.
        union = yield from gather_union(proposal.local, counts, len(acc), context)
        return Selection(union, counts, None)


@dataclass(frozen=True)
class CLTK(Selector):
    """Send the k largest coordinates of one worker, a different one at every step.

    Chen et al., NeurIPS 2020, arXiv:2104.11125. Raises ValueError if a setting is out of range.
    """

    density: float = DEFAULT_DENSITY
    """Share of the coordinates to send."""
    low_pass: float = 1.0
    """Weight of the new residual against the old one. 1 is plain error feedback; less smooths
    residuals and so keeps them similar. The paper uses about 0.1 for large learning rates."""

    exclusive = True

    def __post_init__(self) -> None:
        check_density(self.density)
        if not 0 < self.low_pass <= 1:
            raise ValueError(f"low_pass must be in (0, 1], got {self.low_pass}")

    def propose(self, acc: Tensor, k: int, state: None, context: StepContext) -> Proposal:
        """Select the k largest if this worker leads the step."""
        # Only the leader searches; in the ExDyna authors' code all workers do, and R - 1 results
        # are thrown away.
        leads = context.rank == context.step % context.size and k < len(acc)
        return Proposal.without_header(acc, topk_indices(acc, k).int() if leads else None)

    def agree(
        self,
        acc: Tensor,
        k: int,
        state: None,
        context: StepContext,
        proposal: Proposal,
        headers: Tensor,
    ) -> Script[Selection]:
        """Receive the leader's indices."""
        leader = context.step % context.size
        if k >= len(acc):
            indices = torch.arange(len(acc), device=acc.device)
        else:
            own: Tensor | None = proposal.local
            # The others need a buffer of the same shape. int32 halves the bytes of int64.
            buffer = acc.new_zeros(k, dtype=torch.int32) if own is None else own
            received: Tensor = yield Broadcast(buffer, leader)
            indices = received.long()
        # All of them count as the leader's, so the padding metric is R; a broadcast pads nothing.
        counts = [len(indices) * (rank == leader) for rank in range(context.size)]
        return Selection(indices, counts, None, low_pass=self.low_pass)


@dataclass(frozen=True)
class RandomK(Selector):
    """Send k random coordinates, the same on all workers, drawn anew at every step.

    Stich, Cordonnier and Jaggi, NeurIPS 2018, arXiv:1809.07599. Raises ValueError if a setting is
    out of range.
    """

    density: float = DEFAULT_DENSITY
    """Share of the coordinates to send."""
    seed: int = 0
    """Seed of the draws; must be the same on all workers."""

    exclusive = True

    def __post_init__(self) -> None:
        check_density(self.density)
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")

    def agree(
        self,
        acc: Tensor,
        k: int,
        state: None,
        context: StepContext,
        proposal: Proposal,
        headers: Tensor,
    ) -> Script[Selection]:
        """Draw the coordinates; for the counts, they are shared out evenly over workers."""
        yield from ()  # A generator like all scripts, although nothing is exchanged.
        # From seed and step, with a generator of its own: the draw does not depend on what else
        # uses torch's global generator, and a resumed run draws as if it had not stopped.
        entropy = np.random.SeedSequence([self.seed, context.step])
        # 32 bits are enough: torch's CPU generator ignores the rest of a seed.
        generator = torch.Generator().manual_seed(int(entropy.generate_state(1)[0]))
        # Drawn on the CPU: generators of other devices give other numbers.
        indices = sample(len(acc), min(k, len(acc)), generator).to(acc.device)
        counts = [end - begin for begin, end in pairwise(even_cuts(len(indices), context.size))]
        return Selection(indices, counts, None)


def sample(dim: int, k: int, generator: torch.Generator) -> Tensor:
    """Draw k of `dim` coordinates without replacement, all sets of k being equally likely.

    Draws with replacement are repeated until k are distinct. Whether a coordinate is drawn twice
    does not depend on which one it is, so the result is uniform, and unlike `torch.randperm` this
    takes O(k) memory for small k.

    Args:
        dim: Number of coordinates to draw from.
        k: How many, at most `dim`.
        generator: Of the CPU.

    Returns:
        (k,) int64, ascending.

    >>> sample(7, 7, torch.Generator())
    tensor([0, 1, 2, 3, 4, 5, 6])
    """
    if 16 * k < dim:
        drawn = torch.zeros(0, dtype=torch.int64)
        while len(drawn) < k:
            drawn = torch.unique(torch.cat([drawn, _draw(dim, k - len(drawn), generator)]))
        return drawn
    # With large k most draws would be repeats: draw those to leave out if they are fewer.
    few = min(k, dim - k)
    marked = torch.zeros(dim, dtype=torch.bool)
    while missing := few - int(marked.count_nonzero()):
        marked[_draw(dim, missing, generator)] = True
    return torch.from_numpy(np.flatnonzero(marked.numpy() == (few == k)))


def _draw(dim: int, count: int, generator: torch.Generator) -> Tensor:
    """Return (count,) random coordinates, with replacement."""
    # torch.randint(dim) takes 32 random bits modulo dim, which for 100 million coordinates makes
    # some of them 2 % more likely than others.
    return torch.randint(1 << 62, (count,), generator=generator) % dim


class ByThreshold(Selector):
    """A method whose workers each select what reaches a threshold, and send the union."""

    @staticmethod
    def proposal(selected: Tensor, state: Any, threshold: float | None) -> Proposal:
        """Return a proposal whose header is the number of selected coordinates.

        Args:
            selected: (K_r,) ascending indices that this worker selected.
            state: The method's state for the next step.
            threshold: This worker's threshold.
        """
        count = torch.tensor([len(selected)], dtype=torch.int32, device=selected.device)
        return Proposal(count, (selected, state, threshold))

    def agree(
        self,
        acc: Tensor,
        k: int,
        state: Any,
        context: StepContext,
        proposal: Proposal,
        headers: Tensor,
    ) -> Script[Selection]:
        """Gather the union of all selections, or take everything if k is D."""
        selected, state, threshold = proposal.local
        if k >= len(acc):
            everything = torch.arange(len(acc), device=selected.device)
            return Selection(everything, [len(acc)] * context.size, state, 0.0)
        counts = headers[:, 0].tolist()
        union = yield from gather_union(selected, counts, len(acc), context)
        return Selection(union, counts, state, threshold)


@dataclass(frozen=True)
class ThresholdState:
    """State of `Threshold`, the same on all workers."""

    threshold: float
    """Changes only when the unit of the values changes."""


@dataclass(frozen=True)
class Threshold(ByThreshold):
    """Send the union of what reaches a constant threshold on any worker.

    Sahu et al., NeurIPS 2021, arXiv:2108.00951. Raises ValueError if a setting is out of range.
    """

    density: float = DEFAULT_DENSITY
    """Density that the default threshold is meant for; the actual density may be anything."""
    value: float | None = None
    """The threshold, in the unit of the first step. None is the paper's 1 / (2 sqrt k), which
    follows a warm-up of the density; a given value does not."""

    def __post_init__(self) -> None:
        check_density(self.density)
        if self.value is not None:
            check_numbers(value=self.value)
        if self.value is not None and not 0 < self.value < math.inf:
            raise ValueError(f"value must be a positive number or None, got {self.value}")

    def begin(self, dim: int, workers: int, layers: Sequence[int]) -> ThresholdState:
        """Set the threshold."""
        if self.value is not None:
            return ThresholdState(self.value)
        return ThresholdState(suggested_threshold(target_count(self.density, dim)))

    def propose(self, acc: Tensor, k: int, state: ThresholdState, context: StepContext) -> Proposal:
        """Select what reaches the threshold; the header is the count."""
        threshold = state.threshold
        if self.value is None:
            # During a warm-up of the density k is larger than usual, and the threshold lower.
            usual_k = target_count(self.density, len(acc))
            threshold *= suggested_threshold(k) / suggested_threshold(usual_k)
        threshold = clamp_to_dtype(threshold, acc.dtype)
        selected = indices_above(acc, threshold)
        return self.proposal(selected, state, threshold)

    def rescale(self, state: ThresholdState, factor: float) -> ThresholdState:
        """Multiply the threshold by `factor`."""
        return replace(state, threshold=state.threshold * factor)


def suggested_threshold(k: int) -> float:
    """Return the paper's threshold for sending about k coordinates: 1 / (2 sqrt k).

    >>> suggested_threshold(25)
    0.1
    """
    return 1 / (2 * math.sqrt(k))


def clamp_to_dtype(threshold: float, dtype: torch.dtype) -> float:
    """Return the threshold, clamped to the positive normal range of `dtype`."""
    # Zero would select everything, exact zeros included; infinity nothing at all, for ever.
    limits = torch.finfo(dtype)
    return min(max(threshold, limits.tiny), limits.max)
