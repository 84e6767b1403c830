"""Methods without a state: dense and top-k.

Dense sends everything and keeps no residual: the baseline.

Top-k: Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017,
arXiv:1704.05021. Workers select different coordinates, and the union of their selections is sent.
It grows with the number of workers, up to R times k (gradient build-up). All workers send their
values of the whole union and clear them from their residuals.

Letters: R workers, k coordinates that a worker selects.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor

from gradherd.comm.message_sizes import DEFAULT_DENSITY
from gradherd.comm.script import Script
from gradherd.sparsify.kernels import topk_indices
from gradherd.sparsify.partitions import even_cuts
from gradherd.sparsify.selecting import gather_union
from gradherd.sparsify.selector import (
    Proposal,
    Selection,
    Selector,
    Step,
    check_density,
)


@dataclass(frozen=True)
class Dense(Selector):
    """Send all coordinates.

    Uses the same hook, header and sums as the sparse methods, so that bytes and results compare
    directly. It does not overlap with the backward; to train densely, leave `sparsify` out.
    """

    density: float = 1.0
    """Must be 1; the field exists because every sparsifier has a density."""

    sends_all = True
    agrees_alone = True

    def __post_init__(self) -> None:
        if self.density != 1:
            raise ValueError(f"density of dense must be 1, got {self.density}")

    def agree(self, step: Step, own: Any, headers: Tensor) -> Script[Selection]:
        """Select every coordinate."""
        yield from ()  # A generator like all scripts, although nothing is exchanged.
        # No worker selects anything here; equal shares keep the padding metric at 1.
        cuts = even_cuts(step.dim, step.size)
        counts = [end - begin for begin, end in pairwise(cuts)]
        return Selection(None, counts, None, selected=step.dim)


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

    def propose(self, step: Step) -> Proposal:
        """Select the k largest; the header is empty, as every worker selects k."""
        return Proposal.without_header(step, topk_indices(step.acc, step.k))

    def agree(self, step: Step, own: Any, headers: Tensor) -> Script[Selection]:
        """Gather the union of all selections."""
        counts = [step.k] * step.size
        if step.k >= step.dim:
            return Selection(own, counts, None)
        # Indices are united before values are sent, so that every worker sends its values of all of
        # them. Sending (index, value) of its own selection only would leave the others' parts
        # waiting.
        union = yield from gather_union(own, counts, step.dim, step)
        return Selection(union, counts, None)
