"""Training with all workers in one process: they take turns on one model.

The maths is that of real ranks. Each worker's gradient is computed on its own, with its own
generators and with rank 0's buffers, means are summed in the order of ranks, and rows reach the
order in the same groups. So up to `ONE_BUCKET_ELEMENTS` parameters (and with as many threads) a run
has the same bits as on real ranks, except where whole batches are ordered: their inner products are
summed in another order, and where single examples of a model of more than 16 layers are sketched:
ranks read the layers that they agree on, workers that take turns read all.

Letters: R workers, B examples of a worker in a step, D parameters, U units of a batch, k elements
of a row.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradherd.comm.script import SharedRunner
from gradherd.hooks.row_sources import RowSource, make_row_source
from gradherd.lab.tasks.task import Split, Task, Tensors
from gradherd.lab.train.config import RunConfig
from gradherd.lab.train.cuda_graphs import GraphedFunction, SideBySide, has_dropout
from gradherd.lab.train.exchanges import LocalModels, SharedModel, VirtualExchange
from gradherd.lab.train.measurements import DeviceTimer, can_track_prefix_sums, herding_bound
from gradherd.lab.train.optimizers import flat_grad, get_rng_states, set_rng_states, worker_seed
from gradherd.lab.train.stacked_step import FunctionalModel
from gradherd.lab.train.trainer import (
    EpochCounters,
    Evaluation,
    StepCallback,
    Trainer,
    TrainingLoss,
    evaluate,
    passes,
)
from gradherd.ordering.coordination import (
    RowGatherer,
    observe_gathered,
    observe_slices,
    scatters_columns,
)
from gradherd.ordering.ordering import Ordering
from gradherd.ordering.registry import make_policy
from gradherd.ordering.sharding import UnitSharding
from gradherd.rows.settings import (
    BatchRows,
    RowSettings,
    SketchedRows,
    choose_rows,
    resolve_rows,
    row_length,
)


def make_ordering(config: RunConfig, examples: int) -> tuple[UnitSharding, Ordering]:
    """Return how examples are sharded over workers, and the orders of all workers."""
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


class VirtualCoordination:
    """Runs the coordination of real ranks for workers that share one ordering."""

    def __init__(
        self,
        ordering: Ordering,
        workers: int,
        rows: RowSettings | None = None,
        parameters: int = 0,
    ) -> None:
        """Start empty; real ranks scatter rows that are whole gradients of D `parameters`."""
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
        """Learn from (R, units, k) rows of several steps; `batches` are the units of each."""
        self._runner.start(observe_gathered(self._ordering, rows, batches, scatters=self._scatters))

    def exchange(self, grads: Tensor) -> None:
        """Learn from the (R, D) gradients of whole batches, exchanged by slices."""
        self._runner.start(observe_slices(self._ordering, (grads,)))

    def end_epoch(self) -> None:
        """Adopt the next orders."""
        self._gatherer.flush()
        ordering = self._ordering
        # Nothing was observed, but the order still needs to know that the epoch is complete.
        if not ordering.policy.needs_rows:
            steps = ordering.length - ordering.steps
            ordering.observe(None, torch.ones((steps, self._workers), dtype=torch.bool))
        ordering.end_epoch()


class WorkerTurns:
    """Gives each worker its own generators, and all of a shared model rank 0's buffers, as DDP."""

    def __init__(self, models: Sequence[nn.Module], config: RunConfig) -> None:
        # Models of their own keep buffers of their own.
        self._buffers = list(models[0].buffers()) if len(models) == 1 else []
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


class GradientsOnStreams:
    """The gradients of all workers of a step, worker beside worker; captured as one CUDA graph.

    The passes of one worker are kernels too small for a GPU; those of several fill it.
    """

    def __init__(
        self,
        config: RunConfig,
        loss: TrainingLoss,
        exchange: VirtualExchange,
        tensors: Tensors,
    ) -> None:
        self._config, self._loss, self._tensors = config, loss, tensors
        self._models, self._parameters = list(exchange.models), list(exchange.parameters)
        self._on_streams = SideBySide(on_gpu=tensors[0].is_cuda)

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
        workers = zip(range(len(batch)), models, parameters, batch, grads, strict=True)
        self._on_streams([partial(self._write, *worker) for worker in workers])
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


