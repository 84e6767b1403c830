"""Rows on a GPU: kernels that serve many layers in one launch.

Launching costs more than computing here, so layers wait for each other (`launch_group`) and every
kernel works on all of them. A table of tiles says which layer a program works on, a table of
fields how large the layer is and how it lies in memory, and a table of addresses where. Fields
and tiles stay the same from step to step; addresses are copied anew for each launch.

The columns of a layer take two or three kernels: the input is projected to a few columns, a
convolution adds up its window, and the result is multiplied with the output gradient, whose outputs
are folded as they are read. Both are read once, or once for every 128 columns.

Letters: B examples, C channels or inputs, O outputs, T positions, Q columns of a program.
"""

import torch
import triton
import triton.language as tl

POINTERS = 5
"""Addresses of a layer: input, output gradient, projected input before and after the window (or
mean and reciprocal standard deviation of a norm), columns in the table."""
# A row of `fields` for a product: 0 side matrix, 1 channels, 2 input positions, 3-5 input strides
# over examples, positions, channels, 6 free column, 7 folded outputs, 8 positions, 9 outputs, 10
# columns, 11-13 gradient strides, 14 whether to add, 15-17 strides of the projected input, 18
# elements between two examples' columns, 19 signs of outputs. For a window: 0 signs, 1 count, 2
# places, 3 free column, 4-5 input and 6-7 output size, 8 columns of the window, 9-14 stride,
# padding and dilation, 15 columns. For a norm: 0 rows, 1 channels, 2 positions, 3-6 strides, 8
# whether to add, 9 elements between two examples' columns.
FIELDS = 20
"""Numbers that describe a layer in each of the tables."""

TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
"""Triton's names of the dtypes that kernels read."""


@triton.jit
def _address(pointers, layer, which: tl.constexpr, KIND: tl.constexpr, IS_ALIGNED: tl.constexpr):
    address = tl.load(pointers + layer * 5 + which).to(tl.pointer_type(KIND))
    return tl.multiple_of(address, 16) if IS_ALIGNED else address


# STEP is a promise to the compiler: addresses are multiples of 16 bytes, and strides and lengths of
# the inner dimension multiples of STEP elements. It loads so many at a time. The length counts as
# well as the stride: a mask that could end anywhere makes it load element by element.
@triton.jit
def _multiple(field, STEP: tl.constexpr):
    return tl.multiple_of(tl.load(field), STEP)


@triton.jit
def _length(field, STEP: tl.constexpr):
    # Of 32 bits, in which dividing takes a tenth of the time; addresses and strides have 64.
    return tl.multiple_of(tl.load(field).to(tl.int32), STEP)


