import io
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from gradherd import POLICIES, CDGraB, OrderedSampler, Walk, World
from gradherd.lab.ranks import run_ranks
from gradherd.ordering.batches import FollowedLoader

LEARNED = ["grab", "pair-grab", "id-grab", "id-pair-grab", "cd-grab"]
DIM = 5


class Numbers(torch.utils.data.Dataset):
    """Example i is the number i; a module-level class, for loader workers."""

    def __init__(self, count: int):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


def make(policy="cd-grab", count=24, *, rank=0, size=1, batch_size=4, **kwargs) -> OrderedSampler:
    world = World(rank, size)
    return OrderedSampler(Numbers(count), policy, batch_size=batch_size, world=world, **kwargs)


def gradient(index: int) -> torch.Tensor:
    return torch.randn(DIM, generator=torch.Generator().manual_seed(index), dtype=torch.float64)


def rows_of(sampler: OrderedSampler, first: int, count: int) -> torch.Tensor:
    """(count, workers, D): the mean gradient of the unit each worker visits at each step."""
    sharding, unit = sampler.sharding, sampler.unit
    walks = [sharding.indices(w, order) for w, order in enumerate(sampler.ordering.orders)]
    return torch.stack(
        [
            torch.stack(
                [
                    torch.stack([gradient(int(i)) for i in walk[s * unit : (s + 1) * unit]]).mean(0)
                    for walk in walks
                ]
            )
            for s in range(first, first + count)
        ]
    )


def feed(sampler: OrderedSampler, count: int | None = None) -> None:
    first = sampler.ordering.steps
    count = sampler.ordering.length - first if count is None else count
    sampler.observe(rows_of(sampler, first, count))


def test_is_a_distributed_sampler_with_its_attributes():
    sampler = make(size=3, rank=1, count=25)
    assert isinstance(sampler, DistributedSampler)
    assert (sampler.num_replicas, sampler.rank, sampler.epoch) == (3, 1, 0)
    assert (len(sampler), sampler.num_samples, sampler.total_size) == (9, 9, 27)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=15, deadline=None)
@given(
    count=st.integers(1, 40),
    size=st.integers(1, 5),
    unit=st.sampled_from([1, 2, 4]),
    epochs=st.integers(1, 3),
)
def test_each_epoch_visits_every_example_on_some_rank(policy, count, size, unit, epochs):
    ranks = [make(policy, count, rank=r, size=size, unit=unit) for r in range(size)]
    for _ in range(epochs):
        assert {index for sampler in ranks for index in sampler} == set(range(count))
        assert len({len(list(sampler)) for sampler in ranks}) == 1
        for sampler in ranks:
            feed(sampler)


@pytest.mark.parametrize("policy", LEARNED)
def test_drop_last_leaves_no_example_out_for_ever(policy):
    ranks = [make(policy, 11, rank=r, size=2, drop_last=True) for r in range(2)]
    visited = set()
    for _ in range(2):
        assert [len(list(sampler)) for sampler in ranks] == [5, 5]
        visited |= {index for sampler in ranks for index in sampler}
        for sampler in ranks:
            feed(sampler)
    assert visited == set(range(11))


def test_iterating_changes_nothing():
    sampler = make()
    before = sampler.ordering.state_dict()
    first, half = list(sampler), iter(sampler)
    next(half), next(half)
    assert list(sampler) == first
    after = sampler.ordering.state_dict()
    assert torch.equal(before["orders"], after["orders"])
    assert before["balance"]["steps"] == after["balance"]["steps"] == 0


def test_an_iterator_keeps_the_order_it_began_with():
    sampler = make()
    expected, walk = list(sampler), iter(sampler)
    head = [next(walk) for _ in range(5)]
    feed(sampler)
    assert head + list(walk) == expected
    assert list(sampler) != expected


