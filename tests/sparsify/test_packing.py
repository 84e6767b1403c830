"""Indices come back from all formats; few-bit values lose nothing that is not kept."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gradherd.comm.script import run_together
from gradherd.sparsify.message_sizes import GROUP, VALUE_BITS, index_bytes, value_bytes
from gradherd.sparsify.packing import (
    decode_values,
    encode_values,
    pack_indices,
    places_of,
    unpack_indices,
)
from gradherd.sparsify.partitions import even_cuts
from gradherd.sparsify.selector import StepContext
from gradherd.sparsify.settings import make_settings
from gradherd.sparsify.value_sums import sum_values
from gradherd.sparsify.virtual_workers import VirtualWorkers
from tests.sparsify.rank_work import normal, same

few_bits = pytest.mark.parametrize("bits", [1, 2, 4])


@st.composite
def spans_and_indices(draw):
    first = draw(st.integers(0, 200_000) | st.sampled_from([4095, 4096, 65_535, 65_536]))
    end = first + draw(st.integers(1, 150_000) | st.sampled_from([1, 4096, 65_536]))
    indices = draw(st.sets(st.integers(first, end - 1), max_size=60))
    return (first, end), sorted(indices)


@given(spans_and_indices(), st.sampled_from([1, 8, 12, 16, 32]))
@settings(max_examples=300, deadline=None)
def test_indices_come_back(case, bits):
    span, indices = case
    packed = pack_indices(torch.tensor(indices, dtype=torch.int64), span, bits)
    assert packed.dtype == torch.uint8
    assert len(packed) == index_bytes(len(indices), span, bits)
    assert unpack_indices(packed, len(indices), span, bits).tolist() == indices


def test_twelve_bits_are_twelve_bits():
    """Two counts of 16 bits, then offsets, the lowest bits first: by hand."""
    packed = pack_indices(torch.tensor([0x123, 0xABC, 4096 + 0x7]), (0, 8192), 12)
    assert packed.tolist() == [2, 0, 1, 0, 0x23, 0xC1, 0xAB, 0x07, 0x00]
    # A chunk that is full has a count that needs 13 bits.
    full = torch.arange(4096, 3 * 4096)
    assert same(unpack_indices(pack_indices(full, (0, 20_000), 12), 8192, (0, 20_000), 12), full)


def slow_bytes(indices, span, bits):
    """A message, bit by bit: counts of pages, then offsets; or a bit for each coordinate."""
    first, end = span
    if bits == 1:
        numbers, width = [int(index in set(indices)) for index in range(first, end)], 1
        head = b""
    else:
        page = 1 << bits
        counts = [
            sum(index // page == number for index in indices)
            for number in range(first // page, (end - 1) // page + 1)
        ]
        size = 4 if bits == 16 else 2
        head = b"".join(n.to_bytes(size, "little") for n in counts) if len(counts) > 1 else b""
        numbers, width = [index % page for index in indices], bits
    joined = sum(number << (width * at) for at, number in enumerate(numbers))
    return head + joined.to_bytes(-(-width * len(numbers) // 8), "little")


@pytest.mark.parametrize("bits", [1, 8, 12, 16])
@pytest.mark.parametrize("span", [(0, 256), (250, 1300), (4000, 4103), (65_000, 66_000)])
def test_messages_are_those_of_a_slow_writer(bits, span):
    draw = np.random.RandomState(bits)
    for share in (0.01, 0.2, 1.0):
        indices = np.flatnonzero(draw.rand(span[1] - span[0]) < share) + span[0]
        if not len(indices):
            continue
        packed = pack_indices(torch.from_numpy(indices), span, bits)
        assert packed.numpy().tobytes() == slow_bytes(indices.tolist(), span, bits)
        rows = torch.stack([packed, packed])
        back = unpack_indices(rows, len(indices), span, bits)
        assert back.tolist() == [indices.tolist()] * 2


def test_a_bitmap_is_read_without_waiting_for_a_gpu_too():
    flags = torch.tensor([0, 1, 1, 0, 0, 1, 0, 0], dtype=torch.uint8)
    for count in (3, 5):
        wanted = [1, 2, 5] + [0] * (count - 3)
        assert places_of(flags, count).tolist() == wanted


def first_bytes(method, dim, size, k, bits):
    """Flag, count, offers with an index and a byte each, and values in one round or two."""
    blocks = method.rule(dim).blocks
    reach = max(
        end - first for first, end in pairwise(blocks.bounds(even_cuts(blocks.count, size)))
    )
    offers = -(-105 * k // (100 * size))
    lengths = {one: index_bytes(offers, (0, reach), one) for one in (1, 8, 12, 16, 32)}
    assert min(lengths, key=lengths.get) == bits
    words = -(-lengths[bits] // 4) + 1 + -(-offers // 4)
    values = value_bytes(k, 2)
    values = values if values <= 1024 else 2 * value_bytes(-(-k // size), 2)
    return (4 + 4 + 4 * words + values) * (size - 1)


@pytest.mark.parametrize("density, bits", [(0.01, 12), (0.05, 8), (0.1, 8), (0.2, 1), (0.6, 1)])
@pytest.mark.parametrize("method", ["exdyna", "topk"])
def test_all_workers_choose_what_is_smallest_and_lose_nothing(method, density, bits):
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
                assert workers.metrics["bytes"] == first_bytes(how.method, dim, size, k, bits)
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


def add_all(rows, always, form, dim):
    scripts = [
        sum_values(row.clone(), always, StepContext(0, rank, len(rows)), form, dim)
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
    total, left, sent = add_all(rows, always, form, 0)
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
def test_about_fourteen_bits_for_a_coordinate(method):
    """Two workers, one in a hundred: indices of 12 bits and a count per chunk, and two bits."""
    sent = {}
    for values in ("fp32", "int2"):
        how = make_settings(method, 0.01, values=values)
        workers = VirtualWorkers(how, 400_000, 2)
        workers.step(normal(0, 2, 400_000))
        sent[values] = 8 * workers.metrics["bytes"] / workers.metrics["selected"]
    assert sent["int2"] < sent["fp32"] / 2


@pytest.mark.parametrize("values", VALUE_BITS)
@pytest.mark.parametrize("method", ["exdyna", "topk", "dense"])
def test_error_feedback_brings_all_of_a_gradient_in_the_end(values, method):
    """The same gradient at every step: what arrives on average comes close to it."""
    density = 1.0 if method == "dense" else 0.1
    how = make_settings(method, density, values=values)
    workers = VirtualWorkers(how, 2000, 3)
    grads = normal(0, 3, 2000)
    steps = 60
    total = sum(workers.step(grads) for _ in range(steps)) / steps
    left = float((total - grads.mean(0)).norm() / grads.mean(0).norm())
    assert left < 0.35
    kept = workers.residuals().double().sum(0) + 3 * steps * total.double()
    if method == "dense":
        kept += sum(worker.owner_errors().double() for worker in workers.workers)
    torch.testing.assert_close(kept, steps * grads.double().sum(0), rtol=1e-4, atol=1e-2)
