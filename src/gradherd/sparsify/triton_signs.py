"""One bit for each value, as Triton kernels: signs, and the mean magnitude of each group.

The bytes are those of `packing.encode_values`: of every slice first the level of each group of 64,
then its signs, eight to a byte. A program takes several groups and reads each value once.

Letters: n values, R slices of them, L values of a slice, G groups of a slice.
"""

import triton
import triton.language as tl
from torch import Tensor

from gradherd.gpu import launch
from gradherd.sparsify.message_sizes import SIGN_GROUP
from gradherd.sparsify.packing import LEVEL_OFFSET, LEVEL_SHIFT

_GROUPS = 32  # that one program takes at a time
_WARPS = 4
_SIZE = tl.constexpr(SIGN_GROUP)
_SHIFT = tl.constexpr(LEVEL_SHIFT)
_HALF = tl.constexpr(1 << LEVEL_SHIFT - 1)
_OFFSET = tl.constexpr(LEVEL_OFFSET)


@triton.jit
def _code_of(values, group, length):
    """Return the levels of (GROUPS, 64) values as codes; padding counts as zeros."""
    count = tl.minimum(length - group * _SIZE, _SIZE)
    mean = tl.sum(tl.abs(values), axis=1) / tl.maximum(count, 1).to(tl.float32)
    bits = mean.to(tl.int32, bitcast=True)
    code = ((bits + _HALF) >> _SHIFT) - _OFFSET
    return tl.minimum(tl.maximum(code, 0), 255)


@triton.jit
def _signed(code, negative):
    """Return the (GROUPS, 64) values of codes and signs."""
    bits = tl.where(code > 0, (code + _OFFSET) << _SHIFT, 0)
    level = bits.to(tl.float32, bitcast=True)[:, None]
    return tl.where(negative, -level, level)


@triton.jit
def _store(values, code, group, length, row, GROUPS: tl.constexpr):
    """Write codes and signs of (GROUPS, 64) values to the message that begins at `row`."""
    groups = tl.cdiv(length, _SIZE)
    tl.store(row + group, code.to(tl.uint8), mask=group < groups)
    negative = (values < 0).to(tl.int32).reshape(GROUPS, _SIZE // 8, 8)
    packed = tl.sum(negative << tl.arange(0, 8)[None, None, :], axis=2)
    byte = group[:, None].to(tl.int64) * (_SIZE // 8) + tl.arange(0, _SIZE // 8)[None, :]
    tl.store(row + groups + byte, packed.to(tl.uint8), mask=byte < tl.cdiv(length, 8))


@triton.jit
def _load(row, group, length):
    """Return the (GROUPS, 64) values of a message that begins at `row`."""
    groups = tl.cdiv(length, _SIZE)
    code = tl.load(row + group, mask=group < groups, other=0).to(tl.int32)
    lane = group[:, None].to(tl.int64) * _SIZE + tl.arange(0, _SIZE)[None, :]
    byte = tl.load(row + groups + lane // 8, mask=lane < length, other=0).to(tl.int32)
    return _signed(code, ((byte >> (lane % 8).to(tl.int32)) & 1) == 1)


@triton.jit
def _encode(values, message, left, size, length, row_bytes, GROUPS: tl.constexpr):
    slice_number = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    lane = group[:, None].to(tl.int64) * _SIZE + tl.arange(0, _SIZE)[None, :]
    at = slice_number * length + lane
    inside = (lane < length) & (at < size)
    own = tl.load(values + at, mask=inside, other=0)
    code = _code_of(own, group, length)
    _store(own, code, group, length, message + slice_number * row_bytes, GROUPS)
    tl.store(left + at, own - _signed(code, own < 0), mask=inside)


@triton.jit
def _encode_sum(received, message, lost, real, length, row_bytes, workers, GROUPS: tl.constexpr):
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    lane = group[:, None].to(tl.int64) * _SIZE + tl.arange(0, _SIZE)[None, :]
    total = _load(received, group, length)
    for worker in range(1, workers):
        total += _load(received + tl.cast(worker, tl.int64) * row_bytes, group, length)
    total += tl.load(lost + lane, mask=lane < real, other=0)
    total = tl.where(lane < real, total, 0.0)
    code = _code_of(total, group, length)
    _store(total, code, group, length, message, GROUPS)
    rest = tl.where(lane < real, total - _signed(code, total < 0), 0.0)
    tl.store(lost + lane, rest, mask=lane < length)


@triton.jit
def _decode(messages, out, size, length, row_bytes, GROUPS: tl.constexpr):
    slice_number = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    lane = group[:, None].to(tl.int64) * _SIZE + tl.arange(0, _SIZE)[None, :]
    at = slice_number * length + lane
    values = _load(messages + slice_number * row_bytes, group, length)
    tl.store(out + at, values, mask=(lane < length) & (at < size))


def encode_signs(values: Tensor, length: int, message: Tensor, left: Tensor) -> None:
    """See `kernels.encode_signs`."""
    grid = (_programs(length), len(message))
    sizes = (len(values), length, message.shape[1])
    launch(_encode, grid, values, message, left, *sizes, GROUPS=_GROUPS, num_warps=_WARPS)


def encode_sign_sums(received: Tensor, real: int, message: Tensor, lost: Tensor) -> None:
    """See `kernels.encode_sign_sums`."""
    sizes = (real, len(lost), received.stride(0), len(received))
    launch(
        _encode_sum, (_programs(len(lost)),), received, message, lost, *sizes,
        GROUPS=_GROUPS, num_warps=_WARPS,
    )  # fmt: skip


def decode_signs(messages: Tensor, length: int, out: Tensor) -> None:
    """See `kernels.decode_signs`."""
    grid = (_programs(length), len(messages))
    sizes = (len(out), length, messages.stride(0))
    launch(_decode, grid, messages, out, *sizes, GROUPS=_GROUPS, num_warps=_WARPS)


def _programs(length: int) -> int:
    return int(triton.cdiv(length, SIGN_GROUP * _GROUPS))
