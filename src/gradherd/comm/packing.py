"""How indices and values are written into messages: pure functions, the same bytes everywhere.

Ascending indices are an Elias-Fano code: about two bits more than log2(D / n) for each, half a bit
above what any code needs for indices at random. Its length depends on nothing but n and D, so
receivers know it. A value takes its own dtype; or 4 or 2 bits: a sign, and the number of
a level between two magnitudes that a group of 256 values shares; or 1 bit: a sign, and one
magnitude for the group.

Levels between the smallest and the largest magnitude suit values that were selected for being
large: zero, which a scale alone would make room for, is rarely among them. One bit is that of 1-bit
SGD (Seide et al., Interspeech 2014); the mean magnitude of a group loses the least squares.

Letters: n values or indices, D coordinates that indices come from.
"""

import numpy as np
import torch
from torch import Tensor

from gradherd.comm.message_sizes import GROUP, level_bytes, low_bits

# --- Indices -----------------------------------------------------------------------------------


def pack_indices(indices: Tensor, length: int) -> Tensor:
    """Write (n,) ascending indices below `length`: (index_bytes(n, length),) uint8.

    First the low bits, the lowest of all indices, then the next; then their high bits as steps: of
    flags that are zero, that at i + high bits of index i is one. Indices may repeat.
    """
    count = len(indices)
    if not count:
        return indices.to(torch.uint8)
    low = low_bits(count, length)
    shifts = torch.arange(low, device=indices.device).view(-1, 1)
    steps = torch.zeros(count + (length - 1 >> low), dtype=torch.bool, device=indices.device)
    steps.index_fill_(0, (indices >> low) + torch.arange(count, device=indices.device), True)
    return torch.cat([_pack_flags((indices >> shifts & 1).bool()).reshape(-1), _pack_flags(steps)])


def unpack_indices(packed: Tensor, count: int, length: int) -> Tensor:
    """Return the (..., count) int64 indices that `pack_indices` wrote into (..., bytes) uint8.

    Neither of them waits for a device.
    """
    if not count:
        return packed.long()
    low, each = low_bits(count, length), -(-count // 8)
    steps = places_of(_unpack_flags(packed[..., low * each :]), count)
    high = steps - torch.arange(count, device=packed.device)
    rest = torch.zeros(high.shape, dtype=torch.int32, device=packed.device)
    for bit in range(low):
        flags = _unpack_flags(packed[..., bit * each : (bit + 1) * each])
        rest.add_(flags[..., :count], alpha=1 << bit)
    return (high << low).add_(rest)


def places_of(flags: Tensor, count: int) -> Tensor:
    """Return where (..., n) flags, of which `count` in each row are 1, are so: (..., count)."""
    *rows, length = flags.shape
    if _on_cpu(flags):
        found = torch.from_numpy(np.flatnonzero(flags.numpy().view(np.bool_))).view(*rows, count)
        return found.remainder_(length) if rows else found
    every = torch.arange(length, device=flags.device).expand(flags.shape)
    to = torch.where(flags == 1, flags.cumsum(-1) - 1, count)
    return every.new_zeros(*rows, count + 1).scatter_(-1, to, every)[..., :count]


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


def _on_cpu(tensor: Tensor) -> bool:
    """Return whether numpy's loops take a tensor; torch needs several passes for each."""
    return tensor.is_cpu


def _pack_flags(flags: Tensor) -> Tensor:
    """Pack (..., n) bool, eight to a byte, the first in the lowest bit."""
    if _on_cpu(flags):
        return torch.from_numpy(np.packbits(flags.numpy(), axis=-1, bitorder="little"))
    return _pack_bits(flags.to(torch.uint8), 1)


def _unpack_flags(packed: Tensor) -> Tensor:
    """Return (..., 8 bytes) uint8 the bits of (..., bytes)."""
    if _on_cpu(packed):
        return torch.from_numpy(np.unpackbits(packed.numpy(), axis=-1, bitorder="little"))
    return _unpack_bits(packed, 1)


def _pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Pack (..., n) uint8 codes, 8 / bits to a byte, the first in the lowest bits."""
    each = 8 // bits
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % each))
    padded = padded.reshape(*codes.shape[:-1], padded.shape[-1] // each, each)
    packed = padded[..., 0].clone()
    for place in range(1, each):
        packed |= padded[..., place] << (bits * place)
    return packed


def _unpack_bits(packed: Tensor, bits: int) -> Tensor:
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    codes: Tensor = ((packed.unsqueeze(-1) >> shifts) & (2**bits - 1)).flatten(-2)
    return codes
