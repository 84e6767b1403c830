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

import torch
from torch import Tensor, nn

from gradherd.comm.script import SharedRunner
from gradherd.hooks.row_sources import BatchGradientSource, ExampleRowSource, make_row_source
from gradherd.lab.tasks.task import Split, Task
from gradherd.lab.train.config import RunConfig
from gradherd.lab.train.exchanges import LocalModels, SharedModel, VirtualExchange
from gradherd.lab.train.measurements import DeviceTimer, can_track_prefix_sums, herding_bound
from gradherd.lab.train.optimizers import flat_grad, get_rng_states, set_rng_states, worker_seed
from gradherd.lab.train.trainer import (
    EpochCounters,
    Evaluation,
    StepCallback,
    Trainer,
    evaluate,
    passes,
    training_loss,
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


def epoch_indices(sharding: UnitSharding, ordering: Ordering) -> Tensor:
    """Return (R, L) the examples of all workers in the order of this epoch."""
    return torch.stack([sharding.indices(rank, own) for rank, own in enumerate(ordering.orders)])


def row_settings(config: RunConfig, size: int) -> RowSettings:
    """Return how `attach` would read the rows of a DDP model, for an order that needs them.

    Args:
        config: The settings of the run.
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
    return choose_rows(
        needs_rows=True,
        whole_batches=config.unit == config.batch_size,
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


class VirtualTrainer(Trainer):
    """Trains the R workers of one run, one after the other, on one model or on one each."""

    def __init__(self, config: RunConfig, task: Task, split: Split) -> None:
        super().__init__(config, task, split)
        make_exchange = SharedModel if config.local_steps is None else LocalModels
        self.exchange: VirtualExchange = make_exchange(config, self.model)
        exchange = self.exchange
        size = sum(parameter.numel() for parameter in exchange.parameters[0])
        self.sharding, self.ordering = make_ordering(config, len(split.train[0]))
        self._rows: list[BatchGradientSource | ExampleRowSource] = []
        # Whole batches on several dense workers: the gradients that are averaged are the rows.
        self._gradients_are_rows = False
        rows = None
        if self.ordering.policy.needs_rows:
            rows = row_settings(config, size)
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
        self._ordering_timer = DeviceTimer(self._device)
        steps = -(-self.sharding.length * config.unit // config.batch_size)
        dense = config.density is None and config.local_steps is None
        self._tracks_prefix_sums = dense and can_track_prefix_sums(steps, size)

    def train_epoch(self, number: int, on_step: StepCallback) -> list[EpochCounters]:
        """Train one epoch; a run of local steps that has diverged ends within it, as on ranks."""
        config, exchange, counters, means = self._config, self.exchange, EpochCounters(), []
        begin = time.perf_counter()
        self._examples.begin_epoch(number)
        indices = epoch_indices(self.sharding, self.ordering).to(self._device)
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
        counters.seconds = time.perf_counter() - begin
        counters.ordering_bytes = self._coordination.bytes - sent_before
        counters.bytes += counters.ordering_bytes
        if means:
            examples = config.batch_size * config.workers
            counters.herding_bound = herding_bound(torch.stack(means), examples)
        return [counters]

    def _gradients(self, batch: Tensor, counters: EpochCounters) -> tuple[Tensor, list[Tensor]]:
        """Return the (R, D) gradients of all workers on (R, B) examples, and their (U, k) rows."""
        grads, rows = [], []
        for worker, own in enumerate(batch):
            fetch = time.perf_counter()
            # No DataLoader: all examples are on the device, and one index fetches a batch.
            examples = [tensor[own] for tensor in self._examples.tensors]
            counters.data_seconds += time.perf_counter() - fetch
            which = worker % len(self.exchange.models)
            parameters = self.exchange.parameters[which]
            with self._turns.of(worker):
                for parameter in parameters:
                    parameter.grad = None
                with passes(self._config):
                    loss = training_loss(self._task, self.exchange.models[which], examples)
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
        """Detach from the models."""
        for rows in self._rows:
            rows.remove_hooks()
