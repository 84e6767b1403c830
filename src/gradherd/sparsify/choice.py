"""What a method and the reducer say to each other in one step.

Letters: D coordinates, R workers, K coordinates that travel, H numbers of a header.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Place:
    """Which worker, of how many, in which step."""

    step: int
    """From 0; steps that were skipped do not count."""
    rank: int
    size: int

    @property
    def parts(self) -> list[int]:
        """The partition of each worker: every worker has each of them once in R steps."""
        return [(self.step + rank) % self.size for rank in range(self.size)]


@dataclass(frozen=True)
class Proposal:
    """What a worker finds out by itself, before it has heard of the others."""

    header: Tensor
    """(H,) int32 that everybody will see; H is the same on all workers."""
    found: Any = None
    """What the worker keeps for itself until then."""


@dataclass(frozen=True)
class Chosen:
    """What all workers agreed to send."""

    indices: Tensor
    """(K,) int64, the same on all workers, each at most once."""
    counts: list[int]
    """How many each of the R workers picked."""
    state: Any
    """What the method remembers for the next step."""
    threshold: float | None = None
    """Smallest magnitude that was meant to travel, where the method has one."""
    sums: Tensor | None = None
    """(K,) sums over workers, where the method has added them up on its way."""
    sent: Tensor | None = None
    """(K,) whether this worker's own value is in `sums`, where there are any."""
    low_pass: float = 1.0
    """Weight of the new residual against the old one."""


def target(density: float, dim: int) -> int:
    """Return k, how many of `dim` coordinates a density means: at least one.

    >>> target(0.001, 10), target(0.29, 100), target(1.0, 7)
    (1, 29, 7)
    """
    # 0.29 * 100 is 28.999999999999996, and means 29.
    return max(1, min(dim, int(density * dim * (1 + 1e-12))))


def check_density(density: float) -> None:
    """Raise unless `density` is a share of the coordinates."""
    if isinstance(density, bool) or not isinstance(density, int | float):
        raise ValueError(f"density must be a number in (0, 1], got {density!r}")
    if not 0 < density <= 1:
        raise ValueError(f"density must be in (0, 1], got {density}")
