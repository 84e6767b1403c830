"""Sum values over workers, in the format in which they are sent: every worker gets equal bits.

Letters: D coordinates, R workers, K values.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from gradherd.comm.script import AllGather, AllToAll, Script, run_together
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

    def cut(self, values: Tensor, size: int) -> Tensor:
        """Cut values into `size` slices with equally many of both kinds, padded with zeros."""
        one = self.slice_of(size)
        parts = ((values[: self.few], one.few), (values[self.few :], one.rest))
        rows = [F.pad(part, (0, n * size - len(part))).view(size, n) for part, n in parts if n]
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)

    def join(self, rows: Tensor) -> Tensor:
        """Return the values that `cut` made slices of."""
        few = self.slice_of(len(rows)).few
        first, rest = rows[:, :few].reshape(-1)[: self.few], rows[:, few:].reshape(-1)[: self.rest]
        return torch.cat([first, rest]) if self.few else rest


def sum_values(
    values: Tensor, always: int, context: StepContext, form: ValueFormat, dim: int
) -> Script[tuple[Tensor, Tensor | None]]:
    """Sum `values` over workers; the result has the same bits on all of them.

    Rows are added in the order of workers, in the dtype of `values`. If values are rounded to be
    sent, the worker that rounds keeps the rounding error, so that nothing is lost.

    Args:
        values: (K,) values of this worker.
        always: How many at their end are always sent: with few bits, these take bf16.
        context: Which worker this is.
        form: How values are sent.
        dim: D, the length of the vector that the values are taken from.

    Returns:
        (K,) sums, and (K,) the rounding error that this worker keeps; None is no error.
    """
    if context.size == 1 or not len(values):
        return values, None
    codec = ValueCodec.of(values, always, form)
    if _fits_one_round(codec.bytes, context.size, dim * values.element_size()):
        message = codec.encode(values)
        gathered: Tensor = yield AllGather(message)
        # Decoded as the others do: what differs from the values has not been sent.
        error = None if codec.is_exact else values - codec.decode(message)
        return _sum_in_order(codec.decode(gathered)), error
    # Reduce-scatter by all-to-all, then all-gather. A reduce-scatter of the backend would add
    # rows in an order of its own, and so give other bits.
    rows, part = codec.cut(values, context.size), codec.slice_of(context.size)
    message = part.encode(rows)
    slices: Tensor = yield AllToAll(message)
    mine = _sum_in_order(part.decode(slices))
    rounded = part.encode(mine)
    total: Tensor = yield AllGather(rounded)
    if codec.is_exact:
        return codec.join(total), None
    left = rows - part.decode(message)
    # This worker also rounded its slice of the sum, for everyone.
    left[context.rank] += mine - part.decode(rounded)
    return codec.join(part.decode(total)), codec.join(left)


def sum_rows(
    rows: Tensor, always: int, form: ValueFormat, dim: int
) -> tuple[Tensor, Tensor | None, list[int]]:
    """Do `sum_values` for all workers of this process.

    Args:
        rows: (R, K) values of all workers.
        always: As for `sum_values`.
        form: As for `sum_values`.
        dim: As for `sum_values`.

    Returns:
        (K,) sums, (R, K) what each worker keeps (None is nothing), and the bytes of each.
    """
    size, count = rows.shape
    if form != "fp32":
        # Rounding is a worker's own affair, down to who rounds which slice of the sum.
        contexts = [StepContext(0, rank, size) for rank in range(size)]
        both = zip(rows, contexts, strict=True)
        results = run_together([sum_values(row, always, at, form, dim) for row, at in both])
        total, error = results[0].value
        errors = None if error is None else torch.stack([one.value[1] for one in results])
        return total, errors, [one.bytes for one in results]
    width = rows.element_size()
    # What `sum_values` would send, in one round or in two.
    one = _fits_one_round(count * width, size, dim * width)
    elements = count if one else 2 * -(-count // size)
    return _sum_in_order(rows), None, [elements * width * (size - 1)] * size


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
