"""A run that goes on with another number of ranks, in the middle of an epoch."""

import random

import pytest

from tests.stress.resizes import BATCH, chain


@pytest.mark.timeout(300)  # nine starts of torch
def test_four_then_two_then_three_ranks():
    chain([4, 2, 3], "exdyna", 1, random.Random(1))


def test_whole_batches_that_ride_on_the_dense_exchange():
    chain([2, 3, 1], "dense", BATCH, random.Random(2))
