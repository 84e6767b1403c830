"""Dense: send everything and keep no residual. The baseline."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from gradherd.comm.script import Script
from gradherd.sparsify.partitions import even_cuts
from gradherd.sparsify.selector import Proposal, Selection, StepContext


@dataclass(frozen=True)
class Dense:
    """Send all coordinates.

    Uses the same hook, header and sums as the sparse methods, so that bytes and results compare
    directly. It does not overlap with the backward; to train densely, leave `sparsify` out.
    """

    density: float = 1.0
    """Must be 1; the field exists because every sparsifier has a density."""

    exclusive = True

    def __post_init__(self) -> None:
        if self.density != 1:
            raise ValueError(f"density of dense must be 1, got {self.density}")

    def begin(self, dim: int, workers: int, layers: Sequence[int]) -> None:
        """Dense has no state."""

    def propose(self, acc: Tensor, k: int, state: None, context: StepContext) -> Proposal:
        """Return an empty header: there is nothing to decide."""
        return Proposal(torch.zeros(0, dtype=torch.int32, device=acc.device))

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
        everything = torch.arange(len(acc), device=acc.device)
        # No worker selects anything here; equal shares keep the padding metric at 1.
        cuts = even_cuts(len(acc), context.size)
        return Selection(everything, [end - begin for begin, end in pairwise(cuts)], None)

    def rescale(self, state: None, factor: float) -> None:
        """Dense has no state."""
