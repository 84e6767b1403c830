"""Randomness as a function of seed, epoch and worker: no generator state to save or to sync.

Each draw comes from its own generator, seeded by a hash of its purpose. So any rank can draw what
any worker sees in any epoch, in any order, and gets the same bits. Published code relies on
generators that happen to be in the same state on all ranks; where they are not, orders diverge
without a sign of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradherd.comm.checks import check_whole

# Part of the seed, so that orders and signs of an epoch are independent. Changing a number changes
# every run.
_PURPOSES = {"order": 0, "signs": 1, "blocks": 2}


@dataclass(frozen=True)
class SeededRandom:
    """All random choices of one run."""

    seed: int
    """Seed of the run, at least 0; equal on all ranks."""

    def __post_init__(self) -> None:
        check_whole("seed", self.seed, 0)

    def permutations(
        self, sizes: Sequence[int], epoch: int, purpose: Literal["order", "blocks"] = "order"
    ) -> list[Tensor]:
        """Return a permutation of each worker's n_i units.

        Independent across workers, epochs and purposes.
        """
        return [
            torch.randperm(size, generator=_generator(self._seed(purpose, epoch, worker)))
            for worker, size in enumerate(sizes)
        ]

    def draws(self, steps: int, workers: int, epoch: int) -> NDArray[np.float64]:
        """Return the (steps, workers) uniform draws in [-1, 1) for an epoch's signs, read-only."""
        return _uniform(self._seed("signs", epoch, 0), steps, workers)

    def _seed(self, purpose: str, epoch: int, worker: int) -> int:
        # SeedSequence hashes: neighbouring seeds, epochs and workers get unrelated streams.
        entropy = np.random.SeedSequence([self.seed, _PURPOSES[purpose], epoch, worker])
        return int(entropy.generate_state(1, np.uint64)[0]) % 2**63


def _generator(seed: int) -> torch.Generator:
    # On the CPU, so that the bits do not depend on the device that training runs on.
    return torch.Generator().manual_seed(seed)


@lru_cache(maxsize=2)  # Asked for at every step of an epoch.
def _uniform(seed: int, steps: int, workers: int) -> NDArray[np.float64]:
    uniform = torch.rand(steps, workers, generator=_generator(seed), dtype=torch.float64)
    draws: NDArray[np.float64] = uniform.mul_(2).sub_(1).numpy()
    draws.setflags(write=False)  # The cache hands out the same array again.
    return draws
