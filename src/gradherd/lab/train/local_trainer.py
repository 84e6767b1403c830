"""Local steps with all workers in one process: each has a model and an optimizer of its own.

The maths is that of real ranks (`attach.local_steps`), and so are the scripts, the bits and the
bytes. Evaluated are the shared weights, with worker 0's buffers.

Letters: R workers, D parameters, U units of a batch, k elements of a row.
"""

import copy
import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from gradherd.comm.script import run_together
from gradherd.comm.world import World
from gradherd.hooks.flat_weights import FlatWeights
from gradherd.hooks.local_steps import MAX_CALLED_OFF
from gradherd.hooks.row_sources import make_row_source
from gradherd.lab.tasks.task import Split, Task
from gradherd.lab.train.config import RunConfig
from gradherd.lab.train.cuda_graphs import GraphedFunction, has_dropout
from gradherd.lab.train.measurements import BinnedSeries, DeviceTimer
from gradherd.lab.train.optimizers import (
    clip_and_step,
    get_rng_states,
    make_optimizer,
    set_lr,
    set_rng_states,
    worker_seed,
)
from gradherd.lab.train.trainer import (
    EpochCounters,
    EpochExamples,
    Evaluation,
    StepCallback,
    TrainingLoss,
    evaluation_chunk,
    finite_metric,
    full_loss,
    passes,
)
from gradherd.lab.train.virtual_exchange import VirtualCoordination
from gradherd.lab.train.virtual_trainer import GradientsOnStreams, make_ordering, row_settings
from gradherd.sparsify.local import (
    LocalSteps,
    OuterOptimizer,
    commit_difference,
    exchange_script,
)
from gradherd.sparsify.worker import Worker


@dataclass
class _Pending:
    """What an exchange has given, before it is applied."""

    snapshots: list[Tensor]
    """(D,) each worker's weights when the exchange began."""
    mean: Tensor | None
    buffers: Tensor | None


class VirtualLocalSteps:
    """The exchange of R models that take local steps within one process.

    Args:
        settings: How often and how to exchange.
        weights: The weights of each worker, all equal.
    """

    def __init__(self, settings: LocalSteps, weights: list[FlatWeights]) -> None:
        self._settings, self._weights = settings, weights
        layout = weights[0].layout
        self._sparse = layout.sparse
        self.workers = [
            Worker(
                settings.sent,
                layout.size,
                rank=rank,
                size=len(weights),
                sparse=layout.sparse,
                layers=layout.sparse_numels,
                dtype=weights[0].dtype,
                device=weights[0].device,
            )
            for rank in range(len(weights))
        ]
        self.outer = OuterOptimizer(settings, weights[0].read())
        self.diverged = False
        """Whether training has ended with weights that are not finite."""
        self.series = BinnedSeries()
        self._pending: _Pending | None = None
        self._taken = self._steps = self._called_off = 0

    def after_step(self, counters: EpochCounters) -> None:
        """Count a step of all workers; exchange if it ends a phase."""
        self._taken += 1
        self._steps += 1
        if self._pending is not None and self._taken >= self._settings.steps_until_applied:
            self._apply()
        if self._taken >= self._settings.every:
            self._begin(counters, forced=False)
            if not self._settings.overlap:
                self._apply()

    def sync(self, counters: EpochCounters) -> None:
        """Exchange now, also within a phase."""
        if self._pending is not None:
            self._apply()
        if (self._taken or self._called_off) and not self.diverged:
            self._begin(counters, forced=True)
            self._apply()

    def _begin(self, counters: EpochCounters, *, forced: bool) -> None:
        own = [weights.read() for weights in self._weights]
        base = self._weights[0].rounded(self.outer.shared)
        for worker, snapshot in zip(self.workers, own, strict=True):
            worker.set_unit(1.0)
            worker.add(0, base - snapshot)
        position = torch.tensor([self._steps, int(forced)], device=base.device)
        results = run_together(
            [
                exchange_script(worker, position, weights.read_buffers())
                for worker, weights in zip(self.workers, self._weights, strict=True)
            ]
        )
        outcome, buffers, _ = results[0].value
        if outcome is not None:
            counters.add_sparse(metrics := outcome.metrics(self._sparse))
            self.series.add(metrics["density"])
        else:
            counters.skipped_steps += 1
        means = [
            commit_difference(worker, result.value.outcome, self._settings.decay)
            for worker, result in zip(self.workers, results, strict=True)
        ]
        # The mean is the same on all workers.
        self._pending = _Pending(own, means[0], buffers)
        self._taken = 0
        counters.bytes += round(statistics.fmean(result.bytes for result in results))

    def _apply(self) -> None:
        pending, self._pending = self._pending, None
        assert pending is not None
        if pending.mean is None:
            self._go_on_alone()
            return
        self._called_off = 0
        self.outer.step(pending.mean)
        for weights, snapshot in zip(self._weights, pending.snapshots, strict=True):
            new = weights.rounded(self.outer.shared)
            if self._settings.overlap:
                new += weights.read() - snapshot
            weights.write(new)
            if pending.buffers is not None:
                weights.write_buffers(pending.buffers)

    def _go_on_alone(self) -> None:
        """Put workers whose weights are not finite back to the shared ones, as real ranks do."""
        self._called_off += 1
        self.diverged = self._called_off >= MAX_CALLED_OFF
        for weights in self._weights:
            if not weights.read().isfinite().all():
                weights.write(weights.rounded(self.outer.shared))


