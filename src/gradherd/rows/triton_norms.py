"""Rows of norms on a GPU, where a model runs as it is: one or two launches instead of ten.

A compiler makes such kernels itself, so compiled models use torch's own operations.

Letters: N examples, T positions, C channels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradherd.gpu import launch

_MOST_CHANNELS = 4096
"""Channels of a position that one program holds."""
_PROGRAMS = 512
"""Programs that keep a GPU busy."""


@triton.jit
def _channel_sums_kernel(
    x, g, sums, rows, channels, positions, x_n, x_c, x_t, g_n, g_c, g_t,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum g, g x, x and x^2 over the positions of some (example, channel) pairs."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = row < rows
    n, c = (row // channels).to(tl.int64), (row % channels).to(tl.int64)
    x_row, g_row = x + n * x_n + c * x_c, g + n * g_n + c * g_c
    total_g = tl.zeros((ROWS, BLOCK), tl.float32)
    total_gx = tl.zeros((ROWS, BLOCK), tl.float32)
    total_x = tl.zeros((ROWS, BLOCK), tl.float32)
    total_xx = tl.zeros((ROWS, BLOCK), tl.float32)
    for begin in range(0, positions, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        mask = valid[:, None] & (at < positions)[None, :]
        one = tl.load(x_row[:, None] + at[None, :] * x_t, mask=mask, other=0.0).to(tl.float32)
        two = tl.load(g_row[:, None] + at[None, :] * g_t, mask=mask, other=0.0).to(tl.float32)
        total_g += two
        total_gx += two * one
        total_x += one
        total_xx += one * one
    tl.store(sums + row, tl.sum(total_g, 1), mask=valid)
    tl.store(sums + rows + row, tl.sum(total_gx, 1), mask=valid)
    tl.store(sums + 2 * rows + row, tl.sum(total_x, 1), mask=valid)
    tl.store(sums + 3 * rows + row, tl.sum(total_xx, 1), mask=valid)


@triton.jit
def _channel_rows_kernel(
    sums, out, examples, channels, count, eps,
    BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """From the sums to gradients of scale and shift, for some channels of all examples."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = c < channels
    rows = examples * channels
    total = tl.zeros((BC,), tl.float32)
    squares = tl.zeros((BC,), tl.float32)
    for begin in range(0, examples, BN):
        n = begin + tl.arange(0, BN)
        mask = (n < examples)[:, None] & inside[None, :]
        at = n[:, None] * channels + c[None, :]
        total += tl.sum(tl.load(sums + 2 * rows + at, mask=mask, other=0.0), 0)
        squares += tl.sum(tl.load(sums + 3 * rows + at, mask=mask, other=0.0), 0)
    mean = total / count
    deviation = tl.rsqrt(tl.maximum(squares / count - mean * mean, 0.0) + eps)
    for begin in range(0, examples, BN):
        n = begin + tl.arange(0, BN)
        mask = (n < examples)[:, None] & inside[None, :]
        at = n[:, None] * channels + c[None, :]
        shift = tl.load(sums + at, mask=mask, other=0.0)
        product = tl.load(sums + rows + at, mask=mask, other=0.0)
        scale = (product - mean[None, :] * shift) * deviation[None, :]
        where = n[:, None] * (2 * channels) + c[None, :]
        tl.store(out + where, scale, mask=mask)
        tl.store(out + where + channels, shift, mask=mask)


@triton.jit
def _position_kernel(
    x, g, out, positions, channels, shares, eps, width, x_n, x_t, g_n, g_t,
    RMS: tl.constexpr, SHIFT: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Normalise some positions of an example, and sum g xhat and g over them."""
    n, share = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = tl.arange(0, BC)
    inside = c < channels
    scale = tl.zeros((BC,), tl.float32)
    shift = tl.zeros((BC,), tl.float32)
    for begin in range(share * BT, positions, shares * BT):
        t = begin + tl.arange(0, BT)
        mask = (t < positions)[:, None] & inside[None, :]
        at = t.to(tl.int64)[:, None]
        one = tl.load(x + n * x_n + at * x_t + c[None, :], mask=mask, other=0.0).to(tl.float32)
        two = tl.load(g + n * g_n + at * g_t + c[None, :], mask=mask, other=0.0).to(tl.float32)
        if not RMS:
            mean = tl.sum(one, 1) / channels
            one = tl.where(inside[None, :], one - mean[:, None], 0.0)
        deviation = tl.rsqrt(tl.sum(one * one, 1) / channels + eps)
        scale += tl.sum(two * one * deviation[:, None], 0)
        shift += tl.sum(two, 0)
    where = out + (share * tl.num_programs(0) + n) * width + c
    tl.store(where, scale, mask=inside)
    if SHIFT:
        tl.store(where + channels, shift, mask=inside)


def batch_norm_rows(inputs: Tensor, grads: Tensor, eps: float) -> Tensor:
    """Return the rows (N, 2 C) of a BatchNorm in training: inputs and grads (N, C, ...)."""
    examples, channels = inputs.shape[:2]
    flat, wide = inputs.flatten(2), grads.flatten(2)
    positions, rows = flat.shape[2], examples * channels
    sums = torch.empty(4, rows, device=inputs.device)
    out = torch.empty(examples, 2 * channels, device=inputs.device)
    block = min(1024, max(16, triton.next_power_of_2(positions)))
    per = max(1, 2048 // block)
    launch(
        _channel_sums_kernel, (triton.cdiv(rows, per),),
        flat, wide, sums, rows, channels, positions, *flat.stride(), *wide.stride(),
        ROWS=per, BLOCK=block,
    )  # fmt: skip
    launch(
        _channel_rows_kernel, (triton.cdiv(channels, 16),),
        sums, out, examples, channels, examples * positions, eps, BN=64, BC=16,
    )  # fmt: skip
    return out


def position_norm_rows(
    inputs: Tensor, grads: Tensor, eps: float, *, rms: bool, shift: bool
) -> Tensor:
    """Return the rows of LayerNorm or RMSNorm over C channels: inputs and grads (N, T, C).

    Those of the scale, (N, C), and with `shift` of the shift behind them.
    """
    examples, positions, channels = inputs.shape
    per = max(1, 4096 // triton.next_power_of_2(channels))
    shares = max(1, min(triton.cdiv(positions, per), _PROGRAMS // examples))
    width = 2 * channels if shift else channels
    out = torch.empty(shares, examples, width, device=inputs.device)
    launch(
        _position_kernel, (examples, shares),
        inputs, grads, out, positions, channels, shares, eps, width,
        inputs.stride(0), inputs.stride(1), grads.stride(0), grads.stride(1),
        RMS=rms, SHIFT=shift, BT=per, BC=triton.next_power_of_2(channels),
    )  # fmt: skip
    return out[0] if shares == 1 else out.sum(0)


def reads_positions(inputs: Tensor, grads: Tensor) -> bool:
    """Say whether kernels can read tensors (N, T, C) of a norm over the last dimension."""
    fits = inputs.dim() == 3 and inputs.shape[2] <= _MOST_CHANNELS
    return fits and inputs.stride(2) == 1 and grads.stride(2) == 1
