"""The passes of `kernels` over float32 vectors as Triton kernels.

They are bound by memory bandwidth, so each reads and writes every element once. What reaches the
threshold is marked in a bitmap (one bit per coordinate, 3 % of the vector's memory) with a count
for each tile. From the cumulative counts every tile knows where its selected coordinates go. So
these are ascending and the same in every run, without waiting for the host.

Letters: D coordinates, T tiles of them, C capacity of a selection, K coordinates that are sent.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradherd.gpu import launch
from gradherd.sparsify.marks import TILE, Marks

_GROUP = 2  # Tiles that one program compacts.
# Elements of a tile that a program holds at a time, and its warps: of 16 choices the fastest on an
# H200, at 93 % of the bandwidth of a copy; the slowest takes six times as long.
_PART, _WARPS = 1024, 8
_BLOCK = 1024  # Elements that a program copies or fills at a time.
# Programs per multiprocessor, each of which loops over tiles. Many more than run at once: that
# is what saturates the bandwidth of an H200.
_PROGRAMS_PER_SM = 128
_WORD = tl.constexpr(32)
_INFINITY_BITS = tl.constexpr(0x7F800000)  # As integers, the bits of NaN are larger.


@triton.jit
def _lanes(PART: tl.constexpr):
    """Return the offsets in a part of a tile as (PART / 32, 32): one row per word of the bitmap."""
    return tl.arange(0, PART // _WORD)[:, None] * _WORD + tl.arange(0, _WORD)[None, :]


@triton.jit
def _mark(values, inside, threshold_bits, words, PART: tl.constexpr):
    """Mark where |values| reach the threshold, given as the bits `threshold_bits`.

    Compares bits instead of floats, because the GPU may flush subnormals to zero. Returns how many
    are marked, plus 2**16 for each value that is not finite.
    """
    bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    broken = (inside & (bits >= _INFINITY_BITS)).to(tl.int32)
    # NaN reaches no threshold.
    hits = (inside & (bits >= threshold_bits) & (bits <= _INFINITY_BITS)).to(tl.int32)
    word = tl.sum(hits << tl.arange(0, _WORD)[None, :], axis=1)
    tl.store(words + tl.arange(0, PART // _WORD), word)
    # One sum for both: a tile has fewer than 2**16 values.
    return tl.sum(tl.sum(hits + (broken << 16), axis=1), axis=0)


@triton.jit
def _tile(
    residual, grad, out, factor, bad, threshold_bits, words, tile_counts, tile, size,
    ADD: tl.constexpr, CLEAR: tl.constexpr, CHECK: tl.constexpr, MARK: tl.constexpr,
    MASKED: tl.constexpr, TILE: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    # Pointers to a part and 32-bit offsets in it: offsets of 64 bits would take registers.
    lanes = _lanes(PART)
    tally = 0
    for part in range(TILE // PART):
        begin = tl.full((), TILE, tl.int64) * tile + part * PART
        inside = lanes < size - begin
        if MASKED:
            total = tl.load(residual + begin + lanes, mask=inside, other=0)
        else:
            total = tl.load(residual + begin + lanes)
        if ADD:
            if MASKED:
                total += factor * tl.load(grad + begin + lanes, mask=inside, other=0).to(tl.float32)
                tl.store(out + begin + lanes, total, mask=inside)
            else:
                total += factor * tl.load(grad + begin + lanes).to(tl.float32)
                tl.store(out + begin + lanes, total)
        if CLEAR:
            nothing = tl.zeros_like(total).to(grad.dtype.element_ty)
            if MASKED:
                tl.store(grad + begin + lanes, nothing, mask=inside)
            else:
                tl.store(grad + begin + lanes, nothing)
        if MARK:
            tally += _mark(total, inside, threshold_bits, words + begin // _WORD, PART)
        elif CHECK:
            bits = total.to(tl.int32, bitcast=True) & 0x7FFFFFFF
            worst = tl.max(tl.max(bits, axis=1), axis=0)
            tally += (worst >= _INFINITY_BITS).to(tl.int32) << 16
    if MARK:
        tl.store(tile_counts + tile, tally & 0xFFFF)
    if CHECK:
        if (tally >> 16) > 0:
            tl.store(bad, 1)  # All writers store 1.


# Sizes are not specialised: Triton would compile again for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["tiles", "size"])
def _pass_kernel(
    residual, grad, out, scale, bad, threshold, words, tile_counts, condition, tiles, size,
    ADD: tl.constexpr, CLEAR: tl.constexpr, CHECK: tl.constexpr, MARK: tl.constexpr,
    SCALE_ON_DEVICE: tl.constexpr, PREDICATED: tl.constexpr,
    TILE: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    factor = scale
    if SCALE_ON_DEVICE:
        factor = tl.load(scale)
    threshold_bits = 0
    if MARK:
        threshold_bits = tl.load(threshold).to(tl.int32, bitcast=True)
    end = tiles
    if PREDICATED:  # An empty loop where there is nothing to do.
        end = tiles * (tl.load(condition).to(tl.int32) != 0).to(tl.int32)
    for tile in range(tl.program_id(0), end, tl.num_programs(0)):
        # Full tiles need no mask, which keeps loads wide; the last may.
        if (tile + 1) * TILE <= size:
            _tile(
                residual, grad, out, factor, bad, threshold_bits, words, tile_counts, tile, size,
                ADD, CLEAR, CHECK, MARK, False, TILE, PART,
            )  # fmt: skip
        else:
            _tile(
                residual, grad, out, factor, bad, threshold_bits, words, tile_counts, tile, size,
                ADD, CLEAR, CHECK, MARK, True, TILE, PART,
            )  # fmt: skip


@triton.jit(do_not_specialize=["blocks", "size"])
def _overwrite_unless_kernel(
    ok, target, source, blocks, size, FILL: tl.constexpr, BLOCK: tl.constexpr
):
    todo = blocks * (tl.load(ok).to(tl.int32) == 0).to(tl.int32)
    for block in range(tl.program_id(0), todo, tl.num_programs(0)):
        at = block * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
        if FILL:
            values = tl.full((BLOCK,), 1, tl.float32) * source
        else:
            values = tl.load(source + at, mask=at < size)
        tl.store(target + at, values.to(target.dtype.element_ty), mask=at < size)


@triton.jit
def _popcount(x):
    """Count the bits of int32 that are set."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return (x + (x >> 8) + (x >> 16) + (x >> 24)) & 0x3F


