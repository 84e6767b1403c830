"""Partitions made of blocks, and how to move their borders until all loads are equal.

A partition is a run of whole blocks; R partitions tile the vector. A load is the number of
coordinates selected in a partition. All workers know the loads once the indices are exchanged,
so all of them move the borders the same way without further communication.

Letters: D coordinates, R partitions, NB blocks, K selected coordinates.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# As in the published code: the 32 threads of a warp then read aligned memory.
_ALIGN = 32
# `diffuse` moves a border only if the loads of its two sides differ by more than this share of
# the mean load. The published rule asks for one side above 1.05 times the mean and the other below
# 1 / 1.05, which is about as far apart.
_SLACK = 0.1
LOAD_UNIT = 1 << 16
"""Loads are compared as whole multiples of one over this."""


@dataclass(frozen=True)
class Blocks:
    """A vector cut into blocks of one size; the last may be shorter."""

    dim: int
    """D."""
    size: int
    """Coordinates of a block."""

    @classmethod
    def of(cls, dim: int, count: int) -> "Blocks":
        """Cut `dim` coordinates into about `count` blocks; large blocks are multiples of 32.

        >>> Blocks.of(11_173_962, 1024), Blocks.of(31, 1024).count
        (Blocks(dim=11173962, size=10912), 31)
        """
        # Short vectors have blocks of one coordinate. The published code needs at least 32,768, and
        # adds what is left after 1024 blocks to the last partition; here it becomes further blocks.
        size = max(1, dim // count)
        return cls(dim, size - size % _ALIGN if size > _ALIGN else size)

    @property
    def count(self) -> int:
        """NB, the number of blocks."""
        return -(-self.dim // self.size)


def even_cuts(blocks: int, parts: int) -> list[int]:
    """Return R + 1 borders of partitions with equally many blocks; the first may have one more.

    >>> even_cuts(10, 4)
    [0, 3, 6, 8, 10]
    """
    share, more = divmod(blocks, parts)
    return [part * share + min(part, more) for part in range(parts + 1)]


def whole_loads(loads: Tensor) -> Tensor:
    """Return loads as integers, of which sums are exact in any order.

    All ranks must move borders alike, and a GPU adds floats in an order of its own.
    """
    return (loads * LOAD_UNIT).round().long()


def recut(loads: Tensor, parts: int) -> Tensor:
    """Return the (R + 1,) borders, in blocks, that come closest to equal loads.

    Takes (NB,) float64 loads of the blocks.

    >>> recut(torch.tensor([8.0, 1.0, 1.0, 1.0, 1.0]), 2).tolist()
    [0, 1, 5]
    """
    blocks = len(loads)
    every = torch.arange(parts + 1, device=loads.device)
    before = torch.nn.functional.pad(whole_loads(loads).cumsum(0), (1, 0))
    targets = before[-1] * every[1:-1] // parts
    right = torch.searchsorted(before, targets).clamp_(1, blocks)
    nearer = (targets - before[right - 1]) < (before[right] - targets)
    # `even_cuts`, on the device: a copy from the host would wait.
    even = every * (blocks // parts) + every.clamp(max=blocks % parts)
    cuts = torch.cat([even[:1], right - nearer.long(), even[-1:]])
    return torch.where(before[-1] > 0, cuts, even)


def apart(cuts: Tensor, least: int) -> Tensor:
    """Return (R + 1,) borders with at least `least` blocks between any two of them.

    There must be as many blocks: a worker that has too few coordinates could not select its share.

    >>> apart(torch.tensor([0, 1, 1, 6]), 2).tolist()
    [0, 2, 4, 6]
    """
    # Without the room that partitions keep, borders only have to be in order, none beyond the last.
    room = least * torch.arange(len(cuts), device=cuts.device)
    free = cuts - room
    return torch.minimum(free.cummax(0).values, free[-1]) + room


def diffuse(cuts: Sequence[int], loads: Sequence[float]) -> list[int]:
    """Move each border from the heavier side to the lighter one, from left to right.

    The published rule moves a border only if one neighbour is above the mean and the other below.
    This one compares the two neighbours directly, so a slope with a plateau in it does not stall.

    Takes R + 1 borders in blocks and R loads of the partitions, and returns R + 1 borders.

    >>> diffuse([0, 8, 16], [30.0, 10.0])
    [0, 7, 16]
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
            continue  # The last block of a partition stays.
        # Move a quarter of the difference. Half would equalise two neighbours but overshoot
        # overall, because both borders of a partition move.
        per_block = left[heavy] / width
        count = min(width - 1, max(1, round(abs(difference) / 4 / per_block)))
        load = count * per_block
        sign = 1 if difference > 0 else -1
        moved[border] -= sign * count
        # The next border sees the loads as they will be, or both would move for one surplus.
        left[border - 1] -= sign * load
        left[border] += sign * load
    return moved
