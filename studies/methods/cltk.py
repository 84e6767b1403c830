"""CLT-k: one worker after the other chooses for all.

Chen et al., "ScaleCom: Scalable Sparsified Gradient Compression for Communication-Efficient
Distributed Training", NeurIPS 2020, arXiv:2104.11125. Residuals of different workers are similar,
so what is large on the leader is mostly large on the others. Only the leader searches, and it
broadcasts its indices. Left out: the paper's low-pass filter on residuals.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradherd.comm import collectives
from gradherd.comm.message_sizes import DEFAULT_DENSITY
from gradherd.comm.script import Request, Script, ScriptResult, check_equal
from gradherd.sparsify.kernels import topk_indices
from gradherd.sparsify.selector import Proposal, Selection, Selector, Step, check_density


@dataclass(frozen=True)
class Broadcast(Request):
    """Send the tensor of rank `src` to all ranks; the others give one of its shape and dtype."""

    tensor: Tensor
    src: int

    def start(self, world: Any) -> collectives.PendingCollective:
        """Send a copy: a broadcast writes into its tensor, and this one belongs to the script."""
        sent = collectives.broadcast(self.tensor.clone(), world, src=self.src)
        return collectives.PendingCollective(*sent)

    @staticmethod
    def answer_all(requests: Sequence["Broadcast"]) -> list[ScriptResult]:
        """Give all workers the tensor of one."""
        check_equal([request.src for request in requests], "src")
        tensor = requests[requests[0].src].tensor
        sent = collectives.broadcast_bytes(tensor, len(requests))
        return [ScriptResult(tensor, sent)] * len(requests)


@dataclass(frozen=True)
class CLTK(Selector):
    """Send the k largest coordinates of one worker, a different one at every step.

    Chen et al., NeurIPS 2020, arXiv:2104.11125. Raises ValueError if a setting is out of range.
    """

    density: float = DEFAULT_DENSITY
    """Share of the coordinates to send."""

    def __post_init__(self) -> None:
        check_density(self.density)

    def propose(self, step: Step) -> Proposal:
        """Select the k largest if this worker leads the step."""
        # Only the leader searches; in the ExDyna authors' code all workers do, and R - 1 results
        # are thrown away.
        leads = step.rank == step.number % step.size and step.k < step.dim
        return Proposal.without_header(
            step, topk_indices(step.acc, step.k).int() if leads else None
        )

    def agree(self, step: Step, own: Any, headers: Tensor) -> Script[Selection]:
        """Receive the leader's indices."""
        leader = step.number % step.size
        if step.k >= step.dim:
            indices = step.everything()
        else:
            # The others need a buffer of the same shape. int32 halves the bytes of int64.
            buffer = step.acc.new_zeros(step.k, dtype=torch.int32) if own is None else own
            received: Tensor = yield Broadcast(buffer, leader)
            indices = received.long()
        # All of them count as the leader's, so the padding metric is R; a broadcast pads nothing.
        counts = [len(indices) * (rank == leader) for rank in range(step.size)]
        return Selection(indices, counts, None)
