"""Indices come back from messages; few-bit values lose nothing that is not kept."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gradherd.comm import packing
from gradherd.comm.message_sizes import (
    GROUP,
    ONE_ROUND_BYTES,
    VALUE_BITS,
    VALUE_FORMATS,
    fits_one_round,
    index_bytes,
    value_bytes,
)
from gradherd.comm.packing import (
    decode_values,
    encode_values,
    pack_indices,
    unpack_indices,
)
from gradherd.comm.script import run_together
from gradherd.lab.ranks import run_ranks
from gradherd.sparsify.partitions import even_cuts
from gradherd.sparsify.selector import StepContext
from gradherd.sparsify.settings import make_settings
from gradherd.sparsify.value_sums import sum_values
from gradherd.sparsify.virtual_workers import VirtualWorkers
from tests.sparsify import rank_work
from tests.sparsify.rank_work import normal, same
from tests.sparsify.reference import bounds

few_bits = pytest.mark.parametrize("bits", [1, 2, 4])


@st.composite
def ascending(draw):
    """Indices below a length, some of them several times."""
    length = draw(st.integers(1, 150_000) | st.sampled_from([1, 2, 4096, 65_536, 2**31 - 1]))
    return length, sorted(draw(st.lists(st.integers(0, length - 1), max_size=60)))


@given(ascending())
@example((1, [0, 0, 0]))  # more offers than a short partition has coordinates
@example((2**31 - 1, [2**31 - 2]))
@settings(max_examples=300, deadline=None)
def test_indices_come_back(case):
    length, indices = case
    packed = pack_indices(torch.tensor(indices, dtype=torch.int64), length)
    assert packed.dtype == torch.uint8
    assert len(packed) == index_bytes(len(indices), length)
    assert unpack_indices(packed, len(indices), length).tolist() == indices


def test_an_index_is_its_low_bits_and_a_step():
    """Three indices below 50 have four low bits each, then steps of their high bits: by hand."""
    packed = pack_indices(torch.tensor([1, 18, 20]), 50)
    assert packed.tolist() == [0b001, 0b010, 0b100, 0b000, 0b1101]
    assert unpack_indices(packed, 3, 50).tolist() == [1, 18, 20]


def slow_bytes(indices, length):
    """A message, bit by bit."""
    low = int(np.log2(length / len(indices)))
    planes = [[index >> bit & 1 for index in indices] for bit in range(low)]
    ones = {(index >> low) + number for number, index in enumerate(indices)}
    steps = [int(at in ones) for at in range(len(indices) + ((length - 1) >> low))]
    return b"".join(np.packbits(bits, bitorder="little").tobytes() for bits in [*planes, steps])


@pytest.mark.parametrize("length", [256, 1050, 103, 60_001])
def test_messages_are_those_of_a_slow_writer(length):
    draw = np.random.RandomState(length)
    for share in (0.01, 0.2, 1.0):
        indices = np.flatnonzero(draw.rand(length) < share)
        if not len(indices):
            continue
        packed = pack_indices(torch.from_numpy(indices), length)
        assert packed.numpy().tobytes() == slow_bytes(indices.tolist(), length)
        rows = torch.stack([packed, packed])
        back = unpack_indices(rows, len(indices), length)
        assert back.tolist() == [indices.tolist()] * 2


@pytest.mark.parametrize("count", [1, 700, 3000, 5000])  # of the last two, all bits are steps
def test_indices_are_read_without_waiting_for_a_gpu_too(monkeypatch, count):
    """The form for GPUs, which numpy's stands in for on a CPU."""
    indices = normal(0, 5000).abs().topk(count).indices.sort().values
    packed = pack_indices(indices, 5000)
    monkeypatch.setattr(packing, "_on_cpu", lambda tensor: False)
    assert same(pack_indices(indices, 5000), packed)
    rows = torch.stack([packed, packed])
    assert same(unpack_indices(rows, count, 5000), torch.stack([indices, indices]))
    assert same(unpack_indices(packed, count, 5000), indices)


@pytest.mark.parametrize("share", [0.0001, 0.001, 0.01, 0.1])
def test_indices_take_little_more_than_any_code_must(share):
    length = 10_000_000
    count = int(share * length)
    rest = length - count
    least = -(count * np.log2(share) + rest * np.log2(rest / length)) / count
    assert 8 * index_bytes(count, length) / count < least + 0.6


