"""Offers: written and read back, and the k largest of them against sorting everything."""

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gradherd.sparsify.consensus import (
    PartitionRule,
    accept_largest,
    capacity,
    leading_bits,
    pack,
    smallest_magnitude,
    unpack,
)
from gradherd.sparsify.message_sizes import index_bytes, magnitude_bytes
from gradherd.sparsify.partitions import Blocks, recut
from tests.sparsify.rank_work import normal

TOP = int(leading_bits(torch.tensor(math.inf)))


def smallest(bits):
    """The smallest magnitude with these leading bits, as a number."""
    return float(smallest_magnitude(torch.tensor(bits, dtype=torch.int32)))


LARGEST, SMALLEST, TINY = 3.4028234663852886e38, 1.401298464324817e-45, 1.1754943508222875e-38


def magnitudes(width):
    return st.one_of(
        st.floats(width=width, allow_nan=False, allow_infinity=False),
        st.sampled_from([0.0, -0.0, SMALLEST, TINY, LARGEST, 1.0, -1.0, 1.5, 1 - 2**-24]),
        # Just on and beside the edges of bins.
        st.integers(0, TOP - 1).map(smallest),
        st.integers(1, TOP).map(lambda n: float(np.nextafter(np.float32(smallest(n)), 0))),
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
    assert smallest(number) <= abs(value) < smallest(number + 1)
    assert int(leading_bits(torch.tensor(smallest(number)))) == number
    if abs(value) >= TINY and number + 1 < TOP:
        assert smallest(number + 1) / smallest(number) - 1 < 0.004


@st.composite
def offers(draw):
    """Some ascending indices of a partition that may have several pages."""
    length = draw(st.sampled_from([1, 2, 7, 65_536, 65_537, 140_000, 1_000_000, 2_000_000_000]))
    selections = draw(st.sets(st.integers(0, length - 1), min_size=1, max_size=40))
    edges = {0, length - 1} if draw(st.booleans()) else set()
    return sorted(selections | edges), length


@given(offered=offers(), compact=st.booleans(), seed=st.integers(0, 9))
@settings(max_examples=200, deadline=None)
def test_offers_are_read_as_they_were_written(offered, compact, seed):
    indices, reach = offered
    scales = normal(seed + 9, 2, len(indices)).mul(4).exp()
    magnitudes = (normal(seed, 2, len(indices)) * scales).abs()
    count = len(indices)
    length = -(-index_bytes(count, reach) // 4) - (-magnitude_bytes(count, compact) // 4)
    messages = torch.stack(
        [pack(torch.tensor(indices, dtype=torch.int64), row, reach, compact) for row in magnitudes]
    )
    assert (messages.dtype, messages.shape) == (torch.int32, (2, length))
    actual, bits = unpack(messages, len(indices), reach, compact)
    assert actual.tolist() == [indices, indices]
    wanted = leading_bits(magnitudes)
    if compact:  # One of 255 steps below the largest, by hand; what is smaller counts as zero.
        top = wanted.amax(1, keepdim=True) // 16
        wanted = torch.where(top - wanted // 16 < 255, wanted // 16 * 16, 0)
    assert torch.equal(bits, wanted)


def test_coarse_magnitudes_tell_zero_and_the_largest_apart():
    magnitudes = torch.tensor([1e-9, 0.0, 3.0, 3.1, 1e4, 20.0, 0.0])
    message = pack(torch.arange(7), magnitudes, 7, compact=True)
    _, bits = unpack(message[None], 7, 7, compact=True)
    read = smallest_magnitude(bits[0])
    assert read[[0, 1, 6]].tolist() == [0.0] * 3
    near = magnitudes[2:6] / read[2:6]
    assert bool(((near >= 1) & (near < 1.07)).all())


@given(data=st.data(), sizes=st.lists(st.integers(0, 30), min_size=1, max_size=6))
@settings(max_examples=200, deadline=None)
def test_the_k_largest_offers_are_kept(data, sizes):
    if not sum(sizes):
        sizes = [*sizes, 1]
    kinds = st.sampled_from([0.0, 1.0, 1.0001, 1.5, 2.0, 1e-30, 1e30])
    drawn = [data.draw(st.lists(kinds, min_size=n, max_size=n)) for n in sizes]
    begins = np.cumsum([0, *sizes])
    # Rows of one length: where a worker has fewer offers, there is none.
    bits, indices = torch.full((2, len(sizes), max(sizes)), -1)
    for row, own, begin in zip(range(len(sizes)), drawn, begins, strict=False):
        bits[row, : len(own)] = leading_bits(torch.tensor(own))
        indices[row, : len(own)] = begin + torch.arange(len(own))
    k = data.draw(st.integers(1, sum(sizes)))
    accepted = accept_largest(indices, bits.int(), k)
    chosen, ranks = accepted.indices.numpy(), bits[bits >= 0].numpy()
    assert len(chosen) == len(set(chosen.tolist())) == int(accepted.counts.sum()) == k
    dropped = np.setdiff1d(np.arange(len(ranks)), chosen)
    line = np.sort(ranks)[-k]
    assert float(accepted.threshold) == smallest(int(line))
    assert ranks[chosen].min() == line
    assert len(dropped) == 0 or ranks[dropped].max() <= line
    owner = np.searchsorted(begins, chosen, side="right") - 1
    assert np.bincount(owner, minlength=len(sizes)).tolist() == accepted.counts.tolist()
    # As a sort of all of them would have it: what ties is taken evenly spaced.
    ties = np.flatnonzero(ranks == line)
    need = k - int((ranks > line).sum())
    wanted = np.append(np.flatnonzero(ranks > line), ties[np.arange(need) * len(ties) // need])
    assert chosen.tolist() == sorted(wanted.tolist())


def test_ties_are_shared_out():
    bits = leading_bits(torch.ones(4, 8))
    assert accept_largest(torch.arange(32).view(4, 8), bits, 16).counts.tolist() == [4, 4, 4, 4]


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


@pytest.mark.parametrize("workers", [2, 3, 16])
def test_partitions_have_room_for_all_offers_where_the_last_block_is_short(workers):
    blocks = Blocks.of(11_173_962, 1024)
    rule, k = PartitionRule(1.05, blocks, memory=0.9), 111_740
    assert blocks.dim % blocks.size == 74 and rule.fits(k, workers)
    loads = torch.zeros(blocks.count, dtype=torch.float64)
    loads[-2] = 1  # all of it in front of the short block: borders move there
    bounds = blocks.bounds(recut(loads, workers, rule.least(k, workers)).tolist())
    sizes = [end - begin for begin, end in pairwise(bounds)]
    assert min(sizes) >= rule.offers(k, workers)
