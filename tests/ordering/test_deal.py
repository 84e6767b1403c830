import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradherd.ordering.deal import Deal

deals = st.builds(
    Deal,
    examples=st.integers(1, 60),
    unit=st.integers(1, 7),
    workers=st.integers(1, 9),
    drop_last=st.just(False),
)


def walk(deal: Deal) -> list[list[int]]:
    return [
        deal.indices(worker, torch.randperm(size)).tolist()
        for worker, size in enumerate(deal.sizes)
    ]


@given(deals)
def test_every_example_is_visited_and_all_workers_walk_equally_far(deal: Deal):
    walks = walk(deal)
    assert {len(indices) for indices in walks} == {deal.length * deal.unit}
    assert {index for indices in walks for index in indices} == set(range(deal.examples))


@given(deals)
def test_padding_repeats_less_than_a_round_and_a_unit(deal: Deal):
    visits = sum(len(indices) for indices in walk(deal))
    assert visits - deal.examples < deal.unit * deal.workers + deal.unit


@given(st.integers(1, 60), st.integers(1, 7), st.integers(1, 9))
def test_drop_last_visits_nothing_twice(examples: int, unit: int, workers: int):
    if examples // unit < workers:
        with pytest.raises(ValueError, match="drop_last=True leaves nothing"):
            Deal(examples, unit, workers, drop_last=True)
        return
    deal = Deal(examples, unit, workers, drop_last=True)
    visits = [index for indices in walk(deal) for index in indices]
    assert len(set(visits)) == len(visits) == workers * unit * (examples // unit // workers)


def test_units_are_consecutive_examples_dealt_in_turn():
    deal = Deal(examples=12, unit=2, workers=2, drop_last=False)
    assert deal.indices(0, torch.tensor([2, 0, 1])).tolist() == [8, 9, 0, 1, 4, 5]
    assert deal.indices(1, torch.tensor([0, 1, 2])).tolist() == [2, 3, 6, 7, 10, 11]


def test_a_worker_without_units_borrows_one():
    deal = Deal(examples=2, unit=1, workers=3, drop_last=False)
    assert deal.sizes == (1, 1, 0)
    assert deal.indices(2, torch.arange(0)).tolist() == [0]


def test_no_examples_are_refused():
    with pytest.raises(ValueError, match="at least one example, got 0"):
        Deal(0, 1, 1, drop_last=False)
