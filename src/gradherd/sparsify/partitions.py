"""Blocks of coordinates, partitions made of them, and moving their borders to equal loads.

A partition is a run of whole blocks; R partitions tile the vector. Loads are counts of what was
picked, which all workers know once indices have been exchanged, so all of them move the borders
alike without a word.

Letters: D coordinates, R partitions, NB blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_ALIGN = 32
# A border moves if its two sides differ by more than this part of the mean load.
_SLACK = 0.1


@dataclass(frozen=True)
class Blocks:
    """How a vector is cut into blocks of one size; the last may be shorter."""

    dim: int
    size: int

    @classmethod
    def of(cls, dim: int, wanted: int) -> "Blocks":
        """Cut `dim` coordinates into about `wanted` blocks, aligned to 32 where they are large.

        >>> Blocks.of(11_173_962, 1024), Blocks.of(31, 1024).count
        (Blocks(dim=11173962, size=10912), 31)
        """
        size = max(1, dim // wanted)
        return cls(dim, size - size % _ALIGN if size > _ALIGN else size)

    @property
    def count(self) -> int:
        """NB, the number of blocks."""
        return -(-self.dim // self.size)

    def bounds(self, cuts: Sequence[int]) -> list[int]:
        """Return the R + 1 coordinates at which partitions begin and end."""
        return [min(cut * self.size, self.dim) for cut in cuts]

    def loads(self, indices: Tensor, weights: Tensor) -> Tensor:
        """Add up the weights of what was picked in each block: (K,) -> (NB,) float64."""
        numbers = (indices // self.size).cpu()
        return torch.bincount(numbers, weights.double(), minlength=self.count).double()


def even_cuts(blocks: int, parts: int) -> list[int]:
    """Return R + 1 borders that give each partition as many blocks, the first ones one more.

    >>> even_cuts(10, 4)
    [0, 3, 6, 8, 10]
    """
    share, more = divmod(blocks, parts)
    return [part * share + min(part, more) for part in range(parts + 1)]


def recut(loads: Tensor, parts: int) -> list[int]:
    """Return the R + 1 borders that come nearest to equal loads: (NB,) loads of blocks.

    >>> recut(torch.tensor([8.0, 1.0, 1.0, 1.0, 1.0]), 3)
    [0, 1, 2, 5]
    """
    blocks = len(loads)
    before = torch.cat([loads.new_zeros(1), loads.cumsum(0)])
    if blocks < parts or not before[-1] > 0:
        return even_cuts(blocks, parts)
    wanted = before[-1] * torch.arange(1, parts, dtype=loads.dtype) / parts
    right = torch.searchsorted(before, wanted).clamp_(1, blocks)
    nearer = (wanted - before[right - 1]) < (before[right] - wanted)
    cuts = [0]
    for part, cut in enumerate((right - nearer.long()).tolist(), start=1):
        # Every partition has a block at least.
        cuts.append(min(max(cut, cuts[-1] + 1), blocks - parts + part))
    return [*cuts, blocks]


def diffuse(cuts: Sequence[int], loads: Sequence[float]) -> list[int]:
    """Move each border from the heavier side to the lighter one, from left to right.

    Unlike the published rule, which waits until one neighbour is over and the other under the
    mean, this looks at the difference alone: a slope with a plateau in it does not stall.

    Args:
        cuts: R + 1 borders, in blocks.
        loads: R loads of the partitions.
    """
    moved, left = list(cuts), [float(load) for load in loads]
    mean = sum(left) / len(left)
    for border in range(1, len(moved) - 1):
        difference = left[border - 1] - left[border]
        if abs(difference) <= _SLACK * mean:
            continue
        heavy = border - 1 if difference > 0 else border
        width = moved[heavy + 1] - moved[heavy]
        if width < 2:
            continue
        # A quarter of the difference: half would overshoot, as both borders of a partition move.
        per_block = left[heavy] / width
        count = min(width - 1, max(1, round(abs(difference) / 4 / per_block)))
        load = count * per_block
        sign = 1 if difference > 0 else -1
        moved[border] -= sign * count
        left[border - 1] -= sign * load
        left[border] += sign * load
    return moved
