"""How indices and values are written into messages: pure functions, the same bytes everywhere.

An index takes 32 bits; or 16, 12 or 8 as an offset in a page of 65,536, 4,096 or 256 coordinates,
which need a count for each page; or indices are a bitmap, with a bit for every coordinate. What is
smallest depends on how many there are. A value takes its own dtype; or 4 or 2 bits: a sign, and the
number of a level between two magnitudes that a group of 256 values shares; or 1 bit: a sign, and
one magnitude for the group.

Indices of 12 bits and values of 2 are what SparseLoCo sends (arXiv:2508.15706). Levels between the
smallest and the largest magnitude suit values that were selected for being large: zero, which a
scale alone would make room for, is rarely among them. One bit is that of 1-bit SGD (Seide et al.,
Interspeech 2014); the mean magnitude of a group loses the least squares.

Letters: n values or indices.
"""

import numpy as np
import torch
from torch import Tensor

from gradherd.sparsify.message_sizes import (
    GROUP,
    IndexBits,
    level_bytes,
    pages_of,
)

# --- Indices -----------------------------------------------------------------------------------


def pack_indices(indices: Tensor, span: tuple[int, int], bits: IndexBits) -> Tensor:
    """Write ascending indices: a count for each page unless there is only one, then offsets.

    Args:
        indices: (n,) int64, ascending, within `span`. The last may be repeated, but
            a bitmap holds it once.
        span: Coordinates [first, end) that the indices come from.
        bits: Of each offset; 32 writes whole indices, and 1 a bitmap of the span.

    Returns:
        (index_bytes(n, span, bits),) uint8.
    """
    # Nothing at all, not even counts of zero: the receiver knows n.
    if not len(indices):
        return indices.to(torch.uint8)
    if bits == 32:
        return indices.int().view(torch.uint8)
    if bits == 1:
        marks = torch.zeros(span[1] - span[0], dtype=torch.bool, device=indices.device)
        marks[indices - span[0]] = True
        return _pack_flags(marks)
    pages = pages_of(span, bits)
    low = indices.int()
    if bits == 12:
        offsets = _pack_12(low & 0xFFF)
    else:  # The low bytes of each little-endian int32.
        offsets = low.view(torch.uint8).view(-1, 4)[:, : bits // 8].reshape(-1)
    if len(pages) == 1:
        return offsets
    # Ones added up, not `bincount`, for which the host would wait. Integers: any order will do.
    counts = torch.zeros(len(pages), dtype=torch.int32, device=indices.device)
    counts.index_add_(0, (indices >> bits) - pages.start, torch.ones_like(low))
    return torch.cat([(counts if bits == 16 else counts.short()).view(torch.uint8), offsets])


def unpack_indices(packed: Tensor, count: int, span: tuple[int, int], bits: IndexBits) -> Tensor:
    """Return the (..., count) int64 indices that `pack_indices` wrote into (..., bytes) uint8.

    Rows must have `index_bytes(count, span, bits)` bytes; nothing here waits for a device.
    """
    if not count:
        return packed.long()
    if bits == 1:
        flags = _unpack_flags(packed).reshape(-1, 8 * packed.shape[-1])
        rows = [places_of(row, count) for row in flags]
        return torch.stack(rows).view(*packed.shape[:-1], count) + span[0]
    pages = pages_of(span, bits)
    size = -(-bits * count // 8)
    head, body = packed[..., : packed.shape[-1] - size], packed[..., packed.shape[-1] - size :]
    if bits == 12:
        low = _unpack_12(body, count)
    else:
        body = body.reshape(*packed.shape[:-1], count, bits // 8).long()
        low = body[..., 0]
        for byte in range(1, bits // 8):
            low = low | (body[..., byte] << (8 * byte))
        if bits == 32:
            return low
    if len(pages) == 1:
        return low + (pages.start << bits)
    # Cloned, because a view as integers needs aligned memory.
    counts = head.clone(memory_format=torch.contiguous_format)
    counts = counts.view(torch.int32 if bits == 16 else torch.int16).int()
    if counts.dim() == 1:
        numbers = torch.arange(pages.start, pages.stop, device=packed.device)
        # With `output_size`, repeat_interleave need not wait for the device to add up the counts.
        return low + (torch.repeat_interleave(numbers, counts, output_size=count) << bits)
    # The page of index i is the first whose counts up to there are above i.
    ends = counts.cumsum(-1, dtype=torch.int32)
    places = torch.arange(count, dtype=torch.int32, device=packed.device).expand(low.shape)
    page = torch.searchsorted(ends, places.contiguous(), right=True)
    return low + ((page + pages.start) << bits)


def places_of(flags: Tensor, count: int) -> Tensor:
    """Return where (n,) flags are 1: (count,) ascending, zeros follow if they are fewer."""
    every = torch.arange(len(flags), device=flags.device)
    to = torch.where(flags == 1, flags.cumsum(0) - 1, count)
    return every.new_zeros(count + 1).scatter_(0, to, every)[:count]


def _pack_12(offsets: Tensor) -> Tensor:
    """Pack (n,) int32 below 4,096 two to three bytes: (ceil(1.5 n),) uint8."""
    odd = len(offsets) % 2
    padded = torch.cat([offsets, offsets.new_zeros(1)]) if odd else offsets
    pair = padded.view(-1, 2)
    joined = (pair[:, 0] | (pair[:, 1] << 12)).view(torch.uint8).view(-1, 4)[:, :3].reshape(-1)
    return joined[:-1] if odd else joined


def _unpack_12(packed: Tensor, count: int) -> Tensor:
    padded = torch.nn.functional.pad(packed, (0, count % 2))
    three = padded.reshape(*packed.shape[:-1], -1, 3).long()
    low = three[..., 0] | ((three[..., 1] & 0xF) << 8)
    high = (three[..., 1] >> 4) | (three[..., 2] << 4)
    pairs = torch.stack([low, high], dim=-1)
    return pairs.reshape(*packed.shape[:-1], -1)[..., :count]


# --- Values ------------------------------------------------------------------------------------


def encode_values(values: Tensor, bits: int) -> Tensor:
    """Round finite values to the levels of their groups.

    With 1 or 2 bits a group has the one or two levels that lose the least squares. With 4 bits it
    has 8, evenly from the smallest magnitude to the largest.

    Args:
        values: (..., n) float32 or float64.
        bits: 1, 2 or 4.

    Returns:
        (..., value_bytes(n, bits)) uint8: the levels of all groups, then the codes.

    >>> code = encode_values(torch.tensor([1.0, -1.0, 1.5, -4.0, 5.0]), bits=2)
    >>> decode_values(code, 5, bits=2)
    tensor([ 1.1641, -1.1641,  1.1641, -4.5000,  4.5000])
    """
    count = values.shape[-1]
    if not count:
        return values.to(torch.uint8)
    groups = _grouped(values)
    real = torch.arange(groups.shape[-2] * GROUP, device=values.device).view(-1, GROUP) < count
    magnitudes = groups.abs()
    limit = torch.finfo(torch.bfloat16).max
    if bits == 1:
        # Divided first: the sum of a few of the largest floats overflows.
        mean = magnitudes.div_(real.sum(-1, keepdim=True)).sum(-1)
        level = mean.clamp_(max=limit).to(torch.bfloat16)
        return torch.cat([level.view(torch.uint8), _pack_flags(values < 0)], dim=-1)
    if bits == 2:
        low, high = _two_levels(magnitudes, real)
    else:
        low, high = magnitudes.masked_fill(~real, torch.inf).amin(-1), magnitudes.amax(-1)
    levels = torch.stack([low, high], dim=-1).clamp(max=limit).to(torch.bfloat16)
    # From the levels as they are sent: the sender must round as the others will read.
    base, step = _steps(levels, bits, groups.dtype)
    code = ((magnitudes - base) / step).nan_to_num_(0).round_().clamp_(0, 2 ** (bits - 1) - 1)
    signed = code.to(torch.uint8) | ((groups < 0).to(torch.uint8) << (bits - 1))
    flat = signed.flatten(-2)[..., :count]
    return torch.cat([levels.view(torch.uint8).flatten(-2), _pack_bits(flat, bits)], dim=-1)


def decode_values(
    packed: Tensor, count: int, bits: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the (..., count) values that `encode_values` wrote; equal bytes give equal bits."""
    if not count:
        return packed.to(dtype)
    border = level_bytes(count, bits)
    # Cloned, because a view as bf16 needs aligned memory.
    levels = packed[..., :border].clone(memory_format=torch.contiguous_format).view(torch.bfloat16)
    if bits == 1:
        negative = _unpack_flags(packed[..., border:])[..., :count].to(dtype)
        signs = _grouped(negative.mul_(-2).add_(1))
        one_level: Tensor = signs.mul_(levels.to(dtype).unsqueeze(-1)).flatten(-2)
        return one_level[..., :count]
    levels = levels.reshape(*packed.shape[:-1], -1, 2)
    base, step = _steps(levels, bits, dtype)
    codes = _grouped(_unpack_bits(packed[..., border:], bits)[..., :count])
    sign = 1 - 2 * (codes >> (bits - 1)).to(dtype)
    magnitudes = (codes & (2 ** (bits - 1) - 1)).to(dtype) * step
    decoded: Tensor = ((magnitudes + base) * sign).flatten(-2)
    return decoded[..., :count]


def _steps(levels: Tensor, bits: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the lowest level of each group and the distance between two: (..., G, 1)."""
    low, high = levels.to(dtype).unsqueeze(-1).unbind(-2)
    return low, (high - low) / (2 ** (bits - 1) - 1)


def _two_levels(magnitudes: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two levels of each group with the least squared error: (..., G, 256) -> (..., G).

    Best levels split the sorted magnitudes in two runs and are their means (Lloyd, Max). All 255
    splits are compared: iterating from a guess may end at a worse one, and takes more passes.
    """
    # As shares of the largest, so that no square overflows or vanishes. What is padded comes last.
    top = magnitudes.amax(-1, keepdim=True).clamp(min=torch.finfo(magnitudes.dtype).tiny)
    ordered = (magnitudes / top).masked_fill(~real, torch.inf).sort(-1).values
    ordered = ordered.masked_fill(ordered.isinf(), 0)
    count = real.sum(-1, keepdim=True)
    low_count = torch.arange(1, GROUP + 1, device=real.device)
    low_sum = ordered.cumsum(-1)
    total = low_sum[..., -1:]
    # The squared error is the sum of squares, which no split changes, less this.
    explained = low_sum.square() / low_count + (total - low_sum).square() / (
        (count - low_count).clamp(min=1)
    )
    # With the split after the last one all values share one level.
    split = explained.masked_fill(low_count > count, -1).argmax(-1, keepdim=True)
    low = low_sum.gather(-1, split) / (split + 1)
    high = (total - low_sum.gather(-1, split)) / (count - split - 1).clamp(min=1)
    high = torch.where(split + 1 < count, high, low)
    return (top * low).squeeze(-1), (top * high).squeeze(-1)


def _grouped(values: Tensor) -> Tensor:
    """Pad (..., n) with zeros to whole groups: (..., G, 256)."""
    missing = -values.shape[-1] % GROUP
    return torch.nn.functional.pad(values, (0, missing)).reshape(*values.shape[:-1], -1, GROUP)


def _pack_flags(flags: Tensor) -> Tensor:
    """Pack (..., n) bool, eight to a byte, the first in the lowest bit."""
    if flags.is_cpu:  # numpy has a loop for it, torch would need eight passes
        return torch.from_numpy(np.packbits(flags.numpy(), axis=-1, bitorder="little"))
    return _pack_bits(flags.to(torch.uint8), 1)


def _unpack_flags(packed: Tensor) -> Tensor:
    """Return (..., 8 bytes) uint8 the bits of (..., bytes)."""
    if packed.is_cpu:
        return torch.from_numpy(np.unpackbits(packed.numpy(), axis=-1, bitorder="little"))
    return _unpack_bits(packed, 1)


def _pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Pack (..., n) uint8 codes, 8 / bits to a byte, the first in the lowest bits."""
    each = 8 // bits
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % each))
    padded = padded.reshape(*codes.shape[:-1], -1, each)
    packed = padded[..., 0].clone()
    for place in range(1, each):
        packed |= padded[..., place] << (bits * place)
    return packed


def _unpack_bits(packed: Tensor, bits: int) -> Tensor:
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    codes: Tensor = ((packed.unsqueeze(-1) >> shifts) & (2**bits - 1)).flatten(-2)
    return codes