class LocalTrainer:
    """Trains the R workers of one run, each on a model of its own between two exchanges.

    Args:
        config: The settings; `local_steps` is set.
        task: The task.
        split: Its examples.
    """

    def __init__(self, config: RunConfig, task: Task, split: Split) -> None:
        self._config, self._task = config, task
        device = self._device = torch.device(config.device)
        self._split = split.to(device)
        self._examples = EpochExamples(config, task, self._split.train)
        self._loss = TrainingLoss(config, task, len(split.train[0]), config.workers)
        # As on real ranks: the model comes from the seed of the run, workers get their own after.
        torch.manual_seed(config.seed)
        self.model = task.model().to(device)
        self._models = [self.model, *(copy.deepcopy(self.model) for _ in range(config.workers - 1))]
        settings = config.local()
        self._weights = [
            FlatWeights(
                model, settings.dense_below, device, with_buffers=settings.buffers == "mean"
            )
            for model in self._models
        ]
        self._exchange = VirtualLocalSteps(settings, self._weights)
        self.series = [self._exchange.series]
        self._parameters = [list(weights.parameters.values()) for weights in self._weights]
        self._optimizers = [make_optimizer(own, config) for own in self._parameters]
        self._rng_states = []
        for worker in range(config.workers):
            torch.manual_seed(worker_seed(config.seed, worker))
            self._rng_states.append(get_rng_states(device))
        self.sharding, self.ordering = make_ordering(config, len(split.train[0]))
        needs_rows, size = self.ordering.policy.needs_rows, self._weights[0].layout.size
        rows = row_settings(config, needs_rows, size) if needs_rows else None
        self._coordination = VirtualCoordination(self.ordering, config.workers, rows, size)
        self._rows = [
            make_row_source(model, rows, config.unit, config.batch_size)
            for model in self._models
            if rows is not None
        ]
        self._graphed: GraphedFunction | None = None
        if device.type == "cuda" and not self._rows and not has_dropout(self.model):
            together = GradientsOnStreams(
                config, self._loss, self._models, self._parameters, self._examples.tensors
            )
            buffers = [buffer for model in self._models for buffer in model.buffers()]
            self._graphed = GraphedFunction(together, restore=[*buffers, *self._loss.tensors])
        self._timers = {part: DeviceTimer(device) for part in ("exchange", "ordering")}

    def train_epoch(self, number: int, on_step: StepCallback) -> list[EpochCounters]:
        """Train one epoch."""
        config, counters = self._config, EpochCounters()
        begin = time.perf_counter()
        self._examples.begin_epoch(number)
        self._loss.begin_epoch()
        indices = torch.stack(
            [self.sharding.indices(worker, own) for worker, own in enumerate(self.ordering.orders)]
        ).to(self._device)
        sent_before = self._coordination.bytes
        steps = -(-indices.shape[1] // config.batch_size)
        for model in self._models:
            model.train()
        for at in range(steps):
            lr = config.lr_at(number, at, steps)
            batch = indices[:, at * config.batch_size : (at + 1) * config.batch_size]
            together = None if self._graphed is None else self._graphed.attempt(batch)
            if together is not None:
                self._step_together(together[0], lr)
                rows = []
            else:
                rows = [self._step(worker, own, lr, counters) for worker, own in enumerate(batch)]
            if self._rows:
                with self._timers["ordering"].measure():
                    self._coordination.add(torch.stack([row for row in rows if row is not None]))
            with self._timers["exchange"].measure():
                self._exchange.after_step(counters)
            counters.steps += 1
            on_step()
        if number == config.epochs:
            # What the last steps have changed belongs to the result.
            with self._timers["exchange"].measure():
                self._exchange.sync(counters)
        with self._timers["ordering"].measure():
            self._coordination.end_epoch()
        counters.exchange_seconds = self._timers["exchange"].reset()
        counters.ordering_seconds = self._timers["ordering"].reset()
        counters.seconds = time.perf_counter() - begin
        counters.residual_norm = float(
            torch.linalg.vector_norm(self._exchange.workers[0].feedback.residual)
        )
        counters.ordering_bytes = self._coordination.bytes - sent_before
        counters.bytes += counters.ordering_bytes
        return [counters]

    def _step_together(self, grads: Tensor, lr: float) -> None:
        """Take a step of all workers with their (R, D) gradients."""
        for own, optimizer, flat in zip(self._parameters, self._optimizers, grads, strict=True):
            set_lr(optimizer, lr)
            for parameter, grad in zip(own, flat.split([p.numel() for p in own]), strict=True):
                parameter.grad = grad.view_as(parameter)
            clip_and_step(optimizer, own, self._config.clip)

    def _step(self, worker: int, own: Tensor, lr: float, counters: EpochCounters) -> Tensor | None:
        """Take a step of one worker on its (B,) examples; return its (U, k) rows."""
        optimizer = self._optimizers[worker]
        set_lr(optimizer, lr)
        fetch = time.perf_counter()
        examples = tuple(tensor[own] for tensor in self._examples.tensors)
        counters.data_seconds += time.perf_counter() - fetch
        set_rng_states(self._rng_states[worker], self._device)
        optimizer.zero_grad()
        with passes(self._config):
            loss = self._loss(self._models[worker], *examples, worker=worker)
        loss.backward()
        self._rng_states[worker] = get_rng_states(self._device)
        rows = None
        if self._rows:
            with self._timers["ordering"].measure():
                rows = self._rows[worker].take(len(own), 1.0)
        # Each worker clips its own gradient: there is no averaged one.
        clip_and_step(optimizer, self._parameters[worker], self._config.clip)
        return rows

    def evaluate(self) -> list[Evaluation]:
        """Evaluate the shared weights."""
        # Diverged runs end: their record shows a loss that is not finite.
        shared = self._exchange.outer.shared * (torch.nan if self._exchange.diverged else 1.0)
        chunk = evaluation_chunk(self._task, self.model, self._config.batch_size)
        with self._weights[0].replaced_by(shared), passes(self._config):
            loss = full_loss(self._task, self.model, self._split.train, World.single(), chunk)
            return [Evaluation(loss, finite_metric(self._task, self.model, self._split.test))]

    def close(self) -> None:
        """Detach from the models and free the graphs."""
        self._graphed = None
        for rows in self._rows:
            rows.close()
