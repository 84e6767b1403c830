"""CLT-k: one worker in turn picks the k largest coordinates of its vector, for all.

Chen et al., "ScaleCom: Scalable Sparsified Gradient Compression for Communication-Efficient
Distributed Training", NeurIPS 2020, arXiv:2104.11125. Residuals of different workers are alike,
so what is large for the leader is mostly large for the others. Only the leader searches; its
indices go to everybody. A low-pass filter keeps residuals alike where learning rates are large: of
every step's news only a part goes into them, and what is sent takes off that part only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradherd.comm.script import Broadcast, Script
from gradherd.sparsify.kernels import largest
from gradherd.sparsify.selector import Chosen, Place, Proposal, check_density


@dataclass(frozen=True)
class CLTK:
    """The k largest of one worker, who changes with every step."""

    density: float = 1e-3
    """Share of the coordinates that travels."""
    low_pass: float = 1.0
    """Weight of the new residual against the old one: 1 is plain error feedback, less smooths
    residuals and so keeps them alike; about 0.1 is meant for large learning rates."""

    exclusive = True

    def __post_init__(self) -> None:
        check_density(self.density)
        if not 0 < self.low_pass <= 1:
            raise ValueError(f"low_pass must be in (0, 1], got {self.low_pass}")

    def begin(self, dim: int, workers: int, layers: Sequence[int]) -> None:
        """Nothing is remembered."""

    def propose(self, acc: Tensor, k: int, state: None, place: Place) -> Proposal:
        """Pick, if it is this worker's turn."""
        nothing = torch.zeros(0, dtype=torch.int32, device=acc.device)
        leads = place.rank == place.step % place.size and k < len(acc)
        return Proposal(nothing, largest(acc, k).int() if leads else None)

    def settle(
        self, acc: Tensor, k: int, state: None, place: Place, proposal: Proposal, headers: Tensor
    ) -> Script[Chosen]:
        """Hear the leader's picks."""
        leader = place.step % place.size
        if k >= len(acc):
            indices = torch.arange(len(acc), device=acc.device)
        else:
            own: Tensor | None = proposal.found
            shape = acc.new_zeros(k, dtype=torch.int32) if own is None else own
            heard: Tensor = yield Broadcast(shape, leader)
            indices = heard.long()
        counts = [len(indices) * (rank == leader) for rank in range(place.size)]
        return Chosen(indices, counts, None, low_pass=self.low_pass)

    def rescale(self, state: None, factor: float) -> None:
        """Nothing has a unit."""
