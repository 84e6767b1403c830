"""The passes of `kernels` over float32 vectors as Triton kernels.

They are bound by memory bandwidth, so each reads and writes every element once. What reaches the
threshold is marked in a bitmap (one bit per coordinate, 3 % of the vector's memory) with a count
for each tile. From the cumulative counts every tile knows where its selected coordinates go. So
these are ascending and the same in every run, without waiting for the host.

Letters: D coordinates, T tiles of them, C capacity of a selection, K coordinates that are sent.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 8192
"""Coordinates whose marks are counted together."""
_GROUP = 2  # Tiles that one program compacts.
_WARPS = 8
# Programs per multiprocessor, each of which loops over tiles. Many more than run at once: that
# is what saturates the bandwidth of an H200. Few enough for the atomic adds of their histograms
# not to matter.
_PROGRAMS_PER_SM = 128
_WORD = tl.constexpr(32)
_INFINITY_BITS = tl.constexpr(0x7F800000)  # As integers, the bits of NaN are larger.


class Bitmap(NamedTuple):
    """Which coordinates reach a threshold."""

    words: Tensor
    """(T * TILE / 32,) int32, one bit for each coordinate."""
    counts: Tensor
    """(T,) int32 number of bits set in each tile."""


@triton.jit
def _coordinates(tile, TILE: tl.constexpr):
    """Return the coordinates of a tile as (TILE / 32, 32): one row per word of the bitmap."""
    rows = tl.arange(0, TILE // _WORD).to(tl.int64)[:, None] * _WORD
    return rows + tile * TILE + tl.arange(0, _WORD)[None, :]


@triton.jit
def _mark(values, threshold_bits, words, tile_counts, tile, TILE: tl.constexpr):
    """Mark where |values| reach the threshold, given as the bits `threshold_bits`.

    Compares bits instead of floats, because the GPU may flush subnormals to zero.
    """
    bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    # NaN reaches no threshold.
    hits = ((bits >= threshold_bits) & (bits <= _INFINITY_BITS)).to(tl.int32)
    word = tl.sum(hits << tl.arange(0, _WORD)[None, :], axis=1)
    tl.store(words + tile * (TILE // _WORD) + tl.arange(0, TILE // _WORD), word)
    tl.store(tile_counts + tile, tl.sum(tl.sum(hits, axis=1), axis=0))


# Sizes are not specialised: Triton would compile again for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["first", "tiles", "size"])
def _add_kernel(
    residual, grad, out, scale, counts, window, threshold, words, tile_counts, first, tiles, size,
    CLEAR: tl.constexpr, COUNT: tl.constexpr, MARK: tl.constexpr, MASKED: tl.constexpr,
    TILE: tl.constexpr, BINS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    if MARK:
        threshold_bits = tl.load(threshold).to(tl.int32, bitcast=True)
    if COUNT:
        base = tl.load(window)
        histogram = tl.zeros((BINS,), tl.int32)
    for tile in range(first + tl.program_id(0), first + tiles, tl.num_programs(0)):
        at = _coordinates(tile, TILE)
        if MASKED:
            total = tl.load(residual + at, mask=at < size, other=0)
            total += scale * tl.load(grad + at, mask=at < size, other=0).to(tl.float32)
            tl.store(out + at, total, mask=at < size)
        else:
            total = tl.load(residual + at) + scale * tl.load(grad + at).to(tl.float32)
            tl.store(out + at, total)
        if CLEAR:
            nothing = tl.zeros_like(total).to(grad.dtype.element_ty)
            if MASKED:
                tl.store(grad + at, nothing, mask=at < size)
            else:
                tl.store(grad + at, nothing)
        if COUNT:
            bits = total.to(tl.int32, bitcast=True) & 0x7FFFFFFF
            bins = tl.minimum(tl.maximum((bits >> SHIFT) - base, 0), BINS - 2)
            bins = tl.where(bits >= _INFINITY_BITS, BINS - 1, bins)
            histogram += tl.histogram(tl.reshape(bins, (TILE,)), BINS)
        if MARK:
            if MASKED:  # A threshold of zero would mark the zeros beyond the end.
                total = tl.where(at < size, total, float("nan"))
            _mark(total, threshold_bits, words, tile_counts, tile, TILE)
    if COUNT:
        if MASKED:  # Zeros beyond the end were counted in the first bin.
            beyond = (first + tiles) * TILE - size
            histogram -= tl.where(tl.arange(0, BINS) == 0, beyond, 0)
        # Integers: in whatever order programs add theirs, the counts are the same.
        tl.atomic_add(counts + tl.arange(0, BINS), histogram, sem="relaxed")


@triton.jit(do_not_specialize=["first", "tiles", "size"])
def _mark_kernel(
    values, threshold, words, tile_counts, first, tiles, size,
    MASKED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    threshold_bits = tl.load(threshold).to(tl.int32, bitcast=True)
    for tile in range(first + tl.program_id(0), first + tiles, tl.num_programs(0)):
        at = _coordinates(tile, TILE)
        if MASKED:  # NaN reaches no threshold.
            loaded = tl.load(values + at, mask=at < size, other=float("nan"))
        else:
            loaded = tl.load(values + at)
        _mark(loaded.to(tl.float32), threshold_bits, words, tile_counts, tile, TILE)


@triton.jit
def _popcount(x):
    """Count the bits of int32 that are set."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return (x + (x >> 8) + (x >> 16) + (x >> 24)) & 0x3F


