"""What every policy promises, with every sign rule: the entry ticket for a new one."""

import copy

import pytest
import torch

from gradherd.ordering.bounds import parallel_herding_bound
from gradherd.ordering.ordering import Ordering
from gradherd.ordering.registry import POLICIES, SIGN_RULES, make_policy
from gradherd.replay.recorded import random_vectors, replay_order
from studies.methods import ORDERS
from tests.ordering.helpers import is_permutation, lists, same, show, through_disk

# What contracts hold for: the registry, and what studies bring along.
ALL = [*POLICIES, *ORDERS]


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """Register the orders of studies, so that names work as for all others."""
    for name, policy in ORDERS.items():
        monkeypatch.setitem(POLICIES, name, policy)


def plain(name):
    return ORDERS[name]() if name in ORDERS else make_policy(name)


def learns(name):
    return plain(name).needs_rows


def balances(name):
    return hasattr(plain(name), "rule")


LEARNING = [name for name in ALL if learns(name)]
BALANCING = [name for name in ALL if balances(name)]
CASES = [
    pytest.param(name, rule, id=f"{name} {rule}" if name in BALANCING else name)
    for name in ALL
    for rule in (SIGN_RULES if name in BALANCING else ["greedy"])
]
every_policy = pytest.mark.parametrize(("name", "rule"), CASES)

SIGNING = {"grab", "pair-grab", "id-grab", "id-pair-grab", "cd-grab", "cd-grab-live"}
SCORED = {"curriculum", "stair", "saw"}
DRAWN = {"d-rr", "shuffle-once", "flip-flop", "block-reshuffling"}
PUBLISHED = SIGNING | SCORED | DRAWN | {"fixed", "always-plus"}
published = pytest.mark.parametrize(
    ("name", "rule"), [case for case in CASES if case.values[0] in PUBLISHED]
)

SHAPES = [[8, 8], [7, 12, 4], [5], [1], [1, 1, 1], [2], [0], [0, 3], [6, 0, 5], [0, 0], [1, 16]]


def make(name, rule, sizes, seed=0, start="random"):
    return Ordering(make_policy(name, rule), sizes, seed=seed, start=start)


def drawn(sizes, dim=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, dim, generator=generator, dtype=torch.float64) for n in sizes]


def run(ordering, epochs, vectors):
    for _ in range(epochs):
        show(ordering, vectors)
        ordering.end_epoch()
    return ordering


def test_all_published_names_are_there():
    # At least these: who registers another order changes nothing here.
    assert set(BALANCING) >= SIGNING
    assert set(LEARNING) - set(BALANCING) >= SCORED
    assert set(ALL) - set(LEARNING) >= DRAWN | {"fixed", "always-plus"}
    assert set(SIGN_RULES) >= {"greedy", "walk", "kernel"}


@every_policy
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_orders_are_permutations_after_every_epoch(name, rule, sizes):
    ordering, vectors = make(name, rule, sizes), drawn(sizes)
    for epoch in range(5):
        assert (ordering.epoch, ordering.steps) == (epoch, 0)
        assert all(is_permutation(o, n) for o, n in zip(ordering.orders, sizes, strict=True))
        show(ordering, vectors)
        assert ordering.steps == ordering.length == max(sizes)
        ordering.end_epoch()


@every_policy
def test_orders_are_permutations_when_little_was_seen(name, rule):
    sizes = [7, 12, 4]
    ordering = make(name, rule, sizes)
    for steps in (0, 1, 5, 12):
        seen = torch.rand(steps, 3, generator=torch.Generator().manual_seed(steps)) < 0.6
        ordering.observe(torch.randn(steps, 3, 2), seen)
        ordering.end_epoch()
        assert all(is_permutation(o, n) for o, n in zip(ordering.orders, sizes, strict=True))


