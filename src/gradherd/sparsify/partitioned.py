"""Methods whose workers select from exclusive partitions: ExDyna and MiCRO.

Each worker selects within a partition of its own, so no coordinate is selected twice and selections
do not build up. Partitions rotate, so that every worker searches every part of the vector in turn.
The threshold is agreed on in each step (`consensus`), or is that of the papers (`next_threshold`).

ExDyna: Yoon and Oh, "Preserving Near-Optimal Gradient Sparsification Cost for Scalable Distributed
Deep Learning", CCGrid 2024, arXiv:2402.13781. Partitions are runs of blocks whose borders move
until all have equal loads. Not from the paper: the threshold by consensus, and borders that are
recut from the loads of single blocks. MiCRO: Yoon and Oh, "MiCRO: Near-Zero Cost Gradient
Sparsification for Scaling and Accelerating Distributed DNN Training", HiPC 2023, arXiv:2310.00967.
The predecessor of ExDyna: its borders never move, so loads depend on the gradients alone.

Letters: D coordinates, R workers, K coordinates that all of them select.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from gradherd.comm.checks import check_choice, check_in, check_whole
from gradherd.comm.message_sizes import DEFAULT_DENSITY, EXDYNA_CAPACITY
from gradherd.comm.script import Script
from gradherd.sparsify import consensus
from gradherd.sparsify.consensus import PartitionRule, PartitionState
from gradherd.sparsify.kernels import indices_above, topk_indices
from gradherd.sparsify.partitions import Blocks, even_cuts
from gradherd.sparsify.selecting import gather_indices
from gradherd.sparsify.selector import Proposal, Selection, Selector, Step, check_density

Balance = Literal["recut", "diffusive", "none"]


ThresholdRule = Literal["consensus", "online"]


def first_threshold(k: int) -> float:
    """Return the online threshold of the first step: 1 / (2 sqrt k), regardless of the gradients.

    It is the hard threshold of Sahu et al., arXiv:2108.00951. It ignores the scale of the
    gradients, which is why settling may take hundreds of steps.
    """
    return 1 / (2 * math.sqrt(k))


def next_threshold(threshold: float, selected: int, k: int) -> float:
    """Return the online threshold after a step that selected `selected` coordinates.

    It moves by a small factor, less so if the count is within a tenth of the target. The constants
    are those of the published code. There the third case cannot be reached, because the ratio is
    compared with 0: within the band the threshold only rises. This rule compares with 1.

    >>> [round(next_threshold(1.0, count, k=100), 5) for count in (120, 105, 95, 50)]
    [1.005, 1.00125, 0.9987, 0.995]
    """
    ratio = selected / k
    if ratio > 1.1:
        return threshold * 1.005
    if ratio > 1:
        return threshold * 1.00125
    return threshold * (0.9987 if ratio > 1 / 1.1 else 0.995)


@dataclass(frozen=True)
class Partitioned(Selector):
    """A method whose workers select from exclusive partitions."""

    density: float = DEFAULT_DENSITY
    """Share of the coordinates to send."""
    threshold: ThresholdRule = "consensus"
    """"consensus", or "online", the rule of the papers."""
    capacity: float = EXDYNA_CAPACITY
    """By consensus, no worker sends more than this many times its fair share; the rest stays in
    its residual."""

    def __post_init__(self) -> None:
        check_density(self.density)
        check_in("[1, inf]", capacity=self.capacity)
        check_choice("threshold", self.threshold, "consensus", "online")

    @abstractmethod
    def rule(self, dim: int, workers: int) -> PartitionRule:
        """Return how `dim` coordinates are cut into partitions of so many workers."""

    def begin(self, dim: int, workers: int, layers: Sequence[int]) -> PartitionState:
        """Start with partitions of equal size, one for each worker."""
        return PartitionState.first(self.rule(dim, workers))

    @property
    def agrees_alone(self) -> bool:
        """Whether workers agree from headers alone: by consensus."""
        return self.threshold == "consensus"

    def propose(self, step: Step) -> Proposal:
        """Search this worker's partition.

        By consensus, the header holds the offers; online, the number of selected coordinates.
        """
        rule, count = self._rule_and_count(step)
        # All workers have the same k and D, so all headers are empty.
        if not count:
            return Proposal.without_header(step)
        spans = _spans(rule, tuple(step.state.cuts.tolist()), step.number % step.size, count)
        first, end = int(spans.firsts[step.rank]), int(spans.ends[step.rank])
        part = step.acc[first:end]
        # Nowhere, if the search has no start yet.
        chosen = indices_above(part, self._start(step) or math.inf)
        if self.threshold == "consensus":
            candidates = torch.tensor(len(chosen), dtype=torch.int32, device=part.device)
            if len(chosen) < count:
                # The first step, or the start was too high for this partition: search all of it.
                chosen = topk_indices(part, count)
            offers = consensus.make_offers(chosen, part[chosen].abs(), candidates, count)
            return Proposal(consensus.pack(offers, spans.reach, step.compact), spans)
        if not len(chosen) and len(part):
            # As published: every worker selects at least one coordinate, whichever it is.
            chosen = torch.tensor([step.number % len(part)], device=part.device)
        header = torch.tensor([len(chosen)], dtype=torch.int32, device=part.device)
        return Proposal(header, (spans, first + chosen))

    def agree(self, step: Step, own: Any, headers: Tensor) -> Script[Selection]:
        """Agree on the selection, and move the borders."""
        rule, count = self._rule_and_count(step)
        if not count:
            # No worker selects anything here; equal shares keep the padding metric at 1. The state
            # stays: a step of a warm-up from density 1 says nothing about a threshold.
            cuts = torch.tensor(even_cuts(step.dim, step.size))
            return Selection(step.everything(), cuts.diff().tolist(), step.state, 0.0)
        if self.threshold == "consensus":
            # On the CPU, where the headers are.
            offers = consensus.unpack(headers, count, own, step.compact)
            accepted, state = consensus.accept_offers(rule, step.state, offers, step.k, step.number)
            chosen = accepted.indices.to(step.acc.device, non_blocking=True)
            return Selection(chosen, accepted.counts.tolist(), state, float(accepted.threshold))
        (firsts, ends, _), chosen = own
        counts, threshold = headers[:, 0], self._start(step)
        spans = list(zip(firsts.tolist(), ends.tolist(), strict=True))
        indices = yield from gather_indices(chosen, counts.tolist(), spans, step)
        following = next_threshold(threshold, int(counts.sum()), step.k)
        start = torch.tensor([following, 1.0], dtype=torch.float64)
        state = consensus.moved(
            rule, replace(step.state, start=start), indices.cpu(), counts, counts.double(),
            step.number, count,
        )  # fmt: skip
        return Selection(indices, counts.tolist(), state, threshold)

    def _rule_and_count(self, step: Step) -> tuple[PartitionRule, int]:
        """Return the partitions, and how many each worker selects at least; 0 is everything."""
        rule = self.rule(step.dim, step.size)
        online = int(step.k < step.dim)
        return rule, rule.offers(step.k) if self.threshold == "consensus" else online

    def _start(self, step: Step) -> float:
        """Return where the search starts; 0 is nowhere yet."""
        start = float(step.state.start[0])
        return start if start > 0 or self.threshold == "consensus" else first_threshold(step.k)


@lru_cache(maxsize=8)  # Each worker of a process asks for them.
def _spans(rule: PartitionRule, cuts: tuple[int, ...], turn: int, count: int) -> consensus.Spans:
    return rule.spans(torch.tensor(cuts), turn, count)


@dataclass(frozen=True)
class ExDyna(Partitioned):
    """Send the largest coordinates of exclusive, load-balanced partitions.

    Yoon and Oh, CCGrid 2024, arXiv:2402.13781. The paper's method is `threshold="online",
    balance="diffusive"`, except that its code cannot lower the threshold within the band and its
    borders move by one block at a time. Raises ValueError if a setting is out of range.

    >>> ExDyna(density=0.01, threshold="online").balance
    'recut'
    """

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

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("balance", self.balance, "recut", "diffusive", "none")
        check_whole("blocks", self.blocks, 1)
        check_in("[0, 1)", memory=self.memory)
        check_choice("rotate", self.rotate, True, False)

    def rule(self, dim: int, workers: int) -> PartitionRule:
        """Return partitions of whole blocks."""
        memory = self.memory if self.balance == "recut" else None
        diffusive, blocks = self.balance == "diffusive", Blocks.of(dim, self.blocks)
        return PartitionRule(workers, self.capacity, blocks, memory, self.rotate, diffusive)


@dataclass(frozen=True)
class Micro(Partitioned):
    """Send the largest coordinates of exclusive partitions of equal size.

    Yoon and Oh, HiPC 2023, arXiv:2310.00967; the paper's rule is `threshold="online"`. Raises
    ValueError if a setting is out of range.
    """

    # More than ExDyna's: borders never move, so loads stay unequal, and a tight limit would hold
    # back the largest coordinates of a heavy partition.
    capacity: float = 2.0
    """As for `ExDyna`."""

    def rule(self, dim: int, workers: int) -> PartitionRule:
        """Return even partitions, in single coordinates: no borders move, so no blocks."""
        return PartitionRule(workers, self.capacity, Blocks(dim, 1))
