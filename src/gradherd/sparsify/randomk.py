"""Random-k: k coordinates by lot, the same for all workers.

Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018, arXiv:1809.07599. All
workers draw alike from the seed and the step, so nobody looks at gradients and no index travels.
What one compares with: whatever looks at gradients should do better for the same k.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from gradherd.comm.script import Script
from gradherd.sparsify.partitions import even_cuts
from gradherd.sparsify.selector import Chosen, Place, Proposal, check_density


@dataclass(frozen=True)
class RandomK:
    """The same k coordinates on all workers, drawn anew at every step."""

    density: float = 1e-3
    """Share of the coordinates that travels."""
    seed: int = 0
    """Of the draws; must be the same on all workers."""

    exclusive = True

    def __post_init__(self) -> None:
        check_density(self.density)
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")

    def begin(self, dim: int, workers: int, layers: Sequence[int]) -> None:
        """Nothing is remembered: the step tells the draw."""

    def propose(self, acc: Tensor, k: int, state: None, place: Place) -> Proposal:
        """Nothing to find out."""
        return Proposal(torch.zeros(0, dtype=torch.int32, device=acc.device))

    def settle(
        self, acc: Tensor, k: int, state: None, place: Place, proposal: Proposal, headers: Tensor
    ) -> Script[Chosen]:
        """Draw as everybody does; as nobody picked, each counts for as many as the others."""
        yield from ()
        entropy = np.random.SeedSequence([self.seed, place.step])
        # 32 bits: torch's generator on the CPU looks at no more.
        generator = torch.Generator().manual_seed(int(entropy.generate_state(1)[0]))
        indices = sample(len(acc), min(k, len(acc)), generator).to(acc.device)
        counts = [end - begin for begin, end in pairwise(even_cuts(len(indices), place.size))]
        return Chosen(indices, counts, None)

    def rescale(self, state: None, factor: float) -> None:
        """Nothing has a unit."""


def sample(dim: int, k: int, generator: torch.Generator) -> Tensor:
    """Draw k of `dim` coordinates, ascending: (k,) int64. Every set of k is as likely.

    As many are drawn as are missing, until none is. Which are drawn twice says nothing about
    which they are, so no set is preferred; and no permutation of all coordinates is made.

    >>> sample(7, 7, torch.Generator())
    tensor([0, 1, 2, 3, 4, 5, 6])
    """
    if 16 * k < dim:
        found = torch.zeros(0, dtype=torch.int64)
        while len(found) < k:
            found = torch.unique(torch.cat([found, _draw(dim, k - len(found), generator)]))
        return found
    # Mark those that are drawn or, if they are fewer, those that are not.
    few = min(k, dim - k)
    marked = torch.zeros(dim, dtype=torch.bool)
    while missing := few - int(marked.count_nonzero()):
        marked[_draw(dim, missing, generator)] = True
    return torch.from_numpy(np.flatnonzero(marked.numpy() == (few == k)))


def _draw(dim: int, count: int, generator: torch.Generator) -> Tensor:
    """Return (count,) coordinates, with repetition."""
    # The remainder of 32 bits, torch's way, prefers some of 100 million coordinates by 2 %.
    return torch.randint(1 << 62, (count,), generator=generator) % dim
