"""Which values of a vector reach a threshold, as bits that kernels write and read."""

from typing import NamedTuple

from torch import Tensor

TILE = 8192
"""Coordinates whose marks are counted together (`triton_kernels`)."""


class Marks(NamedTuple):
    """Memory of the marks of one vector.

    Empty where there is no Triton: `kernels.marked` then compares again, which is slow on a GPU.
    """

    words: Tensor
    """(D / 32,) int32, one bit for each value."""
    counts: Tensor
    """(D / TILE,) int32 bits set in each tile."""

    def part(self, begin: int, count: int) -> "Marks":
        """Return the marks of `count` values from `begin` on, which is a multiple of TILE."""
        tiles = slice(begin // TILE, -(-(begin + count) // TILE))
        return Marks(
            self.words[tiles.start * TILE // 32 : tiles.stop * TILE // 32], self.counts[tiles]
        )