@triton.jit
def project_kernel(
    pointers, fields, tiles,
    X: tl.constexpr, THIN: tl.constexpr, LAST: tl.constexpr, STEP: tl.constexpr,
    Q: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Project the channels of some positions of one example to Q columns."""
    layer = tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64)
    block = tl.load(tiles + 2 * tl.program_id(0) + 1)
    field = fields + layer * 20
    x = _address(pointers, layer, 0, X, STEP > 1)
    thin = _address(pointers, layer, 2, THIN, True)  # as all scratch memory
    side = tl.multiple_of(tl.load(field).to(tl.pointer_type(THIN)), 16)
    channels = _length(field + 1, STEP if LAST else 1)
    positions = _length(field + 2, 1 if LAST else STEP)
    free, columns = tl.load(field + 6), _length(field + 16, 16)
    # All columns of a block one after the other: the input is still in the cache.
    parts, blocks = columns // Q, (positions + BT - 1) // BT
    q = (block % parts) * Q + tl.arange(0, Q)
    block //= parts
    example = block // blocks
    t = (block % blocks) * BT + tl.arange(0, BT)
    inside = t < positions
    x += example * _multiple(field + 3, STEP)
    # Read before the loop: in it, every load of the input would wait for this one.
    stride = _multiple(field + (4 if LAST else 5), STEP)
    total = tl.zeros((BT, Q), tl.float32)
    for begin in range(0, channels, BC):
        c = begin + tl.arange(0, BC)
        known = c < channels
        # The inner stride is 1, which wide loads need to know.
        if LAST:
            at = t.to(tl.int64)[:, None] * stride + c[None, :]
            block_x = tl.load(x + at, mask=inside[:, None] & known[None, :], other=0.0)
        else:
            at = c.to(tl.int64)[:, None] * stride + t[None, :]
            block_x = tl.trans(tl.load(x + at, mask=known[:, None] & inside[None, :], other=0.0))
        matrix = tl.load(side + c[:, None] * columns + q[None, :], mask=known[:, None], other=0.0)
        total = tl.dot(block_x.to(THIN), matrix, total, input_precision="tf32")
    # One column may be left free: all ones, whose product is the gradient of the bias.
    total = tl.where((q == free)[None, :], 1.0, total)
    # Scratch memory is dense: all columns of a position lie side by side.
    at = (example * positions + t).to(tl.int64)[:, None] * columns + q[None, :]
    tl.store(thin + at, total.to(THIN), mask=inside[:, None])


@triton.jit
def window_kernel(pointers, fields, tiles, THIN: tl.constexpr, Q: tl.constexpr, BT: tl.constexpr):
    """Add up the window of a convolution with a sign for each place and column."""
    layer = tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64)
    block = tl.load(tiles + 2 * tl.program_id(0) + 1)
    field = fields + layer * 20
    before = _address(pointers, layer, 2, THIN, True)
    after = _address(pointers, layer, 3, THIN, True)
    signs = tl.load(field).to(tl.pointer_type(tl.float32))
    count, taps, free = _length(field + 1, 1), _length(field + 2, 1), tl.load(field + 3)
    height, width = _length(field + 4, 1), _length(field + 5, 1)
    rows, columns = _length(field + 6, 1), _length(field + 7, 1)
    across, size = _length(field + 8, 1), _length(field + 15, 16)
    down, right = _length(field + 13, 1), _length(field + 14, 1)
    parts = size // Q
    q = (block % parts) * Q + tl.arange(0, Q)
    n = (block // parts) * BT + tl.arange(0, BT)
    inside = n < count
    example, place = n // (rows * columns), n % (rows * columns)
    top = (place // columns) * _length(field + 9, 1) - _length(field + 11, 1)
    left = (place % columns) * _length(field + 10, 1) - _length(field + 12, 1)
    total = tl.zeros((BT, Q), tl.float32)
    for tap in range(0, taps):
        y, x = top + (tap // across) * down, left + (tap % across) * right
        # Places in the padding are zero, so they add nothing.
        valid = inside & (y >= 0) & (y < height) & (x >= 0) & (x < width)
        at = ((example * height + y) * width + x).to(tl.int64)[:, None] * size + q[None, :]
        value = tl.load(before + at, mask=valid[:, None], other=0.0).to(tl.float32)
        total += value * tl.load(signs + tap * size + q)[None, :]
    total = tl.where((q == free)[None, :], 1.0, total)
    tl.store(
        after + n.to(tl.int64)[:, None] * size + q[None, :], total.to(THIN), mask=inside[:, None]
    )


@triton.jit
def _grads_of(grads, stride, t, o, inside, outputs, LAST: tl.constexpr):
    """Load the gradients (T, O) of some positions and outputs."""
    known = o < outputs
    if LAST:
        at = t.to(tl.int64)[:, None] * stride + o[None, :]
        block = tl.load(grads + at, mask=inside[:, None] & known[None, :], other=0.0)
    else:
        at = o.to(tl.int64)[:, None] * stride + t[None, :]
        block = tl.trans(tl.load(grads + at, mask=known[:, None] & inside[None, :], other=0.0))
    return block


@triton.jit
def _signed_grads(grads, signs, stride, t, o, inside, outputs, LAST: tl.constexpr):
    sign = tl.load(signs + o, mask=o < outputs, other=0.0)
    return _grads_of(grads, stride, t, o, inside, outputs, LAST).to(tl.float32) * sign[None, :]


@triton.jit
def combine_kernel(
    pointers, fields, tiles,
    G: tl.constexpr, THIN: tl.constexpr, LAST: tl.constexpr, STEP: tl.constexpr,
    DENSE: tl.constexpr, FOLDS: tl.constexpr, Q: tl.constexpr, BT: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """Multiply one example's projected input with some outputs' gradients, over all positions."""
    layer = tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64)
    block = tl.load(tiles + 2 * tl.program_id(0) + 1)
    field = fields + layer * 20
    grads = _address(pointers, layer, 1, G, STEP > 1)
    thin = _address(pointers, layer, 3, THIN, DENSE)
    out = tl.load(pointers + layer * 5 + 4).to(tl.pointer_type(tl.float32))
    positions = _length(field + 8, 1 if LAST else STEP)
    width = _length(field + 7, STEP if LAST else 1)
    outputs, count = _length(field + 9, STEP if LAST else 1), _length(field + 10, 1)
    thin_b, thin_t = (
        _multiple(field + 15, 16 if DENSE else 1),
        _multiple(field + 16, 16 if DENSE else 1),
    )
    add, stride = tl.load(field + 14), _multiple(field + (12 if LAST else 13), STEP)
    row = tl.load(field + 18)
    signs = tl.load(field + 19).to(tl.pointer_type(tl.float32))
    # All columns of some outputs one after the other: the gradients are still in the cache.
    parts, blocks = (count + Q - 1) // Q, (width + BO - 1) // BO
    q = (block % parts) * Q + tl.arange(0, Q)
    block //= parts
    example = block // blocks
    o = (block % blocks) * BO + tl.arange(0, BO)
    known = o < width
    grads += example * _multiple(field + 11, STEP)
    thin += example * thin_b
    total = tl.zeros((Q, BO), tl.float32)
    for begin in range(0, positions, BT):
        t = begin + tl.arange(0, BT)
        inside = t < positions
        if DENSE:  # columns lie side by side, and those that do not count are zero
            at = t.to(tl.int64)[:, None] * thin_t + q[None, :]
            left = tl.trans(tl.load(thin + at, mask=inside[:, None], other=0.0))
        else:
            at = t.to(tl.int64)[None, :] * thin_t + q[:, None] * tl.load(field + 17)
            left = tl.load(thin + at, mask=(q < count)[:, None] & inside[None, :], other=0.0)
        if FOLDS == 1:
            right = _grads_of(grads, stride, t, o, inside, outputs, LAST).to(THIN)
        else:
            folded = tl.zeros((BT, BO), tl.float32)
            if FOLDS <= 4:  # all of them are under way at the same time
                for turn in tl.static_range(FOLDS):
                    ours = turn * width + o
                    folded += _signed_grads(grads, signs, stride, t, ours, inside, outputs, LAST)
            else:  # a vocabulary
                for turn in range(0, FOLDS):
                    ours = turn * width + o
                    folded += _signed_grads(grads, signs, stride, t, ours, inside, outputs, LAST)
            right = folded.to(THIN)
        total = tl.dot(left, right, total, input_precision="tf32")
    at = example * row + q[:, None] * width + o[None, :]
    mask = (q < count)[:, None] & known[None, :]
    if add:
        total += tl.load(out + at, mask=mask, other=0.0)
    tl.store(out + at, total, mask=mask)


@triton.jit
def norm_first_kernel(
    pointers, fields, tiles,
    X: tl.constexpr, G: tl.constexpr, STATS: tl.constexpr, STEP: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum over the positions of some (example, channel) rows of T elements: BatchNorm."""
    layer = tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64)
    block = tl.load(tiles + 2 * tl.program_id(0) + 1)
    field = fields + layer * 20
    inputs = _address(pointers, layer, 0, X, STEP > 1)
    grads = _address(pointers, layer, 1, G, STEP > 1)
    mean = tl.load(pointers + layer * 5 + 2).to(tl.pointer_type(STATS))
    rstd = tl.load(pointers + layer * 5 + 3).to(tl.pointer_type(STATS))
    out = tl.load(pointers + layer * 5 + 4).to(tl.pointer_type(tl.float32))
    rows, channels = _length(field, 1), _length(field + 1, 1)
    positions = _length(field + 2, STEP)
    row = block * ROWS + tl.arange(0, ROWS)
    valid = row < rows
    channel = row % channels
    # All that is needed later is loaded now, while the rows are on their way.
    m = tl.load(mean + channel, mask=valid, other=0.0).to(tl.float32)
    r = tl.load(rstd + channel, mask=valid, other=0.0).to(tl.float32)
    where, add = row // channels * tl.load(field + 9) + channel, tl.load(field + 8)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    product = tl.zeros((ROWS, BLOCK), tl.float32)
    for begin in tl.range(0, positions, BLOCK, num_stages=STAGES):
        at = begin + tl.arange(0, BLOCK)
        mask = valid[:, None] & (at < positions)[None, :]
        offset = row.to(tl.int64)[:, None] * positions + at[None, :]
        g = tl.load(grads + offset, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(inputs + offset, mask=mask, other=0.0).to(tl.float32)
        total += g
        product += g * x
    bias = tl.sum(total, 1)
    # sum(g * (x - m) * r), with the mean and deviation of the channel taken out of the sum.
    scale = (tl.sum(product, 1) - m * bias) * r
    if add:
        scale += tl.load(out + where, mask=valid, other=0.0)
        bias += tl.load(out + where + channels, mask=valid, other=0.0)
    tl.store(out + where, scale, mask=valid)
    tl.store(out + where + channels, bias, mask=valid)


@triton.jit
def norm_last_kernel(
    pointers, fields, tiles,
    X: tl.constexpr, G: tl.constexpr, STATS: tl.constexpr, STEP: tl.constexpr,
    PER_CHANNEL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum over the positions of some channels of one example, which lie side by side."""
    layer = tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64)
    block = tl.load(tiles + 2 * tl.program_id(0) + 1)
    field = fields + layer * 20
    inputs = _address(pointers, layer, 0, X, STEP > 1)
    grads = _address(pointers, layer, 1, G, STEP > 1)
    mean = tl.load(pointers + layer * 5 + 2).to(tl.pointer_type(STATS))
    rstd = tl.load(pointers + layer * 5 + 3).to(tl.pointer_type(STATS))
    out = tl.load(pointers + layer * 5 + 4).to(tl.pointer_type(tl.float32))
    channels, positions = _length(field + 1, STEP), _length(field + 2, 1)
    blocks = (channels + BLOCK - 1) // BLOCK
    example = block // blocks
    channel = (block % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    inputs += example * _multiple(field + 3, STEP)
    grads += example * _multiple(field + 5, STEP)
    stride_x, stride_g = _multiple(field + 4, STEP), _multiple(field + 6, STEP)
    where, add = out + example * tl.load(field + 9) + channel, tl.load(field + 8)
    totals = tl.zeros((ROWS, BLOCK), tl.float32)
    products = tl.zeros((ROWS, BLOCK), tl.float32)
    for begin in tl.range(0, positions, ROWS, num_stages=STAGES):
        at = begin + tl.arange(0, ROWS)
        mask = (at < positions)[:, None] & inside[None, :]
        t = at.to(tl.int64)[:, None]
        x = tl.load(inputs + t * stride_x + channel[None, :], mask=mask, other=0.0)
        g = tl.load(grads + t * stride_g + channel[None, :], mask=mask, other=0.0)
        x, g = x.to(tl.float32), g.to(tl.float32)
        if not PER_CHANNEL:
            place = example * positions + at
            m = tl.load(mean + place, mask=at < positions, other=0.0).to(tl.float32)
            r = tl.load(rstd + place, mask=at < positions, other=0.0).to(tl.float32)
            # A mean for each position cannot be taken out of the sum over positions.
            x = (x - m[:, None]) * r[:, None]
        totals += g
        products += g * x
    total, product = tl.sum(totals, 0), tl.sum(products, 0)
    if PER_CHANNEL:
        m = tl.load(mean + channel, mask=inside, other=0.0).to(tl.float32)
        r = tl.load(rstd + channel, mask=inside, other=0.0).to(tl.float32)
        product = (product - m * total) * r
    if add:
        product += tl.load(where, mask=inside, other=0.0)
        total += tl.load(where + channels, mask=inside, other=0.0)
    tl.store(where, product, mask=inside)
    tl.store(where + channels, total, mask=inside)