def test_set_epoch_is_idempotent_and_agrees_with_the_automatic_step():
    once, often, never = make(), make(), make()
    for epoch in range(3):
        once.set_epoch(epoch)
        for _ in range(3):
            often.set_epoch(epoch)
        assert list(once) == list(often) == list(never)
        for sampler in (once, often, never):
            feed(sampler)
    assert once.epoch == never.epoch == 3


@pytest.mark.parametrize("policy", LEARNED)
def test_forgetting_set_epoch_does_not_freeze_the_order(policy):
    sampler = make(policy)
    before = list(sampler)
    feed(sampler)
    assert list(sampler) != before


def test_d_rr_draws_anew_each_epoch_and_differently_on_each_rank():
    walks = set()
    for rank in range(2):
        sampler = make("d-rr", 40, rank=rank, size=2)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            walks.add(tuple(index // 2 for index in sampler))
    assert len(walks) == 6


@pytest.mark.parametrize("policy", LEARNED)
def test_units_not_visited_come_first(policy):
    sampler = make(policy, 24)
    before = list(sampler)
    feed(sampler, 10)
    sampler.set_epoch(1)
    after = list(sampler)
    assert after[:14] == before[10:]
    assert sorted(after[14:]) == sorted(before[:10])


@pytest.mark.parametrize("policy", LEARNED)
def test_no_unit_starves_where_epochs_end_early(policy):
    sampler, visits = make(policy, 24), torch.zeros(24, dtype=torch.int64)
    for epoch, stop in enumerate([10, 6, 4, 10, 10, 10, 2, 16, 22]):
        sampler.set_epoch(epoch)
        visits[list(sampler)[:stop]] += 1
        feed(sampler, stop)
        assert visits.max() - visits.min() <= 1


def test_whole_batches_keep_their_make_up():
    sampler = make(count=24, batch_size=4, unit=4)
    for _ in range(3):
        walk = list(sampler)
        batches = [walk[i : i + 4] for i in range(0, 24, 4)]
        assert sorted(batches) == [list(range(i, i + 4)) for i in range(0, 24, 4)]
        feed(sampler)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_dataloader_prefetch_early_stop_and_second_iterator(num_workers):
    sampler = make(count=24)
    loader = DataLoader(Numbers(24), batch_size=4, sampler=sampler, num_workers=num_workers)
    expected = list(sampler)
    for step, batch in enumerate(loader):
        assert batch.tolist() == expected[4 * step : 4 * step + 4]
        feed(sampler, 4)
        if step == 2:
            break
    assert [i for batch in loader for i in batch.tolist()] == expected
    sampler.set_epoch(1)
    walk = [i for batch in loader for i in batch.tolist()]
    assert sorted(walk) == list(range(24)) and walk[:12] == expected[12:]


def test_a_loader_that_shuffles_batches_is_refused_where_it_matters():
    sampler = make()
    learned = DataLoader(Numbers(24), batch_size=4, sampler=sampler, num_workers=1, in_order=False)
    with pytest.raises(ValueError, match="in_order=False"):
        FollowedLoader(learned, sampler)
    running = iter(learned)
    next(running)
    with pytest.raises(RuntimeError, match=r"herd.batches\(loader\)"):
        sampler.claim()
    del running
    drawn = DataLoader(
        Numbers(24), batch_size=4, sampler=make("d-rr"), num_workers=1, in_order=False
    )
    assert sorted(i for batch in drawn for i in batch.tolist()) == list(range(24))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("policy", ["cd-grab", "d-rr"])
def test_stateful_loader_resumes_twice_in_an_epoch(policy, num_workers):
    def loader() -> tuple[OrderedSampler, StatefulDataLoader]:
        sampler = make(policy, 24)
        return sampler, StatefulDataLoader(
            Numbers(24), batch_size=4, sampler=sampler, num_workers=num_workers
        )

    sampler, whole = loader()
    feed(sampler)
    expected = [batch.tolist() for batch in whole]

    got, state, learned = [], None, sampler.ordering.state_dict()
    for batches in (2, 1, 3):
        sampler, part = loader()
        sampler.ordering.load_state_dict(learned)
        if state is not None:
            part.load_state_dict(state)
        walk = iter(part)
        got += [next(walk).tolist() for _ in range(batches)]
        state = part.state_dict()
    assert got == expected


def test_cursor_has_constant_size_and_is_a_snapshot():
    small, large = make(count=20), make(count=20_000)
    sizes = [len(pickle.dumps(s.state_dict())) for s in (small, large)]
    assert abs(sizes[0] - sizes[1]) < 16
    walk = iter(large)
    next(walk)
    cursor = walk.state_dict()
    next(walk)
    assert cursor["position"] == 1


def test_cursor_of_an_order_not_at_hand_is_refused():
    sampler = make()
    feed(sampler)
    with pytest.raises(RuntimeError, match="load the state of its ordering first"):
        make().load_state_dict(sampler.state_dict())


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=10, deadline=None)
@given(stop=st.integers(0, 11))
def test_resume_anywhere_gives_the_same_future(policy, stop):
    whole = make(policy, 23, size=2, rank=1)
    feed(whole)
    if stop:
        feed(whole, stop)
    file = io.BytesIO()
    torch.save({"ordering": whole.ordering.state_dict(), "cursor": whole.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    resumed = make(policy, 23, size=2, rank=1)
    resumed.ordering.load_state_dict(state["ordering"])
    resumed.load_state_dict(state["cursor"])
    assert list(resumed) == whole.indices()[whole.ordering.steps :]
    for _ in range(3):
        feed(whole), feed(resumed)
        assert list(resumed) == list(whole)


@pytest.mark.parametrize("skipped_by", ["sampler", "loader"])
def test_a_pass_that_trains_on_nothing_leaves_the_rest_of_a_resumed_epoch(skipped_by):
    whole, resumed = make(), make()
    feed(whole, 8)
    resumed.ordering.load_state_dict(whole.ordering.state_dict())
    resumed.load_state_dict(whole.state_dict(), skipped_by=skipped_by)
    rest = whole.indices()[8 if skipped_by == "sampler" else 0 :]
    for _ in range(3):
        assert list(resumed) == rest
        assert resumed.start == 8


def test_policy_objects_and_names_mean_the_same():
    by_name, by_object = make("cd-grab"), make(CDGraB())
    feed(by_name), feed(by_object)
    assert list(by_name) == list(by_object)
    assert make(CDGraB(rule=Walk(c=2.0))).ordering.policy == CDGraB(rule=Walk(c=2.0))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policy": "grabb"}, "unknown order 'grabb'; known are d-rr"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"unit": 3}, "unit must divide batch_size 4, got 3"),
        ({"unit": 8}, "unit must divide batch_size 4, got 8"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"dataset": Stream()}, "map-style, with a length, got Stream"),
        ({"dataset": Numbers(0)}, "at least one example, got 0"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    arguments = {"dataset": Numbers(8), "policy": "cd-grab", "batch_size": 4} | change
    with pytest.raises(ValueError, match=message):
        OrderedSampler(**arguments)


def walk_on_a_rank() -> list[list[int]]:
    sampler = OrderedSampler(Numbers(30), "cd-grab", batch_size=5)
    walks = []
    for _ in range(3):
        walks.append(list(sampler))
        feed(sampler)
    return walks


def test_real_ranks_find_their_world_and_share_the_data():
    ranks = run_ranks(walk_on_a_rank, 3)
    alone = [make(count=30, rank=r, size=3, batch_size=5) for r in range(3)]
    for epoch in range(3):
        assert sorted(i for walks in ranks for i in walks[epoch]) == list(range(30))
        for rank, sampler in enumerate(alone):
            assert ranks[rank][epoch] == list(sampler)
            feed(sampler)
