"""All workers of a world in one process, with the same arithmetic as on real ranks.

The results have the same bits if torch uses as many threads as each rank would: means and norms
of long vectors, which SIDCo, SAGE and DEFT compute, depend on the number of threads.

Letters: R workers, D coordinates.
"""

import statistics
from typing import Any

import torch
from torch import Tensor

from gradherd.comm.script import run_together
from gradherd.sparsify.settings import Sparsify
from gradherd.sparsify.step import Worker


class VirtualWorkers:
    """R workers that exchange sparse gradients within one process."""

    def __init__(
        self,
        settings: Sparsify,
        dim: int,
        size: int,
        *,
        sparse: int | None = None,
        layers: list[int] | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.workers = [
            Worker(
                settings,
                dim,
                rank=rank,
                size=size,
                sparse=sparse,
                layers=layers,
                dtype=dtype,
                device=device,
            )
            for rank in range(size)
        ]
        self._dim = dim
        self._sparse = dim if sparse is None else sparse
        self.metrics: dict[str, Any] = {}

    def step(self, grads: Tensor) -> Tensor:
        """Average gradients over workers.

        Args:
            grads: (R, D).

        Returns:
            (D,) mean of what was sent, zero elsewhere. If anything was not finite, NaN everywhere;
            residuals are then unchanged.
        """
        for worker, grad in zip(self.workers, grads, strict=True):
            worker.set_unit(1.0)
            worker.add(0, grad)
        if self.workers[0].weightless:
            return torch.zeros_like(grads[0])
        results = run_together([worker.script() for worker in self.workers])
        for worker, result in zip(self.workers, results, strict=True):
            worker.commit(result.value)
        outcome = results[0].value
        if outcome is None:
            return grads.new_full((self._dim,), torch.nan)
        mean = self.workers[0].mean_of(outcome)
        # Stacked first, so that a GPU is waited for once and not once per worker.
        norms = torch.stack([torch.linalg.vector_norm(w.feedback.residual) for w in self.workers])
        self.metrics = outcome.metrics(self._sparse) | {
            "residual_norm": statistics.fmean(norms.tolist()),
            "bytes": round(statistics.fmean(result.bytes for result in results)),
        }
        out = torch.zeros(self._dim, dtype=mean.dtype, device=mean.device)
        return out.index_copy_(0, outcome.indices, mean)

    def residuals(self) -> Tensor:
        """Return the residuals of all workers: (R, D)."""
        return torch.stack([worker.feedback.residual for worker in self.workers])
