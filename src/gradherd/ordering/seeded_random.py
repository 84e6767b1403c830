"""Randomness as a function of seed, epoch and worker: no generator state to save or to sync.

Each draw comes from its own generator, seeded by a hash of its purpose. So any rank can draw what
any worker sees in any epoch, in any order, and gets the same bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_PURPOSES = {"order": 0, "signs": 1}


@dataclass(frozen=True)
class SeededRandom:
    """All random choices of one run."""

    seed: int

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")

    def permutations(self, sizes: Sequence[int], epoch: int) -> list[Tensor]:
        """Return a permutation of each worker's units, independent across workers and epochs."""
        return [
            torch.randperm(size, generator=self._generator("order", epoch, worker))
            for worker, size in enumerate(sizes)
        ]

    def draws(self, steps: int, workers: int, epoch: int) -> NDArray[np.float64]:
        """Return (steps, workers) uniform numbers in [-1, 1) for an epoch's signs; read-only."""
        return _uniform(self._generator("signs", epoch, 0).initial_seed(), steps, workers)

    def _generator(
        self, purpose: Literal["order", "signs"], epoch: int, worker: int
    ) -> torch.Generator:
        entropy = np.random.SeedSequence([self.seed, _PURPOSES[purpose], epoch, worker])
        seed = int(entropy.generate_state(1, np.uint64)[0])
        return torch.Generator().manual_seed(seed % 2**63)


@lru_cache(maxsize=2)  # Asked for at every step of an epoch.
def _uniform(seed: int, steps: int, workers: int) -> NDArray[np.float64]:
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(steps, workers, generator=generator, dtype=torch.float64)
    draws: NDArray[np.float64] = uniform.mul_(2).sub_(1).numpy()
    draws.setflags(write=False)
    return draws
