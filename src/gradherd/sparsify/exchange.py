"""What travels: indices of what was picked, then values, as scripts that any world can run.

Letters: K coordinates that travel, K_r those that worker r picked, R workers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradherd.comm.script import AllGather, AllGatherUneven, AllToAll, Script
from gradherd.sparsify.selector import Place

# Up to this many bytes to each other worker, one round with more bytes beats two with fewer.
_ONE_ROUND = 1 << 10
# So it does while it adds no more than this part of what a dense exchange sends.
_SMALL = 1.25e-3


def gather_indices(
    own: Tensor, counts: Sequence[int], spans: Sequence[tuple[int, int]], place: Place
) -> Script[Tensor]:
    """Lay everybody's picks end to end: (K,) int64, in the order of workers.

    They travel as int32, or as 16-bit offsets in pages of 65,536 coordinates with a count for
    each page, whichever is smaller; everybody can tell which from what everybody knows.

    Args:
        own: (K_r,) ascending indices of this worker.
        counts: K_r of each worker.
        spans: Coordinates [first, end) that each worker may pick from.
        place: Which worker this is.
    """
    if place.size == 1 or not sum(counts):
        return own
    pages = [_pages(span) for span in spans]
    sizes = [_packed_bytes(c, len(p)) for c, p in zip(counts, pages, strict=True)]
    if sum(sizes) >= 4 * sum(counts):
        joined: Tensor = yield AllGatherUneven(own.int(), counts)
        return joined.long()
    # As bytes: collectives know no unsigned 16-bit numbers.
    packed: Tensor = yield AllGatherUneven(_pack(own, pages[place.rank]), sizes)
    parts = torch.split(packed, sizes)
    return torch.cat([_unpack(p, c, s) for p, c, s in zip(parts, counts, pages, strict=True)])


def _pages(span: tuple[int, int]) -> range:
    first, end = span
    return range(first >> 16, (max(end - 1, first) >> 16) + 1)


def _packed_bytes(count: int, pages: int) -> int:
    if not count:
        return 0
    return 2 * count + (4 * pages if pages > 1 else 0)


def _pack(own: Tensor, pages: range) -> Tensor:
    """Return (bytes,) uint8: a count for each page unless there is but one, then offsets."""
    if not len(own):
        return own.to(torch.uint8)
    # The low half of the number, as the two bytes it has in memory.
    offsets = own.int().view(torch.uint8).view(-1, 4)[:, :2].reshape(-1)
    if len(pages) == 1:
        return offsets
    counts = torch.bincount((own >> 16) - pages.start, minlength=len(pages)).int()
    return torch.cat([counts.view(torch.uint8), offsets])


def _unpack(packed: Tensor, count: int, pages: range) -> Tensor:
    """Return (count,) int64 indices."""
    if not count:
        return packed.long()
    offsets = packed[-2 * count :].view(-1, 2).long()
    low = offsets[:, 0] + (offsets[:, 1] << 8)
    if len(pages) == 1:
        return low + (pages.start << 16)
    counts = packed[: 4 * len(pages)].clone().view(torch.int32)  # a copy is aligned
    numbers = torch.arange(pages.start, pages.stop, device=packed.device)
    return low + (torch.repeat_interleave(numbers, counts, output_size=count) << 16)


def gather_union(own: Tensor, counts: Sequence[int], dim: int, place: Place) -> Script[Tensor]:
    """Return what anybody picked, ascending, each once: (U,) int64."""
    everything = yield from gather_indices(own, counts, [(0, dim)] * place.size, place)
    return everything if place.size == 1 else torch.unique(everything)


def add_up(
    values: Tensor, place: Place, wire: torch.dtype, dim: int = 0
) -> Script[tuple[Tensor, Tensor | None]]:
    """Sum `values` over workers; the result has the same bits on all of them.

    Rows are added in the order of workers, in the type of `values`. Where the wire is narrower,
    whoever rounds keeps what was rounded away, so that nothing is lost.

    Args:
        values: (K,) numbers of this worker.
        place: Which worker this is.
        wire: Type in which they travel, if it is narrower.
        dim: D, the length of the vector that they are of.

    Returns:
        (K,) sums, and (K,) what this worker keeps of its own; None is nothing.
    """
    if place.size == 1 or not len(values):
        return values, None
    sent = _narrowed(values, wire) if wire.itemsize < values.dtype.itemsize else values
    left = None if sent is values else values - sent
    size = sent.numel() * sent.element_size()
    # Both are in units of (R - 1) / R: one round sends R times `size`, two send twice.
    if size <= _ONE_ROUND or (place.size - 2) * size <= _SMALL * 2 * dim * values.element_size():
        rows: Tensor = yield AllGather(sent)
        return _in_order(rows, values.dtype), left
    share = -(-len(sent) // place.size)
    padded = sent.new_zeros(share * place.size)
    padded[: len(sent)] = sent
    slices: Tensor = yield AllToAll(padded.view(place.size, share))
    mine = _in_order(slices, values.dtype)
    rounded = mine if left is None else _narrowed(mine, sent.dtype)
    total: Tensor = yield AllGather(rounded)
    if left is not None:
        begin = place.rank * share
        part = left[begin : begin + share]
        part += (mine - rounded)[: len(part)]
    return total.view(-1)[: len(values)].to(values.dtype), left


def _narrowed(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values in a narrower type; what is beyond its range stays finite."""
    limit = torch.finfo(dtype).max
    return values.clamp(-limit, limit).to(dtype)


def _in_order(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Add rows one after the other: the same bits whatever the length, on any device."""
    total = rows[0].to(dtype, copy=True)
    for row in rows[1:]:
        total += row
    return total
