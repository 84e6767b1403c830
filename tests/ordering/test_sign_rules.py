import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradherd.ordering.registry import SIGN_RULES
from gradherd.ordering.sign_rules import Greedy, Kernel, Walk
from tests.ordering import reference

CHEAP = settings(max_examples=80, deadline=None)

numbers = st.floats(-1e6, 1e6)
draws = st.floats(-1, 1, exclude_max=True)
# A zero vector has inner product 0 with anything.
zero = st.tuples(st.just(0.0), st.just(0.0), draws)
real = st.tuples(numbers, st.floats(1e-6, 1e6), draws)
steps = st.lists(st.one_of(real, zero), min_size=1, max_size=30)


def run(rule, steps, total=1, epoch=0):
    """Signs of one stream, and the carry after each step."""
    carry, signs, carries = rule.start(total, epoch), [], []
    for inner, square, draw in steps:
        plus, carry = rule.decide(inner, square, draw, carry)
        signs.append(plus)
        carries.append(list(carry))
    return signs, carries


@given(inner=numbers)
@CHEAP
def test_greedy_takes_plus_up_to_zero(inner):
    assert run(Greedy(), [(inner, 1.0, 0.3)]) == ([inner <= 0], [[]])


def test_greedy_ties_go_to_plus():
    assert run(Greedy(), [(0.0, 1.0, 0.0), (-0.0, 1.0, 0.0), (5e-324, 1.0, 0.0)])[0] == [
        True,
        True,
        False,
    ]


@given(steps=steps, c=st.floats(0.01, 100))
@CHEAP
def test_walk_follows_its_formula(steps, c):
    slow = reference.Walk(c)
    expected = [slow.plus(*step) for step in steps]
    signs, carries = run(Walk(c), steps)
    assert signs == expected
    assert carries[-1] == [max(square for _, square, _ in steps)]


def test_walk_has_the_published_law():
    # |v| = 1, c = 30: P(+) = 1/2 - <S, v> / 60.
    for inner in (-31.0, -30.0, -12.0, 0.0, 7.5, 29.0, 31.0):
        draws = (np.arange(6000) + 0.5) / 3000 - 1
        plus = [run(Walk(), [(inner, 1.0, draw)])[0][0] for draw in draws]
        assert np.mean(plus) == pytest.approx(min(1, max(0, 0.5 - inner / 60)), abs=1e-3)


@given(
    steps=steps,
    total=st.integers(1, 1000),
    epoch=st.integers(0, 50),
    epochs=st.integers(1, 300),
    delta=st.floats(0.01, 0.99),
)
@CHEAP
def test_kernel_follows_its_formula(steps, total, epoch, epochs, delta):
    slow = reference.Kernel(total, epoch + 1, epochs, delta)
    expected, qs = [], []
    for step in steps:
        expected.append(slow.plus(*step))
        qs.append((slow.q, slow.i))
    signs, carries = run(Kernel(epochs, delta), steps, total, epoch)
    assert signs == expected
    assert [(q, i) for q, i, _ in carries] == [(pytest.approx(q, rel=1e-12), i) for q, i in qs]


def test_kernel_by_hand():
    # First vector: q = 0, so r = 0, a = b^2 = 4, q becomes 8.
    rule = Kernel(epochs=1, delta=0.5)
    signs, carries = run(rule, [(1.9, 4.0, 0.5)], total=1, epoch=0)
    assert signs == [True]  # 1.9 <= 0.5 * 4
    assert carries[0][:2] == [8.0, 1.0]
    assert run(rule, [(2.1, 4.0, 0.5)])[0] == [False]
    # Second: l = ln(4/0.5 * 2) = ln 16, r^2 = 8 ln 16 / 4 > 1, a = r b^2.
    r = math.sqrt(2 * math.log(16))
    grown = 8 + 2 * 4 * (math.log(16) + 0.5 - r) / math.log(16)
    for inner, plus in ((0.5 * r * 4 - 1e-9, True), (0.5 * r * 4 + 1e-9, False)):
        signs, carries = run(rule, [(0.0, 4.0, 0.5), (inner, 4.0, 0.5)])
        assert signs[1] is plus
        assert carries[1][:2] == [pytest.approx(grown, rel=1e-14), 2.0]


@pytest.mark.parametrize("name", SIGN_RULES)
def test_zero_vectors_leave_the_carry_alone(name):
    rule = SIGN_RULES[name]()
    before = [(3.0, 2.0, 0.1), (-1.0, 5.0, -0.7)]
    assert run(rule, before)[1][-1] == run(rule, [*before, (0.0, 0.0, 0.9)])[1][-1]


@pytest.mark.parametrize("name", SIGN_RULES)
def test_deciding_does_not_write_into_the_carry(name):
    rule = SIGN_RULES[name]()
    carry = np.array(rule.start(4, 0), dtype=np.float64)
    for square in (4.0, 0.0, 2.0):
        before = carry.copy()
        _, after = rule.decide(1.0, square, 0.1, carry)
        assert np.array_equal(carry, before)
        carry = np.array(after)


@pytest.mark.parametrize("c", [0.0, -1.0, math.inf, math.nan])
def test_walk_wants_a_positive_number(c):
    with pytest.raises(ValueError, match=re.escape(f"c must be in (0, inf), got {c}")):
        Walk(c)


@pytest.mark.parametrize("epochs", [0, -3])
def test_kernel_wants_an_epoch(epochs):
    with pytest.raises(ValueError, match=f"epochs must be at least 1, got {epochs}"):
        Kernel(epochs=epochs)


@pytest.mark.parametrize("delta", [0.0, 1.0, -0.1, math.nan])
def test_kernel_wants_a_probability(delta):
    with pytest.raises(ValueError, match=rf"delta must be in \(0, 1\), got {delta}"):
        Kernel(delta=delta)
