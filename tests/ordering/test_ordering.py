"""Ordering: state, versions, checkpoints, what it refuses."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradherd.ordering.grab import GraB
from gradherd.ordering.ordering import Ordering
from gradherd.ordering.pair_grab import PairGraB
from gradherd.ordering.registry import POLICIES, make_policy
from gradherd.ordering.sign_rules import Walk
from tests.ordering.helpers import (
    BALANCING,
    RULES,
    lists,
    make,
    same,
    show,
    through_disk,
    visited,
    whole_vectors,
)

SIZES = [7, 12, 4]
CASES = [(n, r) for n in POLICIES for r in (RULES if n in BALANCING else RULES[:1])]


@pytest.mark.parametrize("sizes", [[], [3, -1]])
def test_sizes_are_checked(sizes):
    with pytest.raises(ValueError, match="sizes must hold at least one worker, none below 0") as e:
        make("cd-grab", sizes)
    assert str(sizes) in str(e.value)


def test_names_are_checked():
    with pytest.raises(ValueError, match=r"unknown order 'grap'; known are d-rr, .*cd-grab"):
        make_policy("grap")
    with pytest.raises(ValueError, match="unknown sign rule 'x'; known are greedy, walk, kernel"):
        make_policy("cd-grab", "x")


def test_start_is_identity_or_drawn():
    assert lists(make("cd-grab", [3, 2]).orders) == [[0, 1, 2], [0, 1]]
    drawn = lists(make("cd-grab", [20, 20], start="random").orders)
    assert drawn[0] != drawn[1] and drawn[0] != list(range(20))
    assert drawn == lists(make("pair-grab", [20, 20], start="random").orders)


def test_version_tells_tables_and_epochs_apart():
    a, b = make("cd-grab", [6, 6]), make("pair-grab", [6, 6])
    assert a.version == b.version  # Tables are equal, whatever made them.
    assert a.version != make("cd-grab", [12]).version
    assert a.version != make("cd-grab", [6, 6], start="random").version
    before = a.version
    a.observe(torch.randn(4, 2, 3))
    assert a.version == before
    a.end_epoch()
    b.end_epoch()
    assert a.version != before
    fixed = make("fixed", [6])
    before = fixed.version
    fixed.end_epoch()
    assert fixed.version != before  # Same orders, another epoch.


def test_version_does_not_depend_on_the_kind_of_integer():
    assert make("fixed", np.array([3, 4]).tolist()).version == make("fixed", [3, 4]).version
    assert make("fixed", [np.int64(3), np.int64(4)]).version == make("fixed", [3, 4]).version


def test_end_epoch_may_name_the_next_epoch():
    ordering = make("cd-grab", SIZES)
    ordering.end_epoch(5)
    assert (ordering.epoch, ordering.steps) == (5, 0)
    ordering.end_epoch()
    assert ordering.epoch == 6


def test_skip_to_goes_forward_within_the_epoch():
    ordering = make("cd-grab", SIZES)
    ordering.skip_to(3)
    for step in (2, 13, -1):
        with pytest.raises(RuntimeError, match=rf"skip_to\({step}\).* 3, .* 12"):
            ordering.skip_to(step)
    assert ordering.steps == 3
    ordering.skip_to(3)
    ordering.skip_to(12)
    assert ordering.steps == ordering.length == 12


def test_skipping_nowhere_keeps_the_first_half_of_a_pair():
    vectors = whole_vectors(1, [6, 6])
    plain, touched = make("cd-grab", [6, 6]), make("cd-grab", [6, 6])
    rows = visited(vectors, plain.orders)
    plain.observe(rows)
    touched.observe(rows[:3])
    touched.skip_to(3)
    touched.observe(rows[3:])
    assert same(plain.state_dict(), touched.state_dict())


@pytest.mark.parametrize("name", BALANCING)
@pytest.mark.parametrize("at", [0, 1, 2, 5])
def test_observing_nothing_changes_nothing(name, at):
    ordering = make(name, [5, 4])
    ordering.skip_to(at)
    ordering.observe(torch.zeros(0, 2, 3))
    assert ordering.steps == at


@pytest.mark.parametrize(("name", "rule"), CASES)
def test_restart_forgets_the_epoch_but_not_the_past(name, rule):
    vectors = whole_vectors(1, SIZES)
    straight, restarted = (make(name, SIZES, rule, start="random") for _ in range(2))
    for _ in range(2):
        show(straight, vectors)
        show(restarted, vectors)
        straight.end_epoch()
        restarted.end_epoch()
    restarted.observe(torch.randn(5, 3, 3, dtype=torch.float64))
    restarted.restart_epoch()
    assert restarted.steps == 0
    assert same(straight.state_dict(), restarted.state_dict())
    for _ in range(2):
        show(straight, vectors)
        show(restarted, vectors)
        straight.end_epoch()
        restarted.end_epoch()
        assert same(straight.state_dict(), restarted.state_dict())


@pytest.mark.parametrize(("name", "rule"), CASES)
@given(seed=st.integers(0, 2**31), epochs=st.integers(0, 2), steps=st.integers(0, 12))
@settings(max_examples=8, deadline=None)
def test_a_restored_state_has_the_same_future(name, rule, seed, epochs, steps):
    vectors = whole_vectors(seed, SIZES)
    original = make(name, SIZES, rule, seed=3, start="random")
    for _ in range(epochs):
        show(original, vectors)
        original.end_epoch()
    original.observe(visited(vectors, original.orders)[:steps])
    restored = make(name, SIZES, rule, seed=3, start="identity")  # Loading sets the orders.
    restored.load_state_dict(through_disk(original.state_dict()))
    for _ in range(3):
        assert same(original.state_dict(), restored.state_dict())
        assert original.version == restored.version
        for ordering in (original, restored):
            rows = visited(vectors, ordering.orders)
            ordering.observe(rows[ordering.steps :])
            ordering.end_epoch()


@pytest.mark.parametrize(("name", "rule"), CASES)
def test_a_state_is_a_snapshot(name, rule):
    vectors = whole_vectors(1, SIZES)
    ordering = make(name, SIZES, rule)
    show(ordering, vectors)
    ordering.end_epoch()
    ordering.observe(visited(vectors, ordering.orders)[:3])
    state = ordering.state_dict()
    kept = copy.deepcopy(state)
    ordering.observe(visited(vectors, ordering.orders)[3:])
    ordering.end_epoch()
    show(ordering, vectors)
    assert same(state, kept)
    # And the other way round: what was loaded is not written either.
    ordering.load_state_dict(state)
    ordering.observe(visited(vectors, ordering.orders)[3:])
    ordering.end_epoch()
    assert same(state, kept)


def test_orders_handed_out_do_not_change_later():
    ordering = make("cd-grab", SIZES)
    orders = ordering.orders
    before = lists(orders)
    show(ordering, whole_vectors(1, SIZES))
    ordering.end_epoch()
    assert lists(orders) == before != lists(ordering.orders)


STATE = make("cd-grab", SIZES).state_dict()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (make("pair-grab", SIZES), r"policy CDGraB\(.*this run has PairGraB"),
        (make("cd-grab", SIZES, "walk"), r"policy .*Greedy.*this run has .*Walk"),
        (make("fixed", SIZES), r"policy .*this run has .*'fixed'"),
        (make("cd-grab", SIZES, seed=1), "seed 0, this run has 1"),
        (make("cd-grab", [7, 12, 5]), "units 23, this run has 24"),
        (make("cd-grab", [7, 12, 3, 1]), r"\(7, 12, 4\), this run has \(7, 12, 3, 1\)"),
        (make("cd-grab", [7, 11, 5]), r"\(7, 12, 4\), this run has \(7, 11, 5\)"),
        (make("cd-grab", [23]), r"\(7, 12, 4\), this run has \(23,\)"),
    ],
)
def test_a_state_of_another_run_is_refused(other, message):
    before = other.state_dict()
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(STATE)
    assert same(before, other.state_dict())


def test_settings_of_a_rule_are_part_of_the_policy():
    ordering = Ordering(PairGraB(Walk(c=2.0)), [4])
    with pytest.raises(ValueError, match=r"c=3\.0.*c=2\.0"):
        ordering.load_state_dict(Ordering(PairGraB(Walk(c=3.0)), [4]).state_dict())


@pytest.mark.parametrize("version", [0, 1, None])
def test_another_format_is_refused(version):
    with pytest.raises(ValueError, match=f"state has format {version}, expected 2"):
        make("cd-grab", SIZES).load_state_dict({**STATE, "format": version})


def test_something_else_is_refused():
    with pytest.raises(ValueError, match="format None"):
        make("cd-grab", SIZES).load_state_dict({})


@pytest.mark.parametrize(
    ("worker", "index", "value"), [(0, 0, 3), (1, 7, 12), (1, 18, -1), (2, 19, 100)]
)
def test_an_order_that_is_no_permutation_is_refused(worker, index, value):
    ordering = make("cd-grab", SIZES)
    before = ordering.state_dict()
    orders = STATE["orders"].clone()
    orders[index] = value
    with pytest.raises(ValueError, match=f"damaged: worker {worker}'s order is not a permutation"):
        ordering.load_state_dict({**STATE, "orders": orders})
    assert same(before, ordering.state_dict())


@pytest.mark.parametrize("length", [0, 22, 24])
def test_orders_of_another_length_are_refused(length):
    orders = torch.arange(length)
    with pytest.raises(ValueError, match="damaged"):
        make("cd-grab", SIZES).load_state_dict({**STATE, "orders": orders})


@pytest.mark.parametrize("name", ["policy", "seed", "orders", "balance"])
def test_a_state_with_a_part_missing_is_refused(name):
    state = {key: value for key, value in STATE.items() if key != name}
    with pytest.raises(ValueError, match=name):
        make("cd-grab", SIZES).load_state_dict(state)


@pytest.mark.parametrize("name", BALANCING)
def test_the_dimension_must_stay(name):
    ordering = make(name, [4, 4])
    ordering.observe(torch.ones(1, 2, 3))
    with pytest.raises(ValueError, match="dim 3, got 5"):
        ordering.observe(torch.ones(1, 2, 5))
    assert ordering.steps == 1


@pytest.mark.parametrize("before", [3, 1])  # 1 would broadcast.
def test_mean_balance_needs_the_dimension_of_the_epoch_before(before):
    ordering = Ordering(GraB(), [4, 4])
    ordering.observe(torch.ones(4, 2, before))
    ordering.end_epoch()
    with pytest.raises(ValueError, match=f"dim {before}.*got 5"):
        ordering.observe(torch.ones(1, 2, 5))


@pytest.mark.parametrize("name", ["pair-grab", "cd-grab"])
def test_pair_balance_may_change_dimension_between_epochs(name):
    ordering = make(name, [4, 4])
    ordering.observe(torch.ones(4, 2, 3))
    ordering.end_epoch()
    ordering.observe(torch.ones(4, 2, 5))
    assert ordering.steps == 4


def test_rows_with_history_leave_no_graph():
    rows = torch.randn(3, 1, 2, requires_grad=True) * 2
    ordering = make("cd-grab", [6])
    ordering.observe(rows)
    assert not any(
        isinstance(value, torch.Tensor) and value.requires_grad
        for value in ordering.state_dict()["balance"].values()
    )


def test_rows_may_be_strided():
    rows = torch.randn(3, 2, 6).transpose(0, 2)  # (6, 2, 3)
    assert not rows.is_contiguous()
    for name in BALANCING:
        strided, dense = make(name, [6, 6]), make(name, [6, 6])
        strided.observe(rows)
        dense.observe(rows.contiguous())
        assert torch.equal(
            strided.state_dict()["balance"]["sides"], dense.state_dict()["balance"]["sides"]
        )


def test_epochs_move_the_kernel_penalty():
    carry = make("cd-grab", SIZES, "kernel").state_dict()["balance"]["carry"]
    pairs = 3 + 6 + 2
    factor = 4 / 0.5 * (1 + math.log(100)) * (1 + math.log(pairs))
    assert carry[:, 0].tolist() == pytest.approx([0, 0, factor])
    ordering = make("cd-grab", SIZES, "kernel")
    ordering.end_epoch()
    carry = ordering.state_dict()["balance"]["carry"]
    assert carry[:, 0].tolist() == pytest.approx([0, 0, 2 * factor])


@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        ("sides", lambda sides: sides[:4], r"sides is \(4, 2\), not \(6, 2\)"),
        ("sides", lambda sides: sides[:, :1], r"sides is \(6, 1\), not \(6, 2\)"),
        ("carry", lambda carry: torch.zeros(3, 1), r"carry is \(3, 1\), not \(0, 1\)"),
        ("steps", lambda steps: 7, "7 steps of an epoch of 6"),
        ("steps", lambda steps: -1, "-1 steps of an epoch of 6"),
    ],
)
def test_a_state_of_other_shapes_is_refused(name, damage, says):
    ordering = make("cd-grab", [6, 6])
    ordering.observe(torch.randn(3, 2, 5))
    state = ordering.state_dict()
    state["balance"][name] = damage(state["balance"][name])
    with pytest.raises(ValueError, match=f"state is damaged: {says}"):
        make("cd-grab", [6, 6]).load_state_dict(state)
