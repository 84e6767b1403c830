"""The passes of `kernels` over long float32 vectors, as Triton programs for a GPU.

Bandwidth is all that counts here, so each pass reads and writes every number once. What lies
above the floor is marked by one bit for each coordinate (3 % of the vector's memory) with a tally
for each tile; from the tallies' sums every tile knows where its picks go. So picks are ascending
and the same on every run, without a wait for the host.

Letters: D coordinates, T tiles of them, C picks there is room for.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradherd.sparsify.histogram import BINS, SHIFT, Tally

TILE = 8192
"""Coordinates whose picks are counted together."""
_GROUP = 2  # tiles whose picks one program takes
_WARPS = 8
# Programs that walk over tiles, on each multiprocessor: many more than run at once, which is what
# fills an H200's bandwidth, but few enough that adding up their counts does not show.
_PER_SM = 128
_WORD = tl.constexpr(32)
_INFINITE = tl.constexpr(0x7F800000)  # float32's bits of it; those of NaN are larger


class Marks(NamedTuple):
    """Where something was found."""

    words: Tensor
    """(T * TILE / 32,) int32, one bit for each coordinate."""
    tallies: Tensor
    """(T,) int32 bits that are set in each tile."""


@triton.jit
def _places(tile, TILE: tl.constexpr):
    """Coordinates of a tile as (TILE / 32, 32): a row is what one word marks."""
    rows = tl.arange(0, TILE // _WORD).to(tl.int64)[:, None] * _WORD
    return rows + tile * TILE + tl.arange(0, _WORD)[None, :]


@triton.jit
def _mark(values, line, words, tallies, tile, TILE: tl.constexpr):
    """Mark where |values| reach the line; compares bits, so that no subnormal is flushed."""
    sizes = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    # A NaN is above nothing.
    hits = ((sizes >= line) & (sizes <= _INFINITE)).to(tl.int32)
    bits = tl.sum(hits << tl.arange(0, _WORD)[None, :], axis=1)
    tl.store(words + tile * (TILE // _WORD) + tl.arange(0, TILE // _WORD), bits)
    tl.store(tallies + tile, tl.sum(tl.sum(hits, axis=1), axis=0))


@triton.jit(do_not_specialize=["first", "tiles", "size"])
def _add_pass(
    kept, grad, out, unit, counts, window, floor, words, tallies, first, tiles, size,
    CLEAR: tl.constexpr, COUNT: tl.constexpr, MARK: tl.constexpr, MASKED: tl.constexpr,
    TILE: tl.constexpr, BINS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    if MARK:
        line = tl.load(floor).to(tl.int32, bitcast=True)
    if COUNT:
        base = tl.load(window)
        found = tl.zeros((BINS,), tl.int32)
    for tile in range(first + tl.program_id(0), first + tiles, tl.num_programs(0)):
        at = _places(tile, TILE)
        if MASKED:
            total = tl.load(kept + at, mask=at < size, other=0)
            total += unit * tl.load(grad + at, mask=at < size, other=0).to(tl.float32)
            tl.store(out + at, total, mask=at < size)
        else:
            total = tl.load(kept + at) + unit * tl.load(grad + at).to(tl.float32)
            tl.store(out + at, total)
        if CLEAR:
            nothing = tl.zeros_like(total).to(grad.dtype.element_ty)
            if MASKED:
                tl.store(grad + at, nothing, mask=at < size)
            else:
                tl.store(grad + at, nothing)
        if COUNT:
            sizes = total.to(tl.int32, bitcast=True) & 0x7FFFFFFF
            bins = tl.minimum(tl.maximum((sizes >> SHIFT) - base, 0), BINS - 2)
            bins = tl.where(sizes >= _INFINITE, BINS - 1, bins)
            found += tl.histogram(tl.reshape(bins, (TILE,)), BINS)
        if MARK:
            if MASKED:  # or a floor of zero would find what is not there
                total = tl.where(at < size, total, float("nan"))
            _mark(total, line, words, tallies, tile, TILE)
    if COUNT:
        if MASKED:  # what is beyond the end was counted as zeros
            beyond = (first + tiles) * TILE - size
            found -= tl.where(tl.arange(0, BINS) == 0, beyond, 0)
        tl.atomic_add(counts + tl.arange(0, BINS), found, sem="relaxed")


@triton.jit(do_not_specialize=["first", "tiles", "size"])
def _mark_pass(
    values, floor, words, tallies, first, tiles, size, MASKED: tl.constexpr, TILE: tl.constexpr
):
    line = tl.load(floor).to(tl.int32, bitcast=True)
    for tile in range(first + tl.program_id(0), first + tiles, tl.num_programs(0)):
        at = _places(tile, TILE)
        if MASKED:  # a NaN is above nothing
            found = tl.load(values + at, mask=at < size, other=float("nan"))
        else:
            found = tl.load(values + at)
        _mark(found.to(tl.float32), line, words, tallies, tile, TILE)


@triton.jit
def _ones(x):
    """Count the bits of int32 that are set."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return (x + (x >> 8) + (x >> 16) + (x >> 24)) & 0x3F


