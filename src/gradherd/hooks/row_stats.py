"""What the rows of a batch tell beside an order: their norms, and the gradient noise scale.

Of sketched rows they are estimates: a squared norm is right on average, and its relative error is
about sqrt(2 / columns), which is 6% with 512 columns.

Shapes: U rows of a batch, each the mean gradient of `unit` examples, D columns.
"""

import math

import torch
from torch import Tensor

QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}
"""Quantiles of the norms that are logged, by the end of their name."""


def signal_and_noise(rows: Tensor, unit: int) -> Tensor:
    """Return (2,) estimates from (U, D) rows of `unit` examples each, U at least 2.

    The first is that of the squared norm of the true gradient, which may be negative; the second
    that of the variance of one example's gradient, summed over parameters. A mean over b examples
    has the expected square |G|^2 + tr(Sigma) / b. Two sizes of b, one row and the whole batch, give
    unbiased estimates of both (arXiv:1812.06162, appendix A.1).

    >>> signal_and_noise(torch.tensor([[3.0, 0.0], [1.0, 0.0]]), unit=1)
    tensor([3., 2.])
    """
    small, big = unit, unit * len(rows)
    of_rows, of_mean = rows.square().sum(1).mean(), rows.mean(0).square().sum()
    signal = (big * of_mean - small * of_rows) / (big - small)
    return torch.stack([signal, (of_rows - of_mean) / (1 / small - 1 / big)])


class RowFigures:
    """The norms of the last batch, and the noise scale averaged over batches."""

    def __init__(self, unit: int) -> None:
        self._unit = unit  # examples of a row
        self._norms: Tensor | None = None  # (U,) of the last batch
        self._average: Tensor | None = None  # (2,) signal and noise

    def add(self, rows: Tensor) -> None:
        """Measure the (U, D) rows of a batch, without a wait for the device."""
        rows = rows.detach().float()
        self._norms = torch.linalg.vector_norm(rows, dim=1)
        if len(rows) < 2:  # one size of b tells no noise
            return
        both = signal_and_noise(rows, self._unit)
        before = torch.zeros_like(both) if self._average is None else self._average
        # The mean of quotients would be biased; the quotient of two means is not. Both begin at 0,
        # so both are too small by the same factor. A batch that overflowed (AMP) does not count.
        self._average = torch.where(both.isfinite().all(), before.lerp(both, 0.02), before)

    def scalars(self) -> dict[str, float]:
        """Return quantiles of the norms and the noise scale, with one wait for the device."""
        if self._norms is None:
            return {}
        names = [f"row_norm_{name}" for name in QUANTILES]
        levels = torch.tensor(list(QUANTILES.values()), device=self._norms.device)
        values = self._norms.quantile(levels)
        if self._average is not None:
            names.append("noise_scale")
            values = torch.cat([values, self._average[1:] / self._average[:1]])
        found = dict(zip(names, values.tolist(), strict=True))
        # Loggers stumble over NaN.
        return {name: value for name, value in found.items() if math.isfinite(value)}
