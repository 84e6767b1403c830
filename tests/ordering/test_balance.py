"""Two forms, one result: sequential (small and large), block by block, and over shards."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradherd.comm.script import run, run_together
from gradherd.comm.world import World
from gradherd.ordering import balance as forms
from gradherd.ordering.balance import Unsigned, blocks, reorder
from gradherd.ordering.pair_grab import CDGraB
from gradherd.ordering.policy import ShardedRows, SignState
from gradherd.ordering.random import SeededRandom
from gradherd.ordering.registry import SIGN_RULES
from gradherd.ordering.sign_rules import Greedy, Kernel, Walk
from tests.ordering import reference
from tests.ordering.helpers import begun, lists, make, same, signed, visited, whole_vectors

LARGE = 65_536  # Columns from which the sequential form walks stream by stream.
seeds = st.integers(0, 2**31)
rules = st.sampled_from([Greedy(), Walk(), Walk(c=0.5), Kernel()])


def balance(*given):
    return signed(forms.balance, given)


def sequential(*given):
    return signed(forms.sequential, given)


def block_gram(*given, block=64):
    return signed(partial(blocks, block=block), given)


def by_blocks(block):
    return partial(block_gram, block=block)


def by_sharded_blocks(block):
    """Return the sharded form, run by a single rank that holds all columns."""
    return lambda *given: signed(partial(blocks, block=block, sharded=True), given)


FORMS = {
    "sequential": sequential,
    "balance": balance,
    "block 1": by_blocks(1),
    "block 3": by_blocks(3),
    "block 64": by_blocks(64),
    "sharded 1": by_sharded_blocks(1),
    "sharded 4": by_sharded_blocks(4),
    "sharded 64": by_sharded_blocks(64),
}


def whole(seed, streams, count, dim, low=-3, high=3):
    """Whole numbers (all sums exact), draws and a start."""
    draw = np.random.RandomState(seed)
    vectors = torch.from_numpy(draw.randint(low, high + 1, (streams, count, dim)).astype(float))
    running = torch.from_numpy(draw.randint(low, high + 1, (streams, dim)).astype(float))
    return vectors, running, draw.uniform(-1, 1, (streams, count))


def slow_rule(rule, total, epoch):
    if isinstance(rule, Greedy):
        return reference.Greedy()
    if isinstance(rule, Walk):
        return reference.Walk(rule.c)
    return reference.Kernel(total, epoch + 1, rule.epochs, rule.delta)


def assert_same(found, expected):
    assert torch.equal(found.signs, expected.signs)
    assert found.signs.dtype == expected.signs.dtype == torch.int8
    assert torch.equal(found.running, expected.running)
    assert np.array_equal(found.carry, expected.carry)


@pytest.mark.parametrize("form", FORMS)
@given(
    seed=seeds,
    rule=rules,
    streams=st.integers(1, 9),
    count=st.integers(0, 20),
    dim=st.integers(1, 5),
)
@settings(max_examples=20, deadline=None)
def test_every_form_is_the_reference(form, seed, rule, streams, count, dim):
    vectors, running, draws = whole(seed, streams, count, dim)
    found = FORMS[form](vectors, 0 * running, rule, draws, begun(rule, streams, count, 4))
    for w in range(streams):
        slow = slow_rule(rule, max(1, count), 4)
        signs, total = reference.sign_stream(vectors[w].numpy(), slow, draws[w])
        assert found.signs[w].tolist() == signs
        assert found.running[w].tolist() == total.tolist()


@given(
    seed=seeds,
    rule=rules,
    streams=st.integers(1, 5),
    count=st.integers(0, 40),
    block=st.integers(1, 50),
)
@settings(max_examples=100, deadline=None)
def test_blocks_equal_the_sequence_to_the_bit(seed, rule, streams, count, block):
    vectors, running, draws = whole(seed, streams, count, dim=4)
    # A start in the middle of an epoch: running sum and carry are not zero.
    carry = sequential(vectors, running, rule, draws, begun(rule, streams, 50, 1)).carry
    expected = sequential(vectors, running, rule, draws, carry)
    for form in (by_blocks(block), by_sharded_blocks(block), balance):
        assert_same(form(vectors, running, rule, draws, carry), expected)


@given(seed=seeds, rule=rules, streams=st.integers(1, 3), block=st.integers(1, 70))
@settings(max_examples=40, deadline=None)
def test_blocks_give_the_signs_of_the_sequence_on_real_numbers(seed, rule, streams, block):
    draw = np.random.RandomState(seed)
    vectors = torch.from_numpy(draw.randn(streams, 60, 7))
    start, carry = torch.zeros(streams, 7, dtype=torch.float64), begun(rule, streams, 60, 0)
    draws = draw.uniform(-1, 1, (streams, 60))
    expected = sequential(vectors, start, rule, draws, carry)
    for form in (by_blocks(block), by_sharded_blocks(block)):
        found = form(vectors, start, rule, draws, carry)
        assert torch.equal(found.signs, expected.signs)
        torch.testing.assert_close(found.running, expected.running, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", SIGN_RULES)
def test_many_columns_walk_stream_by_stream_with_the_same_result(name):
    rule = SIGN_RULES[name]()
    vectors, running, draws = whole(5, streams=2, count=8, dim=LARGE)
    carry = begun(rule, 2, 8, 0)
    expected = block_gram(vectors, running, rule, draws, carry)
    assert_same(sequential(vectors, running, rule, draws, carry), expected)
    assert_same(balance(vectors, running, rule, draws, carry), expected)
    assert expected.signs.abs().min() == 1


@given(seed=seeds, streams=st.integers(1, 4), count=st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_greedy_sum_is_bounded_by_the_root_of_the_squares(seed, streams, count):
    vectors, running, draws = whole(seed, streams, count, dim=4)
    found = balance(vectors, 0 * running, Greedy(), draws, begun(Greedy(), streams, count, 0))
    prefixes = (found.signs.unsqueeze(-1) * vectors).cumsum(1)
    squares = vectors.square().sum(-1).cumsum(1)
    assert (prefixes.square().sum(-1) <= squares).all()
    assert torch.equal(prefixes[:, -1], found.running)


@pytest.mark.parametrize("name", SIGN_RULES)
@pytest.mark.parametrize("form", FORMS)
@given(seed=seeds)
@settings(max_examples=10, deadline=None)
def test_signs_do_not_depend_on_the_sign_of_everything(form, name, seed):
    rule = SIGN_RULES[name]()
    vectors, running, draws = whole(seed, 3, 12, 4)
    plain = FORMS[form](vectors, running, rule, draws, begun(rule, 3, 12, 0))
    negated = FORMS[form](-vectors, -running, rule, draws, begun(rule, 3, 12, 0))
    assert torch.equal(plain.signs, negated.signs)
    assert torch.equal(plain.running, -negated.running)


def check_left_out(form, rule, vectors, running, draws, bad):
    """Vectors that are not finite get sign 0; the others are signed as if alone."""
    spoilt = vectors.clone()
    for (w, p), value in bad.items():
        spoilt[w, p, p % vectors.shape[-1]] = value
    found = form(spoilt, running, rule, draws, begun(rule, len(vectors), 30, 0))
    for w in range(len(vectors)):
        good = [p for p in range(vectors.shape[1]) if (w, p) not in bad]
        alone = form(
            vectors[w : w + 1, good],
            running[w : w + 1],
            rule,
            draws[w : w + 1, good],
            begun(rule, 1, 30, 0),
        )
        assert found.signs[w, good].tolist() == alone.signs[0].tolist()
        assert [int(found.signs[w, p]) for v, p in bad if v == w] == [0] * sum(
            v == w for v, _ in bad
        )
        assert torch.equal(found.running[w], alone.running[0])
        assert np.array_equal(found.carry[:, w], alone.carry[:, 0])


@pytest.mark.parametrize("name", SIGN_RULES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("form", FORMS)
def test_vectors_that_are_not_finite_are_left_out(form, dtype, value, name):
    vectors, running, draws = whole(3, streams=3, count=11, dim=4)
    bad = {(0, 0): value, (0, 5): value, (1, 10): value, (0, 6): value}
    rule = SIGN_RULES[name]()
    for start in (0 * running, running):
        check_left_out(FORMS[form], rule, vectors.to(dtype), start.to(dtype), draws, bad)


@pytest.mark.parametrize("name", SIGN_RULES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_long_vectors_that_are_not_finite_are_left_out(value, name):
    vectors, running, draws = whole(3, streams=2, count=5, dim=LARGE)
    bad = {(0, 0): value, (1, 3): value}
    check_left_out(sequential, SIGN_RULES[name](), vectors, 0 * running, draws, bad)


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("dim", [1, 100_000, 100_001])
def test_products_of_long_rows_miss_no_column(dim, streams):
    draw = torch.Generator().manual_seed(dim)
    left, right = (torch.randint(-9, 10, (streams, n, dim), generator=draw) for n in (3, 2))
    products = forms.inner_products(left.float(), right.float())
    assert products.tolist() == (left @ right.mT).tolist()


@pytest.mark.parametrize("dim", [7, 100_001])
def test_products_with_a_sum_that_lies_above_the_vectors_are_the_same(dim):
    draw = torch.Generator().manual_seed(dim)
    rows = torch.randint(-9, 10, (4, dim), generator=draw).float()
    assert forms.stacked(rows[:1], rows[1:]).data_ptr() == rows.data_ptr()
    for running in (rows[:1], rows[:1].clone()):
        products = run(forms._products(rows[1:].unsqueeze(0), running, False), World.single())
        both = (rows[1:] @ rows.T).double().unsqueeze(0).numpy()
        assert [part.tolist() for part in products.value] == [
            both[..., 0].tolist(),
            both[..., 1:].tolist(),
        ]


@pytest.mark.parametrize("name", SIGN_RULES)
@given(seed=seeds, streams=st.integers(1, 3), block=st.integers(1, 20))
@settings(max_examples=15, deadline=None)
def test_three_shards_sign_as_one(name, seed, streams, block):
    rule = SIGN_RULES[name]()
    vectors, running, draws = whole(seed, streams, 14, dim=7)
    vectors[0, 4, 6] = float("nan")  # In the last shard only; all must leave it out.
    carry = begun(rule, streams, 14, 0)
    expected = block_gram(vectors, running, rule, draws, carry, block=block)
    cuts = [slice(0, 2), slice(2, 5), slice(5, 7)]

    parts = [
        Unsigned(vectors[..., cut], running[:, cut].clone(), rule, draws, carry.copy())
        for cut in cuts
    ]
    scripts = [blocks(part, block=block, sharded=True) for part in parts]
    for cut, part, (signs, _) in zip(cuts, parts, run_together(scripts), strict=True):
        assert torch.equal(signs, expected.signs)
        assert torch.equal(part.running, expected.running[:, cut])
        assert np.array_equal(part.carry, expected.carry)


@pytest.mark.parametrize("rule", SIGN_RULES)
@pytest.mark.parametrize("name", ["grab", "pair-grab", "cd-grab"])
def test_three_sharded_orderings_order_as_one(name, rule):
    sizes = [9, 6, 12]
    vectors = whole_vectors(8, sizes, dim=7)
    whole_one = make(name, sizes, rule)
    shards = [make(name, sizes, rule) for _ in range(3)]
    cuts = [slice(0, 2), slice(2, 5), slice(5, 7)]
    for _ in range(3):
        rows = visited(vectors, whole_one.orders)
        for part in (rows[:5], rows[5:]):
            whole_one.observe(part)
            run_together(
                [
                    shard.learn(ShardedRows((part[..., cut],)))
                    for shard, cut in zip(shards, cuts, strict=True)
                ]
            )
        whole_one.end_epoch()
        for shard in shards:
            shard.end_epoch()
            assert shard.version == whole_one.version
            assert same(shard.state_dict()["orders"], whole_one.state_dict()["orders"])


def test_a_shard_may_be_without_columns():
    vectors, whole_one = whole_vectors(1, [6, 6]), make("cd-grab", [6, 6])
    rows = visited(vectors, whole_one.orders)
    shards = [make("cd-grab", [6, 6]) for _ in range(2)]
    whole_one.observe(rows)
    cuts = [slice(0, 3), slice(3, 3)]
    run_together(
        [s.learn(ShardedRows((rows[..., cut],))) for s, cut in zip(shards, cuts, strict=True)]
    )
    for ordering in (whole_one, *shards):
        ordering.end_epoch()
    assert len({ordering.version for ordering in (whole_one, *shards)}) == 1


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
    state = SignState(sizes=(3, 2, 0), epoch=0)
    state.sides = sides
    assert lists(CDGraB().reorder(orders, state, 1, SeededRandom(0))) == [[7, 9, 8], [0, 1], []]


@pytest.mark.parametrize("name", ["cd-grab", "id-pair-grab", "grab"])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_blocks_of_columns_are_learned_as_one(name, steps):
    rows = torch.randn(9, 3, 10, generator=torch.Generator().manual_seed(steps))
    whole, pieces = (make(name, [9, 9, 9]) for _ in range(2))
    for part in rows.split(steps):
        run(whole.learn(ShardedRows((part,))), World.single())
        run(pieces.learn(ShardedRows(part.split([4, 1, 5], -1))), World.single())
        ours, theirs = (one.state_dict()["balance"] for one in (pieces, whole))
        for key in ours.keys() & {"sides", "pending", "running"}:
            torch.testing.assert_close(ours[key], theirs[key], equal_nan=True)
    for one in (whole, pieces):
        one.end_epoch()
    assert pieces.version == whole.version


def test_rows_may_be_overwritten_once_they_are_released():
    ordering, released = make("cd-grab", [4, 4]), 0
    rows = torch.randn(4, 2, 6, generator=torch.Generator().manual_seed(0))
    expected = make("cd-grab", [4, 4])
    for row in rows:
        lent = row.clone()

        def release(spare, lent=lent):  # The next exchange writes there.
            nonlocal released
            released += 1
            (lent if spare is None else spare).fill_(torch.nan)

        run(ordering.learn(ShardedRows((lent.unsqueeze(0),), release)), World.single())
        run(expected.learn(ShardedRows((row.unsqueeze(0),))), World.single())
    assert released == 4
    for one in (ordering, expected):
        one.end_epoch()
    assert ordering.version == expected.version
