"""Rows of single layers on a GPU, where a model runs as it is.

Such layers take longer to launch than to compute. So what a launch needs is found once, when sizes
and strides come for the first time (`KernelPlan`); memory is passed as addresses, which costs the
host less than tensors do; and kernels add to the rows of the layers before themselves. Kernels of a
stream run one after the other, and every element has one program that adds to it, so sums do not
depend on chance.

A weight takes two kernels: one factor is projected to a few columns, then multiplied with the other
factor; a convolution adds up its window on the way. Each factor is read once. Biases, norms and
convolutions of few channels are left to torch: of the 16 layers that are read, few are of these
kinds, and a step would hardly be shorter.

Letters: N examples, T positions, C channels, Q columns.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradherd.gpu import Launch
from gradherd.rows.sink_maps import FilterMap, MatrixMap

TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
"""Triton's names of the dtypes that kernels read."""
_MOST_CHANNELS = 4096  # of a position that one program holds
_MOST_COLUMNS = 128  # of a projection
_PROGRAMS = 512  # keep a GPU busy


@triton.jit
def _pointer(address, KIND: tl.constexpr, IS_ALIGNED: tl.constexpr):
    pointer = address.to(tl.int64).to(tl.pointer_type(KIND))
    return tl.multiple_of(pointer, 16) if IS_ALIGNED else pointer


@triton.jit
def _block(base, t, c, stride_t, stride_c, inside, known, LAST: tl.constexpr):
    """Load (T, C) elements; the inner stride is 1, which wide loads need to know."""
    if LAST:
        at = t.to(tl.int64)[:, None] * stride_t + c[None, :]
        return tl.load(base + at, mask=inside[:, None] & known[None, :], other=0.0)
    at = c.to(tl.int64)[:, None] * stride_c + t[None, :]
    return tl.trans(tl.load(base + at, mask=known[:, None] & inside[None, :], other=0.0))


