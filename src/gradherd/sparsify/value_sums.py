"""Sum values over workers, in the format in which they are sent: every worker gets equal bits.

Letters: D coordinates, R workers, K values.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gradherd.comm.message_sizes import VALUE_BITS, ValueFormat, fits_one_round, value_bytes
from gradherd.comm.packing import decode_values, encode_values
from gradherd.comm.script import AllGather, AllToAll, Script
from gradherd.sparsify.selector import StepContext


class ValueSums(NamedTuple):
    """What a worker knows after values were summed."""

    total: Tensor
    """(K,) sums, of the same bits on all workers."""
    error: Tensor | None
    """(K,) the rounding error that this worker keeps; None is no error."""


def sum_values(
    values: Tensor,
    always: int,
    context: StepContext,
    form: ValueFormat,
) -> Script[ValueSums]:
    """Sum `values` over workers; the result has the same bits on all of them.

    Rows are added in the order of workers, in the dtype of `values`. If values are rounded to be
    sent, the worker that rounds keeps the rounding error, so that nothing is lost.

    Each worker owns a slice of the sum, which it rounds for all; the error joins its own values.

    Args:
        values: (K,) values of this worker.
        always: How many at their end are always sent: with few bits, these take bf16.
        context: Which worker this is.
        form: How values are sent.
    """
    if context.size == 1 or not len(values):
        return ValueSums(values, None)
    kinds = _kinds_of(values, always, context, form)
    is_exact = all(kind.is_exact for kind in kinds)
    total = torch.empty_like(values)
    if _fits_one_round(kinds, context.size):
        messages = [kind.written(values[kind.span]) for kind in kinds]
        gathered: Tensor = yield AllGather(_joined(messages))
        left = None if is_exact else values.clone()
        for kind, own, pieces in zip(kinds, messages, _apart(gathered, messages), strict=True):
            total[kind.span] = sum_in_order(kind.read(pieces, kind.count))
            if left is not None:
                # Decoded as the others do: what differs from the values has not been sent.
                left[kind.span] -= kind.read(own, kind.count)
        return ValueSums(total, left)
    left, lost = torch.empty_like(values), values.new_zeros(kinds[-1].at.stop)
    # Reduce-scatter by all-to-all, then all-gather. A reduce-scatter of the backend would add
    # rows in an order of its own, and so give other bits.
    messages = [kind.encode(values[kind.span], left[kind.span]) for kind in kinds]
    received: Tensor = yield AllToAll(_joined(messages))
    slices = zip(kinds, _apart(received, messages), strict=True)
    messages = [kind.encode_sum(piece, lost[kind.at]) for kind, piece in slices]
    gathered = yield AllGather(_joined(messages))
    for kind, pieces in zip(kinds, _apart(gathered, messages), strict=True):
        kind.decode(pieces, total[kind.span])
    if is_exact:
        return ValueSums(total, None)
    for kind in kinds:
        left[kind.owned] += lost[kind.owned_at]
    return ValueSums(total, left)


class _SlicedValues:
    """The values of one kind in a sum; in two rounds, cut into a slice for each worker.

    They are written in few bits, or in a dtype. Biases and scales of norms, which are always sent,
    are few and matter much: bf16 costs little there. Besides, they were not selected for being
    large, so levels would fit them badly.

    Two rounds round twice: each worker's values for the owners of slices, and their sum for all.
    The values are `count` from `begin` on; the owner's error of their slice begins at `at`.
    """

    def __init__(
        self,
        values: Tensor,
        context: StepContext,
        begin: int,
        count: int,
        at: int,
        *,
        bits: int,
        wire: torch.dtype,
    ) -> None:
        self._bits, self._wire, self._dtype = bits, wire, values.dtype
        self.is_exact = not bits and wire == values.dtype
        """Whether values are read as they were written."""
        self.count, self._size = count, context.size
        self._length = length = -(-count // context.size)  # of a slice
        self.span, self.at = slice(begin, begin + count), slice(at, at + length)
        """Where these values are, and the owner's error of this worker's slice."""
        first = min(context.rank * length, count)
        self._real = min(length, count - first)  # The last slices are padded.
        self.owned = slice(begin + first, begin + first + self._real)
        self.owned_at = slice(at, at + self._real)
        """Where the values of the own slice are, and their error."""

    def bytes(self, count: int) -> int:
        """Return the bytes of a message of `count` values."""
        return value_bytes(count, self._bits) if self._bits else count * self._wire.itemsize

    def written(self, values: Tensor) -> Tensor:
        """Return the message of (..., n) values; those beyond the range of a dtype are clamped."""
        if self._bits:
            return encode_values(values, self._bits)
        if self.is_exact:
            return values
        limit = torch.finfo(self._wire).max
        return values.clamp(-limit, limit).to(self._wire)

    def read(self, message: Tensor, count: int) -> Tensor:
        """Return the (..., count) values of a message."""
        if self._bits:
            return decode_values(message, count, self._bits, self._dtype)
        return message.to(self._dtype)

    def encode(self, values: Tensor, left: Tensor) -> Tensor:
        """Round (n,) values into (R, bytes) messages; leave what that takes in `left`."""
        rows = F.pad(values, (0, self._size * self._length - len(values)))
        message = self.written(rows.view(self._size, self._length))
        if not self.is_exact:
            sent = self.read(message, self._length).reshape(-1)
            torch.sub(values, sent[: len(values)], out=left)
        return message

    def encode_sum(self, received: Tensor, lost: Tensor) -> Tensor:
        """Round the sum of (R, bytes) messages and `lost` for all; leave the error in `lost`."""
        total = sum_in_order(self.read(received, self._length)).add_(lost)
        total[self._real :] = 0  # Signs make something of padding.
        message = self.written(total)
        if not self.is_exact:
            torch.sub(total, self.read(message, self._length), out=lost)
            lost[self._real :] = 0
        return message

    def decode(self, messages: Tensor, out: Tensor) -> None:
        """Write the values of all slices, (R, bytes), to `out`."""
        out.copy_(self.read(messages, self._length).reshape(-1)[: len(out)])


def _kinds_of(
    values: Tensor, always: int, context: StepContext, form: ValueFormat
) -> list[_SlicedValues]:
    """Return the kinds of (K,) values, the last of which are always sent."""
    few = len(values) - always if form in VALUE_BITS else 0
    bits, dtype = VALUE_BITS.get(form, 0), values.dtype
    wire = dtype if form == "fp32" else torch.bfloat16
    kinds: list[_SlicedValues] = []
    if few:
        kinds.append(_SlicedValues(values, context, 0, few, 0, bits=bits, wire=wire))
    if rest := len(values) - few:
        at = kinds[0].at.stop if kinds else 0
        kinds.append(_SlicedValues(values, context, few, rest, at, bits=0, wire=wire))
    return kinds


def _joined(messages: Sequence[Tensor]) -> Tensor:
    """Return one message of all kinds."""
    if len(messages) == 1:
        return messages[0]
    return torch.cat([message.view(torch.uint8) for message in messages], dim=-1)


def _apart(joined: Tensor, like: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the messages of each kind, of the lengths and dtypes of some."""
    if len(like) == 1:
        return [joined]
    few, rest = joined.split([one.shape[-1] * one.itemsize for one in like], dim=-1)
    # Cloned, because a view as another dtype needs aligned memory.
    return [few, rest.clone(memory_format=torch.contiguous_format).view(like[1].dtype)]


def _fits_one_round(kinds: Sequence[_SlicedValues], ranks: int) -> bool:
    return fits_one_round(sum(kind.bytes(kind.count) for kind in kinds), ranks)


def sum_in_order(rows: Tensor) -> Tensor:
    """Add rows one by one: `sum(0)` may group them differently for other lengths or devices."""
    # A copy, because virtual workers share `rows`.
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total
