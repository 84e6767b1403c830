"""Where the line is drawn: the online rule, and bins counted by all workers."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gradherd.comm.script import run_together
from gradherd.sparsify.thresholds import (
    BINS,
    Cut,
    Online,
    bin_of,
    bins_of,
    capacity,
    counts_in,
    find,
    floor_of,
    padding,
    search,
)
from tests.sparsify.work import normal

TOP = bin_of(math.inf)
LARGEST, SMALLEST, TINY = 3.4028234663852886e38, 1.401298464324817e-45, 1.1754943508222875e-38


@pytest.mark.parametrize(
    ("picked", "factor"),
    [
        (10_000, 1.005),
        (1_101, 1.005),
        (1_100, 1.00125),  # the edge of the band belongs to it
        (1_001, 1.00125),
        (1_000, 0.9987),  # the branch that the published code cannot reach
        (910, 0.9987),
        (909, 0.995),
        (1, 0.995),
        (0, 0.995),
    ],
)
def test_the_online_rule(picked, factor):
    assert Online().following(2.0, picked, 1_000) == 2.0 * factor


def test_the_online_rule_has_constants_of_ones_own():
    rule = Online(band=2.0, fast_up=4.0, slow_up=3.0, slow_down=0.5, fast_down=0.25)
    found = [rule.following(1.0, picked, 100) for picked in (201, 200, 100, 51, 50)]
    assert found == [4.0, 3.0, 0.5, 0.5, 0.25]


@pytest.mark.parametrize("k", [1, 7, 100, 31_832])
def test_the_first_online_threshold_is_that_of_the_paper(k):
    assert Online().first(k) == pytest.approx(1 / (2 * math.sqrt(k)), rel=1e-15)


def test_stationary_noise_stays_within_a_tenth_of_the_target():
    dim, k = 1_000_000, 10_000
    rule, draw = Online(), np.random.RandomState(0)
    threshold, shares = rule.first(k), []
    for _ in range(3_000):
        picked = draw.binomial(dim, math.erfc(threshold / math.sqrt(2)))
        shares.append(picked / k)
        threshold = rule.following(threshold, picked, k)
    assert shares[0] > 50  # The paper's start is far off here.
    late = np.array(shares[1_500:])
    assert late.min() > 0.9 and late.max() < 1.1
    # Rising and falling alike, it is on the target, not at the lower edge of the band.
    assert late.mean() == pytest.approx(1, abs=0.01)


def magnitudes(width):
    return st.one_of(
        st.floats(width=width, allow_nan=False, allow_infinity=False),
        st.sampled_from([0.0, -0.0, SMALLEST, TINY, LARGEST, 1.0, -1.0, 1.5, 1 - 2**-24]),
        # Just on and beside the edges of bins.
        st.integers(0, TOP - 1).map(floor_of),
        st.integers(1, TOP).map(lambda n: float(np.nextafter(np.float32(floor_of(n)), 0))),
    )


@pytest.mark.parametrize(("width", "dtype"), [(32, torch.float32), (64, torch.float64)])
def test_bins_follow_the_order_of_magnitudes(width, dtype):
    @given(st.lists(magnitudes(width), min_size=2, max_size=30))
    @settings(max_examples=200)
    def check(values):
        values = torch.tensor(values, dtype=dtype)
        bins = bins_of(values)
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
def test_a_magnitude_lies_between_the_edges_of_its_bin(value):
    (number,) = bins_of(torch.tensor([value])).tolist()
    assert number == bin_of(value)
    assert floor_of(number) <= abs(value) < floor_of(number + 1)
    assert bin_of(floor_of(number)) == number
    if abs(value) >= TINY and number + 1 < TOP:
        assert floor_of(number + 1) / floor_of(number) - 1 < 0.008


def test_half_precision_has_the_bins_of_its_numbers():
    values = torch.tensor([0.0, 1e-7, 0.333, -1.0, 60_000.0])
    for dtype in (torch.float16, torch.bfloat16):
        narrow = values.to(dtype)
        assert torch.equal(bins_of(narrow), bins_of(narrow.float()))


def test_counts_in_a_window_keep_what_lies_above():
    last = 100 + BINS - 1
    bins = torch.tensor([100, 100, 101, last - 1, last, last + 1, 5_000], dtype=torch.int32)
    counts = counts_in(bins, 100)
    assert (counts.dtype, len(counts)) == (torch.int32, BINS)
    assert counts[[0, 1, BINS - 2, BINS - 1]].tolist() == [2, 1, 1, 3]
    assert counts.sum() == 7
    assert counts_in(bins[:0], 3).tolist() == [0] * BINS


class Pool:
    """Magnitudes of several workers, and the k-th largest by sorting all of them."""

    def __init__(self, seed, lengths, kind, dtype=np.float32):
        draw = np.random.RandomState(seed)
        self.rows = []
        for length in lengths:
            values = draw.randn(length)
            if kind == "scales":
                values *= 10.0 ** draw.randint(-44, 38, length)
            elif kind == "few":
                values = draw.randint(-2, 3, length) * 0.75
            elif kind == "zeros":
                values *= draw.rand(length) < 0.1
            elif kind == "near":
                values = 1 + draw.randint(-40, 40, length) * 1e-4
            with np.errstate(over="ignore"):
                self.rows.append(values.astype(dtype).clip(-LARGEST, LARGEST).astype(dtype))

    @property
    def tensors(self):
        return [torch.from_numpy(row) for row in self.rows]

    def kth(self, k, most):
        """The k-th largest, if of each worker no more than its `most` largest count."""
        top = [np.sort(np.abs(row))[::-1][:most] for row in self.rows]
        return float(np.sort(np.concatenate(top))[::-1][k - 1])

    def check(self, cut, k, most):
        """The cut is the k-th largest's bin, and its shares are k of the largest."""
        kth = self.kth(k, most)
        floor, end = floor_of(bin_of(kth)), floor_of(bin_of(kth) + 1)
        assert cut.floor == floor
        assert cut.floor <= kth < end
        assert cut.start <= cut.floor
        shares = cut.shares(k)
        assert sum(shares) == k
        assert max(shares) <= most
        for row, above, inside, share in zip(self.rows, cut.above, cut.inside, shares, strict=True):
            size = np.abs(row)
            assert above == min(most, (size >= end).sum())
            assert above + inside == min(most, (size >= floor).sum())
            assert above <= share <= above + inside

    def draw(self, data):
        """A number to pick, and a capacity that has room for it."""
        lengths = [len(row) for row in self.rows]
        k = data.draw(st.integers(1, sum(lengths)))
        room = [m for m in range(1, k + 1) if sum(min(n, m) for n in lengths) >= k]
        return k, data.draw(st.sampled_from([room[0], room[-1], room[len(room) // 2]]))


pools = st.builds(
    Pool,
    st.integers(0, 2**31),
    st.lists(st.integers(0, 60), min_size=1, max_size=5).filter(sum),
    st.sampled_from(["normal", "scales", "few", "zeros", "near"]),
)


def search_all(rows, k, most):
    """The cut that all workers found, and the candidates of each."""
    found = [told.value for told in run_together([search(row, k, most) for row in rows])]
    assert all(cut == found[0][0] for cut, _ in found)
    return found[0][0], [where for _, where in found]


@given(pool=pools, data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_search_finds_the_kth_largest_at_any_scale(pool, data):
    k, most = pool.draw(data)
    cut, found = search_all(pool.tensors, k, most)
    pool.check(cut, k, most)
    for row, own in zip(pool.rows, found, strict=True):
        assert own.tolist() == np.flatnonzero(np.abs(row) >= cut.floor).tolist()


@given(pool=pools, data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_window_finds_what_a_search_finds_or_nothing(pool, data):
    k, most = pool.draw(data)
    bins = [bins_of(row) for row in pool.tensors]
    wanted = bin_of(pool.kth(k, most))
    offset = data.draw(st.sampled_from([0, 1, 64, *range(BINS - 3, BINS + 1), -1, -70, 500]))
    lowest = max(0, wanted - offset)
    counts = torch.stack([counts_in(own[own >= lowest], lowest) for own in bins])
    cut = find(counts, lowest, k, most)
    if lowest <= wanted < lowest + BINS - 1:
        pool.check(cut, k, most)
    else:
        assert cut is None


def test_float64_beside_the_edges_of_float32_loses_no_candidate():
    # As a float32 the first is one, where a bin begins, and the second is infinite.
    for top in (1 - 2.0**-53, 1e39, 1e300, 1e-60):
        rows = [torch.tensor([0.0, top, 0.0]).double(), torch.tensor([0.0, -top]).double()]
        rows[0][1] = top
        rows[1][1] = -top
        cut, found = search_all(rows, 2, 2)
        assert sum(cut.shares(2)) == 2
        for own, share, where in zip(rows, cut.shares(2), found, strict=True):
            assert share <= len(where)
            if top != 1e-60:  # that is zero as a float32
                assert (share, where.tolist()) == (1, [1])
            assert bool((own[where].abs() <= top).all())


def test_a_window_with_too_few_candidates_finds_nothing():
    counts = torch.zeros(2, BINS, dtype=torch.int32)
    counts[0, 10] = 3
    assert find(counts, 0, 4, 9) is None
    cut = find(counts, 0, 3, 9)
    assert (cut.floor, cut.above, cut.inside) == (floor_of(10), [0, 0], [3, 0])
    counts[1, BINS - 1] = 2
    assert find(counts, 0, 2, 9) is None  # how far above is not known
    cut = find(counts, 0, 3, 9)
    assert (cut.floor, cut.above, cut.inside) == (floor_of(10), [0, 2], [3, 0])


@pytest.mark.parametrize("found", ["by search", "in a window"])
def test_the_next_step_starts_where_there_are_candidates_to_spare(found):
    rows, k = [normal(rank, 4000) for rank in range(3)], 100
    everything = torch.cat(rows).abs()
    if found == "by search":
        cut, _ = search_all(rows, k, k)
    else:
        lowest = bin_of(float(everything.sort().values[-320]))
        bins = [bins_of(row) for row in rows]
        counts = torch.stack([counts_in(own[own >= lowest], lowest) for own in bins])
        cut = find(counts, lowest, k, k)
    there = int((everything >= cut.start).sum())
    assert 2 * k <= there <= 5 * k
    # That is enough, and not too much, for a step that is like this one.
    lowest, again = bin_of(cut.start), [normal(rank + 9, 4000) for rank in range(3)]
    bins = [bins_of(row[row.abs() >= cut.start]) for row in again]
    after = find(torch.stack([counts_in(own, lowest) for own in bins]), lowest, k, k)
    kth = float(torch.cat(again).abs().sort().values[-k])
    assert after.floor == floor_of(bin_of(kth))


def test_the_next_step_starts_lower_where_there_was_nothing_to_spare():
    counts = torch.zeros(2, BINS, dtype=torch.int32)
    counts[:, 5] = 3
    cut = find(counts, 5_000, 4, 4)
    assert 0 < cut.start < floor_of(5_000) < cut.floor
    assert find(counts, 0, 4, 4).start == 0


@pytest.mark.parametrize("k", [1, 5, 12])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.3, SMALLEST, LARGEST])
def test_a_search_among_equal_values_shares_them_out(value, k):
    rows = [torch.full((6,), value), torch.full((2,), -value), torch.full((4,), value)]
    cut, found = search_all(rows, k, k)
    assert cut.floor == floor_of(bin_of(value))
    sizes = [min(len(row), k) for row in rows]
    assert (cut.above, cut.inside) == ([0, 0, 0], sizes)
    assert [len(own) for own in found] == [6, 2, 4]
    shares = cut.shares(k)
    assert sum(shares) == k
    for share, length in zip(shares, sizes, strict=True):
        assert abs(share - k * length / sum(sizes)) <= 1


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


@given(
    bins=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=8),
    data=st.data(),
)
@settings(max_examples=200)
def test_shares_add_up_and_are_about_the_same_part_of_the_bin(bins, data):
    above, inside = [a for a, _ in bins], [i for _, i in bins]
    if not sum(inside):
        inside[0] = 1
    need = data.draw(st.integers(1, sum(inside)))
    shares = Cut(1.0, above, inside, start=0.5).shares(sum(above) + need)
    assert sum(shares) == sum(above) + need
    for share, over, within in zip(shares, above, inside, strict=True):
        assert over <= share <= over + within
        assert abs(share - over - need * within / sum(inside)) < 1


def test_padding_is_what_the_longest_costs():
    assert padding([3, 3, 3]) == 1
    assert padding([4, 0, 0, 0]) == 4
    assert padding([3, 2, 1]) == 1.5
    assert padding([0, 0]) == 1
