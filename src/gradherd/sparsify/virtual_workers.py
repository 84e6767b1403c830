"""All workers of a world in one process: the same maths as on real ranks.

To the bit, if torch uses as many threads as the ranks would: means and norms of long vectors, which
sidco, sage and deft look at, depend on that.

Letters: R workers, D coordinates.
"""

import statistics
from typing import Any

import torch
from torch import Tensor

from gradherd.comm.script import run_together
from gradherd.sparsify.settings import Sparsify
from gradherd.sparsify.step import Worker


class Workers:
    """R workers that exchange what the settings say."""

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
        """Average (R, D) gradients: returns (D,), zero where nothing travelled.

        NaN everywhere if anything was not finite; residuals are then as before.
        """
        for worker, grad in zip(self.workers, grads, strict=True):
            worker.set_unit(1.0)
            worker.add(0, grad)
        if self.workers[0].weightless:
            return torch.zeros_like(grads[0])
        told = run_together([worker.script() for worker in self.workers])
        for worker, one in zip(self.workers, told, strict=True):
            worker.commit(one.value)
        outcome = told[0].value
        if outcome is None:
            return grads.new_full((self._dim,), torch.nan)
        mean = self.workers[0].mean_of(outcome)
        self.metrics = outcome.metrics(self._sparse) | {
            "residual_norm": statistics.fmean(
                # Asked of a GPU once, not for each worker.
                torch.stack(
                    [torch.linalg.vector_norm(worker.feedback.kept) for worker in self.workers]
                ).tolist()
            ),
            "bytes": round(statistics.fmean(one.bytes for one in told)),
        }
        out = torch.zeros(self._dim, dtype=mean.dtype, device=mean.device)
        return out.index_copy_(0, outcome.indices, mean)

    def residuals(self) -> Tensor:
        """Return (R, D), what each worker keeps."""
        return torch.stack([worker.feedback.kept for worker in self.workers])
