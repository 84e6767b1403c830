"""Rows on a GPU: one or two launches for each layer.

Launching costs more than computing here, so every kernel does as much as it can: the product of a
layer's projected input with its output gradient, a norm's sums over positions. They write to a
table of all columns, which one more launch sketches at the end of the batch.

Letters: B examples, C channels or inputs, O outputs, T positions, Q columns of the input side,
N columns of the table, K elements of a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_Q = 16  # rows of the smallest matrix product
_BLOCK = 512


@triton.jit
def _sketch_kernel(
    columns, shifts, block_signs, signs, sketch, N, K, blocks, row, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a range of the count sketch of one example's columns."""
    example = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < K
    total = tl.zeros((BLOCK,), tl.float32)
    # Block by block in the same order: equal bits in every run.
    for block in range(blocks):
        shift = tl.load(shifts + block).to(tl.int32)
        source = at - shift
        source = tl.where(source < 0, source + K, source)
        index = block * K + source
        value = tl.load(columns + example * row + index, mask=inside & (index < N), other=0.0)
        sign = tl.load(signs + source, mask=inside, other=0.0) * tl.load(block_signs + block)
        total += value.to(tl.float32) * sign
    tl.store(sketch + example * K + at, total, mask=inside)


def sketch_columns(
    columns: Tensor, size: int, shifts: Tensor, block_signs: Tensor, signs: Tensor
) -> Tensor:
    """Return the count sketch of columns (B, N): (B, K).

    Args:
        columns: Any floating dtype; elements of an example lie side by side.
        size: K.
        shifts: (N / K, rounded up) rotation of each block of K columns.
        block_signs: Sign of each block.
        signs: (K,) sign of each column within a block.
    """
    sketch = torch.empty(len(columns), size, device=columns.device)
    grid = (len(columns), triton.cdiv(size, _BLOCK))
    _sketch_kernel[grid](
        columns, shifts, block_signs, signs, sketch,
        columns.shape[1], size, len(shifts), columns.stride(0), BLOCK=_BLOCK,
    )  # fmt: skip
    return sketch


@triton.jit
def _combine_kernel(
    a, g, out, ab, aq, at, gb, go, gt, outputs, T, row, count,
    ADD: tl.constexpr, Q: tl.constexpr, BO: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Multiply one example's projected input with some outputs' gradients, over all positions."""
    example = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    q = tl.arange(0, Q)
    total = tl.zeros((Q, BO), tl.float32)
    for begin in range(0, T, BT):
        t = begin + tl.arange(0, BT)
        left = tl.load(
            a + example * ab + q[:, None] * aq + t[None, :] * at,
            mask=(q < count)[:, None] & (t < T)[None, :],
            other=0.0,
        )
        right = tl.load(
            g + example * gb + t.to(tl.int64)[:, None] * gt + o.to(tl.int64)[None, :] * go,
            mask=(t < T)[:, None] & (o < outputs)[None, :],
            other=0.0,
        ).to(left.dtype)
        total = tl.dot(left, right, total, input_precision="tf32")
    where = example * row + q[:, None] * outputs + o[None, :]
    mask = (q < count)[:, None] & (o < outputs)[None, :]
    if ADD:
        total += tl.load(out + where, mask=mask, other=0.0)
    tl.store(out + where, total, mask=mask)


def combine(
    projected: Tensor,
    strides: tuple[int, int, int],
    grads: Tensor,
    grad_strides: tuple[int, int, int],
    shape: tuple[int, int, int, int],
    out: Tensor,
    *,
    add: bool,
) -> None:
    """Write (or add) the columns of a layer: q rows of O columns for each example.

    Args:
        projected: Projected inputs in any layout.
        strides: Their strides over examples, columns and positions.
        grads: Output gradients in any layout.
        grad_strides: Their strides over examples, outputs and positions.
        shape: B, q (at most 16), O, T.
        out: (B, q * O) view of the table; columns of an example lie side by side.
        add: Whether to add to what is in `out`.
    """
    examples, count, outputs, positions = shape
    block = 64 if examples * (-(-outputs // 64)) >= 256 else 32
    _combine_kernel[(examples, -(-outputs // block))](
        projected, grads, out, *strides, *grad_strides, outputs, positions, out.stride(0), count,
        ADD=add, Q=_Q, BO=block, BT=32 if positions <= 32 else 64,
    )  # fmt: skip


@triton.jit
def _channels_first_kernel(
    inputs, grads, mean, rstd, out, rows, C, T, row_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum over the positions of some (example, channel) rows of T elements."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = row < rows
    at = tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    product = tl.zeros((ROWS, BLOCK), tl.float32)
    for begin in range(0, T, BLOCK):
        mask = valid[:, None] & (begin + at < T)[None, :]
        offset = row[:, None] * T + (begin + at)[None, :]
        g = tl.load(grads + offset, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(inputs + offset, mask=mask, other=0.0).to(tl.float32)
        total += g
        product += g * x
    bias = tl.sum(total, 1)
    channel = row % C
    m = tl.load(mean + channel, mask=valid, other=0.0).to(tl.float32)
    r = tl.load(rstd + channel, mask=valid, other=0.0).to(tl.float32)
    where = row // C * row_stride + channel
    tl.store(out + where, (tl.sum(product, 1) - m * bias) * r, mask=valid)
    tl.store(out + where + C, bias, mask=valid)


@triton.jit
def _channels_last_kernel(
    inputs, grads, mean, rstd, out, xb, xt, gb, gt, C, T, row_stride,
    PER_CHANNEL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum over the positions of some channels of one example; channels lie side by side."""
    example = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < C
    total = tl.zeros((BLOCK,), tl.float32)
    product = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, T, ROWS):
        at = begin + tl.arange(0, ROWS)
        position = example * T + at
        mask = (at < T)[:, None] & inside[None, :]
        t = at.to(tl.int64)[:, None]
        g = tl.load(grads + example * gb + t * gt + channel[None, :], mask=mask, other=0.0)
        x = tl.load(inputs + example * xb + t * xt + channel[None, :], mask=mask, other=0.0)
        g, x = g.to(tl.float32), x.to(tl.float32)
        if not PER_CHANNEL:
            m = tl.load(mean + position, mask=at < T, other=0.0).to(tl.float32)
            r = tl.load(rstd + position, mask=at < T, other=0.0).to(tl.float32)
            x = (x - m[:, None]) * r[:, None]
        total += tl.sum(g, 0)
        product += tl.sum(g * x, 0)
    if PER_CHANNEL:
        m = tl.load(mean + channel, mask=inside, other=0.0).to(tl.float32)
        r = tl.load(rstd + channel, mask=inside, other=0.0).to(tl.float32)
        product = (product - m * total) * r
    tl.store(out + example * row_stride + channel, product, mask=inside)
    tl.store(out + example * row_stride + C + channel, total, mask=inside)


