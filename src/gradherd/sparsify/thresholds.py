"""Where the line between sent and kept is drawn.

`Online` is the rule of ExDyna and MiCRO: last step's count moves the threshold a little.
Consensus (ours) counts first: each worker gathers how many of its candidates lie in each of some
narrow bins, so all of them know the exact count at every bin's edge before anything is sent, and
share out the bin in which the target falls. Exactly k coordinates travel, from the first step on.

Bins are the leading 16 bits of a magnitude as a float32: its exponent and seven bits of its
mantissa, so a bin is between 0.4 and 0.8 % wide at any scale.

Letters: D coordinates of this worker's partition, R workers, B bins.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradherd.comm.script import Gather, Script

BINS = 128
_OCTAVES = 256
_BELOW = 64  # bins of the window under the last threshold


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
    """A bin that holds the k-th largest magnitude of all workers."""

    floor: float
    """Lower edge of the bin."""
    above: list[int]
    """How many candidates each worker has over the bin: fewer than k in all."""
    inside: list[int]
    """How many each has in the bin: with those above, k or more in all."""

    def shares(self, k: int) -> list[int]:
        """Return how many each worker sends: k in all, each about the same part of the bin.

        >>> Cut(1.0, above=[3, 0], inside=[4, 4]).shares(7)
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


def bins_of(values: Tensor) -> Tensor:
    """Return the bin of each magnitude: (D,) -> (D,) int32, in the order of magnitudes."""
    return values.float().abs().view(torch.int32) >> 16


def floor_of(number: int) -> float:
    """Return the lower edge of a bin."""
    return float(torch.tensor(number << 16, dtype=torch.int32).view(torch.float32))


def window(threshold: float) -> int:
    """Return the lowest of the B bins that are counted around the last threshold."""
    return max(0, int(bins_of(torch.tensor([threshold]))) - _BELOW)


def counts_in(bins: Tensor, lowest: int, count: int = BINS) -> Tensor:
    """Count the candidates of each bin from `lowest` on: (B,) int32; the last has all above."""
    return torch.bincount((bins - lowest).clamp_(max=count - 1), minlength=count).int()


def find(counts: Tensor, lowest: int, k: int) -> Cut | None:
    """Return the bin with the k-th largest, or None if the window does not hold it.

    Args:
        counts: (R, B) candidates of each worker.
        lowest: Number of the first bin.
        k: How many are wanted.
    """
    at = _crossing(counts, k)
    if at is None or at == counts.shape[1] - 1:
        return None
    return Cut(floor_of(lowest + at), counts[:, at + 1 :].sum(1).tolist(), counts[:, at].tolist())


def _crossing(counts: Tensor, k: int) -> int | None:
    """Return the highest bin with k or more candidates from it upwards."""
    from_here = counts.sum(0).flip(0).cumsum(0).flip(0)
    return int((from_here >= k).sum()) - 1 if int(from_here[0]) >= k else None


def search(values: Tensor, k: int) -> Script[Cut]:
    """Find the bin with the k-th largest at any scale, in two rounds.

    Args:
        values: (D,) this worker's partition; k may not exceed the length of all of them together.
        k: How many are wanted.
    """
    bins = bins_of(values)
    octaves: Tensor = yield Gather(counts_in(bins >> 7, 0, _OCTAVES))
    octaves = octaves.cpu()
    octave = _crossing(octaves, k)
    assert octave is not None, "fewer coordinates than wanted"
    higher = octaves[:, octave + 1 :].sum(1)
    inside = bins[bins >> 7 == octave]
    fine: Tensor = yield Gather(counts_in(inside, octave << 7))
    fine = fine.cpu()
    at = _crossing(fine, k - int(higher.sum()))
    assert at is not None, "the octave holds the k-th largest"
    above = higher + fine[:, at + 1 :].sum(1)
    return Cut(floor_of((octave << 7) + at), above.tolist(), fine[:, at].tolist())


def padding(counts: Sequence[int]) -> float:
    """Return f = R max / sum, what padding everybody to the longest costs; 1 is none."""
    total = sum(counts)
    return len(counts) * max(counts) / total if total else 1.0
