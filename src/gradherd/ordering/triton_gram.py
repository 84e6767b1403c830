"""Signs of a block on a GPU: two reads of the vectors, and nothing waits for the host.

Library products are slow where a few rows are millions long. Here every program walks over a run
of columns and keeps its part of u = Z.S and G = Z.Z^T (split-K); the parts are added in float64.
Then one small program takes the signs, and a second pass adds Z^T.s to the running sum, vector by
vector, so that it has the bits of the loop over vectors.

Tensor cores know no float32. A number is split, x = h + l, into the 11 leading bits of its
mantissa and the rest, each of which TF32 holds. h.h^T + h.l^T + l.h^T is then good to 2^-21, and
as a Gram matrix is symmetric, two products do for three.

Letters: W streams, P vectors of a stream, D dimension, N programs for a stream.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST = 64
"""Vectors of one block: the products of more have no room in registers."""
_BLOCK, _UNROLL = 1024, 8  # columns of a program that adds, and vectors it asks for at once


class _Shape(NamedTuple):
    """How a program takes products."""

    columns: int
    warps: int
    per_sm: int


# By vectors, rounded up: the fastest of a dozen each, measured on an H200. A warp by itself needs
# no barriers; from 64 on, four of them have the larger products of Hopper.
_SHAPES = {16: _Shape(64, 1, 16), 32: _Shape(32, 2, 16), 64: _Shape(64, 4, 2)}


@triton.jit
def _one_block(x, s, inner, main, cross):
    """Add the products of (P, K) columns; `inner` is (P, K) still, its sum is for the end."""
    head = (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    part = tl.dot(head, tl.trans(head), input_precision="tf32")
    cross = tl.dot(head, tl.trans(x - head), cross, input_precision="tf32")
    # Tensor cores round towards zero at each of their sums: over a long run that adds up. An
    # addition proper would be folded into the product, this one is not.
    main = tl.fma(part, tl.full(part.shape, 1.0, tl.float32), main)
    return inner + x * s[None, :], main, cross


@triton.jit
def _product_pass(
    z, running, parts, stream, row, run_stream, columns, span, count,
    P: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    p, k = tl.arange(0, P), tl.arange(0, K)
    begin = tl.program_id(0).to(tl.int64) * span
    length = tl.minimum(begin + span, columns) - begin
    z += tl.program_id(1).to(tl.int64) * stream + begin
    running += tl.program_id(1).to(tl.int64) * run_stream + begin
    at = p.to(tl.int64)[:, None] * row + k[None, :]
    inner = tl.zeros((P, K), tl.float32)
    main = tl.zeros((P, P), tl.float32)
    cross = tl.zeros((P, P), tl.float32)
    whole = length // K
    # One block is on its way from memory while the one before it is multiplied; the last one is
    # asked for once more, since a mask along columns would keep loads from being wide.
    x = tl.load(z + at, mask=p[:, None] < tl.where(whole > 0, count, 0), other=0.0)
    s = tl.load(running + k, mask=k < length, other=0.0)
    for i in range(1, whole + 1):
        z += tl.where(i < whole, K, 0)
        running += tl.where(i < whole, K, 0)
        y = tl.load(z + at, mask=p[:, None] < count, other=0.0)
        t = tl.load(running + k)
        inner, main, cross = _one_block(x, s, inner, main, cross)
        x = y
        s = t
    left = length - whole * K
    if left > 0:
        here = (p[:, None] < count) & (k[None, :] < left)
        done = tl.where(whole > 0, K, 0)  # from the last block, if there was one
        x = tl.load(z + done + at, mask=here, other=0.0)
        s = tl.load(running + done + k, mask=k < left, other=0.0)
        inner, main, cross = _one_block(x, s, inner, main, cross)
    parts += (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * (
        count * (count + 1)
    )
    line = p * (count + 1)
    tl.store(parts + line, tl.sum(inner, axis=1), mask=p < count)
    gram = main + cross + tl.trans(cross)
    here = (p[:, None] < count) & (p[None, :] < count)
    tl.store(parts + line[:, None] + 1 + p[None, :], gram, mask=here)


@triton.jit
def _greedy_pass(products, signs, count, P: tl.constexpr):
    """Run the recursion on scalars, as `gram.signs_from_products` does."""
    products += tl.program_id(0) * count * (count + 1)
    p = tl.arange(0, P)
    line = products + p * (count + 1)
    inner = tl.load(line, mask=p < count, other=0.0)
    both = inner + tl.load(line + 1 + p, mask=p < count, other=0.0)
    finite = (both - both == 0.0) & (p < count)  # others are left out
    inner = tl.where(finite, inner, 0.0)
    taken = tl.zeros((P,), tl.int32)
    for k in range(count):
        own = p == k
        row = tl.load(products + k * (count + 1) + 1 + p, mask=finite, other=0.0)
        sign = tl.where(tl.sum(tl.where(own, inner, 0.0), axis=0) <= 0, 1, -1)
        sign *= tl.sum(tl.where(own & finite, 1, 0), axis=0)
        inner = tl.where(sign > 0, inner + row, tl.where(sign < 0, inner - row, inner))
        taken = tl.where(own, sign, taken)
    tl.store(signs + tl.program_id(0) * count + p, taken.to(tl.int8), mask=p < count)


@triton.jit
def _sum_pass(
    z, signs, running, out, stream, row, run_stream, out_stream, first, columns, count,
    BLOCK: tl.constexpr, UNROLL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    w = tl.program_id(1).to(tl.int64)
    at = (first + tl.program_id(0)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    z += w * stream
    running += w * run_stream
    total = tl.load(running + at, mask=at < columns) if MASKED else tl.load(running + at)
    offset = w * 0
    for p in range(0, count, UNROLL):
        for q in tl.static_range(UNROLL):  # so that many loads are on their way
            sign = tl.load(signs + w * count + p + q, mask=p + q < count, other=0).to(tl.int32)
            # In place of a vector that is left out (or beyond the last) the first one is read.
            here = z + tl.where(sign != 0, offset, 0) + at
            x = tl.load(here, mask=at < columns) if MASKED else tl.load(here)
            total = tl.where(sign > 0, total + x, tl.where(sign < 0, total - x, total))
            offset += row
    if MASKED:
        tl.store(out + w * out_stream + at, total, mask=at < columns)
    else:
        tl.store(out + w * out_stream + at, total)


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2  # Triton's interpreter
    return torch.cuda.get_device_properties(device).multi_processor_count


def products(z: Tensor, running: Tensor) -> Tensor:
    """Return u and G side by side, (W, P, 1 + P) float64, of (W, P, D) and (W, D) float32.

    Every row's numbers must lie side by side; P is at most MOST.
    """
    streams, count, columns = z.shape
    size = max(16, triton.next_power_of_2(count))
    shape = _SHAPES[size]
    per_stream = max(1, shape.per_sm * _processors(z.device) // streams)
    # Whole blocks for all but the last program, so that only it needs a mask.
    span = triton.cdiv(triton.cdiv(columns, shape.columns), per_stream) * shape.columns
    programs = triton.cdiv(columns, max(1, span))
    parts = z.new_empty(streams, programs, count, 1 + count)
    if programs:
        _product_pass[(programs, streams)](
            z, running, parts, z.stride(0), z.stride(1), running.stride(0), columns, span, count,
            P=size, K=shape.columns, num_warps=shape.warps, num_stages=1,
        )  # fmt: skip
    return parts.sum(1, dtype=torch.float64)


def greedy(both: Tensor) -> Tensor:
    """Return the greedy rule's (W, P) int8 signs of (W, P, 1 + P) products."""
    streams, count, _ = both.shape
    signs = torch.empty((streams, count), dtype=torch.int8, device=both.device)
    size = max(16, triton.next_power_of_2(count))
    _greedy_pass[(streams,)](both, signs, count, P=size, num_warps=1)
    return signs


def add_signed(z: Tensor, signs: Tensor, running: Tensor, out: Tensor) -> None:
    """Write running + Z^T.signs to (W, D) `out`, which may be `running`: (W, P, D), (W, P) int8."""
    streams, count, columns = z.shape
    whole, rest = divmod(columns, _BLOCK)
    for first, blocks, masked in ((0, whole, False), (whole, int(rest > 0), True)):
        if blocks:
            _sum_pass[(blocks, streams)](
                z, signs, running, out, z.stride(0), z.stride(1), running.stride(0), out.stride(0),
                first, columns, count, BLOCK=_BLOCK, UNROLL=_UNROLL, MASKED=masked,
            )  # fmt: skip


def balance_greedy(vectors: Tensor, running: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Sign (W, P, D) vectors by the greedy rule, at most MOST at a time.

    Returns:
        (W, P) int8 signs and the new (W, D) running sums, both on the device.
    """
    total, signs = running, []
    for z in vectors.split(min(block, MOST), dim=1):
        signs.append(greedy(products(z, total)))
        out = torch.empty_like(running) if total is running else total
        add_signed(z, signs[-1], total, out)
        total = out
    return torch.cat(signs, dim=1), total