def write_norm(
    inputs: Tensor, grads: Tensor, mean: Tensor, rstd: Tensor, out: Tensor, *, per_channel: bool
) -> bool:
    """Write each example's gradient of a norm's scale and shift.

    Args:
        inputs: (B, C, ...) with a mean for each channel (BatchNorm), or (B, ..., C) with a mean
            for each position (LayerNorm).
        grads: Output gradients of the same shape.
        mean: (C,) or one element for each position.
        rstd: Reciprocal standard deviations of the same shape.
        out: (B, 2 C) view of the table.
        per_channel: Whether there is a mean for each channel.

    Returns:
        False, with nothing written, if the tensors lie in memory in another way.
    """
    examples = inputs.shape[0]
    if inputs.dim() < 3 or inputs.shape != grads.shape:
        return False
    contiguous = inputs.is_contiguous() and grads.is_contiguous()
    channels = inputs.shape[1 if per_channel else -1]
    positions = inputs.numel() // (examples * channels)
    if per_channel and contiguous:
        block = min(1024, triton.next_power_of_2(positions))
        rows = max(1, 2048 // block)
        _channels_first_kernel[(triton.cdiv(examples * channels, rows),)](
            inputs, grads, mean, rstd, out, examples * channels, channels, positions,
            out.stride(0), ROWS=rows, BLOCK=block,
        )  # fmt: skip
        return True
    if per_channel:
        inputs, grads = inputs.movedim(1, -1), grads.movedim(1, -1)
    elif mean.numel() != examples * positions or not mean.is_contiguous():
        return False
    strides = [_position_strides(one) for one in (inputs, grads)]
    if strides[0] is None or strides[1] is None:
        return False
    grid = (examples, triton.cdiv(channels, 64))
    _channels_last_kernel[grid](
        inputs, grads, mean, rstd, out, *strides[0], *strides[1], channels, positions,
        out.stride(0), PER_CHANNEL=per_channel, ROWS=32, BLOCK=64,
    )  # fmt: skip
    return True


def _position_strides(tensor: Tensor) -> tuple[int, int] | None:
    """Return the strides of (B, ..., C) over examples and positions, if one leads over all."""
    sizes, strides = tensor.shape[1:-1], tensor.stride()
    if strides[-1] != 1:
        return None
    inner = strides[1:-1]
    if any(inner[at] != sizes[at + 1] * inner[at + 1] for at in range(len(sizes) - 1)):
        return None
    return strides[0], inner[-1]
