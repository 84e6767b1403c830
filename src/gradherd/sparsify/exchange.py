"""The exchange of indices and values, as scripts that run on real or virtual workers.

Letters: K coordinates that are sent, K_r those that worker r selected, R workers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradherd.comm.script import AllGather, AllGatherUneven, AllToAll, Script
from gradherd.sparsify.selector import StepContext
from gradherd.sparsify.wire import (
    COUNT_BYTES,
    INDEX_BYTES,
    OFFSET_BYTES,
    ONE_ROUND_BYTES,
    ONE_ROUND_SHARE,
    PAGE_BITS,
    pages_of,
)


def gather_indices(
    own: Tensor, counts: Sequence[int], spans: Sequence[tuple[int, int]], context: StepContext
) -> Script[Tensor]:
    """Concatenate the indices that all workers selected.

    They are sent as int32, or as 16-bit offsets in pages of 65,536 coordinates with a count for
    each page, whichever is smaller. All workers know `counts` and `spans`, so they agree on the
    format without a flag.

    Args:
        own: (K_r,) int64 ascending indices of this worker.
        counts: K_r of each worker.
        spans: Coordinates [first, end) that each worker selects from.
        context: Which worker this is.

    Returns:
        (K,) int64, in the order of workers.
    """
    if context.size == 1 or not sum(counts):
        return own
    pages = [pages_of(span) for span in spans]
    sizes = [_packed_bytes(c, len(p)) for c, p in zip(counts, pages, strict=True)]
    if sum(sizes) >= INDEX_BYTES * sum(counts):
        joined: Tensor = yield AllGatherUneven(own.int(), counts)
        return joined.long()
    # As bytes, because collectives do not support uint16.
    packed: Tensor = yield AllGatherUneven(_pack(own, pages[context.rank]), sizes)
    parts = torch.split(packed, sizes)
    return torch.cat([_unpack(p, c, s) for p, c, s in zip(parts, counts, pages, strict=True)])


def _packed_bytes(count: int, pages: int) -> int:
    if not count:
        return 0
    return OFFSET_BYTES * count + (COUNT_BYTES * pages if pages > 1 else 0)


def _pack(own: Tensor, pages: range) -> Tensor:
    """Return (bytes,) uint8: a count for each page unless there is only one, then offsets."""
    if not len(own):
        return own.to(torch.uint8)
    # The two low bytes of each little-endian int32.
    offsets = own.int().view(torch.uint8).view(-1, 4)[:, :2].reshape(-1)
    if len(pages) == 1:
        return offsets
    counts = torch.bincount((own >> PAGE_BITS) - pages.start, minlength=len(pages)).int()
    return torch.cat([counts.view(torch.uint8), offsets])


def _unpack(packed: Tensor, count: int, pages: range) -> Tensor:
    """Return the (count,) int64 indices that `_pack` wrote."""
    if not count:
        return packed.long()
    offsets = packed[-2 * count :].view(-1, 2).long()
    low = offsets[:, 0] + (offsets[:, 1] << 8)
    if len(pages) == 1:
        return low + (pages.start << PAGE_BITS)
    # Cloned, because a view as int32 needs aligned memory.
    counts = packed[: 4 * len(pages)].clone().view(torch.int32)
    numbers = torch.arange(pages.start, pages.stop, device=packed.device)
    return low + (torch.repeat_interleave(numbers, counts, output_size=count) << PAGE_BITS)


def gather_union(
    own: Tensor, counts: Sequence[int], dim: int, context: StepContext
) -> Script[Tensor]:
    """Return the union of the indices that all workers selected: int64, ascending."""
    indices = yield from gather_indices(own, counts, [(0, dim)] * context.size, context)
    return indices if context.size == 1 else torch.unique(indices)


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
    # One round sends R times `size`, two rounds send it twice (both times (R - 1) / R). A dense
    # exchange would send 2 D elements.
    dense = 2 * dim * values.element_size()
    if size <= ONE_ROUND_BYTES or (context.size - 2) * size <= ONE_ROUND_SHARE * dense:
        rows: Tensor = yield AllGather(sent)
        return _sum_in_order(rows, values.dtype), error
    # Reduce-scatter by all-to-all, then all-gather. A reduce-scatter of the backend would add
    # rows in an order of its own, and so give other bits.
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


def _narrowed(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert values to a narrower dtype; those beyond its range are clamped, not infinite."""
    limit = torch.finfo(dtype).max
    return values.clamp(-limit, limit).to(dtype)


def _sum_in_order(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Add rows one by one: `sum(0)` may group them differently for other lengths or devices."""
    total = rows[0].to(dtype, copy=True)
    for row in rows[1:]:
        total += row
    return total
