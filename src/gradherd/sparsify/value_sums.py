"""Sum values over workers, in the format in which they are sent: every worker gets equal bits.

Letters: D coordinates, R workers, K values.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gradherd.comm.script import AllGather, AllToAll, Script
from gradherd.gpu import has_triton
from gradherd.sparsify.message_sizes import (
    ONE_ROUND_BYTES,
    ONE_ROUND_SHARE,
    VALUE_BITS,
    ValueFormat,
    value_bytes,
)
from gradherd.sparsify.packing import decode_values, encode_values
from gradherd.sparsify.selector import StepContext


@dataclass(frozen=True)
class ValueCodec:
    """How the values of one message are written: some in few bits, the others in a dtype.

    Biases and scales of norms, which are always sent, are few and matter much: bf16 costs little
    there. Besides, they were not selected for being large, so levels would fit them badly.
    """

    bits: int
    """Bits of each of the first values."""
    few: int
    """How many these are."""
    rest: int
    """How many follow."""
    rest_dtype: torch.dtype
    """Dtype in which those are written."""
    dtype: torch.dtype
    """Dtype of the values."""

    @classmethod
    def of(cls, values: Tensor, always: int, form: ValueFormat) -> "ValueCodec":
        """Return how (K,) values are sent, the last of which are always sent."""
        narrow = values.dtype if form == "fp32" else torch.bfloat16
        few = len(values) - always if form in VALUE_BITS else 0
        return cls(VALUE_BITS.get(form, 0), few, len(values) - few, narrow, values.dtype)

    @property
    def is_exact(self) -> bool:
        """Whether values are read as they were written."""
        return not self.few and self.rest_dtype == self.dtype

    @property
    def bytes(self) -> int:
        """Bytes of a message."""
        return value_bytes(self.few, self.bits) + self.rest * self.rest_dtype.itemsize

    def encode(self, values: Tensor) -> Tensor:
        """Write (..., few + rest) values; those beyond the range of a dtype are clamped."""
        rest = values[..., self.few :]
        if self.rest_dtype != self.dtype:
            limit = torch.finfo(self.rest_dtype).max
            rest = rest.clamp(-limit, limit).to(self.rest_dtype)
        if not self.few:
            return rest
        code = encode_values(values[..., : self.few], self.bits)
        if not self.rest:
            return code
        return torch.cat([code, rest.contiguous().view(torch.uint8)], dim=-1)

    def decode(self, message: Tensor) -> Tensor:
        """Return the (..., few + rest) values that `encode` wrote."""
        if not self.few:
            return message.to(self.dtype)
        border = value_bytes(self.few, self.bits)
        decoded = decode_values(message[..., :border], self.few, self.bits, self.dtype)
        if not self.rest:
            return decoded
        # Cloned, because a view as bf16 needs aligned memory.
        rest = message[..., border:].clone(memory_format=torch.contiguous_format)
        return torch.cat([decoded, rest.view(self.rest_dtype).to(self.dtype)], dim=-1)

    def slice_of(self, size: int) -> "ValueCodec":
        """Return how one of `size` slices is written: all have the same number of bytes."""
        return replace(self, few=-(-self.few // size), rest=-(-self.rest // size))

    def kinds(self) -> list["ValueCodec"]:
        """Return how each kind of values is written by itself, in the order of a message."""
        kinds = (replace(self, rest=0), replace(self, few=0, bits=0))
        return [kind for kind in kinds if kind.few or kind.rest]


# --- Sums --------------------------------------------------------------------------------------


class ValueSums(NamedTuple):
    """What a worker knows after values were summed."""

    total: Tensor
    """(K,) sums, of the same bits on all workers."""
    error: Tensor | None
    """(K,) the rounding error that this worker keeps; None is no error."""
    owner_error: Tensor | None = None
    """What this worker lost when it rounded its slice of the sum, where that is kept apart."""


def sum_values(
    values: Tensor,
    always: int,
    context: StepContext,
    form: ValueFormat,
    dim: int,
    owner_error: Tensor | None = None,
) -> Script[ValueSums]:
    """Sum `values` over workers; the result has the same bits on all of them.

    Rows are added in the order of workers, in the dtype of `values`. If values are rounded to be
    sent, the worker that rounds keeps the rounding error, so that nothing is lost.

    Each worker owns a slice of the sum, which it rounds for all. If that slice holds the same
    coordinates at every step, the owner adds its error to the next sum. Otherwise the error joins
    the owner's own values; it is R times as large as they are, so the few levels of a group then
    fit neither.

    Args:
        values: (K,) values of this worker. With `owner_error` they are overwritten by their error.
        always: How many at their end are always sent: with few bits, these take bf16.
        context: Which worker this is.
        form: How values are sent.
        dim: D, the length of the vector that the values are taken from.
        owner_error: What the last step returned, or `no_owner_error`, if all coordinates are sent
            at every step.
    """
    if context.size == 1 or not len(values):
        return ValueSums(values, None)
    codec = ValueCodec.of(values, always, form)
    if _fits_one_round(codec.bytes, context.size, dim * values.element_size()):
        message = codec.encode(values)
        gathered: Tensor = yield AllGather(message)
        # Decoded as the others do: what differs from the values has not been sent.
        error = None if codec.is_exact else values - codec.decode(message)
        return ValueSums(_sum_in_order(codec.decode(gathered)), error)
    kinds = _slices_of(codec, context, values.device)
    left = torch.empty_like(values) if owner_error is None else values
    lost = _owner_zeros(kinds, values) if owner_error is None else owner_error.clone()
    # Reduce-scatter by all-to-all, then all-gather. A reduce-scatter of the backend would add
    # rows in an order of its own, and so give other bits.
    messages = [kind.encode(values[kind.span], left[kind.span]) for kind in kinds]
    received: Tensor = yield AllToAll(_joined(messages))
    pieces = zip(kinds, _apart(received, kinds), strict=True)
    messages = [kind.encode_sum(piece, lost[kind.at]) for kind, piece in pieces]
    gathered = yield AllGather(_joined(messages))
    total = torch.empty_like(values)
    for kind, piece in zip(kinds, _apart(gathered, kinds), strict=True):
        kind.decode(piece, total[kind.span])
    if codec.is_exact:
        return ValueSums(total, None)
    if owner_error is not None:
        return ValueSums(total, left, lost)
    for kind in kinds:
        left[kind.owned] += lost[kind.owned_at]
    return ValueSums(total, left)


def no_owner_error(values: Tensor, always: int, size: int, form: ValueFormat) -> Tensor | None:
    """Return the error before the first step in which all coordinates of (D,) `values` are sent.

    None if nobody rounds a slice of the sum; the other arguments are those of `sum_values`.
    """
    codec = ValueCodec.of(values, always, form)
    one_round = _fits_one_round(codec.bytes, size, len(values) * values.element_size())
    if size == 1 or codec.is_exact or one_round:
        return None
    return _owner_zeros(_slices_of(codec, StepContext(0, 0, size), values.device), values)


def owned_spans(
    values: Tensor, always: int, context: StepContext, form: ValueFormat
) -> list[tuple[slice, slice]]:
    """Return where the slice of a worker lies in (D,) `values`, and where in its owner's error."""
    kinds = _slices_of(ValueCodec.of(values, always, form), context, values.device)
    return [(kind.owned, kind.owned_at) for kind in kinds]


