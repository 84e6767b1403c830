"""Consensus: everybody offers a little more than its fair share, all drop the smallest offers.

A worker offers the largest coordinates of its partition, as many as its capacity: their indices
and, in 16 bits, their magnitudes. That is one message of known length. All workers then see the
same offers and keep the k largest of them: exactly k coordinates travel, from the first step on,
whatever the scale, and nobody sends more than its capacity.

A magnitude's 16 bits are those of its float32 that lead: its exponent and eight bits of its
mantissa. Those that are alike in them are within 0.4 % of each other.

Letters: R workers, M offers of a worker, k coordinates that will travel.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_PAGE = 16
_SHIFT = 15


@dataclass(frozen=True)
class Kept:
    """The offers that all workers keep."""

    indices: NDArray[np.int64]
    """(k,) in the order of workers, ascending for each."""
    counts: list[int]
    """How many of each worker's."""
    threshold: float
    """What the smallest of them is at least."""


def capacity(factor: float, k: int, lengths: Sequence[int]) -> int:
    """Return the most that a worker may send: `factor` times its fair share of k.

    More where partitions are so short that k would not come together.

    >>> capacity(1.15, 100, [500, 500]), capacity(1.15, 100, [10, 500])
    (58, 90)
    """
    most = k if math.isinf(factor) else math.ceil(factor * k / len(lengths) * (1 - 1e-12))
    left, others = k, len(lengths)
    for length in sorted(lengths):
        level = -(-left // others)
        if level <= length:
            break
        left, others = left - length, others - 1
    return max(most, level)


def rank_of(magnitudes: Tensor) -> Tensor:
    """Return the leading bits of magnitudes, in their order: (M,) -> (M,) int32 below 65,536."""
    return magnitudes.float().view(torch.int32) >> _SHIFT


def floor_of(rank: int) -> float:
    """Return the smallest magnitude with these leading bits."""
    return float(torch.tensor(rank << _SHIFT, dtype=torch.int32).view(torch.float32))


def words(count: int, span: tuple[int, int]) -> int:
    """Return how many int32 a message of so many offers from these coordinates takes."""
    pages = len(_pages(span))
    wide = not _paged(count, pages)
    return (count if wide else (count + 1) // 2 + (pages if pages > 1 else 0)) + (count + 1) // 2


def pack(indices: Tensor, magnitudes: Tensor, span: tuple[int, int], length: int) -> Tensor:
    """Write offers into `length` int32: indices, then magnitudes; the rest is zero.

    Args:
        indices: (M,) int64, ascending, within `span`.
        magnitudes: (M,) of them.
        span: Coordinates [first, end) that they are from.
        length: At least `words` of them.
    """
    count, pages = len(indices), _pages(span)
    ranks = _halves(rank_of(magnitudes))
    if _paged(count, len(pages)):
        parts = [_halves(indices.int() & 0xFFFF), ranks]
        if len(pages) > 1:
            found = torch.bincount((indices >> _PAGE) - pages.start, minlength=len(pages))
            parts.insert(0, found.int())
    else:
        parts = [indices.int(), ranks]
    message = torch.zeros(length, dtype=torch.int32, device=indices.device)
    written = torch.cat(parts)
    message[: len(written)] = written
    return message


def unpack(
    message: NDArray[np.int32], count: int, span: tuple[int, int]
) -> tuple[NDArray[np.int64], NDArray[np.uint16]]:
    """Return (M,) indices and (M,) leading bits of magnitudes."""
    pages, half = _pages(span), (count + 1) // 2
    if not _paged(count, len(pages)):
        indices = message[:count].astype(np.int64)
        return indices, message[count : count + half].view(np.uint16)[:count]
    at = len(pages) if len(pages) > 1 else 0
    indices = message[at : at + half].view(np.uint16)[:count].astype(np.int64)
    if at:
        indices += np.repeat(np.arange(pages.start, pages.stop) << _PAGE, message[:at])
    else:
        indices += pages.start << _PAGE
    return indices, message[at + half : at + 2 * half].view(np.uint16)[:count]


def keep(offers: Sequence[tuple[NDArray[np.int64], NDArray[np.uint16]]], k: int) -> Kept:
    """Return the k largest of everybody's offers; of those that tie, some of each worker."""
    indices = np.concatenate([one for one, _ in offers])
    ranks = np.concatenate([one for _, one in offers])
    line = np.partition(ranks, len(ranks) - k)[len(ranks) - k]
    chosen = ranks > line
    ties = np.flatnonzero(ranks == line)
    need = k - int(chosen.sum())
    chosen[ties[np.arange(need) * len(ties) // need]] = True
    owners = np.repeat(np.arange(len(offers)), [len(one) for one, _ in offers])
    counts = np.bincount(owners[chosen], minlength=len(offers))
    return Kept(indices[chosen], counts.tolist(), floor_of(int(line)))


def _pages(span: tuple[int, int]) -> range:
    first, end = span
    return range(first >> _PAGE, (max(end - 1, first) >> _PAGE) + 1)


def _paged(count: int, pages: int) -> bool:
    """Tell whether 16-bit offsets and a count for each page are smaller than int32."""
    return pages == 1 or (count + 1) // 2 + pages < count


def _halves(numbers: Tensor) -> Tensor:
    """Write (M,) numbers below 65,536 two to an int32: ((M + 1) // 2,)."""
    if len(numbers) % 2:
        numbers = torch.cat([numbers, numbers.new_zeros(1)])
    low, high = numbers.view(-1, 2).unbind(1)
    return low | (high << 16)
