import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradherd.ordering.permute import reorder, reorder_all

side_lists = st.lists(st.sampled_from([-1, 0, 1]), max_size=12)


def two_pointers(order, sides):
    slots = [p for p, side in enumerate(sides) if side]
    following, left, right = list(order), 0, len(slots) - 1
    for p, side in enumerate(sides):
        if side > 0:
            following[slots[left]] = order[p]
            left += 1
        elif side < 0:
            following[slots[right]] = order[p]
            right -= 1
    return following


@given(sides=side_lists, seed=st.integers(0, 1000))
@settings(max_examples=100, deadline=None)
def test_reorder_is_the_walk_of_two_pointers(sides, seed):
    order = torch.randperm(len(sides), generator=torch.Generator().manual_seed(seed))
    before = order.clone()
    found = reorder(order, torch.tensor(sides, dtype=torch.int8))
    assert found.tolist() == two_pointers(order.tolist(), sides)
    assert torch.equal(order, before)


@given(sides=side_lists)
@settings(max_examples=50, deadline=None)
def test_units_of_side_zero_keep_their_place_and_the_others_move_as_if_alone(sides):
    kept = [p for p, side in enumerate(sides) if side == 0]
    moved = [p for p, side in enumerate(sides) if side]
    found = reorder(torch.arange(len(sides)), torch.tensor(sides, dtype=torch.int8)).tolist()
    assert [found[p] for p in kept] == kept
    alone = reorder(torch.tensor(moved, dtype=torch.int64), torch.tensor([s for s in sides if s]))
    assert [found[p] for p in moved] == alone.tolist()


def test_no_sides_no_move():
    order = torch.tensor([3, 1, 0, 2])
    assert reorder(order, torch.zeros(4, dtype=torch.int8)).tolist() == [3, 1, 0, 2]


def test_workers_of_different_sizes_use_their_own_column():
    sides = torch.tensor([[1, -1, 1], [-1, 1, 1], [1, 1, 1]], dtype=torch.int8)
    orders = [torch.tensor([7, 8, 9]), torch.tensor([1, 0]), torch.tensor([], dtype=torch.int64)]
    assert [o.tolist() for o in reorder_all(orders, sides)] == [[7, 9, 8], [0, 1], []]
