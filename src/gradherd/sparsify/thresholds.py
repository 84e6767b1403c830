"""The threshold that moves a little after each step: the rule of ExDyna and MiCRO."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Online:
    """Move the threshold by the last step's count (ExDyna and MiCRO).

    The published code can never lower the threshold inside the band; this is the rule it meant.
    """

    band: float = 1.1
    """Counts within this factor of the target are near it."""
    fast_up: float = 1.005
    """Factor if far too many were picked."""
    slow_up: float = 1.00125
    """Factor if a few too many were picked."""
    slow_down: float = 0.9987
    """Factor if a few too few were picked, or as many as wanted."""
    fast_down: float = 0.995
    """Factor if far too few were picked."""

    def __post_init__(self) -> None:
        if not self.band >= 1:
            raise ValueError(f"band must be at least 1, got {self.band}")
        if not self.fast_up >= self.slow_up >= 1 >= self.slow_down >= self.fast_down > 0:
            raise ValueError(f"factors must fall from fast_up to fast_down around 1, got {self}")

    def first(self, k: int) -> float:
        """Return the threshold of the first step: 1 / (2 sqrt k), whatever the gradients are."""
        return 1 / (2 * math.sqrt(k))

    def following(self, threshold: float, picked: int, k: int) -> float:
        """Return the threshold after a step that picked so many."""
        share = picked / k
        if share > self.band:
            return threshold * self.fast_up
        if share > 1:
            return threshold * self.slow_up
        if share > 1 / self.band:
            return threshold * self.slow_down
        return threshold * self.fast_down


def padding(counts: Sequence[int]) -> float:
    """Return f = R max / sum, what padding everybody to the longest costs; 1 is none."""
    total = sum(counts)
    return len(counts) * max(counts) / total if total else 1.0
