"""Loops of all kinds learn the order that follows from the true examples of each gradient."""

import pytest

from gradherd.lab.ranks import run_ranks
from tests.attach import loops


@pytest.mark.parametrize("first", range(0, 50, 25))  # `make stress` runs 2,000
def test_random_loops(first):
    assert loops.run_loops(range(first, first + 25)) == []


@pytest.mark.parametrize(("ranks", "seeds"), [(2, range(1000, 1010)), (3, range(2000, 2006))])
def test_random_loops_on_ranks(ranks, seeds):
    for wrong in run_ranks(loops.run_loops, ranks, seeds):
        assert wrong == []
