"""Many virtual runs of a model side by side: seeds, orders and learning rates of one study.

The maths of `virtual_trainer`, but gradients come from other kernels, so results differ in their
last bits, and orders may diverge after a while where a sign depends on those bits. Sketched rows
are as accurate, but use another hash: here the whole gradient is available and is sketched at once.

Letters: S runs, s of them that read rows alike, R workers, B examples of a worker in a step, U
units of them, G groups, T steps, D parameters, k elements of a row.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from gradherd.comm.sliced_mean import mean_bytes
from gradherd.lab.tasks.task import Split, Task
from gradherd.lab.train.config import RunConfig
from gradherd.lab.train.exchanges import SparseAverager
from gradherd.lab.train.measurements import BinnedSeries, can_track_prefix_sums, herding_bound
from gradherd.lab.train.optimizers import FunctionalOptimizer
from gradherd.lab.train.stacked_step import StackedStep
from gradherd.lab.train.stacking import make_row_buffers, two_sided_matrix
from gradherd.lab.train.trainer import (
    EpochCounters,
    EpochExamples,
    Evaluation,
    StepCallback,
    evaluate,
)
from gradherd.lab.train.virtual_order import VirtualCoordination, make_ordering, row_settings
from gradherd.ordering.coordination import finite_batches
from gradherd.ordering.registry import make_policy

# Rows are buffered and passed to the orders together, up to this many steps and elements.
_MAX_STEPS, _MAX_ELEMENTS, _MAX_GPU_ELEMENTS = 512, 8_000_000, 1 << 30
# Steps of a graph on the CPU, and steps of an epoch from which building it takes less time than it
# saves. A GPU replays a graph of one step without the host.
_STEPS_PER_CALL, _MANY_STEPS = 16, 2000


class StackedTrainer:
    """Trains S runs of R workers each; settings may differ as `stacking` allows."""

    def __init__(self, configs: Sequence[RunConfig], task: Task, split: Split) -> None:
        self._configs, self._task = list(configs), task
        first, device = self._configs[0], torch.device(configs[0].device)
        self._split = split.to(device)
        # Stacks of augmented runs have one seed.
        self._examples = EpochExamples(first, task, self._split.train)
        initial = []
        for config in self._configs:
            # Each run starts from the weights that it would have alone.
            torch.manual_seed(config.seed)
            self.model = task.model().to(device)
            initial.append(nn.utils.parameters_to_vector(self.model.parameters()).detach())
        self._parameters = torch.stack(initial)
        self._size = self._parameters.shape[1]
        pairs = [make_ordering(config, len(split.train[0])) for config in self._configs]
        self.sharding, self.orderings = pairs[0][0], [ordering for _, ordering in pairs]
        self._coordination = [
            VirtualCoordination(
                ordering,
                first.workers,
                row_settings(config, True, self._size) if ordering.policy.needs_rows else None,
                self._size,
            )
            for config, ordering in zip(self._configs, self.orderings, strict=True)
        ]
        self._row_buffers = buffers = make_row_buffers(
            self._configs,
            self._size,
            partial(two_sided_matrix, task, self.model, self._split.train),
        )
        self._step = StackedStep(
            task,
            self.model,
            self._examples.tensors,
            FunctionalOptimizer.of(first),
            self._parameters,
            # Closes over `buffers`, not `self`: a step that refers back to its trainer would keep
            # GPU memory allocated until the garbage collector runs.
            lambda grads: tuple(buffer.select(grads) for buffer in buffers),
            first.workers,
        )
        self._sparse: list[SparseAverager] = []
        if first.density is not None:
            self._sparse = [SparseAverager(config, self.model) for config in self._configs]
        self.series = [sparse.series for sparse in self._sparse] or [
            BinnedSeries() for _ in configs
        ]
        # Whole batches on several dense workers: the gradients that are averaged are the rows.
        self._gradients_are_rows = (
            first.unit == first.batch_size and first.workers > 1 and not self._sparse
        )
        self._batch_order_bytes = [
            batch_order_bytes(config, len(split.train[0])) if self._gradients_are_rows else 0
            for config in self._configs
        ]
        steps = -(-self.sharding.length * first.unit // first.batch_size)
        self._tracks_prefix_sums = not self._sparse and can_track_prefix_sums(steps, self._size)

    def train_epoch(self, number: int, on_step: StepCallback) -> list[EpochCounters]:
        """Train one epoch of all runs."""
        with _no_autograd(self._parameters.device):
            return self._train_epoch(number, on_step)

    def _train_epoch(self, number: int, on_step: StepCallback) -> list[EpochCounters]:
        config, runs = self._configs[0], len(self._configs)
        counters = [EpochCounters() for _ in self._configs]
        begin = time.perf_counter()
        self._examples.begin_epoch(number)
        batches = self._indices().split(config.batch_size, dim=2)
        # All of an epoch at once: on a GPU each copy from the host would delay the step.
        count = len(batches)
        # Runs of a stack have one schedule: rates are computed once for each base rate.
        bases = {one.lr: one for one in self._configs}
        rates = {
            lr: torch.tensor([one.lr_at(number, at, count) for at in range(count)])
            for lr, one in bases.items()
        }
        lrs = torch.stack([rates[one.lr] for one in self._configs], dim=1).unsqueeze(2)
        lrs = lrs.to(self._parameters.device)
        # (T, S, D): the next replay of a graph overwrites its means, so they are copied anyway.
        means = self._parameters.new_empty(
            (count if self._tracks_prefix_sums else 0, *self._parameters.shape)
        )
        sent_before = [one.bytes for one in self._coordination]
        data_seconds = time.perf_counter() - begin
        buffered, capacity = 0, self._buffered_steps(batches[0].shape[2])
        done, at_once = 0, self._steps_per_call(count)
        while done < count:
            # The last batch may be shorter, so it never shares a call or a buffer with others.
            fits = min(capacity - buffered, count - 1 - done) >= at_once
            span = slice(done, done + (at_once if fits else 1))
            rows_of_buffers, mean = self._advance(lrs[span], batches[span], counters)
            if self._tracks_prefix_sums:
                means[span] = mean
            for buffer, rows in zip(self._row_buffers, rows_of_buffers, strict=True):
                buffer.store(rows, buffered, capacity)
            buffered, done = buffered + span.stop - done, span.stop
            if buffered == capacity or done >= count - 1:
                self._observe(buffered, counters)
                on_step(buffered * runs)
                buffered = 0
        self._end_epoch(counters)
        self._set_herding_bounds(means, counters)
        seconds = time.perf_counter() - begin
        # Measured per run; everything else happens for all runs at once.
        separate = sum(own.ordering_seconds + own.exchange_seconds for own in counters)
        for at, own in enumerate(counters):
            own.steps = len(batches)
            # Time that the runs spent together is divided evenly.
            own.seconds = (seconds - separate) / runs + own.ordering_seconds + own.exchange_seconds
            own.data_seconds = data_seconds / runs
            own.ordering_bytes = self._coordination[at].bytes - sent_before[at]
            # Counted in advance: these rows are observed directly, without the exchange that would
            # count them.
            own.ordering_bytes += self._batch_order_bytes[at]
            own.bytes += own.ordering_bytes
            if not self._sparse:
                own.bytes += len(batches) * mean_bytes(self._size, config.workers)
        return counters

    def _indices(self) -> Tensor:
        """Return (S, R, L) the examples of all runs in the order of this epoch."""
        return torch.stack(
            [
                torch.stack(
                    [self.sharding.indices(r, own) for r, own in enumerate(ordering.orders)]
                )
                for ordering in self.orderings
            ]
        ).to(self._parameters.device)

    def _steps_per_call(self, steps: int) -> int:
        """Return how many steps are taken in a call, in epochs of this many."""
        together = not self._sparse and not self._parameters.is_cuda and steps >= _MANY_STEPS
        together &= self._step.takes_several
        return _STEPS_PER_CALL if together else 1

    def _advance(
        self, lrs: Tensor, batches: Sequence[Tensor], counters: list[EpochCounters]
    ) -> tuple[list[Tensor], Tensor]:
        """Take K steps on (S, R, B) examples each.

        Returns:
            (K, s, G, k) rows of each buffer, and (K, S, D) means.
        """
        if len(batches) > 1:
            together = torch.stack(list(batches))
            shape = (*together.shape[:2], -1, self._group_size(batches[0]))
            several, means = self._step.several(lrs, together.reshape(shape))
            return list(several), means
        rows, mean = self._advance_one(lrs[0], batches[0], counters)
        return [one.unsqueeze(0) for one in rows], mean.unsqueeze(0)

    def _advance_one(
        self, lr: Tensor, batch: Tensor, counters: list[EpochCounters]
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        groups = batch.reshape(len(batch), -1, self._group_size(batch))
        if not self._sparse:
            return self._step(lr, groups)
        rows, grads = self._step.gradients(groups)
        means = [
            average(own, run_counters)
            for average, own, run_counters in zip(self._sparse, grads, counters, strict=True)
        ]
        mean = torch.stack(means)
        self._step.update(lr, mean)
        return rows, mean

    def _group_size(self, batch: Tensor) -> int:
        """Return how many of (S, R, B) examples share a gradient: a unit, a worker's, or all."""
        # The largest group that still gives every row: fewer groups are less work.
        if self._row_buffers:
            return self._configs[0].unit
        return batch.shape[2] if self._sparse else batch[0].numel()

    def _buffered_steps(self, examples: int) -> int:
        """Return how many steps of rows are buffered."""
        units = self._configs[0].workers * max(1, examples // self._configs[0].unit)
        most = _MAX_GPU_ELEMENTS if self._parameters.is_cuda else _MAX_ELEMENTS
        elements = sum(len(buffer.runs) * buffer.columns for buffer in self._row_buffers) * units
        # At least one step, even if its rows alone are over the limit.
        return max(1, min(_MAX_STEPS, most // max(1, elements)))

    def _observe(self, steps: int, counters: list[EpochCounters]) -> None:
        """Pass the buffered rows of `steps` steps to the orders."""
        workers = self._configs[0].workers
        for buffer in self._row_buffers:
            for at, stored in buffer.stored(steps):
                begin = time.perf_counter()
                rows = stored.unflatten(1, (workers, -1)).transpose(1, 2)  # (T, U, R, k)
                sizes = [rows.shape[1]] * steps
                rows = rows.flatten(0, 1)
                if self._gradients_are_rows and buffer.columns == self._size:
                    self.orderings[at].observe(rows, finite_batches(rows, sizes))
                else:
                    self._coordination[at].gather(rows.transpose(0, 1), sizes)
                counters[at].ordering_seconds += time.perf_counter() - begin

    def _end_epoch(self, counters: list[EpochCounters]) -> None:
        for sparse, own in zip(self._sparse, counters, strict=bool(self._sparse)):
            sparse.end_epoch(own)
        for coordination, own in zip(self._coordination, counters, strict=True):
            begin = time.perf_counter()
            coordination.end_epoch()
            own.ordering_seconds += time.perf_counter() - begin

    def _set_herding_bounds(self, means: Tensor, counters: list[EpochCounters]) -> None:
        examples = self._configs[0].batch_size * self._configs[0].workers
        if len(means):
            for at, own in enumerate(counters):
                own.herding_bound = herding_bound(means[:, at], examples)

    def evaluate(self) -> list[Evaluation]:
        """Evaluate the models one after the other."""
        evaluations = []
        for flat in self._parameters:
            nn.utils.vector_to_parameters(flat, self.model.parameters())
            evaluations.append(evaluate(self._configs[0], self._task, self.model, self._split))
        return evaluations

    def close(self) -> None:
        """Do nothing: there are no hooks, and no reference cycle keeps memory alive."""


def batch_order_bytes(config: RunConfig, examples: int) -> int:
    """Return the bytes that ordering sends in an epoch where whole batches are rows.

    Counted on rows of one element: what is sent are inner products, whatever the rows' length.
    """
    if not make_policy(config.order).needs_rows or config.rows == "sketch":
        return 0
    _, ordering = make_ordering(config, examples)
    coordination = VirtualCoordination(ordering, config.workers)
    rows = torch.zeros(config.workers, 1)
    for _ in range(ordering.length):
        coordination.exchange(rows)
    return coordination.bytes


@contextlib.contextmanager
def _no_autograd(device: torch.device) -> Iterator[None]:
    """Disable autograd; inference mode is faster, but CUDA graphs cannot be captured in it."""
    with torch.inference_mode(device.type == "cpu"), torch.no_grad():
        yield
