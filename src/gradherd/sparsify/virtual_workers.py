"""All workers of a world in one process: they exchange sparse gradients as real ranks would.

Every worker runs its own script, in lockstep. What all workers would agree on alike is agreed on
once (`Selector.agrees_alone`).

Letters: D coordinates, of which the first S are sparsified; R workers, K coordinates that are sent.
"""

import statistics
from typing import Any

import torch
from torch import Tensor

from gradherd.comm.script import run_together
from gradherd.sparsify.selecting import Outcome
from gradherd.sparsify.settings import Sparsify
from gradherd.sparsify.worker import Worker, clip_together


class VirtualWorkers:
    """R = `size` workers that exchange sparse gradients within one process, as real ranks would.

    D is `dim`; `given` are `sparse`, `layers`, `dtype` and `device`, as for `Worker`. On a CPU,
    results have the same bits as on ranks if torch uses as many threads as each rank: means and
    norms of long vectors, which some methods read, depend on the number of threads.

    >>> workers = VirtualWorkers(Sparsify(method="topk"), dim=4, size=2)
    >>> workers.step(torch.tensor([[4.0, 3.0, 0.0, 0.0], [4.0, 0.0, 0.0, 1.0]]))
    tensor([4., 0., 0., 0.])
    >>> workers.residuals()
    tensor([[0., 3., 0., 0.],
            [0., 0., 0., 1.]])
    """

    def __init__(self, settings: Sparsify, dim: int, size: int, **given: Any) -> None:
        self.workers = [
            Worker(settings, dim, rank=rank, size=size, **given) for rank in range(size)
        ]
        self.metrics: dict[str, Any] = {}
        self.bytes = 0  # that a worker has sent in the last step, also in one that was called off
        self.measure_norms = True  # put residual_norm into `metrics`: a pass, and a wait for a GPU

    def step(self, grads: Tensor) -> Tensor:
        """Average (R, D) gradients over workers.

        Returns:
            (D,) mean of what was sent, zero elsewhere. If anything was not finite, NaN everywhere;
            residuals are then unchanged.
        """
        first, dim = self.workers[0], grads.shape[1]
        if first.settings.clip is not None:
            grads = grads.clone()  # an order may learn from the old ones
            for grad in grads:
                clip_together([grad], first.settings.clip)
        for worker, grad in zip(self.workers, grads, strict=True):
            worker.begin(1.0)
            worker.add(0, grad)
        # A method of one's own need not inherit from `Selector`.
        alike = getattr(first.settings.method, "agrees_alone", False)
        known: list[Any] | None = [] if alike else None
        results = run_together([worker.script(known) for worker in self.workers])
        for worker, result in zip(self.workers, results, strict=True):
            worker.commit(result.value)
        self.bytes = round(statistics.fmean(result.bytes for result in results))
        outcome: Outcome | None = results[0].value
        if outcome is None:
            self.metrics = {}
            return grads.new_full((dim,), torch.nan)
        self.metrics = outcome.metrics(first.sparse)
        if self.measure_norms:
            norms = [torch.linalg.vector_norm(worker.feedback.residual) for worker in self.workers]
            self.metrics["residual_norm"] = statistics.fmean(torch.stack(norms).tolist())
        self.metrics["bytes"] = self.bytes
        return outcome.whole_mean(dim)

    def residuals(self) -> Tensor:
        """Return the residuals of all workers: (R, D)."""
        return torch.stack([worker.feedback.residual for worker in self.workers])
