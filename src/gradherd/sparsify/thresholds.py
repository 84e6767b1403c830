"""Where the line between sent and kept is drawn.

`Online` is the rule of ExDyna and MiCRO: last step's count moves the threshold a little.
Consensus (ours) counts first: each worker gathers how many of its candidates lie in each of some
narrow bins, so all of them know the exact count at every bin's edge before anything is sent, and
share out the bin in which the target falls. Exactly k coordinates travel, from the first step on.
No worker sends more than its capacity: where one has much more than the others, because its batch
was hard, the rest of it waits, and the threshold is lower for all.

Bins are the leading bits of a magnitude as a float32: its exponent and eight bits of its mantissa,
so a bin is between 0.2 and 0.4 % wide at any scale. Only some bins from a floor on are counted,
and only what lies above it is a candidate. Residuals crowd below the threshold, so the floor
follows the counts: it is where the last step had a few times as many as were wanted.

Letters: D coordinates of this worker's partition, R workers, B bins.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradherd.comm.script import Gather, Script

BINS = 128
_BITS = 8  # of the mantissa
_OCTAVES = 256
_SPARE = 3  # candidates to have for each one that is wanted
_LOWER = 32  # bins to go down by if there were fewer
_UNDER = 88  # bins of the window that may be under the line; the others are for it to rise


@dataclass(frozen=True)
class Online:
    """Move the threshold by the last step's count (ExDyna and MiCRO).

    The published code can never lower the threshold inside the band; this is the rule it meant.
    """

    band: float = 1.1
    """Counts within this factor of the target are near it."""
    fast_up: float = 1.005
    """Factor if far too many were picked."""
    slow_up: float = 1.00125
    """Factor if a few too many were picked."""
    slow_down: float = 0.9987
    """Factor if a few too few were picked, or as many as wanted."""
    fast_down: float = 0.995
    """Factor if far too few were picked."""

    def __post_init__(self) -> None:
        if not self.band >= 1:
            raise ValueError(f"band must be at least 1, got {self.band}")
        if not self.fast_up >= self.slow_up >= 1 >= self.slow_down >= self.fast_down > 0:
            raise ValueError(f"factors must fall from fast_up to fast_down around 1, got {self}")

    def first(self, k: int) -> float:
        """Return the threshold of the first step: 1 / (2 sqrt k), whatever the gradients are."""
        return 1 / (2 * math.sqrt(k))

    def following(self, threshold: float, picked: int, k: int) -> float:
        """Return the threshold after a step that picked so many."""
        share = picked / k
        if share > self.band:
            return threshold * self.fast_up
        if share > 1:
            return threshold * self.slow_up
        if share > 1 / self.band:
            return threshold * self.slow_down
        return threshold * self.fast_down


@dataclass(frozen=True)
class Cut:
    """A bin from which upwards workers have k candidates that they may send."""

    floor: float
    """Lower edge of the bin."""
    above: list[int]
    """How many each worker has over the bin, up to its capacity: fewer than k in all."""
    inside: list[int]
    """How many each has in the bin, up to its capacity: with those above, k or more in all."""
    start: float
    """Floor of the next step's candidates."""
    loads: list[int]
    """How many each has from the bin upwards, whatever its capacity."""

    def shares(self, k: int) -> list[int]:
        """Return how many each worker sends: k in all, each about the same part of the bin.

        >>> Cut(1.0, above=[3, 0], inside=[4, 4], start=0.9, loads=[7, 4]).shares(7)
        [5, 2]
        """
        need, total = k - sum(self.above), sum(self.inside)
        shares, seen = [], 0
        for above, inside in zip(self.above, self.inside, strict=True):
            # Differences of rounded running totals: they add up, and none exceeds its bin.
            part = need * (seen + inside) // total - need * seen // total
            seen += inside
            shares.append(above + part)
        return shares


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


def bins_of(values: Tensor) -> Tensor:
    """Return the bin of each magnitude: (D,) -> (D,) int32, in the order of magnitudes."""
    return values.float().abs().view(torch.int32) >> (23 - _BITS)


