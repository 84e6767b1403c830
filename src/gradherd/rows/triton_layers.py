"""Rows of several layers in one launch, on a GPU, where a model runs as it is.

Launching costs more than computing here, so layers of one kind wait for each other
(`rows.held_layers`). They have equal sizes and strides; a table has the addresses of each.

A weight takes two or three kernels: one factor is projected to a few columns, a convolution adds up
its window, and the result is multiplied with the other factor. Norms and biases take one or two.
Each factor is read once.

Letters: L layers, N examples, T positions, C channels, Q columns.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradherd.gpu import Launch

TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
"""Triton's names of the dtypes that kernels read."""
MOST_CHANNELS = 4096
"""Channels of a position that one program holds."""
_PROGRAMS = 512
"""Programs that keep a GPU busy."""


@triton.jit
def _address(table, which: tl.constexpr, KIND: tl.constexpr, IS_ALIGNED: tl.constexpr):
    # Of a layer: input, gradient, the matrix that projects, signs of a window, signs.
    layer = tl.program_id(2)
    address = tl.load(table + layer * 5 + which).to(tl.pointer_type(KIND))
    return tl.multiple_of(address, 16) if IS_ALIGNED else address


@triton.jit
def _block(base, t, c, stride_t, stride_c, inside, known, LAST: tl.constexpr):
    """Load (T, C) elements; the inner stride is 1, which wide loads need to know."""
    if LAST:
        at = t.to(tl.int64)[:, None] * stride_t + c[None, :]
        return tl.load(base + at, mask=inside[:, None] & known[None, :], other=0.0)
    at = c.to(tl.int64)[:, None] * stride_c + t[None, :]
    return tl.trans(tl.load(base + at, mask=known[:, None] & inside[None, :], other=0.0))


