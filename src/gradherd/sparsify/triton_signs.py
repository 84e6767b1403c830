"""One bit for each value, as Triton kernels: signs, and the mean magnitude of each group.

The bytes are those of `packing.encode_values`: of every slice first the bf16 level of each group of
256, then its signs, eight to a byte. A program takes several groups and reads each value once. Rows
of messages may begin at odd addresses, so a level is written as two bytes.

Letters: n values, R slices of them, L values of a slice, G groups of a slice.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradherd.gpu import launch
from gradherd.sparsify.message_sizes import GROUP

_GROUPS = 8  # that one program takes at a time
_WARPS = 4
_SIZE = tl.constexpr(GROUP)
_LARGEST = tl.constexpr(float(torch.finfo(torch.bfloat16).max))


@triton.jit
def _level_of(values, group, length):
    """Return the (GROUPS, 1) mean magnitudes as bf16 holds them; padding counts as zeros."""
    count = tl.minimum(length - group * _SIZE, _SIZE)
    # Divided first: the sum of a few of the largest floats overflows.
    mean = tl.sum(tl.abs(values) / tl.maximum(count, 1).to(tl.float32)[:, None], axis=1)
    return tl.minimum(mean, _LARGEST).to(tl.bfloat16)


@triton.jit
def _store(values, level, group, length, row, GROUPS: tl.constexpr):
    """Write levels and signs of (GROUPS, 256) values to the message that begins at `row`."""
    groups = tl.cdiv(length, _SIZE)
    inside = group < groups
    bits = level.to(tl.int16, bitcast=True)
    tl.store(row + 2 * group, (bits & 0xFF).to(tl.uint8), mask=inside)
    tl.store(row + 2 * group + 1, ((bits >> 8) & 0xFF).to(tl.uint8), mask=inside)
    negative = (values < 0).to(tl.int32).reshape(GROUPS, _SIZE // 8, 8)
    packed = tl.sum(negative << tl.arange(0, 8)[None, None, :], axis=2)
    byte = group[:, None].to(tl.int64) * (_SIZE // 8) + tl.arange(0, _SIZE // 8)[None, :]
    tl.store(row + 2 * groups + byte, packed.to(tl.uint8), mask=byte < tl.cdiv(length, 8))


@triton.jit
def _load(row, group, length):
    """Return the (GROUPS, 256) values of a message that begins at `row`."""
    groups = tl.cdiv(length, _SIZE)
    inside = group < groups
    low = tl.load(row + 2 * group, mask=inside, other=0).to(tl.int16)
    high = tl.load(row + 2 * group + 1, mask=inside, other=0).to(tl.int16)
    level = (low | (high << 8)).to(tl.bfloat16, bitcast=True).to(tl.float32)
    lane = group[:, None].to(tl.int64) * _SIZE + tl.arange(0, _SIZE)[None, :]
    byte = tl.load(row + 2 * groups + lane // 8, mask=lane < length, other=0).to(tl.int32)
    sign = (byte >> (lane % 8).to(tl.int32)) & 1
    return tl.where(sign == 1, -level[:, None], level[:, None])


@triton.jit
def _encode(values, message, left, size, length, row_bytes, GROUPS: tl.constexpr):
    slice_number = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    lane = group[:, None].to(tl.int64) * _SIZE + tl.arange(0, _SIZE)[None, :]
    at = slice_number * length + lane
    inside = (lane < length) & (at < size)
    own = tl.load(values + at, mask=inside, other=0)
    level = _level_of(own, group, length)
    _store(own, level, group, length, message + slice_number * row_bytes, GROUPS)
    rounded = tl.where(own < 0, -level.to(tl.float32)[:, None], level.to(tl.float32)[:, None])
    tl.store(left + at, own - rounded, mask=inside)


@triton.jit
def _encode_sum(received, message, lost, real, length, row_bytes, workers, GROUPS: tl.constexpr):
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    lane = group[:, None].to(tl.int64) * _SIZE + tl.arange(0, _SIZE)[None, :]
    total = _load(received, group, length)
    for worker in range(1, workers):
        total += _load(received + tl.cast(worker, tl.int64) * row_bytes, group, length)
    total += tl.load(lost + lane, mask=lane < real, other=0)
    total = tl.where(lane < real, total, 0.0)
    level = _level_of(total, group, length)
    _store(total, level, group, length, message, GROUPS)
    rounded = tl.where(total < 0, -level.to(tl.float32)[:, None], level.to(tl.float32)[:, None])
    tl.store(lost + lane, tl.where(lane < real, total - rounded, 0.0), mask=lane < length)


@triton.jit
def _decode(messages, out, size, length, row_bytes, GROUPS: tl.constexpr):
    slice_number = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    lane = group[:, None].to(tl.int64) * _SIZE + tl.arange(0, _SIZE)[None, :]
    at = slice_number * length + lane
    values = _load(messages + slice_number * row_bytes, group, length)
    tl.store(out + at, values, mask=(lane < length) & (at < size))


def encode_signs(values: Tensor, length: int, message: Tensor, left: Tensor) -> None:
    """Round values to one bit, as `packing.encode_values` does with each slice.

    Args:
        values: (n,) float32, of which every slice has `length`; the last may be shorter.
        length: Of a slice.
        message: (R, bytes) uint8 receives the levels and signs of each slice.
        left: (n,) receives what rounding takes; may be `values`.
    """
    grid = (_programs(length), len(message))
    sizes = (len(values), length, message.shape[1])
    launch(_encode, grid, values, message, left, *sizes, GROUPS=_GROUPS, num_warps=_WARPS)


def encode_sign_sums(received: Tensor, real: int, message: Tensor, lost: Tensor) -> None:
    """Add up slices in one bit, in the order of their rows, and round the sum to one bit.

    Args:
        received: (R, bytes) uint8 of each worker's slice.
        real: Values of the slice; zeros follow.
        message: (bytes,) uint8 receives the sum.
        lost: (length,) float32 is added to the sum; receives what rounding takes.
    """
    sizes = (real, len(lost), received.stride(0), len(received))
    launch(
        _encode_sum, (_programs(len(lost)),), received, message, lost, *sizes,
        GROUPS=_GROUPS, num_warps=_WARPS,
    )  # fmt: skip


def decode_signs(messages: Tensor, length: int, out: Tensor) -> None:
    """Write what (R, bytes) messages of `length` values each hold to (n,) `out`."""
    grid = (_programs(length), len(messages))
    sizes = (len(out), length, messages.stride(0))
    launch(_decode, grid, messages, out, *sizes, GROUPS=_GROUPS, num_warps=_WARPS)


def _programs(length: int) -> int:
    return int(triton.cdiv(length, GROUP * _GROUPS))