def floor_of(number: int) -> float:
    """Return the lower edge of a bin."""
    return float(torch.tensor(number << (23 - _BITS), dtype=torch.int32).view(torch.float32))


def bin_of(value: float) -> int:
    """Return the bin of one magnitude."""
    return int(bins_of(torch.tensor([value])))


def counts_in(bins: Tensor, lowest: int, count: int = BINS) -> Tensor:
    """Count the candidates of each bin from `lowest` on: (B,) int32; the last has all above."""
    return torch.bincount((bins - lowest).clamp_(max=count - 1), minlength=count).int()


def find(counts: Tensor, lowest: int, k: int, most: int) -> Cut | None:
    """Return where the line is drawn, or None if it is not in the window.

    Args:
        counts: (R, B) candidates of each worker.
        lowest: Number of the first bin.
        k: How many are wanted.
        most: How many a worker may send.
    """
    at = _crossing(_from_here(counts), k, most)
    if at is None or at == counts.shape[1] - 1:
        return None
    return _cut(_from_here(counts), lowest, at, k, most)


def _from_here(counts: Tensor, higher: Tensor | None = None) -> Tensor:
    """Return how many each worker has from each bin upwards: (R, B)."""
    sums = counts.long().flip(1).cumsum(1).flip(1)
    return sums if higher is None else sums + higher[:, None]


def _crossing(sums: Tensor, k: int, most: int) -> int | None:
    """Return the highest bin with k or more candidates from it upwards that may be sent."""
    in_all = sums.clamp(max=most).sum(0)
    return int((in_all >= k).sum()) - 1 if int(in_all[0]) >= k else None


def _cut(sums: Tensor, lowest: int, at: int, k: int, most: int, top: Tensor | None = None) -> Cut:
    """Return the cut at a bin; `top` is what each worker has above all of them."""
    spare = _crossing(sums, _SPARE * k, _SPARE * most)
    start = lowest - _LOWER if spare is None else lowest + spare
    start = max(0, start, lowest + at - _UNDER)
    over = sums[:, at + 1] if at + 1 < sums.shape[1] else top
    assert over is not None, "the last bin of a window is open"
    over, upto = over.clamp(max=most), sums[:, at].clamp(max=most)
    return Cut(
        floor_of(lowest + at),
        over.tolist(),
        (upto - over).tolist(),
        floor_of(start),
        sums[:, at].tolist(),
    )


def search(values: Tensor, k: int, most: int) -> Script[tuple[Cut, Tensor]]:
    """Find where the line is drawn at any scale, in two rounds.

    Args:
        values: (D,) this worker's partition; all of them together must have room for k.
        k: How many are wanted.
        most: How many a worker may send.

    Returns:
        The cut, and where in `values` this worker's candidates are.
    """
    bins = bins_of(values)
    octaves: Tensor = yield Gather(counts_in(bins >> _BITS, 0, _OCTAVES))
    sums = _from_here(octaves.cpu())
    octave = _crossing(sums, k, most)
    assert octave is not None, "fewer coordinates than wanted"
    higher = sums[:, octave + 1] if octave + 1 < _OCTAVES else torch.zeros_like(sums[:, 0])
    lowest = octave << _BITS
    fine: Tensor = yield Gather(counts_in(bins[bins >> _BITS == octave], lowest, 1 << _BITS))
    sums = _from_here(fine.cpu(), higher)
    at = _crossing(sums, k, most)
    assert at is not None, "the octave holds it"
    cut = _cut(sums, lowest, at, k, most, higher)
    # By bin, not by value: a float64 just below an edge is in the bin that a float32 has it in.
    return cut, (bins >= lowest + at).nonzero().view(-1)


def padding(counts: Sequence[int]) -> float:
    """Return f = R max / sum, what padding everybody to the longest costs; 1 is none."""
    total = sum(counts)
    return len(counts) * max(counts) / total if total else 1.0
