"""Random-k: all workers draw the same coordinates.

Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018, arXiv:1809.07599. All
workers draw from the same seed and step, so no indices are sent and gradients are not even read. A
baseline: a method that reads gradients should do better with the same k.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradherd.comm.message_sizes import DEFAULT_DENSITY
from gradherd.comm.script import Script
from gradherd.sparsify.partitions import even_cuts
from gradherd.sparsify.selector import Selection, Selector, Step, check_density


@dataclass(frozen=True)
class RandomK(Selector):
    """Send k random coordinates, the same on all workers, drawn anew at every step.

    Stich, Cordonnier and Jaggi, NeurIPS 2018, arXiv:1809.07599. Raises ValueError if a setting is
    out of range.
    """

    density: float = DEFAULT_DENSITY
    """Share of the coordinates to send."""
    seed: int = 0
    """Seed of the draws; must be the same on all workers."""

    agrees_alone = True

    def __post_init__(self) -> None:
        check_density(self.density)
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")

    def agree(self, step: Step, own: Any, headers: Tensor) -> Script[Selection]:
        """Draw the coordinates; for the counts, they are shared out evenly over workers."""
        yield from ()  # A generator like all scripts, although nothing is exchanged.
        # From seed and step, with a generator of its own: the draw does not depend on what else
        # uses torch's global generator, and a resumed run draws as if it had not stopped.
        entropy = np.random.SeedSequence([self.seed, step.number])
        # 32 bits are enough: torch's CPU generator ignores the rest of a seed.
        generator = torch.Generator().manual_seed(int(entropy.generate_state(1)[0]))
        # Drawn on the CPU: generators of other devices give other numbers.
        indices = sample(step.dim, step.k, generator).to(step.acc.device)
        counts = [end - begin for begin, end in pairwise(even_cuts(len(indices), step.size))]
        return Selection(indices, counts, None)


def sample(dim: int, k: int, generator: torch.Generator) -> Tensor:
    """Draw k of `dim` coordinates without replacement, all sets of k being equally likely.

    Draws with replacement are repeated until k are distinct. Whether a coordinate is drawn twice
    does not depend on which one it is, so the result is uniform, and unlike `torch.randperm` this
    takes O(k) memory for small k.

    Args:
        dim: Number of coordinates to draw from.
        k: How many, at most `dim`.
        generator: Of the CPU.

    Returns:
        (k,) int64, ascending.

    >>> sample(7, 7, torch.Generator())
    tensor([0, 1, 2, 3, 4, 5, 6])
    """
    if 16 * k < dim:
        drawn = torch.zeros(0, dtype=torch.int64)
        while len(drawn) < k:
            drawn = torch.unique(torch.cat([drawn, _draw(dim, k - len(drawn), generator)]))
        return drawn
    # With large k most draws would be repeats: draw those to leave out if they are fewer.
    few = min(k, dim - k)
    marked = torch.zeros(dim, dtype=torch.bool)
    while missing := few - int(marked.count_nonzero()):
        marked[_draw(dim, missing, generator)] = True
    return torch.from_numpy(np.flatnonzero(marked.numpy() == (few == k)))


def _draw(dim: int, count: int, generator: torch.Generator) -> Tensor:
    """Return (count,) random coordinates, with replacement."""
    # torch.randint(dim) takes 32 random bits modulo dim, which for 100 million coordinates makes
    # some of them 2 % more likely than others.
    return torch.randint(1 << 62, (count,), generator=generator) % dim
