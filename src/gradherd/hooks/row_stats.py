"""What the rows of a batch tell beside an order: their norms, and the gradient noise scale.

Shapes: U rows of a batch, each the mean gradient of `unit` examples, D columns.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}
"""Quantiles of the norms that are logged, by the end of their name."""


@dataclass(frozen=True)
class RowStats:
    """Figures of one batch of this rank, on the device of the gradients.

    Of sketched rows they are estimates: a squared norm is right on average, and its relative error
    is about sqrt(2 / columns), which is 6% with 512 columns.
    """

    norms: Tensor
    """(U,) norm of each row: of the gradients of single examples if units have one example."""
    signal: Tensor
    """() estimate of the squared norm of the true gradient. It may be negative."""
    noise: Tensor
    """() estimate of the variance of the gradient of one example, summed over parameters."""

    @property
    def noise_scale(self) -> Tensor:
        """() noise / signal, in examples: the batch size beyond which larger ones gain little.

        One batch gives a rough estimate. Average signal and noise over batches before you divide;
        `Herd.scalars(rows=True)` does. It is NaN for a batch of one row.
        """
        return self.noise / self.signal


def row_stats(rows: Tensor, unit: int) -> RowStats:
    """Return the figures of (U, D) rows of `unit` examples each, without a wait for the device.

    A mean over b examples has the expected square |G|^2 + tr(Sigma) / b. Two sizes of b, one row
    and the whole batch, give unbiased estimates of both (arXiv:1812.06162, appendix A.1).

    >>> stats = row_stats(torch.tensor([[3.0, 0.0], [1.0, 0.0]]), unit=1)
    >>> stats.norms, stats.signal, stats.noise
    (tensor([3., 1.]), tensor(3.), tensor(2.))
    """
    rows = rows.detach().float()
    squares, of_mean = rows.square().sum(1), rows.mean(0).square().sum()
    if len(rows) < 2:
        nan = torch.full_like(of_mean, torch.nan)
        return RowStats(squares.sqrt(), nan, nan)
    small, big = unit, unit * len(rows)
    of_rows = squares.mean()
    signal = (big * of_mean - small * of_rows) / (big - small)
    noise = (of_rows - of_mean) / (1 / small - 1 / big)
    return RowStats(squares.sqrt(), signal, noise)


class RowFigures:
    """The figures of the last batch, and the noise scale averaged over batches."""

    def __init__(self, unit: int) -> None:
        self._unit = unit  # examples of a row
        self.last: RowStats | None = None
        """Figures of the last batch."""
        self._average: Tensor | None = None  # (2,) signal and noise

    def add(self, rows: Tensor) -> None:
        """Measure the (U, D) rows of a batch."""
        self.last = stats = row_stats(rows, self._unit)
        both = torch.stack([stats.signal, stats.noise])
        before = torch.zeros_like(both) if self._average is None else self._average
        # The mean of quotients would be biased; the quotient of two means is not. Both begin at 0,
        # so both are too small by the same factor. A batch that overflowed (AMP) does not count.
        self._average = torch.where(both.isfinite().all(), before.lerp(both, 0.02), before)

    def scalars(self) -> dict[str, float]:
        """Return quantiles of the norms and the noise scale, with one wait for the device."""
        if self.last is None or self._average is None:
            return {}
        norms = self.last.norms
        levels = torch.tensor(list(QUANTILES.values()), device=norms.device)
        scale = self._average[1] / self._average[0]
        values = torch.cat([norms.quantile(levels), scale.unsqueeze(0)]).tolist()
        names = [*(f"row_norm_{name}" for name in QUANTILES), "noise_scale"]
        # Batches of one row have no noise scale, and loggers stumble over NaN.
        return {k: v for k, v in zip(names, values, strict=True) if math.isfinite(v)}
