"""A run that goes on with another number of ranks, in the middle of an epoch."""

import random

import pytest

from tests.stress.resizes import chain


@pytest.mark.timeout(300)  # nine starts of torch
def test_four_then_two_then_three_ranks():
    chain([4, 2, 3], "exdyna", random.Random(1))
