"""Score orders and length grouping against slow, obvious definitions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradherd import OrderedSampler, World
from gradherd.comm.script import run_together
from gradherd.ordering.ordering import Ordering
from gradherd.ordering.policy import ShardedRows
from studies.methods.scored import (
    Curriculum,
    LengthGrouped,
    Saw,
    Stair,
    easy_to_hard,
    group_by_length,
    saw,
    stair,
)
from tests.ordering.helpers import is_permutation, lists, show, whole_vectors


def layered(part, layers, back_and_forth):
    """Every `layers`-th unit, then the ones after these, and so on; odd layers descend."""
    out = []
    for layer in range(layers):
        one = [unit for at, unit in enumerate(part) if at % layers == layer]
        out += sorted(one, reverse=bool(back_and_forth and layer % 2))
    return out


def around_borders(count, sections, radius, layers, back_and_forth):
    """Mark each unit with the region it is in, then write the regions one after the other."""
    half, region_of, taken = round(count * radius), {}, 0
    for section in range(1, sections):
        border = round(count * section / sections)
        for unit in range(max(taken, border - half), min(count, border + half)):
            region_of[unit] = section
            taken = unit + 1
    out, unit = [], 0
    while unit < count:
        region = region_of.get(unit)
        part = [u for u in range(count) if region is not None and region_of.get(u) == region]
        out += layered(part, layers, back_and_forth) if part else [unit]
        unit += len(part) or 1
    return out


@given(
    count=st.integers(0, 40),
    sections=st.integers(1, 5),
    radius=st.sampled_from([0.0, 0.1, 0.225, 0.5, 1.0]),
    layers=st.integers(1, 4),
)
@settings(max_examples=80, deadline=None)
def test_stair_and_saw_follow_their_definition(count, sections, radius, layers):
    units = torch.arange(count)
    for arrange, back_and_forth in ((stair, False), (saw, True)):
        found = arrange(units, sections, radius, layers).tolist()
        assert found == around_borders(count, sections, radius, layers, back_and_forth)


def test_stair_and_saw_of_twenty_units():
    # The published configurations by hand: two sections, 8 units in three layers around the border;
    # three sections, 4 units around each of the borders 7 and 13.
    found = stair(torch.arange(20)).tolist()
    assert found == [*range(6), 6, 9, 12, 7, 10, 13, 8, 11, *range(14, 20)]
    assert saw(torch.arange(20)).tolist() == [
        *range(5),
        5,
        8,
        6,
        7,
        9,
        10,
        11,
        14,
        12,
        13,
        *range(15, 20),
    ]
    assert easy_to_hard(torch.arange(5)).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "policy, arrange", [(Curriculum(), easy_to_hard), (Stair(), stair), (Saw(), saw)]
)
def test_norms_of_the_last_epoch_order_the_next_one(policy, arrange):
    sizes = [8, 7]
    ordering, vectors = Ordering(policy, sizes), whole_vectors(3, sizes)
    for _ in range(2):
        before = lists(ordering.orders)
        show(ordering, vectors)
        ordering.end_epoch()
        for worker, order in enumerate(before):
            norms = vectors[worker].norm(dim=1).tolist()
            by_norm = sorted(order, key=norms.__getitem__)
            expected = arrange(torch.tensor(by_norm)).tolist()
            assert ordering.orders[worker].tolist() == expected


def test_units_without_a_gradient_keep_their_position():
    ordering = Ordering(Curriculum(), [6], start="identity")
    rows = torch.tensor([5.0, 4.0, 3.0, torch.nan, 2.0, 1.0]).view(6, 1, 1)
    seen = torch.tensor([True, False, True, True, True, True]).view(6, 1)
    ordering.observe(rows, seen)
    ordering.end_epoch()
    # 1 was not seen and 3 is not finite; 5, 4, 2, 0 are sorted around them.
    assert lists(ordering.orders) == [[5, 1, 4, 3, 2, 0]]


def test_slices_give_the_same_scores():
    rows = torch.randn(6, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole, *halves = (Ordering(Saw(), [6, 6], start="identity") for _ in range(3))
    whole.observe(rows)
    run_together(
        [
            one.learn(ShardedRows((part,)))
            for one, part in zip(halves, rows.split(4, -1), strict=True)
        ]
    )
    for ordering in (whole, *halves):
        ordering.end_epoch()
    assert whole.version == halves[0].version == halves[1].version


def test_scores_that_are_given_need_no_gradients_and_order_the_first_epoch():
    scores = torch.tensor([3.0, 1.0, 2.0, 0.0, 1.0, 5.0, 4.0])
    policy = Curriculum(scores=scores)
    sampler = OrderedSampler(range(7), policy, batch_size=1, world=World.single())
    for _ in range(2):
        assert list(sampler) == [3, 1, 4, 2, 0, 6, 5]
        sampler.set_epoch(sampler.epoch + 1)
    # Unit j of worker w is unit 2 j + w of the data set.
    two = Ordering(policy, [4, 3])
    assert lists(two.orders) == [[2, 1, 0, 3], [1, 0, 2]]
    assert policy == Curriculum(scores=scores.tolist()) != Curriculum()
    assert repr(policy) != repr(Curriculum(scores=scores + 1))


@pytest.mark.parametrize("values", [[1.0, 2.0], torch.ones(2, 3), [1.0, torch.nan, 2.0]])
def test_values_that_do_not_fit_are_refused(values):
    with pytest.raises(ValueError, match=r"scores must be one .*number"):
        Ordering(Stair(scores=values), [2, 1])
    with pytest.raises(ValueError, match=r"lengths must be one .*number"):
        Ordering(LengthGrouped(values, batch=1), [2, 1])
    with pytest.raises(ValueError, match="for workers with"):
        Ordering(Stair(scores=[1.0, 2.0, 3.0]), [1, 2])
    with pytest.raises(ValueError, match="batch must be at least 1, got 0"):
        LengthGrouped([1, 2], batch=0)


@given(count=st.integers(0, 60), batch=st.integers(1, 9), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_groups_are_sorted_by_length(count, batch, seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (count,), generator=generator).double()
    permutation = torch.randperm(count, generator=generator)
    order = group_by_length(permutation, lengths, batch)
    assert is_permutation(order, count)
    if count:
        assert lengths[order[0]] == lengths.max()
    group = max(1, min(count // (4 * batch), 50)) * batch
    for at in range(0, count, group):
        # Each group holds the units it was cut with, but for the two that trade places.
        own = set(order[at : at + group].tolist())
        assert len(own - set(permutation[at : at + group].tolist())) <= 1
        inner = lengths[order[at + 1 : at + group]]
        assert (inner[:-1] >= inner[1:]).all()


def test_length_grouping_pads_less_than_shuffling():
    lengths = torch.randint(1, 100, (240,), generator=torch.Generator().manual_seed(1))

    def padding(sampler):
        batches = lengths[torch.tensor(list(sampler))].view(-1, 8)
        return int((batches.max(1, keepdim=True).values - batches).sum())

    world = World.single()
    plain = OrderedSampler(range(240), "d-rr", batch_size=8, world=world)
    grouped = OrderedSampler(range(240), LengthGrouped(lengths, batch=8), batch_size=8, world=world)
    first = list(grouped)
    assert padding(grouped) < 0.4 * padding(plain)
    grouped.set_epoch(1)
    assert list(grouped) != first and sorted(grouped) == list(range(240))
    saved = grouped.ordering.state_dict()
    other = OrderedSampler(range(240), LengthGrouped(lengths, batch=8), batch_size=8, world=world)
    other.ordering.load_state_dict(saved)
    assert lists(other.ordering.orders) == lists(grouped.ordering.orders)