class _Slices:
    """One kind of the values of a sum in two rounds, cut into a slice for each worker.

    It rounds twice: each worker's values for the owners of slices, and their sum for all workers.

    Args:
        codec: How all values of this kind are written.
        context: Which worker this is.
        begin: First of these values.
        at: First element of the owner's error.
    """

    def __init__(self, codec: ValueCodec, context: StepContext, begin: int, at: int) -> None:
        self._codec, self._size = codec.slice_of(context.size), context.size
        count, length = codec.few + codec.rest, self._codec.few + self._codec.rest
        self.bytes, self.rest_dtype = self._codec.bytes, self._codec.rest_dtype
        """Bytes of a slice; their dtype if they are not few bits."""
        self.span, self.at = slice(begin, begin + count), slice(at, at + length)
        """Where these values are, and the owner's error of this worker's slice."""
        first = min(context.rank * length, count)
        self._real = min(length, count - first)  # The last slices are padded.
        self.owned = slice(begin + first, begin + first + self._real)
        self.owned_at = slice(at, at + self._real)
        """Where the values of the own slice are, and their error."""

    def encode(self, values: Tensor, left: Tensor) -> Tensor:
        """Round (n,) values into (R, bytes) messages; leave what that takes in `left`."""
        length = self.at.stop - self.at.start
        rows = F.pad(values, (0, self._size * length - len(values))).view(self._size, length)
        message = self._codec.encode(rows)
        if not self._codec.is_exact:
            torch.sub(values, self._codec.decode(message).reshape(-1)[: len(values)], out=left)
        return message

    def encode_sum(self, received: Tensor, lost: Tensor) -> Tensor:
        """Round the sum of (R, bytes) messages and `lost` for all; leave the error in `lost`."""
        total = _sum_in_order(self._codec.decode(received)).add_(lost)
        total[self._real :] = 0  # Signs make something of padding.
        message = self._codec.encode(total)
        if not self._codec.is_exact:
            torch.sub(total, self._codec.decode(message), out=lost)
            lost[self._real :] = 0
        return message

    def decode(self, messages: Tensor, out: Tensor) -> None:
        """Write the values of all slices, (R, bytes), to `out`."""
        out.copy_(self._codec.decode(messages).reshape(-1)[: len(out)])


