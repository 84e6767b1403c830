"""Virtual workers that take turns on one model: what each of them owns, and what they exchange.

Letters: R workers, D parameters, U units of a batch, k elements of a row.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from gradherd.comm.script import SharedRunner
from gradherd.comm.sliced_mean import mean_bytes, mean_of_rows
from gradherd.flat import FlatSpec
from gradherd.lab.train import POWERSGD
from gradherd.lab.train.config import RunConfig
from gradherd.lab.train.measurements import BinnedSeries
from gradherd.lab.train.optimizers import (
    flat_grad,
    get_rng_states,
    set_rng_states,
    sparse_settings,
    worker_seed,
)
from gradherd.lab.train.powersgd import LowRankWorkers, matrix_shape
from gradherd.lab.train.trainer import EpochCounters
from gradherd.ordering.coordination import (
    RowGatherer,
    observe_gathered,
    observe_slices,
    scatters_columns,
)
from gradherd.ordering.ordering import Ordering
from gradherd.rows.settings import RowSettings, row_length
from gradherd.sparsify.virtual_workers import VirtualWorkers


class WorkerTurns:
    """Gives each worker its own generators, and all of them rank 0's buffers, as DDP does."""

    def __init__(self, model: nn.Module, config: RunConfig) -> None:
        self._buffers = list(model.buffers())
        self._device = torch.device(config.device)
        self._rng_states = []
        for worker in range(config.workers):
            # A generator state per worker: with one shared by all, a worker's dropout masks would
            # depend on how many others there are, and differ from those of a real rank.
            torch.manual_seed(worker_seed(config.seed, worker))
            self._rng_states.append(get_rng_states(self._device))
        self._before: list[Tensor] = []  # buffers before a step, from which all workers start
        self._after: list[Tensor] = []  # buffers after worker 0's forward, which remain

    def restore_rng(self) -> None:
        """Set generators to where the last worker left them, whatever was drawn since."""
        set_rng_states(self._rng_states[-1], self._device)

    @contextlib.contextmanager
    def of(self, worker: int) -> Iterator[None]:
        """Run the forward and backward of `worker` inside."""
        if worker == 0:
            # As DDP does: it broadcasts rank 0's buffers before each forward, so every worker
            # starts from the same ones and only the update of worker 0 remains.
            self._before = [buffer.clone() for buffer in self._buffers]
        else:
            self._set_buffers(self._before)
        set_rng_states(self._rng_states[worker], self._device)
        yield
        self._rng_states[worker] = get_rng_states(self._device)
        if worker == 0:
            self._after = [buffer.clone() for buffer in self._buffers]
        if worker == len(self._rng_states) - 1:
            self._set_buffers(self._after)

    def _set_buffers(self, values: list[Tensor]) -> None:
        for buffer, value in zip(self._buffers, values, strict=True):
            buffer.copy_(value)


class GradientAverager:
    """Averages the gradients of all workers, dense or sparsified."""

    def __init__(self, config: RunConfig, named: Mapping[str, nn.Parameter]) -> None:
        self._workers = config.workers
        settings = None
        if config.density is not None and config.sparsify != POWERSGD:
            settings = sparse_settings(config)
        # The layout of real ranks, so that partitions and thresholds cover the same elements.
        self.layout = FlatSpec.small_last(named, 0 if settings is None else settings.dense_below)
        self.parameters = [named[name] for name in self.layout.names]
        self.mean = torch.empty(0)
        """(D,) the last average."""
        first = self.parameters[0]
        flat = self._flat_grad = torch.zeros(
            self.layout.size, dtype=first.dtype, device=first.device
        )
        pieces = zip(self.layout.split(flat), self.parameters, strict=True)
        self._grads = [piece.view_as(parameter) for piece, parameter in pieces]
        self.series = BinnedSeries()
        """Densities of the steps."""
        self._sparse: VirtualWorkers | LowRankWorkers | None = None
        if config.sparsify == POWERSGD and config.density is not None:
            shapes = [matrix_shape(p.shape) for p in self.parameters]
            device = self.parameters[0].device
            self._sparse = LowRankWorkers(shapes, config.density, config.workers, device)
        if settings is not None:
            workers = self._sparse = VirtualWorkers(
                settings,
                self.layout.size,
                config.workers,
                sparse=self.layout.sparse,
                layers=self.layout.sparse_numels,
                device=self.parameters[0].device,
            )
            workers.keep_payload = config.rows == "payload"
            workers.measure_norms = False  # `end_epoch` does, once

    @property
    def payload(self) -> Tensor | None:
        """(R, D) what each worker has sent in the last step, if rows are made of that."""
        return None if self._sparse is None else self._sparse.payload

    def flat_grad(self) -> Tensor:
        """Return (D,) the model's current gradient."""
        return flat_grad(self.parameters)

    def average(self, grads: Tensor, counters: EpochCounters) -> None:
        """Set the model's gradient to the average of all workers' gradients.

        Args:
            grads: (R, D), in the layout's order of parameters.
            counters: Bytes and densities are added to these.
        """
        if self._sparse is None:
            self.mean = mean_of(grads)
            counters.bytes += mean_bytes(grads.shape[1], self._workers, grads.element_size())
        else:
            self.mean = self._sparse.step(grads)
            metrics = self._sparse.metrics
            counters.add_sparse(metrics)
            self.series.add(metrics.get("density", 0.0))
            counters.bytes += metrics.get("bytes", 0)
        # A copy: clipping writes to the model's gradient, and `mean` must stay as it is. Always to
        # the same place, because making views takes a host longer than a GPU takes to copy.
        self._flat_grad.copy_(self.mean)
        for parameter, grad in zip(self.parameters, self._grads, strict=True):
            parameter.grad = grad

    def end_epoch(self, counters: EpochCounters) -> None:
        """Record the norm of worker 0's residual after the last step."""
        if self._sparse is not None:
            residual = self._sparse.residuals()[0]
            counters.residual_norm = float(torch.linalg.vector_norm(residual))