@triton.jit(do_not_specialize=["tiles", "capacity"])
def _compact_kernel(
    values, words, tile_counts, ends, indices, selected, tiles, capacity,
    CLEAR: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0) * GROUP
    row = tl.arange(0, GROUP * TILE // _WORD)
    word = group * (TILE // _WORD) + row
    bits = tl.load(words + word, mask=word < tiles * (TILE // _WORD), other=0)
    per_word = _popcount(bits)
    most = tl.max(per_word, axis=0)
    if most > 0:
        # Marks of all tiles before this group: where its first one goes.
        before = tl.load(ends + group) - tl.load(tile_counts + group)
        to = before + tl.cumsum(per_word, axis=0) - per_word
        at = word.to(tl.int64) * _WORD
        # Each iteration handles the lowest bit of every word: with few marks, few iterations.
        for _ in range(most):
            index = at + _popcount((bits & -bits) - 1)
            fits = (bits != 0) & (to < capacity)
            value = tl.load(values + index, mask=fits, other=0)
            tl.store(indices + to, index, mask=fits)
            tl.store(selected + to, value, mask=fits)
            if CLEAR:
                tl.store(values + index, tl.zeros_like(value), mask=fits)
            bits = bits & (bits - 1)
            to += 1


@cache
def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 3  # Triton's interpreter: so few that a program has several tiles.
    return _PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count


def _spans(size: int) -> list[tuple[int, int, bool]]:
    """Return (first tile, tiles, masked). Full tiles need no mask, which keeps loads wide."""
    whole, rest = divmod(size, TILE)
    return [(0, whole, False)] * (whole > 0) + [(whole, 1, True)] * (rest > 0)


def _empty_bitmap(like: Tensor) -> Bitmap:
    tiles = -(-len(like) // TILE)
    words = torch.empty(tiles * TILE // 32, dtype=torch.int32, device=like.device)
    return Bitmap(words, torch.empty(tiles, dtype=torch.int32, device=like.device))


def add(
    residual: Tensor,
    grad: Tensor,
    scale: float,
    out: Tensor,
    histogram: tuple[Tensor, Tensor, int] | None,
    threshold: Tensor | None,
    *,
    clear: bool,
) -> Bitmap | None:
    """Write residual + scale * grad to `out`; in the same pass count, mark and clear.

    Args:
        residual: (D,) float32.
        grad: (D,) float32, bfloat16 or float16.
        scale: Factor of the gradient.
        out: (D,) float32, may be `residual`.
        histogram: A `kernels.MagnitudeHistogram` that counts the magnitudes of the result, or
            None. A plain tuple to this module, which `kernels` imports.
        threshold: () float32, marks what reaches it; None does not mark.
        clear: Whether to set `grad` to zero.
    """
    bitmap = None if threshold is None else _empty_bitmap(residual)
    # Arguments that are None belong to branches that are not compiled.
    words, tile_counts = bitmap or (None, None)
    counts, window, shift = histogram or (None, None, 0)
    bins = 0 if counts is None else len(counts)
    size = len(residual)
    for first, tiles, masked in _spans(size):
        _add_kernel[(min(tiles, _programs(residual.device)),)](
            residual, grad, out, scale, counts, window, threshold, words, tile_counts,
            first, tiles, size,
            CLEAR=clear, COUNT=histogram is not None, MARK=threshold is not None, MASKED=masked,
            TILE=TILE, BINS=bins, SHIFT=shift, num_warps=_WARPS,
        )  # fmt: skip
    return bitmap


def mark(values: Tensor, threshold: Tensor) -> Bitmap:
    """Mark where |values| >= threshold: (D,) values, () float32."""
    bitmap = _empty_bitmap(values)
    for first, tiles, masked in _spans(len(values)):
        _mark_kernel[(min(tiles, 2 * _programs(values.device)),)](
            values, threshold, *bitmap, first, tiles, len(values),
            MASKED=masked, TILE=TILE, num_warps=_WARPS,
        )  # fmt: skip
    return bitmap


def compact(
    values: Tensor, bitmap: Bitmap, capacity: int, *, clear: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first marked coordinates, their values, and how many are marked.

    Args:
        values: (D,) float32 that the bitmap belongs to.
        bitmap: From `mark` or `add`.
        capacity: C. What does not fit is left alone; if fewer are marked, zeros follow.
        clear: Whether to set the returned values to zero in `values`.

    Returns:
        (C,) int64 indices, (C,) values, () int32 count.
    """
    ends = bitmap.counts.cumsum(0, dtype=torch.int32)
    count = ends[-1] if len(ends) else ends.new_zeros(())
    return *_compact(values, bitmap, ends, capacity, clear), count


def indices_above(values: Tensor, threshold: float) -> Tensor:
    """Return where |values| >= threshold: (k,) int64. Waits once for the device, to learn k."""
    # As a tensor, like the thresholds that never leave the device: one kernel serves both.
    as_tensor = torch.full((), threshold, dtype=torch.float32, device=values.device)
    bitmap = mark(values, as_tensor)
    ends = bitmap.counts.cumsum(0, dtype=torch.int32)
    count = int(ends[-1]) if len(ends) else 0
    return _compact(values, bitmap, ends, count, False)[0]


def _compact(
    values: Tensor, bitmap: Bitmap, ends: Tensor, capacity: int, clear: bool
) -> tuple[Tensor, Tensor]:
    # One allocation for both, so that one kernel zeroes it.
    memory = torch.zeros(3 * capacity, dtype=torch.int32, device=values.device)
    indices = memory[: 2 * capacity].view(torch.int64)
    selected = memory[2 * capacity :].view(torch.float32)
    if len(ends) and capacity:
        _compact_kernel[(triton.cdiv(len(ends), _GROUP),)](
            values, *bitmap, ends, indices, selected, len(ends), capacity,
            CLEAR=clear, TILE=TILE, GROUP=_GROUP, num_warps=4,
        )  # fmt: skip
    return indices, selected


# --- Small kernels: little work, but a dozen launches each in torch ----------------------------


@triton.jit(do_not_specialize=["k"])
def _topk_threshold_kernel(counts, window, result, k, BINS: tl.constexpr, SHIFT: tl.constexpr):
    bins = tl.arange(0, BINS)
    reach = tl.cumsum(tl.load(counts + bins, mask=bins < BINS - 1, other=0), axis=0, reverse=True)
    at = tl.sum(((reach >= k) & (bins < BINS - 1)).to(tl.int32), axis=0) - 1
    edge = ((at + tl.load(window)) << SHIFT).to(tl.float32, bitcast=True)
    tl.store(result, tl.where(at > 0, edge, 0.0))


@triton.jit(do_not_specialize=["count"])
def _scatter_kernel(
    flat, buckets, number, offsets, values, written, limit, count, BLOCK: tl.constexpr
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = tl.load(buckets + i, mask=i < count, other=-1) == number
    value = tl.load(values + i, mask=mine, other=0)
    # Not tl.clamp: NaN must stay NaN, and minimum and maximum would drop it.
    value = tl.where(value > limit, limit, tl.where(value < -limit, -limit, value))
    value = value.to(flat.dtype.element_ty)
    tl.store(flat + tl.load(offsets + i, mask=mine, other=0), value, mask=mine)
    tl.store(written + i, value.to(written.dtype.element_ty), mask=mine)


def topk_threshold(histogram: tuple[Tensor, Tensor, int], k: int) -> Tensor:
    """Do what `MagnitudeHistogram.topk_threshold` does."""
    counts, window, shift = histogram
    result = torch.empty((), dtype=torch.float32, device=counts.device)
    _topk_threshold_kernel[(1,)](
        counts, window, result, k, BINS=len(counts), SHIFT=shift, num_warps=1
    )
    return result


def scatter_to_bucket(
    flat: Tensor, buckets: Tensor, number: int, offsets: Tensor, values: Tensor, written: Tensor
) -> None:
    """Do what `kernels.scatter_to_bucket` does."""
    if not len(values):
        return
    block, limit = 512, torch.finfo(flat.dtype).max
    _scatter_kernel[(triton.cdiv(len(values), block),)](
        flat, buckets, number, offsets, values, written, limit, len(values), BLOCK=block
    )
