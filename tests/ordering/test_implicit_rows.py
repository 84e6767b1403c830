import pytest
import torch

from gradherd import OrderedSampler, World
from gradherd.ordering import Ordering, make_policy
from gradherd.ordering.balance import LinearCombination
from gradherd.rows.exact_rows import DenseRows
from tests.ordering.helpers import RULES, lists, same


def vectors(count, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(count, 9, dtype=torch.float64, generator=draw) + 0.3


def two_of(name, rule, units):
    return [Ordering(make_policy(name, rule), [units], seed=4) for _ in range(2)]


def show_both(linear, dense, rows, chunks, seen=None):
    first = 0
    for length in chunks:
        part = linear.orders[0][first : first + length]
        linear.observe(DenseRows(rows[part]))
        mask = None if seen is None else seen[first : first + length].unsqueeze(1)
        dense.observe(rows[part].unsqueeze(1), mask)
        first += length


@pytest.mark.parametrize("chunks", [[11], [4, 4, 3], [3, 3, 3, 2], [1] * 11, [1, 2, 8]])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["grab", "pair-grab", "cd-grab"])
def test_rows_that_are_not_formed_give_the_same_orders(name, rule, chunks):
    linear, dense = two_of(name, rule, 11)
    for epoch in range(3):
        show_both(linear, dense, vectors(11), chunks)
        linear.end_epoch()
        dense.end_epoch()
        assert lists(linear.orders) == lists(dense.orders), epoch


@pytest.mark.parametrize("name", ["grab", "pair-grab", "cd-grab"])
def test_both_kinds_may_take_turns(name):
    mixed, dense = two_of(name, "greedy", 10)
    rows = vectors(10)
    visits = mixed.orders[0]
    mixed.observe(rows[visits[:3]].unsqueeze(1))
    mixed.observe(DenseRows(rows[visits[3:8]]))
    mixed.observe(rows[visits[8:]].unsqueeze(1))
    dense.observe(rows[visits].unsqueeze(1))
    mixed.end_epoch()
    dense.end_epoch()
    assert lists(mixed.orders) == lists(dense.orders)


@pytest.mark.parametrize("skip", [(0, 2), (0, 3), (3, 5), (3, 6), (2, 3)])
@pytest.mark.parametrize("name", ["grab", "pair-grab"])
def test_missed_steps_keep_their_place(name, skip):
    linear, dense = two_of(name, "greedy", 11)
    begin, end = skip
    visits, rows = linear.orders[0], vectors(11)
    for ordering in (linear, dense):
        for span in (slice(0, begin), slice(end, 11)):
            ordering.skip_to(span.start)
            part = rows[visits[span]]
            if len(part):
                ordering.observe(DenseRows(part) if ordering is linear else part.unsqueeze(1))
        ordering.end_epoch()
    assert lists(linear.orders) == lists(dense.orders)
    assert set(visits[begin:end].tolist()) <= set(linear.orders[0].tolist())


@pytest.mark.parametrize("chunks", [[4, 4, 3], [3, 3, 3, 2], [3, 1, 7], [5, 5, 1]])
@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("name", ["grab", "pair-grab"])
def test_a_call_that_is_not_finite_is_left_out_and_spoils_nothing_else(name, bad, chunks):
    linear, dense = two_of(name, "greedy", 11)
    begin, end = sum(chunks[:bad]), sum(chunks[: bad + 1])
    rows = vectors(11)
    rows[linear.orders[0][end - 1]] = float("inf")
    seen = torch.ones(11, dtype=torch.bool)
    seen[begin:end] = False
    show_both(linear, dense, rows, chunks, seen)
    linear.end_epoch()
    dense.end_epoch()
    assert lists(linear.orders) == lists(dense.orders)


def test_state_in_the_middle_of_a_pair_is_the_same():
    linear, dense = two_of("pair-grab", "greedy", 8)
    show_both(linear, dense, vectors(8), [3, 2])
    ours, theirs = linear.state_dict(), dense.state_dict()
    for key in ("running", "pending"):
        torch.testing.assert_close(ours["balance"].pop(key), theirs["balance"].pop(key))
    assert same(ours, theirs)


def test_mixed_rows_are_what_their_coefficients_say():
    draw = torch.Generator().manual_seed(0)
    rows, a, extra, c, some, weights = (
        torch.randn(shape, dtype=torch.float64, generator=draw)
        for shape in ((4, 9), (3, 4), (2, 9), (3, 2), (5, 9), (6, 3))
    )
    mixed, matrix = LinearCombination(DenseRows(rows), a, extra, c), a @ rows + c @ extra
    torch.testing.assert_close(mixed.dot(some), some @ matrix.T)
    torch.testing.assert_close(mixed.gram(), matrix @ matrix.T)
    torch.testing.assert_close(mixed.combine(weights), weights @ matrix)
    plain = LinearCombination(DenseRows(rows), a, extra[:0], c[:, :0])
    torch.testing.assert_close(plain.gram(), a @ rows @ (a @ rows).T)


def test_only_one_worker_may_give_rows_that_are_not_formed():
    ordering = Ordering(make_policy("cd-grab"), [4, 4])
    with pytest.raises(ValueError, match="rows that are not formed need a single worker, got 2"):
        ordering.observe(DenseRows(vectors(2)))


def test_a_sampler_takes_them():
    sampler = OrderedSampler(range(5), "cd-grab", batch_size=2, world=World.single())
    want = Ordering(make_policy("cd-grab"), [5])
    rows = vectors(5)[sampler.ordering.orders[0]]
    want.observe(rows.unsqueeze(1))
    want.end_epoch()
    for first in (0, 2, 4):
        sampler.observe(DenseRows(rows[first : first + 2]), first=first)
    assert lists(sampler.ordering.orders) == lists(want.orders)
