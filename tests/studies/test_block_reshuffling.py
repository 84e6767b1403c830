"""Block reshuffling with paired reversal."""

import pytest

from gradherd.ordering.ordering import Ordering
from studies.methods.block_reshuffling import BlockReshuffling
from tests.ordering.helpers import lists

SIZES = [16, 16, 9]


def make(seed, sizes=SIZES):
    return Ordering(BlockReshuffling(), sizes, seed=seed, start="identity")


def history(epochs=6, seed=0, sizes=SIZES):
    ordering = make(seed, sizes)
    orders = [lists(ordering.orders)]
    for _ in range(epochs - 1):
        ordering.end_epoch()
        orders.append(lists(ordering.orders))
    return orders


def test_equal_seeds_draw_equal_orders():
    assert history(seed=4) == history(seed=4) != history(seed=5)


def test_it_can_go_to_any_epoch():
    ordering = make(seed=3)
    ordering.end_epoch(5)
    assert ordering.epoch == 5
    assert lists(ordering.orders) == history(seed=3)[5]


def test_block_reshuffling_keeps_its_blocks_and_walks_back():
    orders = history(epochs=8, seed=2)
    for there, back in zip(orders[0::2], orders[1::2], strict=True):
        assert back == [order[::-1] for order in there]
    for worker, size in enumerate(SIZES):
        block = round(size**0.5)  # 16 and 9 units: 4 and 3 blocks, of as many units
        sequences = [
            [sorted(there[worker][at : at + block]) for at in range(0, size, block)]
            for there in orders[0::2]
        ]
        # The blocks are the runs of epoch 0; their sequence is drawn anew, and so is the order
        # within them.
        assert all(sorted(found) == sorted(sequences[0]) for found in sequences)
        assert len(set(map(str, sequences))) > 1
        starts = {there[worker][0] for there in orders[0::2]}
        assert starts != {found[0][0] for found in sequences}
    assert len({str(there) for there in orders[0::2]}) == 4


@pytest.mark.parametrize("sizes", [[0], [1], [2, 5], [17]], ids=str)
def test_block_reshuffling_of_any_size(sizes):
    for orders in history(sizes=sizes):
        assert [sorted(order) for order in orders] == [list(range(size)) for size in sizes]
