"""PowerSGD with simulated workers: the low-rank exchange that sparsifiers are compared with.

Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization"
(arXiv:1905.13727), Algorithm 1, with error feedback and a warm start, as torch's own hook does it.
Real ranks use that hook; this one makes it an arm of a comparison.

Letters: R workers, D parameters, (m, n) a parameter as a matrix, r rank.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradherd.comm.sliced_mean import mean_bytes

Shape = tuple[int, int]


def matrix_shape(shape: Sequence[int]) -> Shape:
    """Return a parameter's shape as a matrix: its first dimension, and all others.

    >>> matrix_shape((8, 3, 5, 5)), matrix_shape((10,))
    ((8, 75), (10, 1))
    """
    rows = shape[0] if shape else 1
    return rows, math.prod(shape[1:])


def compresses(shape: Shape, rank: int) -> bool:
    """Return whether two factors are smaller than the matrix; biases never are.

    >>> compresses((64, 10), 1), compresses((10, 1), 1)
    (True, False)
    """
    return rank * sum(shape) < math.prod(shape)


def rank_for(shapes: Sequence[Shape], density: float) -> int:
    """Return the largest rank that sends no more than a share of the elements, but at least 1.

    Args:
        shapes: (m, n) of each parameter.
        density: Share of all elements.

    >>> rank_for([(64, 128), (10, 64)], 0.1)
    3
    """
    total, rank = sum(map(math.prod, shapes)), 1
    while _elements(shapes, rank + 1) <= density * total and rank < max(map(min, shapes)):
        rank += 1
    return rank


def _elements(shapes: Sequence[Shape], rank: int) -> int:
    """Return how many elements of factors and of whole parameters a worker contributes."""
    return sum(
        rank * sum(shape) if compresses(shape, rank) else math.prod(shape) for shape in shapes
    )


def low_rank_mean(matrices: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Return the low-rank mean of all workers' matrices, and the factor for the next step.

    Args:
        matrices: (R, m, n), each worker's gradient plus its residual.
        q: (n, r) the factor of the step before.

    Returns:
        (m, n) mean, of rank r at most, and (n, r).
    """
    # Two all-reduces, of P and of Q: both products are linear, so means of them are enough.
    p, _ = torch.linalg.qr((matrices @ q).mean(0))
    q = (matrices.transpose(1, 2) @ p).mean(0)
    return p @ q.T, q


class LowRankWorkers:
    """R = `size` workers that exchange low-rank gradients; the counterpart of `VirtualWorkers`.

    The share of the elements that may be sent decides the rank. Parameters, as (m, n) matrices, are
    in the order of the flat gradient.
    """

    bytes: int = 0  # that a worker has sent in the last step

    def __init__(
        self, shapes: Sequence[Shape], density: float, size: int, device: torch.device | str = "cpu"
    ) -> None:
        self._shapes, self._size = list(shapes), size
        self.rank = rank_for(self._shapes, density)
        self._residuals = torch.zeros(size, sum(map(math.prod, shapes)), device=device)
        # Equal on all ranks: from a seed, and orthogonal, as in torch.
        generator = torch.Generator().manual_seed(0)
        self._factors = {
            at: torch.linalg.qr(torch.randn(n, self.rank, generator=generator))[0].to(device)
            for at, (m, n) in enumerate(self._shapes)
            if compresses((m, n), self.rank)
        }
        sent = _elements(self._shapes, self.rank)
        self._metrics: dict[str, Any] = {
            "density": sent / self._residuals.shape[1],
            "padding": 1.0,  # all workers send as much
            "per_rank": [sent / size] * size,
            "bytes": mean_bytes(sent, size),
        }
        self.metrics: dict[str, Any] = {}

    def step(self, grads: Tensor) -> Tensor:
        """Average (R, D) gradients; return the (D,) mean, NaN if anything was not finite."""
        sums = self._residuals + grads
        if not sums.isfinite().all():
            self.metrics, self.bytes = {}, 0
            return torch.full_like(grads[0], torch.nan)
        means, begin = torch.empty_like(grads[0]), 0
        for at, (m, n) in enumerate(self._shapes):
            span = slice(begin, begin + m * n)
            if at in self._factors:
                mean, self._factors[at] = low_rank_mean(
                    sums[:, span].view(-1, m, n), self._factors[at]
                )
                means[span] = mean.flatten()
                # What the mean leaves out of this worker's own sum: R means and residuals add up
                # to R sums.
                self._residuals[:, span] = sums[:, span] - means[span]
            else:
                means[span] = sums[:, span].mean(0)
            begin = span.stop
        self.metrics, self.bytes = self._metrics, self._metrics["bytes"]
        return means

    def residuals(self) -> Tensor:
        """Return the residuals of all workers: (R, D)."""
        return self._residuals.clone()