class VirtualCoordination:
    """Runs the coordination of real ranks for workers that share one ordering."""

    def __init__(
        self,
        ordering: Ordering,
        workers: int,
        rows: RowSettings | None = None,
        parameters: int = 0,
    ) -> None:
        """Start empty.

        Args:
            ordering: The orders of all workers.
            workers: Number of workers.
            rows: How rows are read, if they are: real ranks scatter whole gradients.
            parameters: Number of parameters, D.
        """
        self._ordering = ordering
        self._workers = workers
        self._runner = SharedRunner(workers)
        length = 0 if rows is None else row_length(rows, parameters)
        self._scatters = scatters_columns(length, parameters, workers)
        self._gatherer = RowGatherer(ordering, self._runner, scatters=self._scatters)

    @property
    def bytes(self) -> int:
        """Bytes that one worker would have sent for ordering alone."""
        return self._runner.bytes

    def add(self, rows: Tensor) -> None:
        """Add the (R, U, k) rows of one batch of every worker."""
        self._gatherer.add(rows)

    def gather(self, rows: Tensor, batches: Sequence[int]) -> None:
        """Learn from the rows of several steps, gathered at once.

        Args:
            rows: (R, units, k) rows of all workers, step after step.
            batches: Number of units in each step.
        """
        self._runner.start(observe_gathered(self._ordering, rows, batches, scatters=self._scatters))

    def exchange(self, grads: Tensor) -> None:
        """Learn from the (R, D) gradients of whole batches, exchanged by slices."""
        self._runner.start(observe_slices(self._ordering, grads))

    def end_epoch(self) -> None:
        """Adopt the next orders."""
        self._gatherer.flush()
        ordering = self._ordering
        # Nothing was observed, but the order still needs to know that the epoch is complete.
        if not ordering.policy.needs_rows:
            steps = ordering.length - ordering.steps
            ordering.observe(None, torch.ones((steps, self._workers), dtype=torch.bool))
        ordering.end_epoch()


class SparseAverager:
    """Averages the sparsified gradients of one run among those that are trained side by side."""

    def __init__(self, config: RunConfig, model: nn.Module) -> None:
        self._averager = GradientAverager(config, dict(model.named_parameters()))
        self.series = self._averager.series
        slices = FlatSpec.of(model).slices
        # The sparsifier orders parameters in its own way, not as the optimizer does.
        spans = [slices[name] for name in self._averager.layout.names]
        positions = [torch.arange(span.start, span.stop) for span in spans]
        self._positions = torch.cat(positions).to(config.device)

    def __call__(self, grads: Tensor, counters: EpochCounters) -> Tensor:
        """Return (D,) the mean of (R, D) gradients, zero where nothing was sent."""
        begin = time.perf_counter()
        self._averager.average(grads[:, self._positions], counters)
        mean = self._averager.mean
        unpermuted = torch.empty_like(mean).index_copy_(0, self._positions, mean)
        counters.exchange_seconds += time.perf_counter() - begin
        return unpermuted

    def end_epoch(self, counters: EpochCounters) -> None:
        """Record the norm of worker 0's residual after the last step."""
        self._averager.end_epoch(counters)


def mean_of(grads: Tensor) -> Tensor:
    """Return (D,) the mean of (R, D) gradients, in the bits that ranks would get."""
    return mean_of_rows(grads, out=torch.empty_like(grads[0]))
