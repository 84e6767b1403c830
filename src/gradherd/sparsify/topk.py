"""Top-k: every worker selects the k largest coordinates of its whole vector.

Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017,
arXiv:1704.05021. Workers select different coordinates, and the union of their selections is sent.
It grows with the number of workers, up to R times k (gradient build-up). All workers send their
values of the whole union and clear them from their residuals.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradherd.comm.script import Script
from gradherd.sparsify.exchange import gather_union
from gradherd.sparsify.kernels import topk_indices
from gradherd.sparsify.selector import Proposal, Selection, StepContext, check_density


@dataclass(frozen=True)
class TopK:
    """Send the union of each worker's k largest coordinates.

    Aji and Heafield, EMNLP 2017, arXiv:1704.05021. Raises ValueError if the density is out of
    range.
    """

    density: float = 1e-3
    """Share of the coordinates that each worker selects."""

    exclusive = False

    def __post_init__(self) -> None:
        check_density(self.density)

    def begin(self, dim: int, workers: int, layers: Sequence[int]) -> None:
        """Top-k has no state."""

    def propose(self, acc: Tensor, k: int, state: None, context: StepContext) -> Proposal:
        """Select the k largest; the header is empty, as every worker selects k."""
        nothing = torch.zeros(0, dtype=torch.int32, device=acc.device)
        return Proposal(nothing, topk_indices(acc, k))

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

    def rescale(self, state: None, factor: float) -> None:
        """Top-k has no state."""
