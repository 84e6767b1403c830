"""Sum values over workers, in the format in which they are sent: every worker gets equal bits.

Letters: D coordinates, R workers, K values.
"""

import torch
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


def sum_values(
    values: Tensor, always: int, context: StepContext, form: ValueFormat, dim: int
) -> Script[tuple[Tensor, Tensor | None]]:
    """Sum `values` over workers in the format in which they are to be sent.

    Args:
        values: (K,) values of this worker.
        always: How many at their end are always sent: with few bits, these take bf16.
        context: Which worker this is.
        form: How values are sent.
        dim: D, the length of the vector that the values are taken from.

    Returns:
        As `sum_over_workers`.
    """
    # Biases and scales of norms are few and matter much: bf16 costs little there. Besides, they
    # were not selected for being large, so levels would fit them badly.
    if form in VALUE_BITS and always < len(values):
        return sum_few_bits(values, always, context, VALUE_BITS[form], dim)
    narrow = torch.bfloat16 if form != "fp32" else values.dtype
    return sum_over_workers(values, context, narrow, dim)


def sum_over_workers(
    values: Tensor, context: StepContext, sent_dtype: torch.dtype, dim: int = 0
) -> Script[tuple[Tensor, Tensor | None]]:
    """Sum `values` over workers; the result has the same bits on all of them.

    Rows are added in the order of workers, in the dtype of `values`. If values are sent in a
    narrower dtype, the worker that rounds keeps the rounding error, so that nothing is lost.

    Args:
        values: (K,) values of this worker.
        context: Which worker this is.
        sent_dtype: Dtype in which values are sent, if it is narrower than theirs.
        dim: D, the length of the vector that the values are taken from.

    Returns:
        (K,) sums, and (K,) the rounding error that this worker keeps; None is no error.
    """
    if context.size == 1 or not len(values):
        return values, None
    narrow = sent_dtype.itemsize < values.dtype.itemsize
    sent = _narrowed(values, sent_dtype) if narrow else values
    error = values - sent if narrow else None
    size = sent.numel() * sent.element_size()
    if _fits_one_round(size, context.size, dim * values.element_size()):
        rows: Tensor = yield AllGather(sent)
        return _sum_in_order(rows, values.dtype), error
    # Reduce-scatter by all-to-all, then all-gather. A reduce-scatter of the backend would add
    # rows in an order of its own, and so give other bits.
    # Padded with zeros to R equal slices; the padding is cut off the sums.
    share = -(-len(sent) // context.size)
    padded = sent.new_zeros(share * context.size)
    padded[: len(sent)] = sent
    slices: Tensor = yield AllToAll(padded.view(context.size, share))
    mine = _sum_in_order(slices, values.dtype)
    rounded = mine if error is None else _narrowed(mine, sent.dtype)
    total: Tensor = yield AllGather(rounded)
    if error is not None:
        # This worker also rounded its slice of the sum, for everyone.
        begin = context.rank * share
        part = error[begin : begin + share]
        part += (mine - rounded)[: len(part)]
    return total.view(-1)[: len(values)].to(values.dtype), error


def sum_few_bits(
    values: Tensor, always: int, context: StepContext, bits: int, dim: int = 0
) -> Script[tuple[Tensor, Tensor | None]]:
    """Sum values of a few bits each; see `sum_values`, and `packing` for the format."""
    if context.size == 1:
        return values, None
    size, count = context.size, len(values) - always
    length = value_bytes(count, bits) + 2 * always
    if _fits_one_round(length, size, dim * values.element_size()):
        message = _encode(values, count, bits)
        gathered: Tensor = yield AllGather(message)
        # Decoded as the others do: what differs from the values has not been sent.
        error = values - _decode(message, count, always, bits, values.dtype)
        return _sum_in_order(
            _decode(gathered, count, always, bits, values.dtype), values.dtype
        ), error
    # Slices of both kinds for each worker, so that every slice has the same size in bytes.
    share, tail = -(-count // size), -(-always // size)
    padded = [
        torch.nn.functional.pad(part, (0, each * size - len(part))).view(size, each)
        for part, each in ((values[:count], share), (values[count:], tail))
    ]
    rows = torch.cat(padded, dim=1)
    message = _encode(rows, share, bits)
    slices: Tensor = yield AllToAll(message)
    mine = _sum_in_order(_decode(slices, share, tail, bits, values.dtype), values.dtype)
    rounded = _encode(mine, share, bits)
    total: Tensor = yield AllGather(rounded)
    left = rows - _decode(message, share, tail, bits, values.dtype)
    # This worker also rounded its slice of the sum, for everyone.
    left[context.rank] += mine - _decode(rounded, share, tail, bits, values.dtype)

    def flat(rows: Tensor) -> Tensor:
        selected, others = rows[:, :share].reshape(-1), rows[:, share:].reshape(-1)
        return torch.cat([selected[:count], others[:always]])

    return flat(_decode(total, share, tail, bits, values.dtype)), flat(left)


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
    # What `sum_over_workers` would send, in one round or in two.
    one = _fits_one_round(count * width, size, dim * width)
    elements = count if one else 2 * -(-count // size)
    return _sum_in_order(rows, rows.dtype), None, [elements * width * (size - 1)] * size


def _fits_one_round(size: int, ranks: int, dense: int) -> bool:
    """Return whether messages of `size` bytes are all-gathered; `dense` are those of the vector."""
    # One round sends R times `size`, two rounds send it twice (both times (R - 1) / R). A dense
    # exchange would send the vector twice.
    return size <= ONE_ROUND_BYTES or (ranks - 2) * size <= ONE_ROUND_SHARE * 2 * dense


def _encode(values: Tensor, count: int, bits: int) -> Tensor:
    """Write the first `count` of (..., n) values in a few bits, the others as bf16."""
    code = encode_values(values[..., :count], bits)
    if count == values.shape[-1]:
        return code
    others = _narrowed(values[..., count:], torch.bfloat16).contiguous().view(torch.uint8)
    return torch.cat([code, others], dim=-1)


def _decode(message: Tensor, count: int, always: int, bits: int, dtype: torch.dtype) -> Tensor:
    """Return the (..., count + always) values that `_encode` wrote."""
    border = value_bytes(count, bits)
    decoded = decode_values(message[..., :border], count, bits, dtype)
    if not always:
        return decoded
    # Cloned, because a view as bf16 needs aligned memory.
    others = message[..., border:].clone(memory_format=torch.contiguous_format)
    return torch.cat([decoded, others.view(torch.bfloat16).to(dtype)], dim=-1)


def _narrowed(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert values to a narrower dtype; those beyond its range are clamped, not infinite."""
    limit = torch.finfo(dtype).max
    return values.clamp(-limit, limit).to(dtype)


def _sum_in_order(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Add rows one by one: `sum(0)` may group them differently for other lengths or devices."""
    # A copy, because virtual workers share `rows`.
    total = rows[0].to(dtype, copy=True)
    for row in rows[1:]:
        total += row
    return total
