"""How many magnitudes lie in which bin: a threshold without sorting, and without the host.

Bins are a sixteenth of an octave wide and reach four octaves below and above a threshold, so
that one vector's tally tells a good floor for the next one's picks. All of it stays on the device.
"""

from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

BINS = 128
"""The last one counts what is not finite, the first all that is below the others."""
SHIFT = 19
"""Bits of a float32 that bins leave out; its exponent and four bits of its mantissa remain."""
_INFINITE = 0x7F800000  # the bits of infinity; those of NaN are larger


@dataclass(frozen=True)
class Tally:
    """Counts of (D,) magnitudes.

    >>> tally = Tally.around(torch.tensor(1.0))
    >>> tally.add(torch.tensor([1.5, -0.3, 3.0]))
    >>> tally.floor(2)
    tensor(1.5000)
    """

    counts: Tensor
    """(BINS,) int32."""
    window: Tensor
    """() int32, leading bits of the magnitudes in the first bin, not negative."""

    @classmethod
    def around(cls, threshold: Tensor) -> "Tally":
        """Return an empty tally whose bins lie around a threshold, () on its device."""
        middle = threshold.abs().float().view(torch.int32) >> SHIFT
        counts = torch.zeros(BINS, dtype=torch.int32, device=threshold.device)
        return cls(counts, (middle - BINS // 2).clamp_(min=0))

    def add(self, values: Tensor) -> None:
        """Count (D,) values; on a GPU `kernels.add` does it on the way."""
        sizes = values.abs().float().view(torch.int32)
        bins = ((sizes >> SHIFT) - self.window).clamp_(0, BINS - 2)
        bins = torch.where(sizes >= _INFINITE, BINS - 1, bins)
        self.counts.add_(torch.bincount(bins, minlength=BINS).int())

    def floor(self, k: int) -> Tensor:
        """Return the highest border of bins that at least k finite magnitudes reach: () float32.

        Zero where fewer lie in the bins above the first.
        """
        if self._on_triton():
            from gradherd.sparsify import triton_kernels

            return triton_kernels.floor(self.counts, self.window, k)
        reach = self.counts[:-1].flip(0).cumsum(0).flip(0)
        at = (reach >= k).sum() - 1  # reach never grows, so this is the last bin that has enough
        border = ((at + self.window) << SHIFT).int().view(torch.float32)
        return torch.where(at > 0, border, torch.zeros_like(border))

    def _on_triton(self) -> bool:
        # Triton starts its programs on the current device.
        here = self.counts.is_cuda and self.counts.get_device() == torch.cuda.current_device()
        return here and find_spec("triton") is not None

    def finite(self) -> Tensor:
        """Return whether all that was counted is finite: () bool."""
        return self.counts[-1] == 0
