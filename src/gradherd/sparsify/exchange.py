"""The exchange of one step: headers, indices and values, as scripts for real or virtual workers.

Letters: D coordinates, of which the first S are sparsified and the others are always sent; R
workers; K coordinates that are sent, K_r those that worker r selected. Sizes are in bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradherd.comm.script import AllGather, AllGatherUneven, AllToAll, Script
from gradherd.sparsify.selector import Proposal, Selection, Selector, StepContext, target_count

# --- The format of messages; `gradherd advise` predicts bytes from the same constants ----------

FLAG_BYTES = 4
"""Header of every worker and step: an int32 that says whether its values are finite."""

COUNT_BYTES = 4
"""A count in a header (of candidates, or of selected coordinates): int32."""

INDEX_BYTES = 4
"""A coordinate as int32."""

OFFSET_BYTES = 2
"""A coordinate as its offset in a page. Cheaper than an index as long as pages are not too many:
each page also costs a count."""

PAGE_BITS = 16
"""A page is 2**16 coordinates, so that an offset has 16 bits."""

PAGE = 1 << PAGE_BITS
"""Coordinates of a page."""

MAGNITUDE_BYTES = 2
"""A magnitude in an offer (consensus): the leading 16 bits of its float32, without the sign."""

ONE_ROUND_BYTES = 1 << 10
"""Values of up to this size are all-gathered: one round with more bytes then beats two rounds
(all-to-all, all-gather) with fewer."""

ONE_ROUND_SHARE = 1.25e-3
"""They are all-gathered, too, while that adds at most this share of what a dense exchange sends."""

EXDYNA_CAPACITY = 1.05
"""ExDyna: a worker offers at most this many times its fair share of k (default of `capacity`)."""


def pages_of(span: tuple[int, int]) -> range:
    """Return the numbers of the pages that the coordinates [first, end) lie in.

    An empty span has one page, so that there is always a first one to count from.

    >>> pages_of((0, 65_536)), pages_of((65_535, 65_537)), pages_of((7, 7))
    (range(0, 1), range(0, 2), range(0, 1))
    """
    first, end = span
    return range(first >> PAGE_BITS, (max(end - 1, first) >> PAGE_BITS) + 1)


# --- One step ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """Result of a step on one worker."""

    indices: Tensor
    """(K,) coordinates that were sent, the same on all workers."""
    mean: Tensor
    """(K,) mean over workers, the same bits on all of them."""
    remainder: Tensor | None
    """(K,) what this worker keeps at those coordinates; None is nothing."""
    sent: Tensor | None
    """(K,) whether this worker's own value is part of the mean; None is everywhere."""
    selection: Selection
    """What the method selected, without what is always sent."""

    def metrics(self, dim: int) -> dict[str, Any]:
        """Return the metrics of a step that sparsified `dim` coordinates."""
        selected = len(self.selection.indices)
        return {
            "selected": selected,
            "per_rank": self.selection.counts,
            "threshold": self.selection.threshold,
            "density": selected / dim if dim else 1.0,
            "padding": padding(self.selection.counts),
        }


def padding(counts: Sequence[int]) -> float:
    """Return R max / sum of the counts: the cost of padding all workers to the longest.

    1 is perfect balance. The ExDyna paper calls this f(t).

    >>> padding([3, 1])
    1.5
    """
    total = sum(counts)
    return len(counts) * max(counts) / total if total else 1.0


