"""A histogram of magnitudes: a threshold for the next step without sorting or host sync.

Bins are a sixteenth of an octave wide and reach four octaves below and above a threshold, so the
histogram of one step gives a good threshold for the next. Everything stays on the device.

Letters: D coordinates.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

BINS = 128
"""The first bin also counts everything below the others; the last counts what is not finite."""
SHIFT = 19
"""Low bits of a float32 that bins ignore; the exponent and four bits of the mantissa remain."""
_INFINITY_BITS = 0x7F800000  # As integers, the bits of NaN are larger, those of numbers smaller.


@dataclass(frozen=True)
class MagnitudeHistogram:
    """Counts of magnitudes.

    >>> histogram = MagnitudeHistogram.around(torch.tensor(1.0))
    >>> histogram.add(torch.tensor([1.5, -0.3, 3.0]))
    >>> histogram.topk_threshold(2)
    tensor(1.5000)
    """

    counts: Tensor
    """(BINS,) int32."""
    window: Tensor
    """() int32, not negative: leading bits of the magnitudes in the first bin."""

    @classmethod
    def around(cls, threshold: Tensor) -> "MagnitudeHistogram":
        """Return an empty histogram with bins around a () threshold, on the same device."""
        middle = threshold.abs().float().view(torch.int32) >> SHIFT
        counts = torch.zeros(BINS, dtype=torch.int32, device=threshold.device)
        return cls(counts, (middle - BINS // 2).clamp_(min=0))

    def add(self, values: Tensor) -> None:
        """Count (D,) values; on a GPU, `kernels.add` does this while it adds."""
        bits = values.abs().float().view(torch.int32)
        bins = ((bits >> SHIFT) - self.window).clamp_(0, BINS - 2)
        bins = torch.where(bits >= _INFINITY_BITS, BINS - 1, bins)
        self.counts.add_(torch.bincount(bins, minlength=BINS).int())

    def topk_threshold(self, k: int) -> Tensor:
        """Return the highest lower edge of a bin that at least k finite magnitudes reach.

        `kernels.topk_threshold` does the same in one kernel on a GPU.

        Returns:
            () float32; zero if fewer than k magnitudes are in the bins above the first.
        """
        reach = self.counts[:-1].flip(0).cumsum(0).flip(0)
        at = (reach >= k).sum() - 1  # `reach` never grows, so this is the last bin with enough.
        edge = ((at + self.window) << SHIFT).int().view(torch.float32)
        return torch.where(at > 0, edge, torch.zeros_like(edge))

    def finite(self) -> Tensor:
        """Return whether everything that was counted is finite: () bool."""
        return self.counts[-1] == 0
