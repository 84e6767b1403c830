"""CLT-k: one worker at a time selects its k largest coordinates for all.

Chen et al., "ScaleCom: Scalable Sparsified Gradient Compression for Communication-Efficient
Distributed Training", NeurIPS 2020, arXiv:2104.11125. Residuals of different workers are similar,
so what is large on the leader is mostly large on the others. Only the leader searches, and it
broadcasts its indices. With large learning rates residuals drift apart; a low-pass filter on the
residuals keeps them similar.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradherd.comm.script import Broadcast, Script
from gradherd.sparsify.kernels import topk_indices
from gradherd.sparsify.selector import Proposal, Selection, StepContext, check_density


@dataclass(frozen=True)
class CLTK:
    """Send the k largest coordinates of one worker, a different one at every step.

    Chen et al., NeurIPS 2020, arXiv:2104.11125. Raises ValueError if a setting is out of range.
    """

    density: float = 1e-3
    """Share of the coordinates to send."""
    low_pass: float = 1.0
    """Weight of the new residual against the old one. 1 is plain error feedback; less smooths
    residuals and so keeps them similar. The paper uses about 0.1 for large learning rates."""

    exclusive = True

    def __post_init__(self) -> None:
        check_density(self.density)
        if not 0 < self.low_pass <= 1:
            raise ValueError(f"low_pass must be in (0, 1], got {self.low_pass}")

    def begin(self, dim: int, workers: int, layers: Sequence[int]) -> None:
        """CLT-k has no state."""

    def propose(self, acc: Tensor, k: int, state: None, context: StepContext) -> Proposal:
        """Select the k largest if this worker leads the step."""
        nothing = torch.zeros(0, dtype=torch.int32, device=acc.device)
        # Only the leader searches; in the ExDyna authors' code all workers do, and R - 1 results
        # are thrown away.
        leads = context.rank == context.step % context.size and k < len(acc)
        return Proposal(nothing, topk_indices(acc, k).int() if leads else None)

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

    def rescale(self, state: None, factor: float) -> None:
        """CLT-k has no state."""