@every_policy
def test_equal_seeds_and_rows_give_equal_bits(name, rule):
    sizes = [7, 12, 4]
    a, b = (run(make(name, rule, sizes, seed=5), 3, drawn(sizes)) for _ in range(2))
    assert same(a.state_dict(), b.state_dict())
    assert a.version == b.version


@every_policy
def test_the_global_generator_plays_no_part(name, rule):
    sizes = [7, 12, 4]
    torch.manual_seed(1)
    a = run(make(name, rule, sizes), 2, drawn(sizes))
    torch.manual_seed(2)
    b = run(make(name, rule, sizes), 2, drawn(sizes))
    assert a.version == b.version


@published  # of another one it is not known where chance plays a part
@pytest.mark.parametrize("start", ["random", "identity"])
def test_another_seed_gives_other_orders_where_chance_plays_a_part(name, rule, start):
    sizes = [30, 30]
    a, b = (run(make(name, rule, sizes, seed, start), 2, drawn(sizes)) for seed in (1, 2))
    # A score order sorts: where it started from no longer matters.
    by_start = start == "random" and name not in SCORED | {"fixed"}
    by_policy = name in DRAWN
    by_rule = balances(name) and SIGN_RULES[rule]().randomized
    assert (a.version != b.version) == (by_start or by_policy or by_rule)


@every_policy
@pytest.mark.parametrize("sizes", [[7, 10, 4], [1], [0, 3]], ids=str)
def test_resume_is_no_resume(name, rule, sizes):
    vectors, length = drawn(sizes), max(sizes)
    straight = make(name, rule, sizes, seed=2)
    for epoch in range(2):
        rows = torch.randn(length, len(sizes), 3, generator=torch.Generator().manual_seed(epoch))
        for step in range(length):
            resumed = make(name, rule, sizes, seed=2)
            resumed.load_state_dict(through_disk(straight.state_dict()))
            resumed.observe(rows[step:])
            resumed.end_epoch()
            whole = copy.deepcopy(straight)
            whole.observe(rows[step:])
            whole.end_epoch()
            assert same(run(resumed, 2, vectors).state_dict(), run(whole, 2, vectors).state_dict())
            straight.observe(rows[step : step + 1])
        straight.end_epoch()


@every_policy
def test_reading_changes_nothing(name, rule):
    sizes = [7, 12, 4]
    read, alone = make(name, rule, sizes), make(name, rule, sizes)
    for epoch in range(3):
        for first in range(0, 12, 5):
            torch.manual_seed(epoch * 12 + first)
            rows = torch.randn(min(5, 12 - first), 3, 2)
            read.observe(rows)
            alone.observe(rows)
            for _ in range(2):
                _ = read.orders, read.version, read.epoch, read.steps, read.length, repr(read)
                _ = read.state_dict()
        read.end_epoch()
        alone.end_epoch()
        assert same(read.state_dict(), alone.state_dict())


@every_policy
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64])
def test_rows_of_other_precision_count_as_float32(name, rule, dtype):
    sizes = [7, 12, 4]
    narrow, wide = make(name, rule, sizes), make(name, rule, sizes)
    for _ in range(2):
        rows = (10 * torch.randn(12, 3, 4)).to(dtype)
        narrow.observe(rows)
        wide.observe(rows.float())
        assert same(narrow.state_dict(), wide.state_dict())
        narrow.end_epoch()
        wide.end_epoch()


@every_policy
@pytest.mark.parametrize("shape", [(3, 3, 2), (3, 1, 2), (3, 2), (2,), (1, 3, 2, 2)], ids=str)
def test_rows_of_a_wrong_shape_are_refused(name, rule, shape):
    ordering = make(name, rule, [6, 6])
    before = ordering.state_dict()
    with pytest.raises(ValueError) as caught:
        ordering.observe(torch.zeros(shape))
    assert "(steps, 2 workers, dim)" in str(caught.value)
    assert str(shape) in str(caught.value)
    assert same(before, ordering.state_dict())


