"""Offers: written and read back, and the k largest of them against sorting everything."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gradherd.sparsify.consensus import (
    accept_largest,
    capacity,
    leading_bits,
    message_length,
    pack,
    smallest_magnitude,
    unpack,
)
from tests.sparsify.rank_work import normal

TOP = int(leading_bits(torch.tensor(math.inf)))
LARGEST, SMALLEST, TINY = 3.4028234663852886e38, 1.401298464324817e-45, 1.1754943508222875e-38


def magnitudes(width):
    return st.one_of(
        st.floats(width=width, allow_nan=False, allow_infinity=False),
        st.sampled_from([0.0, -0.0, SMALLEST, TINY, LARGEST, 1.0, -1.0, 1.5, 1 - 2**-24]),
        # Just on and beside the edges of bins.
        st.integers(0, TOP - 1).map(smallest_magnitude),
        st.integers(1, TOP).map(
            lambda n: float(np.nextafter(np.float32(smallest_magnitude(n)), 0))
        ),
    )


@pytest.mark.parametrize(("width", "dtype"), [(32, torch.float32), (64, torch.float64)])
def test_leading_bits_follow_the_order_of_magnitudes(width, dtype):
    @given(st.lists(magnitudes(width), min_size=2, max_size=30))
    @settings(max_examples=200)
    def check(values):
        values = torch.tensor(values, dtype=dtype)
        bins = leading_bits(values.abs())
        assert bins.dtype == torch.int32
        assert int(bins.min()) >= 0
        in_order = bins[values.abs().sort().indices].tolist()
        assert in_order == sorted(in_order)

    check()


@given(magnitudes(32))
@example(SMALLEST)
@example(TINY)
@example(LARGEST)
@example(0.0)
@settings(max_examples=300)
def test_a_magnitude_lies_between_the_edges_of_its_leading_bits(value):
    (number,) = leading_bits(torch.tensor([abs(value)])).tolist()
    assert smallest_magnitude(number) <= abs(value) < smallest_magnitude(number + 1)
    assert int(leading_bits(torch.tensor(smallest_magnitude(number)))) == number
    if abs(value) >= TINY and number + 1 < TOP:
        assert smallest_magnitude(number + 1) / smallest_magnitude(number) - 1 < 0.004


@st.composite
def spans(draw):
    """Some ascending indices of a span that may cross pages."""
    first = draw(st.sampled_from([0, 1, 65_535, 65_536, 131_000, 2_000_000_000]))
    length = draw(st.sampled_from([1, 2, 7, 65_536, 65_537, 140_000, 1_000_000]))
    selections = draw(st.sets(st.integers(0, length - 1), max_size=40))
    edges = {0, length - 1} if draw(st.booleans()) else set()
    return sorted(first + index for index in selections | edges), (first, first + length)


@given(offered=spans(), more=st.integers(0, 9), seed=st.integers(0, 9))
@settings(max_examples=200, deadline=None)
def test_offers_are_read_as_they_were_written(offered, more, seed):
    indices, span = offered
    magnitudes = normal(seed, len(indices)).abs()
    length = message_length(len(indices), span) + more
    message = pack(torch.tensor(indices, dtype=torch.int64), magnitudes, span, length)
    assert (message.dtype, len(message)) == (torch.int32, length)
    assert not message[length - more :].any()  # nothing that was not written
    actual, ranks = unpack(message.numpy(), len(indices), span)
    assert actual.tolist() == indices
    assert ranks.tolist() == leading_bits(magnitudes).tolist()


@pytest.mark.parametrize(
    ("count", "span", "wanted"),
    [
        (100, (0, 65_536), 100),  # one page: 2 + 2 bytes each
        (101, (0, 65_536), 102),
        (100, (0, 65_537), 102),  # two pages: a count for each
        (100, (0, 40 * 65_536), 140),
        (100, (0, 60 * 65_536), 150),  # so many that whole indices are smaller
        (0, (5, 9), 0),
    ],
)
def test_the_smaller_way_to_write_is_taken(count, span, wanted):
    assert message_length(count, span) == wanted


@given(data=st.data(), sizes=st.lists(st.integers(0, 30), min_size=1, max_size=6))
@settings(max_examples=200, deadline=None)
def test_the_k_largest_offers_are_kept(data, sizes):
    if not sum(sizes):
        sizes = [*sizes, 1]
    kinds = st.sampled_from([0.0, 1.0, 1.0001, 1.5, 2.0, 1e-30, 1e30])
    drawn = [data.draw(st.lists(kinds, min_size=n, max_size=n)) for n in sizes]
    begins = np.cumsum([0, *sizes])
    given_offers = [
        (
            np.arange(begin, begin + len(row), dtype=np.int64),
            leading_bits(torch.tensor(row)).numpy().astype(np.uint16),
        )
        for begin, row in zip(begins, drawn, strict=False)
    ]
    k = data.draw(st.integers(1, sum(sizes)))
    residual = accept_largest(given_offers, k)
    ranks = np.concatenate([one for _, one in given_offers])
    assert len(residual.indices) == len(set(residual.indices.tolist())) == sum(residual.counts) == k
    dropped = np.setdiff1d(np.arange(len(ranks)), residual.indices)
    line = np.sort(ranks)[-k]
    assert residual.threshold == smallest_magnitude(int(line))
    assert ranks[residual.indices].min() == line
    assert len(dropped) == 0 or ranks[dropped].max() <= line
    owner = np.searchsorted(begins, residual.indices, side="right") - 1
    assert np.bincount(owner, minlength=len(sizes)).tolist() == residual.counts


def test_ties_are_shared_out():
    row = leading_bits(torch.ones(8)).numpy().astype(np.uint16)
    rows = [(np.arange(8 * r, 8 * r + 8, dtype=np.int64), row) for r in range(4)]
    assert accept_largest(rows, 16).counts == [4, 4, 4, 4]


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(sum),
    factor=st.sampled_from([1.0, 1.1, 1.5, 3.0, math.inf]),
    data=st.data(),
)
@settings(max_examples=150)
def test_capacity_is_the_fair_share_and_makes_room_for_k(lengths, factor, data):
    k = data.draw(st.integers(1, sum(lengths)))
    most = capacity(factor, k, lengths)

    def room(each):
        return sum(min(length, each) for length in lengths)

    share = Fraction(k, len(lengths))
    wanted = k if math.isinf(factor) else math.ceil(Fraction(str(factor)) * share)
    assert room(most) >= k
    assert most == wanted or (most > wanted and room(most - 1) < k)
