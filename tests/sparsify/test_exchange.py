"""What is sent: indices arrive unchanged, sums have the same bits, nothing is lost."""

from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gradherd.comm.message_sizes import ONE_ROUND_BYTES, index_bytes
from gradherd.comm.packing import pack_indices
from gradherd.comm.script import run_together
from gradherd.lab.ranks import run_ranks
from gradherd.sparsify.selecting import gather_indices, gather_union
from gradherd.sparsify.selector import StepContext
from tests.sparsify import rank_work

PAGE = 65_536


@st.composite
def selections(draw):
    """Spans that tile a vector and ascending selections in them; borders on and beside pages."""
    dim = draw(st.integers(1, 400_000) | st.sampled_from([PAGE - 1, PAGE, PAGE + 1, 3 * PAGE]))
    places = st.integers(0, dim) | st.sampled_from([PAGE - 1, PAGE, PAGE + 1, 2 * PAGE])
    workers = draw(st.integers(1, 5))
    inner = draw(st.lists(places.map(lambda at: min(at, dim)), min_size=workers - 1, max_size=4))
    borders = [0, *sorted(inner[: workers - 1]), dim]
    spans = list(pairwise(borders))
    own = []
    for begin, end in spans:
        if begin == end:
            own.append([])
            continue
        some = st.sets(st.integers(begin, end - 1), max_size=draw(st.sampled_from([0, 1, 3, 40])))
        own.append(sorted(draw(some)))
    return own, spans


def gather_all(own, spans):
    counts = [len(mine) for mine in own]
    return [
        gather_indices(
            torch.tensor(mine, dtype=torch.int64), counts, spans, StepContext(5, r, len(own))
        )
        for r, mine in enumerate(own)
    ]


@given(selections())
@example(([[0]], [(0, 1)]))
@example(([[], []], [(0, 5), (5, 9)]))
@example(([[PAGE - 1, PAGE], [2 * PAGE]], [(0, PAGE + 1), (PAGE + 1, 3 * PAGE)]))
@example(([[1, 2, PAGE + 1], []], [(0, 2 * PAGE), (2 * PAGE, 2 * PAGE)]))
@settings(max_examples=200, deadline=None)
def test_indices_come_back_in_the_bytes_of_the_longest_message(case):
    own, spans = case
    size, everything = len(own), [index for mine in own for index in mine]
    sizes = [
        index_bytes(len(mine), end - first) for mine, (first, end) in zip(own, spans, strict=True)
    ]
    for results in run_together(gather_all(own, spans)):
        assert results.value.dtype == torch.int64
        assert results.value.tolist() == everything
        # The longest message is what each of them takes.
        assert results.bytes == max(sizes) * (size - 1)


@given(selections())
@settings(max_examples=100, deadline=None)
def test_every_byte_sent_is_counted(case):
    own, spans = case
    sizes = [
        index_bytes(len(mine), end - first) for mine, (first, end) in zip(own, spans, strict=True)
    ]
    for script, mine, (first, end) in zip(gather_all(own, spans), own, spans, strict=True):
        request = next(script, None)
        if request is None:
            assert len(own) == 1 or not any(own)
            continue
        wanted = pack_indices(torch.tensor(mine, dtype=torch.int64) - first, end - first)
        assert len(request.tensor) == max(sizes)
        assert torch.equal(request.tensor[: len(wanted)], wanted)
        assert not any(request.tensor[len(wanted) :])


@given(
    st.integers(1, 5).flatmap(
        lambda r: st.lists(st.sets(st.integers(0, 99_999), max_size=30), min_size=r, max_size=r)
    )
)
@settings(max_examples=60, deadline=None)
def test_a_union_has_each_index_once(own):
    counts = [len(mine) for mine in own]
    scripts = [
        gather_union(
            torch.tensor(sorted(mine)).long(), counts, 100_000, StepContext(0, r, len(own))
        )
        for r, mine in enumerate(own)
    ]
    for results in run_together(scripts):
        assert results.value.tolist() == sorted(set().union(*own))


def add_all(rows, wire):
    results = run_together(
        [
            rank_work.sum_as(row.clone(), StepContext(0, r, len(rows)), wire)
            for r, row in enumerate(rows)
        ]
    )
    totals = [one.value[0] for one in results]
    left = [one.value[1] for one in results]
    assert all(rank_work.same(total, totals[0]) for total in totals), "the same bits on all workers"
    return totals[0], left, [one.bytes for one in results]