def first_bytes(method, dim, size, k):
    """Flag, count, offers with an index and a byte each, and values in one round or two."""
    blocks = method.rule(dim, size).blocks
    reach = max(
        end - first for first, end in pairwise(bounds(blocks, even_cuts(blocks.count, size)))
    )
    offers = -(-105 * k // (100 * size))
    words = -(-index_bytes(offers, reach) // 4) + 1 + -(-offers // 4)
    values = value_bytes(k, 2)
    values = values if values <= 1024 else 2 * value_bytes(-(-k // size), 2)
    return (4 + 4 + 4 * words + values) * (size - 1)


@pytest.mark.parametrize("density", [0.01, 0.05, 0.2, 0.6])
@pytest.mark.parametrize("method", ["exdyna", "topk"])
def test_messages_have_their_length_and_nothing_is_lost(method, density):
    dim, size, k = 40_000, 4, int(density * 40_000)
    how = make_settings(method, density, values="int2", dense_below=0)
    workers = VirtualWorkers(how, dim, size)
    sent, computed = torch.zeros(dim).double(), torch.zeros(dim).double()
    for step in range(4):
        grads = normal(step, size, dim)
        computed += grads.double().sum(0)
        sent += size * workers.step(grads).double()
        if method == "exdyna":
            assert workers.metrics["selected"] == k
            if step == 0:  # Partitions are even: all lengths are known.
                assert workers.metrics["bytes"] == first_bytes(how.method, dim, size, k)
    actual = sent + workers.residuals().double().sum(0)
    torch.testing.assert_close(actual, computed, rtol=1e-4, atol=1e-4)


def best_two_levels(size):
    """The two levels with the least squared error, by trying every split of the sorted values."""
    ordered = np.sort(size)
    best = len(ordered) * ordered.var(), ordered.mean(), ordered.mean()
    for split in range(1, len(ordered)):
        low, high = ordered[:split], ordered[split:]
        error = len(low) * low.var() + len(high) * high.var()
        best = min(best, (error, low.mean(), high.mean()))
    return best[1:]


def reference_decoded(values, bits):
    """What a receiver reads, value by value."""
    out = np.zeros(len(values))
    for begin in range(0, len(values), GROUP):
        group = np.asarray(values[begin : begin + GROUP], dtype=np.float64)
        size = np.abs(group)
        if bits == 1:
            low = high = size.mean()
        elif bits == 2:
            low, high = best_two_levels(size)
        else:
            low, high = size.min(), size.max()
        low, high = (float(torch.tensor(level).bfloat16()) for level in (low, high))
        levels = np.linspace(low, high, max(1, 2 ** (bits - 1)))
        nearest = levels[np.abs(size[:, None] - levels).argmin(1)]
        out[begin : begin + GROUP] = np.where(group < 0, -nearest, nearest)
    return out


@few_bits
@pytest.mark.parametrize("count", [1, 2, 3, 255, 256, 257, 1000])
def test_values_are_rounded_to_the_nearest_level_of_their_group(bits, count):
    values = normal(count, count) * torch.exp(normal(count + 1, count))
    code = encode_values(values, bits)
    assert code.shape == (value_bytes(count, bits),)
    decoded = decode_values(code, count, bits)
    # As near as the nearest level; which of two equally near ones is taken does not matter.
    wanted = torch.from_numpy(reference_decoded(values, bits))
    error, best = (values - decoded).abs(), (values - wanted).abs()
    assert bool((error <= best * (1 + 1e-5) + 1e-6 * values.abs().max()).all())


@few_bits
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=600)
)
@example([0.0, 1.7014117331926443e38, 1.7014118346046923e38])  # whose sum overflows
@settings(max_examples=100, deadline=None)
def test_rounding_never_adds_and_stays_finite(bits, values):
    given_values = torch.tensor(values)
    decoded = decode_values(encode_values(given_values, bits), len(values), bits)
    assert bool(decoded.isfinite().all())
    # Levels are rounded to bf16, so by up to 2**-8; subnormals round by more.
    left, whole = (x.double().square().sum() for x in (given_values - decoded, given_values))
    assert left <= 1.02 * whole + 1e-70


@few_bits
def test_rows_are_encoded_one_by_one(bits):
    rows = normal(0, 3, 700)
    together = encode_values(rows, bits)
    assert same(together, torch.stack([encode_values(row, bits) for row in rows]))
    assert same(
        decode_values(together, 700, bits),
        torch.stack([decode_values(row, 700, bits) for row in together]),
    )


def add_all(rows, always, form):
    scripts = [
        sum_values(row.clone(), always, StepContext(0, rank, len(rows)), form)
        for rank, row in enumerate(rows)
    ]
    results = run_together(scripts)
    totals = [result.value[0] for result in results]
    assert all(same(total, totals[0]) for total in totals), "the same bits on all workers"
    return totals[0], [result.value[1] for result in results], results[0].bytes


@pytest.mark.parametrize("form", VALUE_BITS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(("count", "always"), [(1, 0), (0, 40), (300, 7), (9001, 0), (9001, 2050)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_few_bits_round_away_is_left(form, size, count, always, dtype):
    """In one round and in two; the small parameters at the end are rounded to bf16 at most."""
    rows = normal(count, size, count + always, dtype=dtype)
    total, left, sent = add_all(rows, always, form)
    assert total.dtype == dtype
    if size == 1:
        assert same(total, rows[0]) and left == [None] and sent == 0
        return
    residual = torch.stack(left)
    error = total.double() + residual.double().sum(0) - rows.double().sum(0)
    assert float(error.abs().max()) < (1e-5 if dtype == torch.float32 else 1e-13)
    small = residual[:, count:].abs() / (rows.abs() + rows.abs().sum(0))[:, count:]
    assert always == 0 or float(small.max()) <= 2**-8 * 1.01
    if count > GROUP:
        bits = VALUE_BITS[form]
        assert sent < 2.2 * (size - 1) / size * ((bits * count / 8) * 1.1 + 2 * always) + 2000


@pytest.mark.parametrize("method", ["exdyna", "topk"])
def test_few_bits_for_a_coordinate(method):
    """Two workers, one in a hundred."""
    sent = {}
    for values in ("fp32", "int2"):
        how = make_settings(method, 0.01, values=values)
        workers = VirtualWorkers(how, 400_000, 2)
        workers.step(normal(0, 2, 400_000))
        sent[values] = 8 * workers.metrics["bytes"] / workers.metrics["selected"]
    assert sent["int2"] < sent["fp32"] / 2


def test_fewer_bits_send_fewer_bytes():
    """Eight workers: one bit takes two rounds as well, although one would add few bytes."""
    sent = {}
    for values in VALUE_FORMATS:
        workers = VirtualWorkers(make_settings("exdyna", 0.01, values=values), 800_000, 8)
        workers.step(normal(0, 8, 800_000))
        sent[values] = workers.metrics["bytes"]
    assert sorted(sent.values(), reverse=True) == list(sent.values())
    assert 2 * 7 / 8 * 4 * 800_000 / sent["int1"] > 300  # fewer than dense


@pytest.mark.parametrize("size", [2, 3, 8, 64])
@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 1000, 8000, 10**6])
def test_one_round_never_sends_much_more_than_two(size, bits, count):
    whole, share = value_bytes(count, bits), value_bytes(-(-count // size), bits)
    one, two = (size - 1) * whole, 2 * (size - 1) * share
    sent = one if fits_one_round(whole, size) else two
    assert sent <= two or sent <= (size - 1) * ONE_ROUND_BYTES


@pytest.mark.parametrize("size", [2, 4])
def test_real_ranks_send_the_bytes_of_one_round_or_two(size):
    count = 10_000
    for sent in run_ranks(rank_work.sums_in_few_bits, size, count):
        for form, bits in VALUE_BITS.items():
            one, two = value_bytes(count, bits), 2 * value_bytes(-(-count // size), bits)
            assert sent[form] == (size - 1) * (one if size == 2 else two)


@pytest.mark.parametrize("values", VALUE_BITS)
@pytest.mark.parametrize("method", ["exdyna", "topk"])
def test_error_feedback_brings_all_of_a_gradient_in_the_end(values, method):
    """The same gradient at every step: what arrives on average comes close to it."""
    workers = VirtualWorkers(make_settings(method, 0.1, values=values), 2000, 3)
    grads = normal(0, 3, 2000)
    steps = 60
    total = sum(workers.step(grads) for _ in range(steps)) / steps
    left = float((total - grads.mean(0)).norm() / grads.mean(0).norm())
    assert left < 0.35
    kept = workers.residuals().double().sum(0) + 3 * steps * total.double()
    torch.testing.assert_close(kept, steps * grads.double().sum(0), rtol=1e-4, atol=1e-2)
