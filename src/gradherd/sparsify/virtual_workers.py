"""All workers of a world in one process: they exchange sparse gradients as real ranks would.

Two ways lead to the same result. Either every worker runs its own script, in lockstep, or the
workers are the rows of one tensor: sums, values and residuals of all of them take one launch each,
and what all workers would agree on alike is agreed on once (`Selector.agrees_alone`).

Letters: D coordinates, of which the first S are sparsified; R workers, K coordinates that are sent.
"""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gradherd.comm.collectives import nbytes
from gradherd.comm.script import run_together
from gradherd.sparsify.exchange import Outcome, agreed, select
from gradherd.sparsify.message_sizes import FLAG_BYTES, MAX_COORDINATES
from gradherd.sparsify.selector import Selection
from gradherd.sparsify.settings import Sparsify
from gradherd.sparsify.value_sums import sum_rows
from gradherd.sparsify.worker import (
    ErrorFeedback,
    Worker,
    clip_factor,
    clip_together,
    is_finite,
)


class VirtualWorkers:
    """R workers that exchange sparse gradients within one process, as real ranks would.

    On a CPU, results have the same bits as on ranks if torch uses as many threads as each rank:
    means and norms of long vectors, which some methods read, depend on the number of threads.

    Args:
        settings: The sparsifier and how it is run.
        dim: D, the number of elements of all parameters.
        size: R.
        sparse, layers: As for `Worker`.
        dtype, device: Of the residuals.
        stacked: Whether workers are rows of one tensor; None is wherever they can be.

    >>> workers = VirtualWorkers(Sparsify(method="topk"), dim=4, size=2)
    >>> workers.step(torch.tensor([[4.0, 3.0, 0.0, 0.0], [4.0, 0.0, 0.0, 1.0]]))
    tensor([4., 0., 0., 0.])
    >>> workers.residuals()
    tensor([[0., 3., 0., 0.],
            [0., 0., 0., 1.]])
    """

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
        stacked: bool | None = None,
    ) -> None:
        own: dict[str, Any] = {"size": size, "sparse": sparse, "layers": layers}
        memory: dict[str, Any] = {"dtype": dtype, "device": torch.device(device)}
        # A method that sums values itself leaves every worker with sums and remainders of its own.
        # Not all of torch's kernels count further than an int32.
        alone = getattr(settings.method, "sums_values", False) or size * dim > MAX_COORDINATES
        self._together: ErrorFeedback | None = None
        rows: list[ErrorFeedback | None] = [None] * size
        if stacked is not False and not alone:
            self._together = ErrorFeedback((size, dim), momentum=settings.momentum, **memory)
            rows = [*self._together.rows()]
        self.workers = [
            Worker(settings, dim, rank=rank, feedback=row, **own, **memory)
            for rank, row in enumerate(rows)
        ]
        self._always = torch.arange(dim if sparse is None else sparse, dim, device=device)
        self._dim, self._sparse = dim, dim if sparse is None else sparse
        self.metrics: dict[str, Any] = {}
        self.keep_payload = False  # keep (R, D) what each worker has sent in the last step
        self.payload: Tensor | None = None
        self.measure_norms = True  # put residual_norm into `metrics`: a pass, and a wait for a GPU

    def step(self, grads: Tensor) -> Tensor:
        """Average gradients over workers.

        Args:
            grads: (R, D).

        Returns:
            (D,) mean of what was sent, zero elsewhere. If anything was not finite, NaN everywhere;
            residuals are then unchanged.
        """
        clip = self.workers[0].settings.clip
        if clip is not None:
            grads = self._clipped(grads, clip)
        for worker in self.workers:
            worker.set_unit(1.0)
        if self._together is None:
            for worker, grad in zip(self.workers, grads, strict=True):
                worker.add(0, grad)
        else:
            self._together.begin()
            self._together.add(0, grads, self.workers[0].unit)
        # All workers have the same learning rate.
        if self.workers[0].lr_is_zero:
            return torch.zeros_like(grads[0])
        if self._together is None:
            outcome, sent = self._run_scripts()
        else:
            outcome, sent = self._run_stacked(self._together)
        if outcome is None:
            self.metrics = {}
            return grads.new_full((self._dim,), torch.nan)
        self.metrics = outcome.metrics(self._sparse)
        if self.measure_norms:
            self.metrics["residual_norm"] = self._residual_norm()
        self.metrics["bytes"] = round(statistics.fmean(sent))
        mean = self.workers[0].mean_of(outcome)
        return replace(outcome, mean=mean).whole_mean(self._dim)

    def _clipped(self, grads: Tensor, clip: float) -> Tensor:
        """Return gradients whose rows are clipped, as new ones: an order may learn from the old."""
        if grads.is_cuda:
            norms = torch.linalg.vector_norm(grads, dim=1, keepdim=True, dtype=torch.float64)
            return grads * clip_factor(norms, clip).to(grads.dtype)
        grads = grads.clone()
        for grad in grads:
            clip_together([grad], clip)
        return grads

    def _run_scripts(self) -> tuple[Outcome | None, Sequence[int]]:
        """Exchange worker by worker; return worker 0's outcome, and the bytes of each."""
        # A copy: rounding may overwrite it.
        sums = [worker.feedback.acc.clone() for worker in self.workers if self.keep_payload]
        results = run_together([worker.script() for worker in self.workers])
        if self.keep_payload:
            self.payload = self._sent(sums, [result.value for result in results])
        for worker, result in zip(self.workers, results, strict=True):
            worker.commit(result.value)
        return results[0].value, [result.bytes for result in results]

    def _run_stacked(self, together: ErrorFeedback) -> tuple[Outcome | None, Sequence[int]]:
        """Exchange all rows at once; return worker 0's outcome, and the bytes of each."""
        first = self.workers[0]
        self.payload = None
        chosen = self._select(together.acc) if together.finite() else None
        if chosen is not None:
            selection, states, headers = chosen
            indices, values = None, together.acc
            if selection.indices is not None:
                indices = torch.cat([selection.indices, self._always])
                values = together.acc.index_select(1, indices)
            before = values.clone() if self.keep_payload else None
            total, errors, owned, sent = sum_rows(
                values,
                len(self._always),
                first.settings.values,
                self._dim,
                [worker.owner_error for worker in self.workers],
            )
        if chosen is None or not is_finite(total):
            for worker in self.workers:
                worker.commit(None)
            return None, []
        if before is not None:
            self.payload = before if errors is None else before - errors
            if indices is not None:
                empty = torch.zeros_like(together.acc)
                self.payload = empty.index_copy_(1, indices, self.payload)
        outcome = Outcome(indices, total / len(self.workers), None, None, selection)
        together.commit(
            indices, errors, restarted=first.restarted(outcome), low_pass=selection.low_pass
        )
        for worker, row, state, own in zip(
            self.workers, together.rows(), states, owned, strict=True
        ):
            worker.feedback, worker.state, worker.owner_error = row, state, own
            worker.counters[0] += 1
        return outcome, [both[0] + both[1] for both in zip(headers, sent, strict=True)]

    def _select(self, acc: Tensor) -> tuple[Selection, list[Any], list[int]]:
        """Select coordinates of (R, D) `acc`, which is finite.

        Returns:
            What worker 0 selected, the state of each worker, and the bytes that each sent.
        """
        method: Any = self.workers[0].settings.method
        parts = zip(acc[:, : self._sparse], self.workers, strict=True)
        steps = [worker.next_step(own) for own, worker in parts]
        # A method of one's own need not inherit from `Selector`.
        if self._sparse and getattr(method, "agrees_alone", False):
            proposals = [method.propose(step) for step in steps]
            headers = torch.stack([one.header for one in proposals]).cpu()
            (result,) = run_together([agreed(steps[0], proposals[0], headers, method)])
            sent = (FLAG_BYTES + nbytes(headers[0])) * (len(steps) - 1)
            return result.value, [result.value.state] * len(steps), [sent] * len(steps)
        results = run_together([select(step, True, method) for step in steps])
        states = [result.value.state for result in results]
        return results[0].value, states, [result.bytes for result in results]

    def _residual_norm(self) -> float:
        """Return the mean norm of the residuals."""
        if self._together is not None:
            return float(torch.linalg.vector_norm(self._together.residual, dim=1).mean())
        norms = [torch.linalg.vector_norm(worker.feedback.residual) for worker in self.workers]
        return statistics.fmean(torch.stack(norms).tolist())

    def _sent(self, sums: list[Tensor], outcomes: list[Outcome | None]) -> Tensor | None:
        """Return (R, D) what each worker has sent, zero elsewhere; None if nothing was."""
        sent = []
        for acc, outcome in zip(sums, outcomes, strict=True):
            if outcome is None:
                return None
            at = outcome.coordinates()
            # Of rounded values, or of a part of them, the remainder was not sent.
            own = acc[at] if outcome.remainder is None else acc[at] - outcome.remainder
            sent.append(torch.zeros_like(acc).index_copy_(0, at, own))
        return torch.stack(sent)

    def residuals(self) -> Tensor:
        """Return the residuals of all workers: (R, D)."""
        return torch.stack([worker.feedback.residual for worker in self.workers])
