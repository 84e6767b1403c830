"""Offers: written and read back, and the k largest of them against sorting everything."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gradherd.comm.message_sizes import index_bytes, magnitude_bytes
from gradherd.sparsify.consensus import (
    Offers,
    PartitionRule,
    Spans,
    accept_largest,
    leading_bits,
    make_offers,
    pack,
    smallest_magnitude,
    unpack,
)
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
    length = 1 - (-index_bytes(count, reach) // 4) - (-magnitude_bytes(count, compact) // 4)
    places, found = torch.tensor(indices, dtype=torch.int64), torch.tensor(seed, dtype=torch.int32)
    messages = torch.stack(
        [pack(Offers(places, leading_bits(row), found), reach, compact) for row in magnitudes]
    )
    assert (messages.dtype, messages.shape) == (torch.int32, (2, length))
    firsts = torch.tensor([0, 7])
    actual, bits, candidates = unpack(
        messages, count, Spans(firsts, firsts + reach, reach), compact
    )
    assert actual.tolist() == [indices, [7 + index for index in indices]]
    assert candidates.tolist() == [seed, seed]
    wanted = leading_bits(magnitudes)
    if compact:  # One of 255 steps below the largest, by hand; what is smaller counts as zero.
        top = wanted.amax(1, keepdim=True) // 16
        wanted = torch.where(top - wanted // 16 < 255, wanted // 16 * 16, 0)
    assert torch.equal(bits, wanted)


def test_coarse_magnitudes_tell_zero_and_the_largest_apart():
    magnitudes = torch.tensor([1e-9, 0.0, 3.0, 3.1, 1e4, 20.0, 0.0])
    offers = Offers(torch.arange(7), leading_bits(magnitudes), torch.zeros((), dtype=torch.int32))
    message = pack(offers, 7, compact=True)
    spans = Spans(torch.tensor([0]), torch.tensor([7]), 7)
    bits = unpack(message[None], 7, spans, compact=True).bits
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
    # Rows of one length; -1 is below all offers.
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
    candidates=st.dictionaries(
        st.integers(0, 99), st.sampled_from([0.0, 1.0, 1.5, 3.0]), min_size=1
    ),
    data=st.data(),
)
@settings(max_examples=150)
def test_the_largest_candidates_are_offered(candidates, data):
    count = data.draw(st.integers(1, len(candidates)))
    # In any order, with places between them that are none.
    order = data.draw(st.permutations([*candidates, *[100] * data.draw(st.integers(0, 5))]))
    magnitudes = torch.tensor([candidates.get(place, -1.0) for place in order])
    offers = make_offers(torch.tensor(order), magnitudes, torch.tensor(7), count)
    chosen = offers.indices.tolist()
    assert chosen == sorted(set(chosen)) and len(chosen) == count and chosen[-1] < 100
    own = torch.tensor([candidates[place] for place in chosen])
    assert torch.equal(offers.bits, leading_bits(own))
    assert sorted(own.tolist()) == sorted(candidates.values())[-count:]


@given(
    dim=st.integers(1, 3000),
    size=st.integers(1, 64),
    workers=st.integers(1, 9),
    factor=st.sampled_from([1.0, 1.1, 1.5, 3.0, math.inf]),
    data=st.data(),
)
@settings(max_examples=200)
def test_offers_are_the_fair_share_and_have_room(dim, size, workers, factor, data):
    k = data.draw(st.integers(1, dim))
    rule = PartitionRule(workers, factor, Blocks(dim, size), memory=0.9)
    offers = rule.offers(k)
    narrowest = rule.blocks.count // workers * size - (-dim % size)
    if not offers:
        assert k == dim or narrowest * workers < k
        return
    share = Fraction(k, workers)
    wanted = k if math.isinf(factor) else min(k, math.ceil(Fraction(str(factor)) * share))
    assert offers == min(wanted, narrowest) and offers * workers >= k
    inner = st.lists(st.integers(0, rule.blocks.count), min_size=workers - 1, max_size=workers - 1)
    cuts = torch.tensor([0, *sorted(data.draw(inner)), rule.blocks.count])
    firsts, ends, reach = rule.spans(cuts, data.draw(st.integers(0, 20)), offers)
    lengths = ends - firsts
    assert int(lengths.min()) >= offers and int(lengths.max()) == reach
    assert sorted(firsts.tolist()) == [0, *sorted(ends.tolist())[:-1]] and int(ends.max()) == dim


@pytest.mark.parametrize("workers", [2, 3, 16])
def test_partitions_have_room_for_all_offers_where_the_last_block_is_short(workers):
    blocks = Blocks.of(11_173_962, 1024)
    rule, k = PartitionRule(workers, 1.05, blocks, memory=0.9), 111_740
    offers = rule.offers(k)
    assert blocks.dim % blocks.size == 74 and offers
    loads = torch.zeros(blocks.count, dtype=torch.float64)
    loads[-2] = 1  # all of it in front of the short block: borders move there
    firsts, ends, _ = rule.spans(recut(loads, workers), 0, offers)
    assert int((ends - firsts).min()) >= offers
