"""Signs of a block on a GPU: two reads of the vectors, and nothing waits for the host.

Library matrix products are slow if a few rows are millions long. Here every program sums u = Z.S
and G = Z.Z^T over its own range of columns (split-K), and the partial sums are added in float64.
Then one small program decides the signs, and another kernel adds Z^T.s to the running sum, vector
by vector, so that it has the bits of the loop over vectors.

Tensor cores do not multiply float32. An element is split, x = h + l, into the 11 leading bits of
its mantissa and the rest, each of which TF32 can hold. h.h^T + h.l^T + l.h^T is then accurate to
2^-21, and because a Gram matrix is symmetric, two products suffice for the three terms.

Letters: W streams, P vectors of a stream, D columns, N programs for a stream, K columns that a
program loads at a time.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradherd.gpu import launch

# Columns of a program of `_sum_kernel`, and vectors that it loads at once.
_BLOCK, _UNROLL = 1024, 8
# Rows of single examples are short. Fewer, longer ranges then leave fewer partial sums to add, and
# smaller blocks of columns use more multiprocessors.
_LEAST_SPAN, _SHORT_BLOCK = 256, 256


# How `_product_kernel` is launched, by number of vectors, rounded up: K, warps of a program, and
# programs per multiprocessor; the fastest of a dozen candidates each, measured on an H200. A single
# warp needs no barriers; from 64 vectors on, four warps can use the larger matrix instructions of
# Hopper.
_SHAPES = {16: (64, 1, 16), 32: (32, 2, 16), 64: (64, 4, 2)}


@triton.jit
def _add_products(x, s, inner, main, cross):
    """Add the products of (P, K) columns; `inner` stays (P, K) and is summed once at the end."""
    # -8192 clears the 13 low bits of the mantissa: what is left fits TF32 without rounding.
    head = (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    part = tl.dot(head, tl.trans(head), input_precision="tf32")
    cross = tl.dot(head, tl.trans(x - head), cross, input_precision="tf32")
    # Tensor cores round towards zero whenever they accumulate, which adds up over many columns.
    # So the sum is kept outside of them. The compiler would merge a plain addition into the
    # product; it does not do that with an fma.
    main = tl.fma(part, tl.full(part.shape, 1.0, tl.float32), main)
    return inner + x * s[None, :], main, cross


@triton.jit
def _product_kernel(
    z, running, parts, stream, row, run_stream, columns, span, count,
    P: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Write the products over one range of `span` columns of one stream to `parts`."""
    p, k = tl.arange(0, P), tl.arange(0, K)
    # Offsets in int64: a stream may hold more than 2^31 elements.
    begin = tl.program_id(0).to(tl.int64) * span
    length = tl.minimum(begin + span, columns) - begin
    z += tl.program_id(1).to(tl.int64) * stream + begin
    running += tl.program_id(1).to(tl.int64) * run_stream + begin
    at = p.to(tl.int64)[:, None] * row + k[None, :]
    inner = tl.zeros((P, K), tl.float32)
    main = tl.zeros((P, P), tl.float32)
    cross = tl.zeros((P, P), tl.float32)
    whole = length // K
    # Software pipelining: a block is loaded while the one before it is multiplied. The last
    # iteration loads the last block again, since a mask along columns would prevent wide loads.
    x = tl.load(z + at, mask=p[:, None] < tl.where(whole > 0, count, 0), other=0.0)
    s = tl.load(running + k, mask=k < length, other=0.0)
    for i in range(1, whole + 1):
        z += tl.where(i < whole, K, 0)
        running += tl.where(i < whole, K, 0)
        y = tl.load(z + at, mask=p[:, None] < count, other=0.0)
        t = tl.load(running + k)
        inner, main, cross = _add_products(x, s, inner, main, cross)
        x = y
        s = t
    left = length - whole * K
    if left > 0:
        inside = (p[:, None] < count) & (k[None, :] < left)
        done = tl.where(whole > 0, K, 0)  # `z` still points at the last whole block, if any
        x = tl.load(z + done + at, mask=inside, other=0.0)
        s = tl.load(running + done + k, mask=k < left, other=0.0)
        inner, main, cross = _add_products(x, s, inner, main, cross)
    parts += (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * (
        count * (count + 1)
    )
    line = p * (count + 1)
    tl.store(parts + line, tl.sum(inner, axis=1), mask=p < count)
    gram = main + cross + tl.trans(cross)
    inside = (p[:, None] < count) & (p[None, :] < count)
    tl.store(parts + line[:, None] + 1 + p[None, :], gram, mask=inside)


@triton.jit
def _greedy_kernel(products, signs, stride, count, P: tl.constexpr):
    """Run the recursion on scalars, as `balance.signs_from_products` does."""
    products += tl.program_id(0) * count * (count + 1)
    p = tl.arange(0, P)
    line = products + p * (count + 1)
    inner = tl.load(line, mask=p < count, other=0.0)
    both = inner + tl.load(line + 1 + p, mask=p < count, other=0.0)
    # x - x is zero only for finite x. Vectors that are not finite are left out.
    finite = (both - both == 0.0) & (p < count)
    # Not a number is neither above nor below zero: such a vector gets no sign.
    inner = tl.where(finite, inner, float("nan"))
    decided = tl.zeros((P,), tl.int32)
    row = tl.load(products + 1 + p, mask=finite, other=0.0)
    for k in range(count):
        # Loaded before it is needed: waiting for memory would take most of the time.
        at = tl.minimum(k + 1, count - 1) * (count + 1) + 1
        following = tl.load(products + at + p, mask=finite, other=0.0)
        value = tl.sum(tl.where(p == k, inner, 0.0), axis=0)
        sign = tl.where(value <= 0, 1, tl.where(value > 0, -1, 0))
        inner = tl.where(sign > 0, inner + row, tl.where(sign < 0, inner - row, inner))
        decided = tl.where(p == k, sign, decided)
        row = following
    tl.store(signs + tl.program_id(0) * stride + p, decided.to(tl.int8), mask=p < count)


@triton.jit
def _sum_kernel(
    z, signs, running, mean, total, stream, row, sign_stream, run_stream, columns, count,
    BLOCK: tl.constexpr, UNROLL: tl.constexpr, TOTAL: tl.constexpr,
):  # fmt: skip
    """Add signed vectors to `running`, and if TOTAL vectors plus mean to `total`, some columns."""
    w = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    z += w * stream
    running += w * run_stream
    signed = tl.load(running + at, mask=inside, other=0.0)
    if TOTAL:
        m = tl.load(mean + w * columns + at, mask=inside, other=0.0)
        plain = tl.load(total + w * columns + at, mask=inside, other=0.0)
    offset = w * 0
    for p in range(0, count, UNROLL):
        for q in tl.static_range(UNROLL):  # so that several loads overlap
            sign = tl.load(signs + w * sign_stream + p + q, mask=p + q < count, other=0)
            sign = sign.to(tl.int32)
            # In place of a vector that is left out (or beyond the last) the first one is loaded,
            # and not added: its address is always valid.
            x = tl.load(z + tl.where(sign != 0, offset, 0) + at, mask=inside, other=0.0)
            signed = tl.where(sign > 0, signed + x, tl.where(sign < 0, signed - x, signed))
            if TOTAL:
                plain = tl.where(sign != 0, plain + (x + m), plain)
            offset += row
    tl.store(running + at, signed, mask=inside)
    if TOTAL:
        tl.store(total + w * columns + at, plain, mask=inside)


@cache
def _processors(device: torch.device) -> int:
    """Return the number of multiprocessors."""
    if device.type != "cuda":
        return 2  # Triton's interpreter: more than one, so that tests cover split-K
    return torch.cuda.get_device_properties(device).multi_processor_count


def products(z: Tensor, running: Tensor, least: int = 1) -> Tensor:
    """Return the inner products of a block of vectors.

    Args:
        z: (W, P, D) float32, contiguous along D; P is at most 64.
        running: (W, D) float32 running sums, contiguous along D.
        least: Columns of a program, at least.

    Returns:
        (W, P, 1 + P) float64: u = Z.S in column 0, then G = Z.Z^T.
    """
    streams, count, columns = z.shape
    block, warps, per_processor = _SHAPES[_padded(count)]
    per_stream = max(1, per_processor * _processors(z.device) // streams)
    # Whole blocks for all programs but the last, so that only that one needs a mask.
    span = max(least, triton.cdiv(triton.cdiv(columns, block), per_stream) * block)
    programs = triton.cdiv(columns, span)
    parts = z.new_empty(streams, programs, count, 1 + count)
    if programs:
        launch(
            _product_kernel, (programs, streams),
            z, running, parts, z.stride(0), z.stride(1), running.stride(0), columns, span, count,
            P=_padded(count), K=block, num_warps=warps, num_stages=1,
        )  # fmt: skip
    return parts.sum(1, dtype=torch.float64)


def _padded(count: int) -> int:
    """Return the vectors of a block as kernels count them."""
    return max(16, 1 << (count - 1).bit_length())  # matrix instructions start at 16 rows


def add_signed(
    z: Tensor,
    signs: Tensor,
    running: Tensor,
    mean: Tensor | None = None,
    total: Tensor | None = None,
) -> None:
    """Add Z^T.signs to running sums in place, and vectors plus mean to plain sums, if given.

    Args:
        z: (W, P, D) float32, contiguous along D.
        signs: (W, P) int8, contiguous along P.
        running: (W, D) float32, contiguous along D.
        mean: (W, D) what was subtracted from the vectors, contiguous.
        total: (W, D) sums of vectors plus mean, contiguous.
    """
    streams, count, columns = z.shape
    block = _BLOCK if total is None else _SHORT_BLOCK
    unused = running  # memory that no program reads in its place
    launch(
        _sum_kernel, (triton.cdiv(columns, block), streams), z, signs, running,
        unused if mean is None else mean, unused if total is None else total, z.stride(0),
        z.stride(1), signs.stride(0), running.stride(0), columns, count,
        BLOCK=block, UNROLL=_UNROLL, TOTAL=total is not None,
    )  # fmt: skip


def sign_greedily(z: Tensor, signs: Tensor, mean: Tensor, running: Tensor, total: Tensor) -> None:
    """Write the signs of vectors by the greedy rule, at most 64, and add as `add_signed` does."""
    both, count = products(z, running, _LEAST_SPAN), z.shape[1]
    launch(
        _greedy_kernel, (len(z),),
        both, signs, signs.stride(0), count, P=_padded(count), num_warps=1,
    )  # fmt: skip
    add_signed(z, signs, running, mean, total)
