"""GraB, pair balance and CD-GraB against the two-pointer reference, and their laws."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gradherd.ordering.bounds import parallel_herding_bound as bound
from gradherd.ordering.ordering import Ordering
from gradherd.ordering.pair_grab import PairGraB
from gradherd.ordering.random import SeededRandom
from gradherd.ordering.sign_rules import Kernel, Walk
from tests.ordering import reference
from tests.ordering.helpers import (
    BALANCING,
    RULES,
    is_permutation,
    lists,
    make,
    same,
    show,
    visited,
    whole_vectors,
)

seeds = st.integers(0, 2**31)
many_sizes = st.lists(st.integers(0, 12), min_size=1, max_size=4)
names = st.sampled_from(BALANCING)
rules = st.sampled_from(RULES)
NORMAL = settings(max_examples=60, deadline=None)


def some_seen(seed, sizes, share):
    shape = (max(sizes), len(sizes))
    return torch.from_numpy(np.random.RandomState(seed).random_sample(shape) < share)


class Slow:
    """An Ordering made of the reference."""

    def __init__(self, name, sizes, rule, seed, dim):
        self.shared = name == "cd-grab"
        self.pairs = self.shared or "pair" in name
        self.orders = [list(range(size)) for size in sizes]
        self.rule, self.chance, self.epoch = rule, SeededRandom(seed), 0
        self.means = [np.zeros(dim) for _ in sizes]

    def pass_epoch(self, vectors, seen):
        rows = visited(vectors, self.orders).numpy()
        steps = len(rows) // 2 if self.pairs else len(rows)
        draws = self.chance.draws(steps, len(self.orders), self.epoch)
        self.epoch += 1
        options = {"rule": self.rule, "epoch": self.epoch, "seen": seen.numpy(), "draws": draws}
        if self.pairs:
            out = reference.pair_epoch(self.orders, rows, shared=self.shared, **options)
        else:
            out, self.means = reference.mean_epoch(self.orders, rows, self.means, **options)
        self.orders = out.orders
        return out


@given(seed=seeds, name=names, rule=rules, sizes=many_sizes, share=st.sampled_from([1.0, 0.8, 0.3]))
@example(seed=221291042, name="grab", rule="walk", sizes=[0, 0, 0, 2], share=0.3)  # An empty epoch.
@settings(max_examples=150, deadline=None)
def test_orders_are_those_of_the_reference(seed, name, rule, sizes, share):
    vectors = whole_vectors(seed, sizes)
    fast, slow = make(name, sizes, rule, seed), Slow(name, sizes, rule, seed, 3)
    for epoch in range(4):
        seen = some_seen(seed % 1000 + epoch, sizes, share)
        show(fast, vectors, seen)
        fast.end_epoch()
        slow.pass_epoch(vectors, seen)
        assert lists(fast.orders) == slow.orders
        assert all(is_permutation(o, n) for o, n in zip(fast.orders, sizes, strict=True))


@pytest.mark.parametrize("name", BALANCING)
@pytest.mark.parametrize("rule", RULES)
def test_orders_are_those_of_the_reference_on_real_numbers(name, rule):
    sizes = [40, 33, 40]
    draw = np.random.RandomState(1)
    vectors = [torch.from_numpy(draw.randn(n, 5) + 0.5) for n in sizes]
    fast, slow = make(name, sizes, rule, 9), Slow(name, sizes, rule, 9, 5)
    for _ in range(4):
        show(fast, vectors)
        fast.end_epoch()
        slow.pass_epoch(vectors, torch.ones(40, 3, dtype=torch.bool))
        assert lists(fast.orders) == slow.orders


@given(seed=seeds, rule=rules, sizes=many_sizes, name=st.sampled_from(["pair-grab", "cd-grab"]))
@NORMAL
def test_pair_balance_does_not_see_a_constant_shift(seed, rule, sizes, name):
    vectors = whole_vectors(seed, sizes, scale=1)
    shift = torch.tensor([1000.0, -77.0, 3.0])
    plain, shifted = make(name, sizes, rule), make(name, sizes, rule)
    for _ in range(3):
        show(plain, vectors)
        show(shifted, [own + shift for own in vectors])
        # Only a first half that waits for its partner may know the shift.
        a, b = plain.state_dict()["balance"], shifted.state_dict()["balance"]
        a.pop("pending", None), b.pop("pending", None)
        assert same(a, b)
        plain.end_epoch()
        shifted.end_epoch()
        assert plain.version == shifted.version


@given(seed=seeds, name=names, rule=rules, sizes=many_sizes)
@NORMAL
def test_orders_do_not_depend_on_the_sign_of_all_vectors(seed, name, rule, sizes):
    vectors = whole_vectors(seed, sizes)
    plain, negated = make(name, sizes, rule), make(name, sizes, rule)
    for _ in range(3):
        show(plain, vectors)
        show(negated, [-own for own in vectors])
        plain.end_epoch()
        negated.end_epoch()
        assert plain.version == negated.version


@given(
    seed=seeds,
    name=st.sampled_from(["cd-grab", "pair-grab"]),
    rule=rules,
    workers=st.integers(1, 4),
    half=st.integers(1, 10),
)
@settings(max_examples=80, deadline=None)
def test_halving_lemma_for_pairs(seed, name, rule, workers, half):
    sizes = [2 * half] * workers
    table = np.random.RandomState(seed).randn(workers, 2 * half, 3)
    vectors = list(torch.from_numpy(table))
    fast, slow = make(name, sizes, rule), Slow(name, sizes, rule, 0, 3)
    for _ in range(4):
        before = bound(vectors, fast.orders)
        out = slow.pass_epoch(vectors, torch.ones(2 * half, workers, dtype=torch.bool))
        a = max(np.abs(sums.sum(0)).max() for sums in out.sums)
        show(fast, vectors)
        fast.end_epoch()
        assert bound(vectors, fast.orders) <= (before + a) / 2 + 1e-9


@given(seed=seeds, rule=rules, units=st.integers(1, 20))
@NORMAL
def test_halving_lemma_for_centred_mean_balance(seed, rule, units):
    (vectors,) = whole_vectors(seed, [units], scale=1)
    vectors = [torch.cat([vectors, -vectors.sum(0, keepdim=True)])]
    fast, slow = make("grab", [units + 1], rule), Slow("grab", [units + 1], rule, 0, 3)
    for _ in range(4):
        before = bound(vectors, fast.orders)
        out = slow.pass_epoch(vectors, torch.ones(units + 1, 1, dtype=torch.bool))
        a = max(np.abs(sums).max() for sums in out.sums)
        show(fast, vectors)
        fast.end_epoch()
        assert bound(vectors, fast.orders) <= (before + a) / 2 + 1e-9


@given(seed=seeds, name=names, rule=rules, sizes=many_sizes, data=st.data())
@settings(max_examples=100, deadline=None)
def test_splits_do_not_matter(seed, name, rule, sizes, data):
    vectors = whole_vectors(seed, sizes)
    seen = some_seen(seed % 1000, sizes, 0.8)
    at_once, in_parts = make(name, sizes, rule), make(name, sizes, rule)
    cuts = sorted(data.draw(st.lists(st.integers(0, max(sizes)), max_size=6)))
    chunks = np.diff([0, *cuts, max(sizes)]).tolist()  # Odd ones and empty ones among them.
    for _ in range(3):
        show(at_once, vectors, seen)
        show(in_parts, vectors, seen, chunks)
        assert same(at_once.state_dict(), in_parts.state_dict())
        at_once.end_epoch()
        in_parts.end_epoch()
        assert same(at_once.state_dict(), in_parts.state_dict())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", BALANCING)
@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_the_caller_may_overwrite_its_buffer(name, rule, chunk):
    # Published loops gather into one buffer, step after step. Keeping a reference to it made
    # every difference zero and every sign plus.
    sizes = [8, 8]
    vectors = whole_vectors(2, sizes)
    clean, reused = make(name, sizes, rule), make(name, sizes, rule)
    buffer = torch.empty(chunk, 2, 3, dtype=torch.float64)
    for _ in range(2):
        rows = visited(vectors, clean.orders)
        clean.observe(rows)
        for first in range(0, 8, chunk):
            part = rows[first : first + chunk]
            buffer[: len(part)] = part
            reused.observe(buffer[: len(part)])
            buffer.fill_(float("nan"))
        assert same(clean.state_dict(), reused.state_dict())
        clean.end_epoch()
        reused.end_epoch()
    plus = make("always-plus", sizes)
    plus.end_epoch()
    plus.end_epoch()
    assert plus.version != clean.version


@pytest.mark.parametrize("name", ["pair-grab", "cd-grab"])
@given(seed=seeds, half=st.integers(0, 5))
@settings(max_examples=20, deadline=None)
def test_a_leftover_goes_to_the_middle(name, seed, half):
    sizes = [2 * half + 1, 2 * half + 3]
    ordering = make(name, sizes)
    show(ordering, whole_vectors(seed, sizes))
    ordering.end_epoch()
    for order, size in zip(ordering.orders, sizes, strict=True):
        assert order[size // 2] == size - 1
        # Pair k fills slots k and n-1-k.
        for k in range(size // 2):
            assert {int(order[k]), int(order[size - 1 - k])} == {2 * k, 2 * k + 1}


@pytest.mark.parametrize("name", ["pair-grab", "cd-grab"])
def test_a_leftover_needs_no_row(name):
    # Its place does not depend on its gradient, so a bad one changes nothing.
    vectors = whole_vectors(3, [5])
    spoilt = vectors[0].clone()
    spoilt[4] = float("nan")
    clean, bad = make(name, [5]), make(name, [5])
    show(clean, vectors)
    show(bad, [spoilt])
    clean.end_epoch()
    bad.end_epoch()
    assert clean.version == bad.version
    assert clean.orders[0][2] == 4


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", BALANCING)
def test_rows_that_are_not_finite_count_as_not_seen(name, rule, value):
    sizes = [8, 12]
    vectors = whole_vectors(4, sizes)
    spoilt, masked = make(name, sizes, rule), make(name, sizes, rule)
    for bad in ([(2, 0), (3, 0), (11, 1)], [(0, 0), (0, 1)], []):
        rows, seen = visited(vectors, masked.orders), torch.ones(12, 2, dtype=torch.bool)
        for step, worker in bad:
            seen[step, worker] = False
        masked.observe(rows, seen)
        for step, worker in bad:
            rows[step, worker, 1] = value
        spoilt.observe(rows)
        assert same(masked.state_dict(), spoilt.state_dict())
        masked.end_epoch()
        spoilt.end_epoch()


@given(
    seed=seeds,
    name=names,
    sizes=st.lists(st.integers(2, 10), min_size=1, max_size=3),
    data=st.data(),
)
@NORMAL
def test_units_not_seen_keep_their_place_and_the_others_are_ordered_as_if_alone(
    seed, name, sizes, data
):
    # Whole pairs are hidden, of all workers alike, so that the rest is a smaller problem.
    # (Greedy: what is drawn belongs to a time step, not to a count.)
    hidden = data.draw(st.sets(st.integers(0, max(sizes) // 2)))
    steps = [t for t in range(max(sizes)) if t // 2 not in hidden]
    vectors = whole_vectors(seed, sizes)
    ordering = make(name, sizes)
    seen = torch.zeros(max(sizes), len(sizes), dtype=torch.bool)
    seen[steps] = True
    show(ordering, vectors, seen)
    ordering.end_epoch()

    own_steps = [[t for t in steps if t < size] for size in sizes]
    alone = make(name, [len(own) for own in own_steps])
    show(alone, [own[steps] for own, steps in zip(vectors, own_steps, strict=True)])
    alone.end_epoch()
    for w, (order, own) in enumerate(zip(ordering.orders, own_steps, strict=True)):
        expected = list(range(sizes[w]))
        for place, unit in zip(own, alone.orders[w].tolist(), strict=True):
            expected[place] = own[unit]
        assert order.tolist() == expected


@given(
    seed=seeds,
    name=names,
    rule=rules,
    sizes=st.lists(st.integers(1, 11), min_size=1, max_size=3),
    data=st.data(),
)
@NORMAL
def test_skipping_is_not_seeing(seed, name, rule, sizes, data):
    length = max(sizes)
    first = data.draw(st.integers(0, length))
    until = data.draw(st.integers(first, length))
    last = data.draw(st.integers(until, length))  # The epoch ends early.
    vectors = whole_vectors(seed, sizes)
    skipping, masked = make(name, sizes, rule), make(name, sizes, rule)
    for _ in range(3):
        rows = visited(vectors, masked.orders)
        seen = torch.zeros(length, len(sizes), dtype=torch.bool)
        seen[:first] = seen[until:last] = True
        masked.observe(rows, seen)
        masked.end_epoch()
        skipping.observe(rows[:first])
        skipping.skip_to(until)
        assert skipping.steps == until
        skipping.observe(rows[until:last])
        assert skipping.steps == last
        skipping.skip_to(length)  # What is not visited at all comes first in the next epoch.
        skipping.end_epoch()
        assert lists(skipping.orders) == lists(masked.orders)


def test_cd_grab_on_one_worker_is_pair_grab():
    vectors = whole_vectors(6, [12])
    one, other = make("cd-grab", [12]), make("pair-grab", [12])
    for _ in range(4):
        for ordering in (one, other):
            show(ordering, vectors)
            ordering.end_epoch()
        assert one.version == other.version


def test_id_balancing_is_every_worker_on_its_own():
    sizes = [8, 5, 12]
    vectors = whole_vectors(7, sizes)
    for name in ("id-grab", "id-pair-grab"):
        together, apart = make(name, sizes), [make(name[3:], [size]) for size in sizes]
        for _ in range(3):
            show(together, vectors)
            together.end_epoch()
            for ordering, own in zip(apart, vectors, strict=True):
                show(ordering, [own])
                ordering.end_epoch()
            assert lists(together.orders) == [o.orders[0].tolist() for o in apart]


def test_cd_grab_signs_workers_of_a_pair_one_after_the_other():
    # Both workers show the same difference twice: the second worker must answer the first.
    row = torch.tensor([[[1.0], [1.0]], [[0.0], [0.0]]])
    shared, own = make("cd-grab", [2, 2]), make("pair-grab", [2, 2])
    shared.observe(row)
    own.observe(row)
    assert shared.state_dict()["balance"]["sides"].tolist() == [[1, -1], [-1, 1]]
    assert shared.state_dict()["balance"]["running"].tolist() == [[0.0]]
    assert own.state_dict()["balance"]["sides"].tolist() == [[1, 1], [-1, -1]]
    assert own.state_dict()["balance"]["running"].tolist() == [[1.0], [1.0]]


def test_grab_centres_by_the_mean_of_the_epoch_before():
    vectors = whole_vectors(5, [6, 4])
    ordering = make("grab", [6, 4])
    assert "mean" not in ordering.state_dict()["balance"]
    show(ordering, vectors)
    assert "mean" not in ordering.state_dict()["balance"]
    ordering.end_epoch()
    expected = torch.stack([own.mean(0) for own in vectors])
    assert torch.equal(ordering.state_dict()["balance"]["mean"], expected)
    # An epoch without rows has no mean of its own and leaves the old one.
    ordering.end_epoch()
    assert torch.equal(ordering.state_dict()["balance"]["mean"], expected)
    # The mean is of raw rows, not of centred ones.
    show(ordering, vectors)
    ordering.end_epoch()
    assert torch.equal(ordering.state_dict()["balance"]["mean"], expected)


def test_rule_settings_reach_the_signs():
    vectors = [torch.from_numpy(np.random.RandomState(0).randn(400, 3))]
    orders = set()
    for policy in (PairGraB(), PairGraB(Kernel()), PairGraB(Walk()), PairGraB(Walk(c=1.0))):
        ordering = Ordering(policy, [400], seed=1, start="identity")
        show(ordering, vectors)
        ordering.end_epoch()
        orders.add(tuple(ordering.orders[0].tolist()))
    assert len(orders) == 4
