"""A run with all workers in one process: they take turns on one model.

The same maths as on real ranks. Each worker's gradient is computed by itself, with its own
generator and with rank 0's buffers, means are added up in the order of ranks, and rows are shown to
the order in the same portions; so up to `mean.SMALL` parameters (and with as many threads) a run
has the same bits as on real ranks, except where whole batches are ordered: their inner products
are added up in another order.

Letters: R workers, D parameters, k numbers of a row.
"""

import time

import torch
from torch import Tensor

from gradherd.attach.attach import make_reader
from gradherd.attach.row_sources import Reader
from gradherd.comm.world import World
from gradherd.lab.tasks.task import Split, Task
from gradherd.lab.train.config import RunConfig
from gradherd.lab.train.cuda_graphs import GraphedFunction, has_dropout
from gradherd.lab.train.measurements import DeviceTimer, can_track_prefix_sums, herding_bound
from gradherd.lab.train.optimizers import clip_and_step, make_optimizer, set_lr
from gradherd.lab.train.trainer import (
    EpochCounters,
    Evaluation,
    StepCallback,
    chunk_size,
    finite_metric,
    full_loss,
)
from gradherd.lab.train.virtual_exchange import GradientAverager, Portions, WorkerTurns
from gradherd.ordering.ordering import Ordering
from gradherd.ordering.registry import make_policy
from gradherd.ordering.sharding import UnitSharding
from gradherd.rows.settings import BatchRows, RowSettings, choose_rows, resolve_rows


def make_ordering(config: RunConfig, examples: int) -> tuple[UnitSharding, Ordering]:
    """Return how examples are dealt to workers, and the order of all of them."""
    deal = UnitSharding(examples, config.unit, config.workers, drop_last=False)
    policy = make_policy(config.order)
    return deal, Ordering(policy, deal.sizes, seed=config.seed, length=deal.length)


def row_settings(config: RunConfig, needs_rows: bool, size: int) -> RowSettings:
    """Return how `attach` would read rows of a DDP model."""
    named = resolve_rows(config.row_choice(), config.unit, config.batch_size)
    free = config.workers == 1 or config.density is None
    if isinstance(named, BatchRows) and not free:
        raise ValueError("rows='batch' cannot be had with a sparsifier: use 'sketch'")
    batches = config.unit == config.batch_size
    return (
        named or choose_rows(needs_rows=needs_rows, whole_batches=batches, free=free, size=size)[0]
    )