ONE_ROUND = ONE_ROUND_BYTES  # to each other worker
# On both sides of the border between one round and two, for values of two and four bytes.
BORDERS = [ONE_ROUND // item + beside for item in (4, 2) for beside in (-1, 0, 1)]
LENGTHS = [0, 1, 2, 7, *BORDERS, ONE_ROUND + 3, 20_001]
sizes = pytest.mark.parametrize("size", [1, 2, 3, 4, 5])


@sizes
@pytest.mark.parametrize("length", LENGTHS)
def test_sums_are_those_of_rows_added_in_order(size, length):
    rows = rank_work.normal(size, size, length) * torch.exp(6 * rank_work.normal(9, size, length))
    total, left, _ = add_all(rows, torch.float32)
    wanted = rows[0].clone()
    for row in rows[1:]:
        wanted += row
    assert rank_work.same(total, wanted)
    assert left == [None] * size
    error = (total.double() - rows.double().sum(0)).abs()
    assert bool((error <= size * 2**-24 * rows.double().abs().sum(0)).all())


@sizes
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(
    ("dtype", "wire"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.bfloat16),
    ],
    ids=str,
)
def test_what_a_narrow_wire_rounds_away_is_left(size, length, dtype, wire):
    rows = rank_work.normal(size + 50, size, length, dtype=dtype)
    total, left, _ = add_all(rows, wire)
    assert total.dtype == dtype
    if size == 1 or not length:
        assert rank_work.same(total, rows.sum(0))
        assert left == [None] * size
        return
    assert all(own.dtype == dtype for own in left)
    residual = torch.stack(left)
    assert bool((residual != 0).any())
    unit = {torch.float32: 2**-24, torch.float64: 2**-53}[dtype]
    error = (total.double() + residual.double().sum(0) - rows.double().sum(0)).abs()
    assert bool((error <= 2 * size * unit * rows.double().abs().sum(0)).all())
    # What is left is what rounding takes: half a step of the wire, of a row or of the total.
    step = 2**-8 * 1.01
    bound = step * (rows.abs() + rows.abs().sum(0))
    assert bool((residual.abs() <= bound).all())
    if length * wire.itemsize > ONE_ROUND and size > 2:  # Two rounds: the total was rounded too.
        assert rank_work.same(total, total.to(wire).to(dtype))


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16], ids=str)
def test_values_that_the_wire_can_hold_leave_nothing(wire):
    rows = (4 * rank_work.normal(0, 4, 20_000)).round()
    total, left, _ = add_all(rows, wire)
    assert rank_work.same(total, rows.sum(0))
    assert not any(own is not None and bool(own.any()) for own in left)


@sizes
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_few_values_take_one_round_and_many_take_two(size, wire, length):
    rows = rank_work.normal(0, size, length)
    *_, sent = add_all(rows, wire)
    if size == 2 or length * wire.itemsize <= ONE_ROUND:
        assert sent == [length * wire.itemsize * (size - 1)] * size
    else:
        share = -(-length // size)
        assert sent == [2 * share * wire.itemsize * (size - 1) if size > 1 else 0] * size


@pytest.fixture
def poisoned():
    """Whatever is not initialised is NaN, or the largest whole number."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_uninitialised_is_sent(poisoned, wire):
    assert torch.empty(3).isnan().all()
    for length in (5, 20_001):
        scripts = [
            rank_work.sum_as(torch.ones(length), StepContext(0, rank, 4), wire) for rank in range(4)
        ]
        requests = [next(script) for script in scripts]
        assert not any(bool(request.tensor.isnan().any()) for request in requests)
        padding = requests[0].tensor.view(-1)[length:]
        assert not padding.any()


def test_values_are_not_written_to():
    for length in (10, 20_000):
        for wire in (torch.float32, torch.bfloat16):
            rows = rank_work.normal(3, 3, length)
            before = rows.clone()
            run_together(
                [rank_work.sum_as(row, StepContext(0, r, 3), wire) for r, row in enumerate(rows)]
            )
            assert rank_work.same(rows, before)


@pytest.mark.parametrize("size", [2, 4])
def test_real_ranks_exchange_the_same_bits_and_bytes(size):
    virtual_sums = [
        run_together([rank_work.sum_script(case, r, size) for r in range(size)])
        for case in rank_work.SUMS
    ]
    virtual_indices = [
        run_together([rank_work.index_script(density, r, size) for r in range(size)])
        for density in (0.0, 1e-5, 0.01)
    ]
    for rank, (sums, indices) in enumerate(run_ranks(rank_work.exchanges, size)):
        for real, virtual in zip(sums, virtual_sums, strict=True):
            assert rank_work.same(real, tuple(virtual[rank]))
        for real, virtual in zip(indices, virtual_indices, strict=True):
            assert rank_work.same(real, tuple(virtual[rank]))
    assert [len(results[0].value) > 0 for results in virtual_indices] == [False, True, True]