class VirtualTrainer(Trainer):
    """Trains the R workers of one run, one after the other, on one model or on one each.

    On a GPU the forward and backward passes of all workers in a step are replayed as one CUDA
    graph, worker beside worker, unless they draw random numbers or rows are read by hooks.
    """

    def __init__(
        self, config: RunConfig, task: Task, split: Split, *, capture: bool = True
    ) -> None:
        """Build the model; `capture` allows CUDA graphs, which only change the speed."""
        super().__init__(config, task, split)
        device = self._device
        self._loss = TrainingLoss(config, task, len(split.train[0]), config.workers)
        make_exchange = SharedModel if config.local_steps is None else LocalModels
        self.exchange: VirtualExchange = make_exchange(config, self.model)
        exchange = self.exchange
        self.series = [exchange.series]
        size = sum(parameter.numel() for parameter in exchange.parameters[0])
        self.sharding, self.ordering = make_ordering(config, len(split.train[0]))
        needs_rows = self.ordering.policy.needs_rows
        self._rows: list[RowSource] = []
        self._backward_seconds = 0.0
        # Whole batches on several dense workers: the gradients that are averaged are the rows.
        self._gradients_are_rows = False
        rows = None
        if needs_rows:
            rows = row_settings(config, needs_rows, size)
            self._gradients_are_rows = isinstance(rows, BatchRows) and config.workers > 1
            if isinstance(rows, SketchedRows):
                # Ranks agree on the layers they read; workers that take turns read all.
                rows = replace(rows, layers=None)
            if not self._gradients_are_rows:
                self._rows = [
                    make_row_source(model, rows, config.unit, config.batch_size)
                    for model in exchange.models
                ]
        self._coordination = VirtualCoordination(self.ordering, config.workers, rows, size)
        self._turns = WorkerTurns(exchange.models, config)
        self._graphed: GraphedFunction | None = None
        # Hooks that read rows call Python, and dropout draws random numbers: no replay of these.
        if capture and device.type == "cuda" and not self._rows and not has_dropout(self.model):
            together = GradientsOnStreams(config, self._loss, exchange, self._examples.tensors)
            buffers = [buffer for model in exchange.models for buffer in model.buffers()]
            self._graphed = GraphedFunction(together, restore=[*buffers, *self._loss.tensors])
        self._ordering_timer = DeviceTimer(device)
        steps = -(-self.sharding.length * config.unit // config.batch_size)
        dense = config.density is None and config.local_steps is None
        self._tracks_prefix_sums = dense and can_track_prefix_sums(steps, size)

    def train_epoch(self, number: int, on_step: StepCallback) -> list[EpochCounters]:
        """Train one epoch; a run of local steps that has diverged ends within it, as on ranks."""
        config, exchange, counters, means = self._config, self.exchange, EpochCounters(), []
        begin = time.perf_counter()
        self._examples.begin_epoch(number)
        self._loss.begin_epoch()
        indices = torch.stack(
            [self.sharding.indices(worker, own) for worker, own in enumerate(self.ordering.orders)]
        ).to(self._device)
        for model in exchange.models:
            model.train()
        self._turns.restore_rng()
        sent_before = self._coordination.bytes
        batches = indices.split(config.batch_size, dim=1)
        for at, batch in enumerate(batches):
            grads, rows = self._gradients(batch, counters)
            exchange.step(grads, config.lr_at(number, at, len(batches)), counters)
            if exchange.diverged:
                break
            if self._tracks_prefix_sums and exchange.mean is not None:
                means.append(exchange.mean)  # a new tensor in each step
            with self._ordering_timer.measure():
                if self._gradients_are_rows:
                    self._coordination.exchange(grads)
                elif rows:
                    self._coordination.add(torch.stack(rows))
            counters.steps += 1
            on_step()
        with self._ordering_timer.measure():
            if not exchange.diverged:
                self._coordination.end_epoch()
        # Reading the timers waits for the GPU, so the total below covers all of its work.
        exchange.end_epoch(counters, last=number == config.epochs)
        counters.ordering_seconds = self._ordering_timer.reset()
        # Part of the work on rows runs inside the backward.
        before, self._backward_seconds = (
            self._backward_seconds,
            sum(one.seconds_in_backward for one in self._rows),
        )
        counters.ordering_seconds += self._backward_seconds - before
        counters.seconds = time.perf_counter() - begin
        counters.ordering_bytes = self._coordination.bytes - sent_before
        counters.bytes += counters.ordering_bytes
        if means:
            examples = config.batch_size * config.workers
            counters.herding_bound = herding_bound(torch.stack(means), examples)
        return [counters]

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
            which = worker % len(self.exchange.models)
            parameters = self.exchange.parameters[which]
            with self._turns.of(worker):
                for parameter in parameters:
                    parameter.grad = None
                with passes(self._config):
                    loss = self._loss(self.exchange.models[which], *examples, worker=worker)
                loss.backward()
            # Copied out: the next worker's backward may write to the same gradients.
            grads.append(flat_grad(parameters))
            if self._rows:
                with self._ordering_timer.measure():
                    rows.append(self._rows[which].take(len(own), 1.0))
        return torch.stack(grads), rows

    def evaluate(self) -> list[Evaluation]:
        """Evaluate the model; of local steps, the weights that workers share."""
        with self.exchange.evaluated(), passes(self._config):
            return [evaluate(self._config, self._task, self.model, self._split)]

    def close(self) -> None:
        """Detach from the models and free the graphs."""
        self._graphed = None  # Its graphs hold GPU memory.
        for rows in self._rows:
            rows.remove_hooks()
