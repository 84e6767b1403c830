"""Training with all workers in one process: they take turns on one model.

The maths is that of real ranks. Each worker's gradient is computed on its own, with its own
generators and with rank 0's buffers, means are summed in the order of ranks, and rows reach the
order in the same groups. So up to `ONE_BUCKET_ELEMENTS` parameters (and with as many threads) a run
has the same bits as on real ranks, except where whole batches are ordered: their inner products are
summed in another order.

Letters: R workers, B examples of a worker in a step, D parameters, U units of a batch, k elements
of a row.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradherd.comm.world import World
from gradherd.hooks.row_sources import RowSource, make_row_source
from gradherd.lab.tasks.task import Split, Task, Tensors
from gradherd.lab.train.config import RunConfig
from gradherd.lab.train.cuda_graphs import GraphedFunction, has_dropout
from gradherd.lab.train.measurements import DeviceTimer, can_track_prefix_sums, herding_bound
from gradherd.lab.train.optimizers import clip_and_step, make_optimizer, mean_clip, set_lr
from gradherd.lab.train.stacked_step import FunctionalModel
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
from gradherd.lab.train.virtual_exchange import GradientAverager, VirtualCoordination, WorkerTurns
from gradherd.ordering.ordering import Ordering
from gradherd.ordering.registry import make_policy
from gradherd.ordering.sharding import UnitSharding
from gradherd.rows.settings import BatchRows, RowSettings, choose_rows, resolve_rows

# Workers whose passes run beside each other; more fill a GPU no further.
_STREAMS = 8


def make_ordering(config: RunConfig, examples: int) -> tuple[UnitSharding, Ordering]:
    """Return how examples are sharded over workers, and the orders of all workers.

    Args:
        config: The settings of the run.
        examples: Number of training examples.
    """
    sharding = UnitSharding(examples, config.unit, config.workers, drop_last=False)
    policy = make_policy(config.order)
    return sharding, Ordering(policy, sharding.sizes, seed=config.seed, length=sharding.length)


def row_settings(config: RunConfig, needs_rows: bool, size: int) -> RowSettings:
    """Return how `attach` would read the rows of a DDP model.

    Args:
        config: The settings of the run.
        needs_rows: Whether its order needs rows at all.
        size: Number of parameters, D.

    Raises:
        ValueError: `attach` would refuse these settings.
    """
    named = resolve_rows(config.row_choice(), config.unit, config.batch_size)
    # Local steps have no DDP whose hook could deliver whole gradients.
    free = config.workers == 1 or (config.density is None and config.local_steps is None)
    if isinstance(named, BatchRows) and not free:
        # The same refusal as by `attach`: a virtual run must not accept what real ranks do not.
        raise ValueError(
            "rows='batch' does not work with a sparsifier or local steps: use 'sketch'"
        )
    if named is not None:
        return named
    whole_batches = config.unit == config.batch_size
    return choose_rows(
        needs_rows=needs_rows,
        whole_batches=whole_batches,
        free=free,
        size=size,
        on_gpu=False,  # the same rows as on the CPU: virtual runs have the bits of real ranks
        workers=config.workers,
    )[0]


class GradientsOnStreams:
    """The gradients of all workers of a step, worker beside worker; captured as one CUDA graph.

    The passes of one worker are kernels too small for a GPU; those of several fill it.

    Args:
        config: The settings of the run.
        loss: The loss on a worker's batch.
        models: The model of all workers, or one of each.
        parameters: Its parameters in the order of the result, for each model.
        tensors: The training examples, read where they are.
    """

    def __init__(
        self,
        config: RunConfig,
        loss: TrainingLoss,
        models: Sequence[nn.Module],
        parameters: Sequence[Sequence[nn.Parameter]],
        tensors: Tensors,
    ) -> None:
        self._config, self._loss, self._models = config, loss, list(models)
        self._parameters, self._tensors = [list(own) for own in parameters], tensors
        on_gpu = tensors[0].is_cuda
        self._streams = [torch.cuda.Stream() for _ in range(_STREAMS)] if on_gpu else []

    def __call__(self, batch: Tensor) -> tuple[Tensor]:
        """Return the (R, D) gradients on (R, B) examples."""
        size = sum(parameter.numel() for parameter in self._parameters[0])
        # All of this is allocated before the streams begin and freed after they have ended.
        grads = self._parameters[0][0].new_empty(len(batch), size)
        parameters, models = self._parameters, self._models
        if len(models) == 1:
            parameters = parameters * len(batch)
            # As DDP does: all workers start from rank 0's buffers, and only its update remains.
            models = [models[0], *self._with_buffers(len(batch) - 1)]
        current = torch.cuda.current_stream() if self._streams else None
        for at, worker in enumerate(zip(models, parameters, batch, grads, strict=True)):
            if current is None:
                self._write(at, *worker)
                continue
            stream = self._streams[at % len(self._streams)]
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                self._write(at, *worker)
        for stream in self._streams[: len(batch)]:
            torch.cuda.current_stream().wait_stream(stream)
        return (grads,)

    def _with_buffers(self, count: int) -> list[Any]:
        """Return the shared model so many times, each with buffers of its own."""
        (model,) = self._models
        named = dict(model.named_buffers())
        if not named:
            return [model] * count
        copies = [{name: torch.empty_like(b) for name, b in named.items()} for _ in range(count)]
        # A few launches for all copies: no worker begins before they are made.
        for dtype in {buffer.dtype for buffer in named.values()}:
            names = [name for name, buffer in named.items() if buffer.dtype == dtype]
            targets = [copy[name] for copy in copies for name in names]
            if targets:
                torch._foreach_copy_(targets, [named[name] for name in names] * count)
        return [FunctionalModel(model, buffers) for buffers in copies]

    def _write(
        self, at: int, model: nn.Module, parameters: list[nn.Parameter], own: Tensor, out: Tensor
    ) -> None:
        """Write the gradient of worker `at` on its (B,) examples to `out`, (D,)."""
        with passes(self._config):
            loss = self._loss(model, *(tensor[own] for tensor in self._tensors), worker=at)
        # Not `backward`: the parameters' gradients would be one place for all workers.
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        parts = zip(found, parameters, strict=True)
        flat = [(torch.zeros_like(p) if g is None else g).flatten() for g, p in parts]
        torch.cat(flat, out=out)


class VirtualTrainer:
    """Trains the R workers of one run, one after the other.

    On a GPU the forward and backward passes of all workers in a step are replayed as one CUDA
    graph, worker beside worker, unless they draw random numbers or rows are read by hooks.
    """

    def __init__(
        self, config: RunConfig, task: Task, split: Split, *, capture: bool = True
    ) -> None:
        """Build the model.

        Args:
            config: The settings.
            task: The task.
            split: Its examples.
            capture: Whether steps may be captured as CUDA graphs; this only changes their speed.
        """
        self._config, self._task = config, task
        device = self._device = torch.device(config.device)
        self._split = split.to(device)
        self._examples = EpochExamples(config, task, self._split.train)
        self._loss = TrainingLoss(config, task, len(split.train[0]), config.workers)
        # As on real ranks: the model comes from the seed of the run, workers get their own after
        # it.
        torch.manual_seed(config.seed)
        self.model = task.model().to(device)
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.sharding, self.ordering = make_ordering(config, len(split.train[0]))
        self._averager = GradientAverager(config, named)
        self.series = [self._averager.series]
        size = self._averager.layout.size
        needs_rows = self.ordering.policy.needs_rows
        self._rows: RowSource | None = None
        self._backward_seconds = 0.0
        # Whole batches on several dense workers: the gradients that are averaged are the rows.
        self._gradients_are_rows = False
        # Every worker has received these values: nothing else is sent.
        self._payload_is_rows = needs_rows and config.rows == "payload"
        if self._payload_is_rows and (config.density is None or config.unit != config.batch_size):
            raise ValueError(
                "rows='payload' orders whole batches (unit = batch_size) by what a sparsifier "
                f"sends, got unit {config.unit} of {config.batch_size} and {config.sparsify!r}"
            )
        rows = None
        if needs_rows and not self._payload_is_rows:
            rows = row_settings(config, needs_rows, size)
            self._gradients_are_rows = isinstance(rows, BatchRows) and config.workers > 1
            if not self._gradients_are_rows:
                self._rows = make_row_source(self.model, rows, config.unit, config.batch_size)
        self._coordination = VirtualCoordination(self.ordering, config.workers, rows, size)
        self._parameters = list(named.values())
        self._optimizer = make_optimizer(self._parameters, config)
        self._turns = WorkerTurns(self.model, config)
        self._graphed: GraphedFunction | None = None
        # Hooks that read rows call Python, and dropout draws random numbers: no replay of these.
        if capture and device.type == "cuda" and self._rows is None and not has_dropout(self.model):
            together = GradientsOnStreams(
                config,
                self._loss,
                [self.model],
                [self._averager.parameters],
                self._examples.tensors,
            )
            written = [*self.model.buffers(), *self._loss.tensors]
            self._graphed = GraphedFunction(together, restore=written)
        self._exchange_timer, self._ordering_timer = DeviceTimer(device), DeviceTimer(device)
        steps = -(-self.sharding.length * config.unit // config.batch_size)
        self._tracks_prefix_sums = config.density is None and can_track_prefix_sums(steps, size)

    def train_epoch(self, number: int, on_step: StepCallback) -> list[EpochCounters]:
        """Train one epoch."""
        config, counters, means = self._config, EpochCounters(), []
        begin = time.perf_counter()
        self._examples.begin_epoch(number)
        self._loss.begin_epoch()
        indices = torch.stack(
            [self.sharding.indices(worker, own) for worker, own in enumerate(self.ordering.orders)]
        ).to(self._device)
        self.model.train()
        self._turns.restore_rng()
        sent_before = self._coordination.bytes
        batches = indices.split(config.batch_size, dim=1)
        for at, batch in enumerate(batches):
            set_lr(self._optimizer, config.lr_at(number, at, len(batches)))
            grads, rows = self._gradients(batch, counters)
            with self._exchange_timer.measure():
                self._averager.average(grads, counters)
            if self._tracks_prefix_sums:
                # A new tensor each step, and a copy is what gets clipped: no clone is needed.
                means.append(self._averager.mean)
            with self._ordering_timer.measure():
                if self._gradients_are_rows:
                    self._coordination.exchange(grads)
                elif self._payload_is_rows:
                    self._observe_payload(at)
                elif rows:
                    self._coordination.add(torch.stack(rows))
            clip_and_step(self._optimizer, self._parameters, mean_clip(config))
            counters.steps += 1
            on_step()
        with self._ordering_timer.measure():
            self._coordination.end_epoch()
        # Reading the timers waits for the GPU, so the total below covers all of its work.
        counters.exchange_seconds = self._exchange_timer.reset()
        counters.ordering_seconds = self._ordering_timer.reset()
        if self._rows is not None:  # part of the work on rows runs inside the backward
            before, self._backward_seconds = self._backward_seconds, self._rows.seconds_in_backward
            counters.ordering_seconds += self._backward_seconds - before
        counters.seconds = time.perf_counter() - begin
        self._averager.end_epoch(counters)
        counters.ordering_bytes = self._coordination.bytes - sent_before
        counters.bytes += counters.ordering_bytes
        if means:
            examples = config.batch_size * config.workers
            counters.herding_bound = herding_bound(torch.stack(means), examples)
        return [counters]

    def _observe_payload(self, step: int) -> None:
        """Order by what was sent in a step; one that was called off is skipped."""
        payload = self._averager.payload
        if payload is not None:
            self.ordering.observe(payload.unsqueeze(0), first=step)

    def _gradients(self, batch: Tensor, counters: EpochCounters) -> tuple[Tensor, list[Tensor]]:
        """Return the (R, D) gradients of all workers on (R, B) examples, and their (U, k) rows.

        The next step may overwrite the gradients.
        """
        together = None if self._graphed is None else self._graphed.attempt(batch)
        if together is not None:
            return together[0], []
        # Also the step whose loss turned out to draw: each worker has its own generators.
        return self._worker_gradients(batch, counters)

    def _worker_gradients(
        self, batch: Tensor, counters: EpochCounters
    ) -> tuple[Tensor, list[Tensor]]:
        grads, rows = [], []
        for worker, own in enumerate(batch):
            fetch = time.perf_counter()
            # No DataLoader: all examples are on the device, and one index fetches a batch.
            examples = tuple(tensor[own] for tensor in self._examples.tensors)
            counters.data_seconds += time.perf_counter() - fetch
            with self._turns.of(worker):
                self._optimizer.zero_grad()
                with passes(self._config):
                    loss = self._loss(self.model, *examples, worker=worker)
                loss.backward()
            # Copied out: the next worker's backward writes to the same gradients.
            grads.append(self._averager.flat_grad())
            if self._rows is not None:
                with self._ordering_timer.measure():
                    rows.append(self._rows.take(len(own), 1.0))
        return torch.stack(grads), rows

    def evaluate(self) -> list[Evaluation]:
        """Evaluate the model."""
        chunk = evaluation_chunk(self._task, self.model, self._config.batch_size)
        with passes(self._config):
            loss = full_loss(self._task, self.model, self._split.train, World.single(), chunk)
            return [Evaluation(loss, finite_metric(self._task, self.model, self._split.test))]

    def close(self) -> None:
        """Detach from the model and free the graphs."""
        self._graphed = None  # Its graphs hold GPU memory.
        if self._rows is not None:
            self._rows.close()