@triton.jit(do_not_specialize=["tiles", "room"])
def _take_pass(
    values, words, tallies, ends, indices, picked, tiles, room,
    CLEAR: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0) * GROUP
    row = tl.arange(0, GROUP * TILE // _WORD)
    word = group * (TILE // _WORD) + row
    bits = tl.load(words + word, mask=word < tiles * (TILE // _WORD), other=0)
    here = _ones(bits)
    most = tl.max(here, axis=0)
    if most > 0:
        before = tl.load(ends + group) - tl.load(tallies + group)
        to = before + tl.cumsum(here, axis=0) - here
        at = word.to(tl.int64) * _WORD
        # Each turn takes the lowest bit of every word: few turns, as picks are few.
        for _ in range(most):
            index = at + _ones((bits & -bits) - 1)
            fits = (bits != 0) & (to < room)
            value = tl.load(values + index, mask=fits, other=0)
            tl.store(indices + to, index, mask=fits)
            tl.store(picked + to, value, mask=fits)
            if CLEAR:
                tl.store(values + index, tl.zeros_like(value), mask=fits)
            bits = bits & (bits - 1)
            to += 1


@cache
def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 3  # Triton's interpreter: few enough that a program has several tiles
    return _PER_SM * torch.cuda.get_device_properties(device).multi_processor_count


def _spans(size: int) -> list[tuple[int, int, bool]]:
    """Return (first tile, tiles, masked): whole tiles need no mask, so that loads are wide."""
    whole, rest = divmod(size, TILE)
    return [(0, whole, False)] * (whole > 0) + [(whole, 1, True)] * (rest > 0)


def _no_marks(like: Tensor) -> Marks:
    tiles = -(-len(like) // TILE)
    words = torch.empty(tiles * TILE // 32, dtype=torch.int32, device=like.device)
    return Marks(words, torch.empty(tiles, dtype=torch.int32, device=like.device))


def add(
    kept: Tensor,
    grad: Tensor,
    unit: float,
    out: Tensor,
    tally: Tally | None,
    floor: Tensor | None,
    *,
    clear: bool,
) -> Marks | None:
    """Write kept + unit * grad to `out`; count, mark and clear on the way.

    Args:
        kept: (D,) float32.
        grad: (D,) float32, bfloat16 or float16; zeros afterwards if `clear`.
        unit: What it is multiplied by.
        out: (D,) float32, may be `kept`.
        tally: Counts the results; None counts nothing.
        floor: () float32, marks what reaches it; None marks nothing.
        clear: Whether to clear `grad`.
    """
    marks = None if floor is None else _no_marks(kept)
    words, tallies = marks or (None, None)
    counts, window = (tally.counts, tally.window) if tally else (None, None)
    for first, tiles, masked in _spans(len(kept)):
        _add_pass[(min(tiles, _programs(kept.device)),)](
            kept, grad, out, unit, counts, window, floor, words, tallies, first, tiles, len(kept),
            CLEAR=clear, COUNT=tally is not None, MARK=floor is not None, MASKED=masked,
            TILE=TILE, BINS=BINS, SHIFT=SHIFT, num_warps=_WARPS,
        )  # fmt: skip
    return marks


def mark(values: Tensor, floor: Tensor) -> Marks:
    """Mark where |values| >= floor: (D,) values, () float32."""
    marks = _no_marks(values)
    for first, tiles, masked in _spans(len(values)):
        _mark_pass[(min(tiles, 2 * _programs(values.device)),)](
            values, floor, *marks, first, tiles, len(values),
            MASKED=masked, TILE=TILE, num_warps=_WARPS,
        )  # fmt: skip
    return marks


def take(values: Tensor, marks: Marks, room: int, *, clear: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return (C,) int64 indices and (C,) values of the first marks, and () int32 their number.

    Args:
        values: (D,) float32 that the marks are of; zero where taken afterwards if `clear`.
        marks: Of `mark` or `add`.
        room: C. What is beyond it stays; if there is less, zeros follow.
        clear: Whether to clear what is taken.
    """
    ends = marks.tallies.cumsum(0, dtype=torch.int32)
    count = ends[-1] if len(ends) else ends.new_zeros(())
    return *_taken(values, marks, ends, room, clear), count


def above(values: Tensor, floor: float) -> Tensor:
    """Return where |values| >= floor: (k,) int64, with one wait for k."""
    marks = mark(values, torch.full((), floor, dtype=torch.float32, device=values.device))
    ends = marks.tallies.cumsum(0, dtype=torch.int32)
    count = int(ends[-1]) if len(ends) else 0
    return _taken(values, marks, ends, count, False)[0]


def _taken(
    values: Tensor, marks: Marks, ends: Tensor, room: int, clear: bool
) -> tuple[Tensor, Tensor]:
    # Together, so that they are cleared together.
    memory = torch.zeros(3 * room, dtype=torch.int32, device=values.device)
    indices, picked = memory[: 2 * room].view(torch.int64), memory[2 * room :].view(torch.float32)
    if len(ends) and room:
        _take_pass[(triton.cdiv(len(ends), _GROUP),)](
            values, *marks, ends, indices, picked, len(ends), room,
            CLEAR=clear, TILE=TILE, GROUP=_GROUP, num_warps=4,
        )  # fmt: skip
    return indices, picked


@triton.jit(do_not_specialize=["k"])
def _floor_pass(counts, window, floor, k, BINS: tl.constexpr, SHIFT: tl.constexpr):
    bins = tl.arange(0, BINS)
    reach = tl.cumsum(tl.load(counts + bins, mask=bins < BINS - 1, other=0), axis=0, reverse=True)
    at = tl.sum(((reach >= k) & (bins < BINS - 1)).to(tl.int32), axis=0) - 1
    border = ((at + tl.load(window)) << SHIFT).to(tl.float32, bitcast=True)
    tl.store(floor, tl.where(at > 0, border, 0.0))


@triton.jit(do_not_specialize=["count"])
def _put_pass(flat, number, own, at, values, held, limit, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = tl.load(number + i, mask=i < count, other=-1) == own
    value = tl.load(values + i, mask=mine, other=0)
    # NaN stays NaN: minimum and maximum would drop it.
    value = tl.where(value > limit, limit, tl.where(value < -limit, -limit, value))
    value = value.to(flat.dtype.element_ty)
    tl.store(flat + tl.load(at + i, mask=mine, other=0), value, mask=mine)
    tl.store(held + i, value.to(held.dtype.element_ty), mask=mine)


def floor(counts: Tensor, window: Tensor, k: int) -> Tensor:
    """Do what `Tally.floor` does."""
    found = torch.empty((), dtype=torch.float32, device=counts.device)
    _floor_pass[(1,)](counts, window, found, k, BINS=BINS, SHIFT=SHIFT, num_warps=1)
    return found


def put(flat: Tensor, number: Tensor, own: int, at: Tensor, values: Tensor, held: Tensor) -> None:
    """Write values where number == own to flat[at], and what its type could hold to `held`."""
    if not len(values):
        return
    block, limit = 512, torch.finfo(flat.dtype).max
    _put_pass[(triton.cdiv(len(values), block),)](
        flat, number, own, at, values, held, limit, len(values), BLOCK=block
    )