def reduce(
    acc: Tensor,
    sparse: int,
    finite: bool,
    method: Selector,
    density: float,
    state: Any,
    context: StepContext,
    sent_dtype: torch.dtype,
) -> Script[Outcome | None]:
    """Average the selected coordinates over workers.

    Args:
        acc: (D,) residual + gradient of this worker; not changed.
        sparse: S, how many coordinates are sparsified; the others are always sent.
        finite: Whether all of `acc` is finite.
        method: Selects the coordinates.
        density: Share of the S coordinates to send.
        state: State of the method.
        context: Which worker this is.
        sent_dtype: Dtype in which values are sent.

    Returns:
        The outcome; None, on all workers, if a value of any worker or a sum is not finite.
    """
    # A worker with values that are not finite must still take part, or the others would hang. It
    # proposes zeros, and its flag calls the step off everywhere.
    part = acc[:sparse] if finite else torch.zeros_like(acc[:sparse])
    # Of S, not of D: what is always sent does not use up the density.
    k = target_count(density, sparse)
    flag = torch.tensor([int(finite)], dtype=torch.int32, device=acc.device)
    # If all parameters are small, there is nothing to select.
    proposal = method.propose(part, k, state, context) if sparse else Proposal(flag[:0])
    # The flag and the method's header share one message: a round costs more than its few bytes.
    headers: Tensor = yield AllGather(torch.cat([flag, proposal.header]))
    headers = headers.cpu()  # The host waits for the device here: later shapes depend on headers.
    if not bool(headers[:, 0].all()):
        return None
    selection = Selection(flag[:0].long(), [0] * context.size, state)
    if sparse:
        selection = yield from method.settle(part, k, state, context, proposal, headers[:, 1:])

    # Small parameters are sent together with the selected values, in the same rounds.
    always = torch.arange(sparse, len(acc), device=acc.device)
    indices = torch.cat([selection.indices, always])
    if selection.sums is None:
        total, remainder = yield from sum_over_workers(acc[indices], context, sent_dtype, len(acc))
        sent = None
    else:
        rest, error = yield from sum_over_workers(acc[sparse:], context, sent_dtype, len(acc))
        total = torch.cat([selection.sums, rest])
        sent, remainder = _partly_sent(acc, selection, rest, error)
    # Finite values may have a sum that overflows. All workers have the same bits of it, so all
    # of them call the step off, without another round.
    if not bool(total.isfinite().all()):
        return None
    # Divided once, after the sum: dividing every summand would round R times.
    return Outcome(indices, total / context.size, remainder, sent, selection)


def _partly_sent(
    acc: Tensor, selection: Selection, rest: Tensor, error: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return which own values were sent and what stays, for a method that sums values itself."""
    assert selection.sent is not None
    sent = torch.cat([selection.sent, torch.ones_like(rest, dtype=torch.bool)])
    unsent = acc[selection.indices].masked_fill(selection.sent, 0)
    return sent, torch.cat([unsent, torch.zeros_like(rest) if error is None else error])


# --- Indices -----------------------------------------------------------------------------------


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
    # All workers know all counts, so either all of them skip the round or none does.
    if context.size == 1 or not sum(counts):
        return own
    pages = [pages_of(span) for span in spans]
    sizes = [_packed_bytes(c, len(p)) for c, p in zip(counts, pages, strict=True)]
    if sum(sizes) >= INDEX_BYTES * sum(counts):
        # `Worker` refuses vectors whose coordinates do not fit int32.
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
    # Nothing at all, not even zero counts: the others know `counts`.
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
    page_numbers = torch.arange(pages.start, pages.stop, device=packed.device)
    # With `output_size`, repeat_interleave need not wait for the device to add up the counts.
    return low + (torch.repeat_interleave(page_numbers, counts, output_size=count) << PAGE_BITS)


def gather_union(
    own: Tensor, counts: Sequence[int], dim: int, context: StepContext
) -> Script[Tensor]:
    """Return the union of the indices that all workers selected.

    Args:
        own: (K_r,) int64 ascending indices of this worker.
        counts: K_r of each worker.
        dim: Number of coordinates that workers select from.
        context: Which worker this is.

    Returns:
        (K,) int64 without repeats, ascending and so in the same order on all workers.
    """
    indices = yield from gather_indices(own, counts, [(0, dim)] * context.size, context)
    return indices if context.size == 1 else torch.unique(indices)


# --- Values ------------------------------------------------------------------------------------


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
