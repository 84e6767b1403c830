"""Units, their workers, and another number of workers: nothing is lost, nothing comes twice."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradherd.comm.world import World
from gradherd.ordering.ordering import Ordering
from gradherd.ordering.registry import POLICIES, make_policy
from gradherd.ordering.sampler import OrderedSampler
from gradherd.ordering.sharding import UnitSharding, own_units, sequence, stripe

shardings = st.builds(
    UnitSharding,
    examples=st.integers(1, 60),
    unit=st.integers(1, 7),
    workers=st.integers(1, 9),
    drop_last=st.just(False),
)


def visited(sharding: UnitSharding) -> list[list[int]]:
    return [
        sharding.indices(worker, torch.randperm(size)).tolist()
        for worker, size in enumerate(sharding.sizes)
    ]


@given(shardings)
def test_every_example_is_visited_and_all_workers_take_as_many_steps(sharding: UnitSharding):
    all_indices = visited(sharding)
    assert {len(indices) for indices in all_indices} == {sharding.length * sharding.unit}
    assert {index for indices in all_indices for index in indices} == set(range(sharding.examples))


@given(shardings)
def test_padding_repeats_less_than_a_round_and_a_unit(sharding: UnitSharding):
    visits = sum(len(indices) for indices in visited(sharding))
    assert visits - sharding.examples < sharding.unit * sharding.workers + sharding.unit


@given(st.integers(1, 60), st.integers(1, 7), st.integers(1, 9))
def test_drop_last_visits_nothing_twice(examples: int, unit: int, workers: int):
    if examples // unit < workers:
        with pytest.raises(ValueError, match="drop_last=True leaves nothing"):
            UnitSharding(examples, unit, workers, drop_last=True)
        return
    sharding = UnitSharding(examples, unit, workers, drop_last=True)
    visits = [index for indices in visited(sharding) for index in indices]
    assert len(set(visits)) == len(visits) == workers * unit * (examples // unit // workers)


def test_units_are_consecutive_examples_striped_over_workers():
    sharding = UnitSharding(examples=12, unit=2, workers=2, drop_last=False)
    assert sharding.indices(0, torch.tensor([2, 0, 1])).tolist() == [8, 9, 0, 1, 4, 5]
    assert sharding.indices(1, torch.tensor([0, 1, 2])).tolist() == [2, 3, 6, 7, 10, 11]


def test_a_worker_without_units_borrows_one():
    sharding = UnitSharding(examples=2, unit=1, workers=3, drop_last=False)
    assert sharding.sizes == (1, 1, 0)
    assert sharding.indices(2, torch.arange(0)).tolist() == [0]


def test_no_examples_are_refused():
    with pytest.raises(ValueError, match="at least one example, got 0"):
        UnitSharding(0, 1, 1, drop_last=False)


def slow_sequence(orders, first, length):
    units = []
    for step in range(first, length):
        for worker, order in enumerate(orders):
            if step < len(order):
                units.append(int(order[step]) * len(orders) + worker)
    return units


@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.integers(0, 6), st.integers(0, 99))
def test_the_sequence_is_that_of_time(sizes, first, seed):
    torch.manual_seed(seed)
    orders = [torch.randperm(size) for size in sizes]
    assert sequence(orders, first).tolist() == slow_sequence(orders, first, max(sizes))


@given(st.integers(1, 40), st.integers(1, 6), st.integers(0, 99))
def test_stripes_are_permutations_of_each_workers_own(units, workers, seed):
    torch.manual_seed(seed)
    order = torch.randperm(units)
    stripes = own_units(order, workers)
    sizes = UnitSharding(units, 1, workers, drop_last=False).sizes
    assert [sorted(own.tolist()) for own in stripes] == [list(range(n)) for n in sizes]
    for worker, own in enumerate(stripes):
        positions = [order.tolist().index(int(unit) * workers + worker) for unit in own]
        assert positions == sorted(positions)


@given(st.integers(0, 30), st.integers(1, 6), st.booleans())
def test_stripes_share_everything(count, workers, drop_last):
    units = torch.randperm(50)[:count]
    shares = [stripe(units, worker, workers, drop_last).tolist() for worker in range(workers)]
    assert len({len(share) for share in shares}) == 1
    times = Counter(unit for share in shares for unit in share)
    if drop_last:
        assert set(times.values()) <= {1} and count - sum(times.values()) < workers
    else:
        assert times.keys() == set(units.tolist())
        assert sum(times.values()) - count < workers


class Ranks:
    """All ranks of a run, in one process: each has a sampler, and all learn the same rows."""

    def __init__(self, workers, policy, *, units, unit, drop_last=False):
        self.samplers = [
            OrderedSampler(
                range(units * unit - unit // 2),
                policy,
                batch_size=unit,
                unit=unit,
                seed=3,
                world=World(rank, workers),
                drop_last=drop_last,
            )
            for rank in range(workers)
        ]
        self.rows = torch.randn(units, 7, generator=torch.Generator().manual_seed(1))

    def epoch(self, most=10**9):
        """Walk on for some steps of this epoch; return the units that all ranks visited."""
        unit = self.samplers[0].unit
        passes = [iter(sampler) for sampler in self.samplers]
        visited = []
        for _ in range(min(most, (len(self.samplers[0]) - self.samplers[0].start) // unit)):
            batches = [[next(one) for _ in range(unit)] for one in passes]
            now = [batch[0] // unit for batch in batches]
            visited += now
            claims = [sampler.claim() for sampler in self.samplers]
            for sampler, claim in zip(self.samplers, claims, strict=True):
                if sampler.finishing_rest:
                    sampler.skip_rest()
                else:
                    sampler.observe(self.rows[now].unsqueeze(0), first=claim.step)
        return visited

    def state(self):
        sampler = self.samplers[0]
        return sampler.ordering.state_dict(), sampler.state_dict()

    def load(self, state):
        for sampler in self.samplers:
            sampler.ordering.load_state_dict(state[0])
            sampler.load_state_dict(state[1])


@settings(deadline=None, max_examples=60)
@given(
    policy=st.sampled_from(sorted(POLICIES)),
    worlds=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    units=st.integers(5, 40),
    unit=st.sampled_from([1, 3]),
    steps=st.lists(st.integers(0, 4), min_size=3, max_size=3),
)
def test_an_epoch_on_changing_ranks_visits_every_unit_once(policy, worlds, units, unit, steps):
    ranks = Ranks(worlds[0], policy, units=units, unit=unit)
    ranks.epoch()
    assert ranks.samplers[0].epoch == 1
    visited, spare = [], 0
    for at, workers in enumerate(worlds):
        if at:
            state = ranks.state()
            ranks = Ranks(workers, policy, units=units, unit=unit)
            ranks.load(state)
        last = at == len(worlds) - 1
        visited += ranks.epoch(10**9 if last else steps[at])
        if ranks.samplers[0].epoch == 2:
            spare = workers - 1
            break
        spare = workers - 1
    times = Counter(visited)
    assert times.keys() == set(range(units))
    assert sum(times.values()) - units <= spare, "only the last round may be filled"
    assert {sampler.epoch for sampler in ranks.samplers} == {2}
    assert len({sampler.ordering.version for sampler in ranks.samplers}) == 1
    orders = ranks.samplers[0].ordering.orders
    assert sorted(sequence(orders).tolist()) == list(range(units))
    assert not ranks.samplers[0].finishing_rest
    again = Counter(ranks.epoch())
    assert again.keys() == set(range(units))


def test_what_was_learned_goes_into_the_new_orders():
    four = Ranks(4, "cd-grab", units=48, unit=1)
    four.epoch()
    four.epoch(6)  # of 12: half of the units have a side
    straight = Ordering(make_policy("cd-grab"), four.samplers[0].ordering.sizes, seed=3)
    straight.load_state_dict(four.state()[0])
    straight.end_epoch(rest_follows=True)
    two = Ranks(2, "cd-grab", units=48, unit=1)
    two.load(four.state())
    two.epoch()
    expected = own_units(sequence(straight.orders), 2)
    got = two.samplers[0].ordering.orders
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))
    untouched = own_units(sequence(four.samplers[0].ordering.orders), 2)
    assert not all(torch.equal(*pair) for pair in zip(got, untouched, strict=True))


def test_a_whole_epoch_is_learned_from():
    four = Ranks(4, "cd-grab", units=48, unit=1)
    four.epoch()
    three = Ranks(3, "cd-grab", units=48, unit=1)
    three.load(four.state())
    assert not three.samplers[0].finishing_rest
    before = three.samplers[0].ordering.orders
    three.epoch()
    assert not all(
        torch.equal(*p) for p in zip(before, three.samplers[0].ordering.orders, strict=True)
    )


def test_one_mean_serves_all_new_workers():
    four = Ranks(4, "grab", units=16, unit=1)
    four.epoch()
    two = Ranks(2, "grab", units=16, unit=1)
    two.load(four.state())
    mean = two.samplers[0].ordering.state_dict()["balance"]["mean"]
    assert mean.shape == (2, 7)
    torch.testing.assert_close(mean, four.rows.mean(0).expand(2, 7))


def test_a_rest_goes_on_after_it_was_saved():
    four = Ranks(4, "cd-grab", units=41, unit=1)
    four.epoch()
    first = four.epoch(3)
    two = Ranks(2, "cd-grab", units=41, unit=1)
    two.load(four.state())
    second = two.epoch(5)
    again = Ranks(2, "cd-grab", units=41, unit=1)
    again.load(two.state())
    third = again.epoch()
    assert Counter(first + second + third).keys() == set(range(41))
    assert len(first + second + third) == 42, "29 are left for two"


def test_dropping_the_last_leaves_less_than_a_round_out():
    four = Ranks(4, "d-rr", units=41, unit=1, drop_last=True)
    visited = four.epoch(3)
    three = Ranks(3, "d-rr", units=41, unit=1, drop_last=True)
    three.load(four.state())
    visited += three.epoch()
    assert len(visited) == len(set(visited)) == 39, "40 of four; 28 are left for three"


def test_other_data_are_refused():
    state = Ranks(4, "cd-grab", units=48, unit=1).state()
    with pytest.raises(ValueError, match="units 48, this run has 47"):
        Ranks(2, "cd-grab", units=47, unit=1).load(state)


def test_positions_that_were_saved_apart_are_refused():
    four = Ranks(4, "cd-grab", units=48, unit=1)
    ordering, _ = four.state()
    four.epoch(2)
    _, cursor = four.state()
    with pytest.raises(ValueError, match="is not where its ordering was saved"):
        Ranks(2, "cd-grab", units=48, unit=1).load((ordering, cursor))


def test_a_rest_is_not_learned_from():
    four = Ranks(4, "cd-grab", units=48, unit=1)
    four.epoch(2)
    two = Ranks(2, "cd-grab", units=48, unit=1)
    two.load(four.state())
    with pytest.raises(RuntimeError, match="without learning"):
        two.samplers[0].observe(torch.zeros(1, 2, 7))


def test_iterators_that_are_restored_start_with_the_rest():
    four = Ranks(4, "cd-grab", units=48, unit=1)
    seen = four.epoch(5)
    ordering, cursor = four.state()
    two = Ranks(2, "cd-grab", units=48, unit=1)
    left = []
    for sampler in two.samplers:
        sampler.ordering.load_state_dict(ordering)
        iterator = iter(sampler)
        iterator.load_state_dict(cursor)  # as a loader that keeps its own state does
        left += list(iterator)
    assert sorted(seen + left) == list(range(48))


def test_a_rest_that_is_dropped_does_not_freeze_the_order():
    two = Ranks(2, "d-rr", units=9, unit=1, drop_last=True)
    two.epoch(3)
    four = Ranks(4, "d-rr", units=9, unit=1, drop_last=True)
    four.load(two.state())
    assert {sampler.epoch for sampler in four.samplers} == {1}
    assert len(four.epoch()) == 8


@pytest.mark.parametrize("rest", [[0, 1, 1], [0, 48], [-1, 2]])
def test_a_rest_of_no_units_is_refused(rest):
    two = Ranks(2, "cd-grab", units=48, unit=1)
    state = two.state()[0] | {"rest": torch.tensor(rest)}
    with pytest.raises(ValueError, match="the rest of its epoch"):
        two.samplers[0].ordering.load_state_dict(state)
