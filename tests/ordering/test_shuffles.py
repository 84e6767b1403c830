import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ordering.helpers import lists, make

SIZES = [16, 16, 9]


def history(name, epochs=6, seed=0, start="random", sizes=SIZES):
    ordering = make(name, sizes, seed=seed, start=start)
    orders = [lists(ordering.orders)]
    for _ in range(epochs - 1):
        ordering.end_epoch()
        orders.append(lists(ordering.orders))
    return orders


def test_reshuffling_differs_between_workers_and_epochs():
    drawn = [tuple(order) for orders in history("d-rr") for order in orders]
    assert len(set(drawn)) == len(drawn) == 18


@pytest.mark.parametrize("name", ["d-rr", "shuffle-once", "flip-flop"])
def test_equal_seeds_draw_equal_orders(name):
    assert history(name, seed=4) == history(name, seed=4) != history(name, seed=5)


def test_shuffle_once_keeps_its_draw():
    orders = history("shuffle-once", start="identity")  # Its own start wins.
    assert orders == [orders[0]] * 6
    assert orders[0][0] != list(range(16)) and orders[0][0] != orders[0][1]


def test_fixed_keeps_the_order_of_the_data():
    assert history("fixed", start="random") == [[list(range(size)) for size in SIZES]] * 6


@pytest.mark.parametrize("start", ["identity", "random"])
def test_flip_flop_walks_back_every_second_epoch(start):
    orders = history("flip-flop", start=start)
    for there, back in zip(orders[0::2], orders[1::2], strict=True):
        assert back == [order[::-1] for order in there]
    assert len({str(there) for there in orders[0::2]}) == 3
    assert (orders[0][0] == list(range(16))) == (start == "identity")


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    seed=st.integers(0, 99),
    shown=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_always_plus_is_evens_up_then_odds_down_whatever_the_rows(sizes, seed, shown):
    ordering = make("always-plus", sizes, seed=seed, start="random")
    for epoch in range(3):
        before = lists(ordering.orders)
        if shown:
            rows = torch.randn(max(sizes), len(sizes), 2) * 10.0**epoch
            ordering.observe(rows)
        ordering.end_epoch()
        assert lists(ordering.orders) == [order[0::2] + order[1::2][::-1] for order in before]


def test_an_order_of_seed_and_epoch_alone_can_go_anywhere():
    ordering = make("d-rr", SIZES, seed=3, start="random")
    ordering.end_epoch(5)
    assert ordering.epoch == 5
    assert lists(ordering.orders) == history("d-rr", seed=3)[5]


@pytest.mark.parametrize("name", ["d-rr", "shuffle-once", "fixed", "flip-flop", "always-plus"])
def test_time_passes_without_rows(name):
    ordering = make(name, [4, 4])
    ordering.observe(None, torch.ones(3, 2, dtype=torch.bool))
    assert ordering.steps == 3
    with pytest.raises(RuntimeError, match="after 3: the epoch has only 4"):
        ordering.observe(None, torch.ones(2, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="rows"):
        ordering.observe(None)