class VirtualTrainer:
    """R workers of one run, one after the other.

    On a GPU the passes of all workers in a step are replayed as one CUDA graph, unless numbers
    are drawn in them or rows are read by hooks.
    """

    def __init__(
        self, config: RunConfig, task: Task, split: Split, *, capture: bool = True
    ) -> None:
        """Build the model.

        Args:
            config: The settings.
            task: What is trained.
            split: Its examples.
            capture: Whether steps may be replayed; that changes how long they take only.
        """
        self._config, self._task = config, task
        device = self._device = torch.device(config.device)
        self._split = Split(
            *(tuple(c.to(device) for c in part) for part in (split.train, split.test))
        )
        torch.manual_seed(config.seed)
        self.model = task.model().to(device)
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.deal, self.ordering = make_ordering(config, len(split.train[0]))
        self._exchange = GradientAverager(config, named)
        self.series = [self._exchange.series]
        size = self._exchange.layout.size
        needs_rows = self.ordering.policy.needs_rows
        self._portions = Portions(self.ordering, config.workers)
        self._reader: Reader | None = None
        # Whole batches on several dense workers: what is exchanged is the row.
        self._rides = False
        if needs_rows:
            rows = row_settings(config, needs_rows, size)
            self._rides = isinstance(rows, BatchRows) and config.workers > 1
            if not self._rides:
                self._reader = make_reader(self.model, rows, config.unit, config.batch_size)
        self._parameters = list(named.values())
        self._optimizer = make_optimizer(self._parameters, config)
        self._turns = WorkerTurns(self.model, config)
        self._captured: GraphedFunction | None = None
        if (
            capture
            and device.type == "cuda"
            and self._reader is None
            and not has_dropout(self.model)
        ):
            self._captured = GraphedFunction(self._passes, restore=list(self.model.buffers()))
        self._exchange_time, self._ordering_time = DeviceTimer(device), DeviceTimer(device)
        batches = -(-self.deal.length * config.unit // config.batch_size)
        self._watches = config.density is None and can_track_prefix_sums(batches, size)

    def epoch(self, number: int, tick: StepCallback) -> list[EpochCounters]:
        """Train one epoch."""
        config, tally, means = self._config, EpochCounters(), []
        begin = time.perf_counter()
        set_lr(self._optimizer, config.lr_at(number))
        indices = torch.stack(
            [self.deal.indices(worker, own) for worker, own in enumerate(self.ordering.orders)]
        ).to(self._device)
        self.model.train()
        self._turns.resume()
        sent_before = self._portions.bytes
        for at in range(0, indices.shape[1], config.batch_size):
            batch = indices[:, at : at + config.batch_size]
            grads, rows = self._gradients(batch, tally)
            with self._exchange_time.one():
                self._exchange.average(grads, tally)
            if self._watches:
                means.append(self._exchange.mean)
            with self._ordering_time.one():
                if self._rides:
                    self._portions.ride(grads)
                elif rows:
                    self._portions.add(torch.stack(rows, dim=1))
            clip_and_step(self._optimizer, self._parameters, config.clip)
            tally.steps += 1
            tick()
        with self._ordering_time.one():
            self._portions.end_epoch()
        # These wait for the GPU.
        tally.exchange_seconds = self._exchange_time.take()
        tally.ordering_seconds = self._ordering_time.take()
        tally.seconds = time.perf_counter() - begin
        self._exchange.end_epoch(tally)
        tally.ordering_bytes = self._portions.bytes - sent_before
        tally.bytes += tally.ordering_bytes
        if means:
            tally.herding_bound = herding_bound(
                torch.stack(means), config.batch_size * config.workers
            )
        return [tally]

    def _gradients(self, batch: Tensor, tally: EpochCounters) -> tuple[Tensor, list[Tensor]]:
        """Return every worker's (R, D) gradient of its own (R, B) examples, and (U, k) rows.

        The gradients may be overwritten by those of the next step.
        """
        if self._captured is not None and self._captured.why_not is None:
            return self._captured(batch)[0], []
        return self._one_by_one(batch, tally)

    def _passes(self, batch: Tensor) -> tuple[Tensor]:
        """Return the (R, D) gradients alone, as what is captured."""
        return (self._one_by_one(batch, EpochCounters())[0],)

    def _one_by_one(self, batch: Tensor, tally: EpochCounters) -> tuple[Tensor, list[Tensor]]:
        grads, rows = [], []
        for worker, own in enumerate(batch):
            fetch = time.perf_counter()
            columns = tuple(column[own] for column in self._split.train)
            tally.data_seconds += time.perf_counter() - fetch
            with self._turns.of(worker):
                self._optimizer.zero_grad()
                self._task.loss(self.model, *columns).backward()
            grads.append(self._exchange.flat())
            if self._reader is not None:
                with self._ordering_time.one():
                    rows.append(self._reader.take(len(own), 1.0))
        return torch.stack(grads), rows

    def quality(self) -> list[Evaluation]:
        """Measure the model."""
        chunk = chunk_size(self.model, self._config.batch_size)
        loss = full_loss(self._task, self.model, self._split.train, World.single(), chunk)
        return [Evaluation(loss, finite_metric(self._task, self.model, self._split.test))]

    def close(self) -> None:
        """Leave the model."""
        self._captured = None  # It holds on to this fleet, and the graphs to their memory.
        if self._reader is not None:
            self._reader.close()