@triton.jit
def _project_kernel(
    table, thin, positions, channels, columns, stride_n, stride_t, stride_c, side_c, side_q,
    FIRST: tl.constexpr, KIND: tl.constexpr, IS_ALIGNED: tl.constexpr, LAST: tl.constexpr,
    PRECISION: tl.constexpr, Q: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Project the channels of some positions of one example to Q columns."""
    n, layer = tl.program_id(1), tl.program_id(2)
    factor = _address(table, FIRST, KIND, IS_ALIGNED) + n.to(tl.int64) * stride_n
    side = _address(table, 2, KIND, True)
    t, q = tl.program_id(0) * BT + tl.arange(0, BT), tl.arange(0, Q)
    inside = t < positions
    total = tl.zeros((BT, Q), tl.float32)
    for begin in range(0, channels, BC):
        c = begin + tl.arange(0, BC)
        known = c < channels
        block = _block(factor, t, c, stride_t, stride_c, inside, known, LAST)
        mask = known[:, None] & (q < columns)[None, :]
        matrix = tl.load(side + c[:, None] * side_c + q[None, :] * side_q, mask=mask, other=0.0)
        total = tl.dot(block, matrix, total, input_precision=PRECISION)
    example = layer.to(tl.int64) * tl.num_programs(1) + n
    at = (example * positions + t)[:, None] * Q + q[None, :]
    tl.store(thin + at, total.to(KIND), mask=inside[:, None])


@triton.jit
def _window_kernel(
    table, before, after, columns, height, width, rows, across, places, window,
    stride_y, stride_x, pad_y, pad_x, step_y, step_x,
    KIND: tl.constexpr, Q: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Add up the window of a convolution with a sign for each place and column."""
    signs = _address(table, 3, KIND, False)
    positions = rows * across
    example = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    t, q = tl.program_id(0) * BT + tl.arange(0, BT), tl.arange(0, Q)
    top, left = (t // across) * stride_y - pad_y, (t % across) * stride_x - pad_x
    before += example * height * width * Q
    total = tl.zeros((BT, Q), tl.float32)
    for place in range(0, places):
        y, x = top + (place // window) * step_y, left + (place % window) * step_x
        # Places in the padding are zero, so they add nothing.
        valid = (t < positions) & (y >= 0) & (y < height) & (x >= 0) & (x < width)
        at = (y * width + x)[:, None] * Q + q[None, :]
        value = tl.load(before + at, mask=valid[:, None], other=0.0).to(tl.float32)
        sign = tl.load(signs + q * places + place, mask=q < columns, other=0.0).to(tl.float32)
        total += value * sign[None, :]
    at = (example * positions + t)[:, None] * Q + q[None, :]
    tl.store(after + at, total.to(KIND), mask=(t < positions)[:, None])


@triton.jit
def _combine_kernel(
    table, thin, out, positions, channels, columns, stride_n, stride_t, stride_c,
    SECOND: tl.constexpr, KIND: tl.constexpr, IS_ALIGNED: tl.constexpr, LAST: tl.constexpr,
    PRECISION: tl.constexpr, Q: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Multiply one example's projected factor with some channels of the other."""
    n, layer = tl.program_id(1), tl.program_id(2)
    factor = _address(table, SECOND, KIND, IS_ALIGNED) + n.to(tl.int64) * stride_n
    signs = _address(table, 4, tl.float32, False)
    c, q = tl.program_id(0) * BC + tl.arange(0, BC), tl.arange(0, Q)
    known = c < channels
    example = layer.to(tl.int64) * tl.num_programs(1) + n
    thin += example * positions * Q
    total = tl.zeros((Q, BC), tl.float32)
    for begin in range(0, positions, BT):
        t = begin + tl.arange(0, BT)
        inside = t < positions
        left = tl.load(thin + t[:, None] * Q + q[None, :], mask=inside[:, None], other=0.0)
        right = _block(factor, t, c, stride_t, stride_c, inside, known, LAST)
        total = tl.dot(tl.trans(left), right, total, input_precision=PRECISION)
    total *= tl.load(signs + c, mask=known, other=0.0)[None, :]
    at = (example * columns + q)[:, None] * channels + c[None, :]
    tl.store(out + at, total, mask=(q < columns)[:, None] & known[None, :])


@triton.jit
def _channel_sums_kernel(
    table, sums, rows, channels, positions, x_n, x_c, x_t, g_n, g_c, g_t,
    X: tl.constexpr, G: tl.constexpr, IS_ALIGNED: tl.constexpr, LAST: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum g, g x, x and x^2 over the positions of some (example, channel) pairs."""
    x, g = _address(table, 0, X, IS_ALIGNED), _address(table, 1, G, IS_ALIGNED)
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
        if LAST:
            one = tl.load(x_row[:, None] + at[None, :] * x_t, mask=mask, other=0.0)
            two = tl.load(g_row[:, None] + at[None, :] * g_t, mask=mask, other=0.0)
        else:
            one = tl.load(x_row[:, None] + at[None, :], mask=mask, other=0.0)
            two = tl.load(g_row[:, None] + at[None, :], mask=mask, other=0.0)
        one, two = one.to(tl.float32), two.to(tl.float32)
        total_g += two
        total_gx += two * one
        total_x += one
        total_xx += one * one
    sums += tl.program_id(2).to(tl.int64) * 4 * rows
    tl.store(sums + row, tl.sum(total_g, 1), mask=valid)
    tl.store(sums + rows + row, tl.sum(total_gx, 1), mask=valid)
    tl.store(sums + 2 * rows + row, tl.sum(total_x, 1), mask=valid)
    tl.store(sums + 3 * rows + row, tl.sum(total_xx, 1), mask=valid)


@triton.jit
def _channel_rows_kernel(
    table, sums, out, examples, channels, count, eps,
    BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """From the sums to gradients of scale and shift, for some channels of all examples."""
    layer = tl.program_id(2).to(tl.int64)
    signs = _address(table, 4, tl.float32, False)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = c < channels
    rows = examples * channels
    sums += layer * 4 * rows
    out += layer * 2 * rows
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
    deviation *= tl.load(signs + c, mask=inside, other=0.0)
    sign = tl.load(signs + channels + c, mask=inside, other=0.0)
    for begin in range(0, examples, BN):
        n = begin + tl.arange(0, BN)
        mask = (n < examples)[:, None] & inside[None, :]
        at = n[:, None] * channels + c[None, :]
        shift = tl.load(sums + at, mask=mask, other=0.0)
        product = tl.load(sums + rows + at, mask=mask, other=0.0)
        scale = (product - mean[None, :] * shift) * deviation[None, :]
        where = n[:, None] * (2 * channels) + c[None, :]
        tl.store(out + where, scale, mask=mask)
        tl.store(out + where + channels, shift * sign[None, :], mask=mask)


@triton.jit
def _position_kernel(
    table, out, positions, channels, shares, eps, width, x_n, x_t, g_n, g_t,
    X: tl.constexpr, G: tl.constexpr, IS_ALIGNED: tl.constexpr, SCALE: tl.constexpr,
    RMS: tl.constexpr, SHIFT: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Normalise some positions of an example, and sum g xhat and g over them."""
    share, n, layer = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    g = _address(table, 1, G, IS_ALIGNED)
    signs = _address(table, 4, tl.float32, False)
    c = tl.arange(0, BC)
    inside = c < channels
    scale = tl.zeros((BC,), tl.float32)
    shift = tl.zeros((BC,), tl.float32)
    for begin in range(share * BT, positions, shares * BT):
        t = begin + tl.arange(0, BT)
        mask = (t < positions)[:, None] & inside[None, :]
        at = t.to(tl.int64)[:, None]
        two = tl.load(g + n * g_n + at * g_t + c[None, :], mask=mask, other=0.0).to(tl.float32)
        if SCALE:
            x = _address(table, 0, X, IS_ALIGNED) + n * x_n
            one = tl.load(x + at * x_t + c[None, :], mask=mask, other=0.0).to(tl.float32)
            if not RMS:
                mean = tl.sum(one, 1) / channels
                one = tl.where(inside[None, :], one - mean[:, None], 0.0)
            deviation = tl.rsqrt(tl.sum(one * one, 1) / channels + eps)
            scale += tl.sum(two * one * deviation[:, None], 0)
        shift += tl.sum(two, 0)
    where = out + ((layer * shares + share) * tl.num_programs(1) + n) * width + c
    if SCALE:
        sign = tl.load(signs + c, mask=inside, other=0.0)
        tl.store(where, scale * sign, mask=inside)
        where += channels
        signs += channels
    if SHIFT:
        sign = tl.load(signs + c, mask=inside, other=0.0)
        tl.store(where, shift * sign, mask=inside)


class Factor(NamedTuple):
    """Sizes and strides of a tensor of examples, positions and channels."""

    examples: int
    positions: int
    channels: int
    stride_n: int
    stride_t: int
    stride_c: int

    @property
    def strides(self) -> tuple[int, int, int]:
        """Of the three."""
        return self.stride_n, self.stride_t, self.stride_c

    @classmethod
    def of(cls, tensor: Tensor) -> "Factor | None":
        """Describe a tensor (N, T, C), or (N, C, height, width); None if no kernel can read it."""
        if tensor.dim() == 3:
            (n, t, c), (stride_n, stride_t, stride_c) = tensor.shape, tensor.stride()
        elif tensor.dim() == 4:
            n, c, height, width = tensor.shape
            stride_n, stride_c, stride_y, stride_t = tensor.stride()
            if height > 1 and stride_y != width * stride_t:
                return None
            t = height * width
        else:
            return None
        if tensor.dtype not in TYPES or 1 not in (stride_t, stride_c) or not tensor.numel():
            return None
        return cls(n, t, c, stride_n, stride_t, stride_c)


Pair = tuple[int, int]
Window = tuple[Pair, Pair, Pair, Pair]
"""Size, stride, padding and dilation of a convolution."""


Plan = Callable[[Tensor], Tensor]
"""Takes the addresses (L, 5) of some layers to their signed rows, or columns of rows (S, N, ...),
which are to be summed over S."""


def product_plan(
    first: Tensor, second: Tensor, columns: int, count: int, *,
    first_at: int, window: Window | None, is_aligned: bool, allow_tf32: bool,
    matrix_strides: tuple[int, int],
) -> Plan:  # fmt: skip
    """Prepare the columns (L, N, Q, C) of weights.

    Args:
        first: The factor that is projected, of one layer.
        second: The other one.
        columns: Q.
        count: L.
        first_at: Field of the first factor's address, 0 or 1.
        window: Of a convolution, if positions of the two differ.
        is_aligned: Whether all addresses are multiples of 16 bytes.
        allow_tf32: Whether factors in float32 may be rounded.
        matrix_strides: Of the matrix that projects, over channels and columns.
    """
    one, two = Factor.of(first), Factor.of(second)
    assert one is not None and two is not None
    dtype, device = first.dtype, first.device
    kind, width = TYPES[dtype], max(16, triton.next_power_of_2(columns))
    precision, half = "tf32" if allow_tf32 else "ieee", dtype.itemsize == 2
    examples, positions, last = one.examples, one.positions, one.stride_c == 1
    before = (count, examples, positions, width)
    if last and one.stride_n == positions * one.stride_t:  # one long example: no tiles in part
        examples, positions = 1, examples * positions
    block, channels = 64 if half else 32, 128 if last and width == 16 else 64
    project = Launch(
        _project_kernel, (triton.cdiv(positions, block), examples, count),
        positions, one.channels, columns, *one.strides, *matrix_strides,
        first_at, kind, is_aligned, last, precision, width, block, channels,
    )  # fmt: skip
    move: Launch | None = None
    if window is not None:
        size, stride, padding, dilation = window
        block = max(16, 1024 // width)
        move = Launch(
            _window_kernel, (triton.cdiv(two.positions, block), one.examples, count),
            columns, *first.shape[2:], *second.shape[2:], size[0] * size[1], size[1],
            *stride, *padding, *dilation, kind, width, block,
        )  # fmt: skip
    after = (count, two.examples, two.positions, width)
    last = two.stride_c == 1
    block, most = (64, 128) if last else (32, 64)
    if two.examples * count * triton.cdiv(two.channels, block) < _PROGRAMS // 2:
        block //= 2
    most = 32 if two.positions <= 32 else most if half else most // 2
    combine = Launch(
        _combine_kernel, (triton.cdiv(two.channels, block), two.examples, count),
        two.positions, two.channels, columns, *two.strides,
        1 - first_at, kind, is_aligned, last, precision, width, most, block,
    )  # fmt: skip
    found = (count, two.examples, columns, two.channels)

    def run(table: Tensor) -> Tensor:
        thin = torch.empty(before, dtype=dtype, device=device)
        project(table, thin)
        if move is not None:
            projected, thin = thin, torch.empty(after, dtype=dtype, device=device)
            move(table, projected, thin)
        out = torch.empty(found, device=device)
        combine(table, thin, out)
        return out

    return run


def batch_norm_plan(
    inputs: Tensor, grads: Tensor, eps: float, count: int, *, is_aligned: bool
) -> Plan:
    """Prepare the rows (L, N, 2 C) of BatchNorms in training: tensors (N, C, ...)."""
    examples, channels = inputs.shape[:2]
    flat, wide, device = inputs.flatten(2), grads.flatten(2), inputs.device
    positions, rows = flat.shape[2], examples * channels
    block = min(1024, max(16, triton.next_power_of_2(positions)))
    per, strided = max(1, 2048 // block), flat.stride(2) != 1 or wide.stride(2) != 1
    add = Launch(
        _channel_sums_kernel, (triton.cdiv(rows, per), 1, count),
        rows, channels, positions, *flat.stride(), *wide.stride(),
        TYPES[inputs.dtype], TYPES[grads.dtype], is_aligned, strided, per, block,
    )  # fmt: skip
    finish = Launch(
        _channel_rows_kernel, (triton.cdiv(channels, 16), 1, count),
        examples, channels, examples * positions, eps, 64, 16,
    )  # fmt: skip

    def run(table: Tensor) -> Tensor:
        sums = torch.empty(count, 4, rows, device=device)
        out = torch.empty(count, examples, 2 * channels, device=device)
        add(table, sums)
        finish(table, sums, out)
        return out

    return run


def position_plan(
    inputs: Tensor | None, grads: Tensor, eps: float, count: int, *,
    rms: bool, shift: bool, is_aligned: bool,
) -> Plan:  # fmt: skip
    """Prepare the rows of LayerNorms or RMSNorms over C channels, or of biases.

    Those of the scale, (S, N, C), with `shift` those of the shift behind them. Tensors are
    (N, T, C); without inputs there is a shift alone.
    """
    examples, positions, channels = grads.shape
    device, width = grads.device, triton.next_power_of_2(channels)
    per = max(1, 4096 // width)
    most = max(1, _PROGRAMS // (examples * count))
    shares = max(1, min(triton.cdiv(positions, per), most))
    size = ((inputs is not None) + shift) * channels
    one = grads if inputs is None else inputs
    add = Launch(
        _position_kernel, (shares, examples, count),
        positions, channels, shares, eps, size,
        one.stride(0), one.stride(1), grads.stride(0), grads.stride(1),
        TYPES[one.dtype], TYPES[grads.dtype], is_aligned,
        inputs is not None, rms, shift, per, width,
    )  # fmt: skip

    def run(table: Tensor) -> Tensor:
        out = torch.empty(count * shares, examples, size, device=device)
        add(table, out)
        return out

    return run
