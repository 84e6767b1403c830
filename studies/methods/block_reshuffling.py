"""Block reshuffling with paired reversal, an order that needs no gradients.

After Nguyen, Phan, Kalagnanam, "Learning to Shuffle" (arXiv:2604.00260), whose two components are
block reshuffling and paired reversal; docs/orders.md says what is ours.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradherd.ordering.policy import Start
from gradherd.ordering.random import SeededRandom
from gradherd.ordering.shuffles import NextOrders, Shuffle


def block_reshuffling(orders: list[Tensor], epoch: int, random: SeededRandom) -> list[Tensor]:
    """Reshuffle blocks, and units within them, in even epochs; reverse the order in odd ones.

    Depends on seed and epoch only, so a run may go to any epoch directly.
    """
    even, sizes = epoch - epoch % 2, [len(order) for order in orders]
    # Blocks are runs of the first epoch's random order: those of the data set could be sorted.
    following = [
        _reshuffled_blocks(first, within, blocks)
        for first, within, blocks in zip(
            random.permutations(sizes, 0),
            random.permutations(sizes, even),
            random.permutations([_num_blocks(size) for size in sizes], even, "blocks"),
            strict=True,
        )
    ]
    if not even:
        following = random.permutations(sizes, 0)
    return [order.flip(0) for order in following] if epoch % 2 else following


def _num_blocks(size: int) -> int:
    """Return about the square root: as many blocks as units in a block."""
    return round(math.sqrt(size))


def _reshuffled_blocks(first: Tensor, within: Tensor, blocks: Tensor) -> Tensor:
    """Return (n,) units block by block, the blocks in the order of `blocks`.

    Args:
        first: (n,) units whose runs are the blocks.
        within: (n,) permutation that orders the units of each block.
        blocks: Permutation of the blocks.
    """
    if not len(first):
        return first
    rank_of_block = blocks.argsort()
    block_of_unit = torch.empty_like(first)
    block_of_unit[first] = torch.arange(len(first)) * len(blocks) // len(first)
    # Stable, so that units of a block stay in the order of `within`.
    return within[rank_of_block[block_of_unit[within]].argsort(stable=True)]


@dataclass(frozen=True)
class BlockReshuffling(Shuffle):
    """A new order of blocks, and within blocks, in even epochs; the same reversed in odd ones."""

    name: str = "block-reshuffling"
    next_orders: NextOrders = field(default=block_reshuffling, repr=False)
    start: Start | None = "random"
