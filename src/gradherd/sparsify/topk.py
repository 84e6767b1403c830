"""Top-k: every worker picks the k largest coordinates of its whole vector.

Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017. Workers
pick differently, so what travels is the union of their picks: it builds up, to R times k at
worst. Values of the union travel from all workers, and all clear it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradherd.comm.script import Script
from gradherd.sparsify.exchange import gather_union
from gradherd.sparsify.kernels import largest
from gradherd.sparsify.selector import Chosen, Place, Proposal, check_density


@dataclass(frozen=True)
class TopK:
    """The k largest of each worker, united."""

    density: float = 1e-3
    """Share of the coordinates that each worker picks."""

    exclusive = False

    def __post_init__(self) -> None:
        check_density(self.density)

    def begin(self, dim: int, workers: int, layers: Sequence[int]) -> None:
        """Nothing is remembered."""

    def propose(self, acc: Tensor, k: int, state: None, place: Place) -> Proposal:
        """Pick; there is nothing to tell, as everybody picks as many."""
        return Proposal(torch.zeros(0, dtype=torch.int32, device=acc.device), largest(acc, k))

    def settle(
        self, acc: Tensor, k: int, state: None, place: Place, proposal: Proposal, headers: Tensor
    ) -> Script[Chosen]:
        """Unite everybody's picks."""
        counts = [k] * place.size
        if k >= len(acc):
            return Chosen(proposal.found, counts, None)
        union = yield from gather_union(proposal.found, counts, len(acc), place)
        return Chosen(union, counts, None)

    def rescale(self, state: None, factor: float) -> None:
        """Nothing has a unit."""
