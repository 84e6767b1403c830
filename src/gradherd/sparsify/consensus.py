"""Consensus: workers offer a little more than their fair share, and all keep the k largest offers.

A worker offers the largest coordinates of its partition, as many as its capacity: their indices
and, in 16 bits each, their magnitudes. The length of that message is known beforehand. All workers
then see the same offers and accept the k largest. So exactly k coordinates are sent, from the
first step on and at any scale of the gradients, and no worker sends more than its capacity.

The 16 bits of a magnitude are the leading bits of its float32 after the sign: the exponent and
eight bits of the mantissa. Magnitudes that agree in them differ by less than 0.4 %.

Letters: R workers, M offers of a worker, k coordinates to send.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradherd.sparsify.message_sizes import IndexBits, index_bytes, pages_of
from gradherd.sparsify.packing import pack_indices, unpack_indices

# The sign bit is zero, so dropping 15 bits of a float32 leaves the 16 that are sent.
_DROPPED_BITS = 15


Offer = tuple[NDArray[np.int64], NDArray[np.uint16]]
"""(M,) indices that a worker offers, and (M,) leading bits of their magnitudes."""


@dataclass(frozen=True)
class AcceptedOffers:
    """The k offers that all workers accept."""

    indices: NDArray[np.int64]
    """(k,) in the order of workers, ascending within each."""
    counts: list[int]
    """Number of accepted offers of each worker."""
    threshold: float
    """Lower bound of the accepted magnitudes."""


def capacity(factor: float, k: int, lengths: Sequence[int]) -> int:
    """Return how many coordinates a worker may send: `factor` times its fair share of k.

    If some partitions are shorter than a fair share, the others may send more, so that there
    are k offers.

    Args:
        factor: At least 1; infinity lets one worker send everything.
        k: Number of coordinates that all workers send together.
        lengths: Lengths of the partitions.

    >>> capacity(1.15, 100, [500, 500]), capacity(1.15, 100, [10, 500])
    (58, 90)
    """
    # Without the small term, rounding could turn an exact share into one more.
    most = k if math.isinf(factor) else math.ceil(factor * k / len(lengths) * (1 - 1e-12))
    # Shortest first: a partition below the level gives all it has, and the rest divides what is
    # left evenly.
    left, others = k, len(lengths)
    for length in sorted(lengths):
        level = -(-left // others)
        if level <= length:
            break
        left, others = left - length, others - 1
    return max(most, level)


def leading_bits(magnitudes: Tensor) -> Tensor:
    """Return the 16 leading bits of magnitudes: (M,) -> (M,) int32."""
    # The bits of floats that are not negative sort as the floats do, also when cut short.
    return magnitudes.float().view(torch.int32) >> _DROPPED_BITS


def smallest_magnitude(bits: int) -> float:
    """Return the smallest magnitude with these leading bits."""
    return float(torch.tensor(bits << _DROPPED_BITS, dtype=torch.int32).view(torch.float32))


def message_length(count: int, span: tuple[int, int], compact: bool = False) -> int:
    """Return how many int32 `count` offers from the coordinates of `span` take."""
    return _index_words(count, span, _index_bits(count, span, compact)) + (count + 1) // 2


def pack(
    indices: Tensor,
    magnitudes: Tensor,
    span: tuple[int, int],
    length: int,
    compact: bool = False,
) -> Tensor:
    """Write offers into `length` int32: indices, then magnitudes, then zeros.

    Args:
        indices: (M,) int64, ascending, within `span`.
        magnitudes: (M,) their magnitudes.
        span: Coordinates [first, end) that the offers come from.
        length: At least `message_length(M, span, compact)`.
        compact: Whether indices may take 12 bits.

    Returns:
        (length,) int32.
    """
    bits = _index_bits(len(indices), span, compact)
    packed = pack_indices(indices, span, bits)
    # Zeros, not `empty`: the padding is sent, and messages should be the same in every run.
    message = torch.zeros(length, dtype=torch.int32, device=indices.device)
    message.view(torch.uint8)[: len(packed)] = packed
    half, words = (len(indices) + 1) // 2, _index_words(len(indices), span, bits)
    message[words : words + half] = _pack_pairs(leading_bits(magnitudes))
    return message


def unpack(
    message: NDArray[np.int32], count: int, span: tuple[int, int], compact: bool = False
) -> Offer:
    """Return the (M,) indices and (M,) leading bits of magnitudes that `pack` wrote.

    Args:
        message: (length,) int32 from one worker.
        count: M.
        span: As in `pack`.
        compact: As in `pack`.
    """
    # In numpy, which has uint16; torch collectives and many torch operations do not.
    bits = _index_bits(count, span, compact)
    words, half = _index_words(count, span, bits), (count + 1) // 2
    magnitudes = message[words : words + half].view(np.uint16)[:count]
    packed = message[:words].view(np.uint8)[: index_bytes(count, span, bits)]
    return unpack_indices(torch.from_numpy(packed), count, span, bits).numpy(), magnitudes


def unpack_rows(
    messages: Tensor, count: int, span: tuple[int, int], compact: bool = False
) -> tuple[Tensor, Tensor]:
    """Do what `unpack` does for the (R, length) messages of all workers, on their device.

    Returns:
        (R, M) int64 indices, and (R, M) int32 leading bits of magnitudes.
    """
    bits = _index_bits(count, span, compact)
    words, half = _index_words(count, span, bits), (count + 1) // 2
    packed = messages[:, :words].contiguous().view(torch.uint8)[:, : index_bytes(count, span, bits)]
    pairs = messages[:, words : words + half]
    magnitudes = torch.stack([pairs & 0xFFFF, (pairs >> 16) & 0xFFFF], dim=-1)
    return unpack_indices(packed, count, span, bits), magnitudes.flatten(1)[:, :count]


def accept_largest(offers: Sequence[Offer], k: int) -> AcceptedOffers:
    """Return the k largest of all offers.

    Args:
        offers: Those of each worker, as `unpack` returns them.
        k: How many to accept.
    """
    indices = np.concatenate([one for one, _ in offers])
    bits = np.concatenate([one for _, one in offers])
    # The k-th largest; a partition takes linear time, a sort would not.
    kth_bits = np.partition(bits, len(bits) - k)[len(bits) - k]
    accepted = bits > kth_bits
    # Sixteen bits leave many ties. Taking them evenly spaced over all workers' offers keeps the
    # loads equal; taking the first ones would favour the first workers.
    ties = np.flatnonzero(bits == kth_bits)
    need = k - int(accepted.sum())  # At least one: the k-th largest has these bits itself.
    accepted[ties[np.arange(need) * len(ties) // need]] = True
    owners = np.repeat(np.arange(len(offers)), [len(one) for one, _ in offers])
    counts = np.bincount(owners[accepted], minlength=len(offers))
    return AcceptedOffers(indices[accepted], counts.tolist(), smallest_magnitude(int(kth_bits)))


def _index_bits(count: int, span: tuple[int, int], compact: bool) -> IndexBits:
    """Return in how many bits offers are written: all workers must agree on the smallest."""
    formats: tuple[IndexBits, ...] = (16, 32) if len(pages_of(span)) == 1 else (32, 16)
    formats += (12,) if compact else ()
    return min(formats, key=lambda bits: _index_words(count, span, bits))


def _index_words(count: int, span: tuple[int, int], bits: IndexBits) -> int:
    """Return how many int32 the indices of a message take."""
    return -(-index_bytes(count, span, bits) // 4)


def _pack_pairs(values: Tensor) -> Tensor:
    """Pack (M,) values below 65,536 two to an int32: ((M + 1) // 2,)."""
    if len(values) % 2:
        values = torch.cat([values, values.new_zeros(1)])
    low, high = values.view(-1, 2).unbind(1)
    return low | (high << 16)