class _SignSlices(_Slices):
    """One bit for each float32 on a GPU: each rounding is a kernel that reads values once."""

    def encode(self, values: Tensor, left: Tensor) -> Tensor:
        message = values.new_empty((self._size, self.bytes), dtype=torch.uint8)
        _sign_kernels().encode_signs(values, self._codec.few, message, left)
        return message

    def encode_sum(self, received: Tensor, lost: Tensor) -> Tensor:
        message = received.new_empty(self.bytes)
        _sign_kernels().encode_sign_sums(received, self._real, message, lost)
        return message

    def decode(self, messages: Tensor, out: Tensor) -> None:
        _sign_kernels().decode_signs(messages, self._codec.few, out)


def _sign_kernels() -> Any:
    # Imported late: it takes a second, and machines without Triton cannot.
    from gradherd.sparsify import triton_signs

    return triton_signs


def _slices_of(codec: ValueCodec, context: StepContext, device: torch.device) -> list[_Slices]:
    slices: list[_Slices] = []
    begin = at = 0
    for kind in codec.kinds():
        fused = kind.bits == 1 and kind.dtype == torch.float32 and device.type == "cuda"
        made = _SignSlices if fused and has_triton() else _Slices
        slices.append(made(kind, context, begin, at))
        begin, at = slices[-1].span.stop, slices[-1].at.stop
    return slices


def _owner_zeros(kinds: Sequence[_Slices], values: Tensor) -> Tensor:
    return values.new_zeros(kinds[-1].at.stop)


def _joined(messages: Sequence[Tensor]) -> Tensor:
    if len(messages) == 1:
        return messages[0]
    return torch.cat([message.view(torch.uint8) for message in messages], dim=-1)


def _apart(joined: Tensor, kinds: Sequence[_Slices]) -> Sequence[Tensor]:
    if len(kinds) == 1:
        return [joined]
    few, rest = joined.split([kind.bytes for kind in kinds], dim=-1)
    # Cloned, because a view as another dtype needs aligned memory.
    rest = rest.clone(memory_format=torch.contiguous_format)
    return [few, rest.view(kinds[1].rest_dtype)]


def _fits_one_round(size: int, ranks: int, dense: int) -> bool:
    """Return whether messages of `size` bytes are all-gathered; `dense` are those of the vector."""
    # One round sends R times `size`, two rounds send it twice (both times (R - 1) / R). A dense
    # exchange would send the vector twice.
    return size <= ONE_ROUND_BYTES or (ranks - 2) * size <= ONE_ROUND_SHARE * 2 * dense


def _sum_in_order(rows: Tensor) -> Tensor:
    """Add rows one by one: `sum(0)` may group them differently for other lengths or devices."""
    # A copy, because virtual workers share `rows`.
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total