# Other layers, and other steps, have other addresses: kernels must not be made for the first.
@triton.jit(do_not_specialize=["first", "side", "thin"])
def _project_kernel(
    first, side, thin, positions, channels, columns, stride_n, stride_t, stride_c, side_c, side_q,
    KIND: tl.constexpr, IS_ALIGNED: tl.constexpr, LAST: tl.constexpr,
    PRECISION: tl.constexpr, Q: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Project the channels of some positions of one example to Q columns."""
    n = tl.program_id(1).to(tl.int64)
    factor = _pointer(first, KIND, IS_ALIGNED) + n * stride_n
    matrices = _pointer(side, KIND, True)
    t, q = tl.program_id(0) * BT + tl.arange(0, BT), tl.arange(0, Q)
    inside = t < positions
    total = tl.zeros((BT, Q), tl.float32)
    for begin in range(0, channels, BC):
        c = begin + tl.arange(0, BC)
        known = c < channels
        block = _block(factor, t, c, stride_t, stride_c, inside, known, LAST)
        mask = known[:, None] & (q < columns)[None, :]
        matrix = tl.load(matrices + c[:, None] * side_c + q[None, :] * side_q, mask=mask, other=0.0)
        total = tl.dot(block, matrix, total, input_precision=PRECISION)
    at = (n * positions + t)[:, None] * Q + q[None, :]
    tl.store(_pointer(thin, KIND, True) + at, total.to(KIND), mask=inside[:, None])


@triton.jit(do_not_specialize=["second", "thin", "places", "signs", "out"])
def _combine_kernel(
    second, thin, places, signs, out, positions, channels, columns, folds, kept, row,
    stride_n, stride_t, stride_c, height, width, across, count, window,
    stride_y, stride_x, pad_y, pad_x, step_y, step_x,
    KIND: tl.constexpr, IS_ALIGNED: tl.constexpr, LAST: tl.constexpr, WINDOW: tl.constexpr,
    PRECISION: tl.constexpr, Q: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Multiply one example's projected factor with some channels of the other; add the result."""
    n = tl.program_id(1).to(tl.int64)
    factor = _pointer(second, KIND, IS_ALIGNED) + n * stride_n
    own, q = tl.program_id(0) * BC + tl.arange(0, BC), tl.arange(0, Q)
    before = _pointer(thin, KIND, True)
    total = tl.zeros((Q, BC), tl.float32)
    for fold in range(0, folds):
        c = fold * kept + own
        known = (own < kept) & (c < channels)
        part = tl.zeros((Q, BC), tl.float32)
        for begin in range(0, positions, BT):
            t = begin + tl.arange(0, BT)
            inside = t < positions
            if WINDOW:  # what was projected is added up, with a sign for each place and column
                top, side = (t // across) * stride_y - pad_y, (t % across) * stride_x - pad_x
                sums = tl.zeros((BT, Q), tl.float32)
                for place in range(0, count):
                    y, x = top + (place // window) * step_y, side + (place % window) * step_x
                    # Places in the padding are zero, so they add nothing.
                    valid = inside & (y >= 0) & (y < height) & (x >= 0) & (x < width)
                    at = ((n * height + y) * width + x)[:, None] * Q + q[None, :]
                    value = tl.load(before + at, mask=valid[:, None], other=0.0).to(tl.float32)
                    sign = tl.load(
                        _pointer(places, KIND, False) + q * count + place,
                        mask=q < columns, other=0.0,
                    )  # fmt: skip
                    sums += value * sign.to(tl.float32)[None, :]
                left = sums.to(KIND)
            else:
                at = (n * positions + t)[:, None] * Q + q[None, :]
                left = tl.load(before + at, mask=inside[:, None], other=0.0)
            right = _block(factor, t, c, stride_t, stride_c, inside, known, LAST)
            part = tl.dot(tl.trans(left), right, part, input_precision=PRECISION)
        sign = tl.load(_pointer(signs, tl.float32, False) + c, mask=known, other=0.0)
        total += part * sign[None, :]
    at = _pointer(out, tl.float32, False) + n * row + q[:, None] * kept + own[None, :]
    mask = (q < columns)[:, None] & (own < kept)[None, :]
    tl.store(at, tl.load(at, mask=mask, other=0.0) + total, mask=mask)


def _by_position(tensor: Tensor) -> Tensor | None:
    """View (N, C), (N, T, C) or (N, C, height, width) as (N, T, C); None if no kernel reads it."""
    seen = tensor
    if tensor.dim() == 2:
        seen = tensor.unsqueeze(1)
    elif tensor.dim() == 4:
        seen = tensor.flatten(2).transpose(1, 2)
    is_copy = seen.data_ptr() != tensor.data_ptr()
    if seen.dim() != 3 or is_copy or tensor.dtype not in TYPES or not tensor.numel():
        return None
    return seen if 1 in seen.stride()[1:] else None


Pair = tuple[int, int]
Window = tuple[Pair, Pair, Pair, Pair]
"""Size, stride, padding and dilation of a convolution."""


class KernelPlan(NamedTuple):
    """How the rows of one layer are launched."""

    run: Callable[[int, int, int, int, int], None]
    """Takes a stream and the addresses of input, gradient, rows to add to, and scratch memory."""
    scratch: int
    """Bytes of scratch memory."""
    place: tuple[str, int, int]
    """Where the rows are added (`sink.Place`)."""


def plan_product(
    one: MatrixMap, projects_grads: bool, window: Window | None,
    inputs: Tensor, grads: Tensor, place: tuple[str, int, int], is_aligned: bool,
) -> KernelPlan | None:  # fmt: skip
    """Prepare to launch on tensors of these sizes and strides; None: no kernel reads them.

    One factor is projected and multiplied with the other.

    Args:
        one: The map of the weight.
        projects_grads: Whether gradients are projected and inputs kept, or the other way round.
        window: How the window of a convolution moves, if it has one.
        inputs: Of the layer.
        grads: Of its output.
        place: Where the rows are added.
        is_aligned: Whether both tensors begin at multiples of 16 bytes.
    """
    first, second = (grads, inputs) if projects_grads else (inputs, grads)
    thin, wide = _by_position(first), _by_position(second)
    if thin is None or wide is None or first.dtype != second.dtype or one.columns > _MOST_COLUMNS:
        return None
    if isinstance(one, FilterMap) and one.filters[0, 0].numel() > 1:
        return None  # few channels: filters are not products of signs for channels and places
    dtype, is_filter = first.dtype, isinstance(one, FilterMap)
    # As the layers themselves are told.
    rounds = torch.get_float32_matmul_precision() != "highest"
    precision = "tf32" if (torch.backends.cudnn.allow_tf32 if is_filter else rounds) else "ieee"
    kind, columns, half = TYPES[dtype], one.columns, dtype.itemsize == 2
    width = max(16, triton.next_power_of_2(columns))
    moves = (0,) * 11
    if window is not None:
        size, stride, padding, dilation = window
        moves = (
            *first.shape[2:], second.shape[3], size[0] * size[1], size[1],
            *stride, *padding, *dilation,
        )  # fmt: skip
    (examples, positions, depth), last = thin.shape, thin.stride(2) == 1
    scratch = examples * positions * width * dtype.itemsize
    if last and thin.stride(0) == positions * thin.stride(1):  # one long example
        examples, positions = 1, examples * positions
    block, channels = 64 if half else 32, 128 if last and width <= 64 else 64
    if depth > _MOST_CHANNELS and last and width <= 64:  # the head of a vocabulary
        block, channels = 16, 256
    while block > 32 and examples * triton.cdiv(positions, block) < _PROGRAMS:
        block //= 2
    sides = (1, depth) if is_filter else (columns, 1)
    project = Launch(
        _project_kernel, (triton.cdiv(positions, block), examples, 1),
        positions, depth, columns, *thin.stride(), *sides,
        kind, is_aligned, last, precision, width, block, channels,
    )  # fmt: skip
    (examples, positions, depth), last = wide.shape, wide.stride(2) == 1
    block, most = 64 if last else 32, 128
    if window is not None:  # which every program adds up again
        block = 128
    while block > 32 and examples * triton.cdiv(one.width, block) < _PROGRAMS // 2:
        block //= 2
    most = 32 if positions <= 32 else most if half else most // 2
    combine = Launch(
        _combine_kernel, (triton.cdiv(one.width, block), examples, 1),
        positions, depth, columns, one.folds, one.width, place[1], *wide.stride(),
        *moves, kind, is_aligned, last, window is not None, precision, width, most, block,
    )  # fmt: skip
    if isinstance(one, FilterMap):
        side = one.filters.to(dtype)
        ones = side.new_ones(columns, 1)
        signs_of_places = ones if one.places is None else one.places.to(dtype)
    else:
        side = signs_of_places = one.tensor_for("side", first)

    def run(stream: int, inputs: int, grads: int, out: int, scratch: int) -> None:
        first, second = (grads, inputs) if projects_grads else (inputs, grads)
        out += place[2] * one.signs.itemsize
        project(stream, first, side.data_ptr(), scratch)
        places = signs_of_places.data_ptr()
        combine(stream, second, scratch, places, one.signs.data_ptr(), out)

    return KernelPlan(run, scratch, place)
