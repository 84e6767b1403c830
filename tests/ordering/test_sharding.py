import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradherd.ordering.sharding import UnitSharding

deals = st.builds(
    UnitSharding,
    examples=st.integers(1, 60),
    unit=st.integers(1, 7),
    workers=st.integers(1, 9),
    drop_last=st.just(False),
)


def walk(sharding: UnitSharding) -> list[list[int]]:
    return [
        sharding.indices(worker, torch.randperm(size)).tolist()
        for worker, size in enumerate(sharding.sizes)
    ]


@given(deals)
def test_every_example_is_visited_and_all_workers_walk_equally_far(sharding: UnitSharding):
    walks = walk(sharding)
    assert {len(indices) for indices in walks} == {sharding.length * sharding.unit}
    assert {index for indices in walks for index in indices} == set(range(sharding.examples))


@given(deals)
def test_padding_repeats_less_than_a_round_and_a_unit(sharding: UnitSharding):
    visits = sum(len(indices) for indices in walk(sharding))
    assert visits - sharding.examples < sharding.unit * sharding.workers + sharding.unit


@given(st.integers(1, 60), st.integers(1, 7), st.integers(1, 9))
def test_drop_last_visits_nothing_twice(examples: int, unit: int, workers: int):
    if examples // unit < workers:
        with pytest.raises(ValueError, match="drop_last=True leaves nothing"):
            UnitSharding(examples, unit, workers, drop_last=True)
        return
    sharding = UnitSharding(examples, unit, workers, drop_last=True)
    visits = [index for indices in walk(sharding) for index in indices]
    assert len(set(visits)) == len(visits) == workers * unit * (examples // unit // workers)


def test_units_are_consecutive_examples_dealt_in_turn():
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
