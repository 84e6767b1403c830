"""Dense: everything travels, nothing stays. What one compares with."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from gradherd.comm.script import Script
from gradherd.sparsify.partitions import even_cuts
from gradherd.sparsify.selector import Chosen, Place, Proposal


@dataclass(frozen=True)
class Dense:
    """Send all coordinates."""

    density: float = 1.0
    """Only 1 makes sense; it is here because every method has one."""

    exclusive = True

    def __post_init__(self) -> None:
        if self.density != 1:
            raise ValueError(f"density of dense must be 1, got {self.density}")

    def begin(self, dim: int, workers: int, layers: Sequence[int]) -> None:
        """Nothing is remembered."""

    def propose(self, acc: Tensor, k: int, state: None, place: Place) -> Proposal:
        """Nothing to find out."""
        return Proposal(torch.zeros(0, dtype=torch.int32, device=acc.device))

    def settle(
        self, acc: Tensor, k: int, state: None, place: Place, proposal: Proposal, headers: Tensor
    ) -> Script[Chosen]:
        """Everybody knows: everything."""
        yield from ()
        everything = torch.arange(len(acc), device=acc.device)
        cuts = even_cuts(len(acc), place.size)  # nobody picks; each answers for its share
        return Chosen(everything, [end - begin for begin, end in pairwise(cuts)], None)

    def rescale(self, state: None, factor: float) -> None:
        """Nothing has a unit."""