@triton.jit(do_not_specialize=["tiles", "capacity"])
def _compact_kernel(
    words, tile_counts, ends, indices, tiles, capacity,
    TILE: tl.constexpr, GROUP: tl.constexpr,
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
            tl.store(indices + to, index, mask=(bits != 0) & (to < capacity))
            bits = bits & (bits - 1)
            to += 1


@cache
def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 3  # Triton's interpreter: so few that a program has several tiles.
    return _PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count


def _few_programs(device: torch.device) -> int:
    """Return a number of programs for what is rarely done: most of the time they only start."""
    return max(2, _programs(device) // 16)


def _launch_pass(most: int, residual: Tensor, *args: object, **flags: bool) -> None:
    """Launch `_pass_kernel` with at most so many programs."""
    tiles = triton.cdiv(len(residual), TILE)
    if tiles:
        launch(
            _pass_kernel, (min(tiles, most),), residual, *args, tiles, len(residual),
            TILE=TILE, PART=min(_PART, TILE), num_warps=_WARPS, **flags,
        )  # fmt: skip


def add(
    residual: Tensor,
    grad: Tensor,
    scale: float | Tensor,
    out: Tensor,
    *,
    bad: Tensor | None = None,
    clear: bool = False,
    threshold: Tensor | None = None,
    marks: Marks | None = None,
) -> None:
    """Do what `kernels.add` does, with float32 and gradients of float32, bfloat16 or float16."""
    # Arguments that are None belong to branches that are not compiled.
    words, tile_counts = marks or (None, None)
    _launch_pass(
        _programs(residual.device),
        residual, grad, out, scale, bad, threshold, words, tile_counts, None,
        ADD=True, CLEAR=clear, CHECK=bad is not None, MARK=marks is not None,
        SCALE_ON_DEVICE=isinstance(scale, Tensor), PREDICATED=False,
    )  # fmt: skip


def mark(values: Tensor, threshold: Tensor, marks: Marks, condition: Tensor | None = None) -> None:
    """Mark where |values| >= threshold; with a () bool `condition`, only if it is true."""
    _launch_pass(
        2 * _programs(values.device) if condition is None else _few_programs(values.device),
        values, None, None, None, None, threshold, *marks, condition,
        ADD=False, CLEAR=False, CHECK=False, MARK=True,
        SCALE_ON_DEVICE=False, PREDICATED=condition is not None,
    )  # fmt: skip


def compact(marks: Marks, capacity: int) -> tuple[Tensor, Tensor]:
    """Do what `kernels.marked` does: (C,) int64 positions, () int32 count."""
    ends = marks.counts.cumsum(0, dtype=torch.int32)
    count = ends[-1] if len(ends) else ends.new_zeros(())
    return _compact(marks, ends, capacity), count


def indices_above(values: Tensor, threshold: float) -> Tensor:
    """Return where |values| >= threshold: (k,) int64. Waits once for the device, to learn k."""
    # As a tensor, like the thresholds that never leave the device: one kernel serves both.
    as_tensor = torch.full((), threshold, dtype=torch.float32, device=values.device)
    tiles = triton.cdiv(len(values), TILE)
    memory = torch.empty(tiles * (TILE // 32 + 1), dtype=torch.int32, device=values.device)
    marks = Marks(memory[tiles:], memory[:tiles])
    mark(values, as_tensor, marks)
    ends = marks.counts.cumsum(0, dtype=torch.int32)
    count = int(ends[-1]) if len(ends) else 0
    return _compact(marks, ends, count)


def _compact(marks: Marks, ends: Tensor, capacity: int) -> Tensor:
    indices = torch.zeros(capacity, dtype=torch.int64, device=ends.device)
    if len(ends) and capacity:
        launch(
            _compact_kernel, (triton.cdiv(len(ends), _GROUP),),
            *marks, ends, indices, len(ends), capacity, TILE=TILE, GROUP=_GROUP, num_warps=4,
        )  # fmt: skip
    return indices


def overwrite_unless(ok: Tensor, target: Tensor, source: Tensor | float) -> None:
    """Overwrite (D,) `target` by a vector or a number unless the () bool `ok` is true."""
    blocks = triton.cdiv(len(target), _BLOCK)
    if blocks:
        launch(
            _overwrite_unless_kernel, (min(blocks, _few_programs(target.device)),),
            ok, target, source, blocks, len(target),
            FILL=not isinstance(source, Tensor), BLOCK=_BLOCK,
        )  # fmt: skip


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


def scatter_to_bucket(
    flat: Tensor, buckets: Tensor, number: int, offsets: Tensor, values: Tensor, written: Tensor
) -> None:
    """Do what `kernels.scatter_to_bucket` does."""
    if not len(values):
        return
    block, limit = 512, torch.finfo(flat.dtype).max
    launch(
        _scatter_kernel, (triton.cdiv(len(values), block),),
        flat, buckets, number, offsets, values, written, limit, len(values), BLOCK=block,
    )  # fmt: skip