@every_policy
@pytest.mark.parametrize("shape", [(3,), (2, 2), (3, 1), (3, 2, 4)], ids=str)
def test_a_mask_of_a_wrong_shape_is_refused(name, rule, shape):
    ordering = make(name, rule, [6, 6])
    before = ordering.state_dict()
    with pytest.raises(ValueError) as caught:
        ordering.observe(torch.zeros(3, 2, 4), torch.ones(shape, dtype=torch.bool))
    assert "(3, 2)" in str(caught.value)
    assert str(shape) in str(caught.value)
    assert same(before, ordering.state_dict())


@every_policy
def test_rows_may_be_missing_only_where_none_are_needed(name, rule):
    ordering = make(name, rule, [6, 6])
    seen = torch.ones(2, 2, dtype=torch.bool)
    if learns(name):
        with pytest.raises(ValueError, match="needs rows, got None"):
            ordering.observe(None, seen)
        assert ordering.steps == 0
    else:
        ordering.observe(None, seen)
        assert ordering.steps == 2


@every_policy
def test_more_steps_than_an_epoch_has_are_refused(name, rule):
    ordering = make(name, rule, [5, 6])
    ordering.observe(torch.ones(4, 2, 3))
    before = ordering.state_dict()
    with pytest.raises(RuntimeError, match="3 time steps after 4: the epoch has only 6"):
        ordering.observe(torch.ones(3, 2, 3))
    assert same(before, ordering.state_dict())
    ordering.observe(torch.ones(2, 2, 3))
    with pytest.raises(RuntimeError, match="call end_epoch"):
        ordering.observe(torch.ones(1, 2, 3))


@every_policy
def test_rows_beyond_a_workers_units_play_no_part(name, rule):
    sizes = [3, 8]
    clean, noisy = make(name, rule, sizes), make(name, rule, sizes)
    for value in (1e30, float("nan")):
        rows = torch.randn(8, 2, 3, dtype=torch.float64)
        rows[3:, 0] = 0
        clean.observe(rows)
        rows[3:, 0] = value
        noisy.observe(rows)
        clean.end_epoch()
        noisy.end_epoch()
        assert same(clean.state_dict(), noisy.state_dict())


@pytest.mark.parametrize("name", ALL)
def test_a_policy_prints_itself_and_equals_its_like(name):
    assert make_policy(name) == make_policy(name)
    assert hash(make_policy(name)) == hash(make_policy(name))
    assert repr(make_policy(name)) == repr(make_policy(name))
    assert "0x" not in repr(make_policy(name))


@pytest.mark.parametrize("name", BALANCING)
@pytest.mark.parametrize("workers", [1, 4])
def test_balancing_herds(name, workers):
    vectors = random_vectors(workers, 256, 8, seed=1)
    shuffled = replay_order(vectors, make_policy("d-rr"), rounds=8, start="random").bounds
    found = replay_order(vectors, make_policy(name), rounds=8, start="random")
    assert found.bounds[-1] < 0.35 * min(shuffled)
    orders = [torch.tensor(order) for order in found.orders]
    assert found.bounds[-1] == parallel_herding_bound(list(vectors), orders)


def test_sharing_the_sum_herds_better_than_balancing_alone():
    vectors = random_vectors(32, 64, 8, seed=1)
    after = {n: replay_order(vectors, make_policy(n), rounds=8).bounds[-1] for n in BALANCING}
    assert after["cd-grab"] < 0.5 * min(after["id-grab"], after["id-pair-grab"])


@pytest.mark.parametrize("name", [name for name in ALL if name not in LEARNING])
def test_orders_without_gradients_do_not_depend_on_them(name):
    a, b = make(name, "greedy", [9, 8]), make(name, "greedy", [9, 8])
    run(a, 3, drawn([9, 8], seed=1))
    run(b, 3, drawn([9, 8], seed=2))
    assert lists(a.orders) == lists(b.orders)
