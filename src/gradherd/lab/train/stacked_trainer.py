"""Many virtual runs of a model side by side: seeds, orders and learning rates of one study.

The maths of `virtual_trainer`, but gradients come from other kernels, so results differ in their
last bits, and orders may diverge after a while where a sign depends on those bits. Sketched rows
are as accurate, but use another hash: here the whole gradient is available and is sketched at once.

Letters: S runs, s of them whose orders need rows, R workers, B examples of a worker in a step, U
units of them, G groups, T steps, D parameters, k elements of a row.
"""

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from gradherd.comm.sliced_mean import mean_bytes
from gradherd.lab.tasks.task import Split, Task, Tensors
from gradherd.lab.train.config import RunConfig
from gradherd.lab.train.measurements import BinnedSeries, can_track_prefix_sums, herding_bound
from gradherd.lab.train.optimizers import FunctionalOptimizer
from gradherd.lab.train.stacked_step import StackedStep
from gradherd.lab.train.trainer import (
    EpochCounters,
    EpochExamples,
    Evaluation,
    StepCallback,
    evaluate,
)
from gradherd.lab.train.virtual_trainer import VirtualCoordination, make_ordering, row_settings
from gradherd.ordering.coordination import finite_batches
from gradherd.rows.capture import Capture
from gradherd.rows.settings import RowSettings, SketchRows, TwoSidedRows
from gradherd.rows.sketch import CountSketch

# Rows are buffered and passed to the orders together, up to this many steps and elements.
_MAX_STEPS, _MAX_ELEMENTS, _MAX_GPU_ELEMENTS = 512, 8_000_000, 1 << 30


class StackedTrainer:
    """Trains S runs of R workers each; settings may differ as `stacking` allows."""

    def __init__(self, configs: Sequence[RunConfig], task: Task, split: Split) -> None:
        """Build a model of each run; runs whose orders need rows come last."""
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
        size = self._size = self._parameters.shape[1]
        pairs = [make_ordering(config, len(split.train[0])) for config in self._configs]
        self.sharding, self.orderings = pairs[0][0], [ordering for _, ordering in pairs]
        needs_rows = [ordering.policy.needs_rows for ordering in self.orderings]
        assert needs_rows == sorted(needs_rows)
        self._first_with_rows = without = needs_rows.count(False)
        # Orders of a stack that need rows read them alike.
        rows = row_settings(self._configs[-1], True, size) if needs_rows[-1] else None
        self._coordination = [
            VirtualCoordination(ordering, first.workers, rows if needs else None, size)
            for ordering, needs in zip(self.orderings, needs_rows, strict=True)
        ]
        sketch = make_sketch(rows, task, self.model, self._split.train)
        self._columns = size if sketch is None else sketch(self._parameters[:1]).shape[1]
        self._rows = torch.empty(0)  # (s, T, G, k) of the steps that were not observed yet
        # Closes over these two, not `self`: a step that refers back to its trainer would keep GPU
        # memory allocated until the garbage collector runs.
        self._step = StackedStep(
            task,
            self.model,
            self._examples.tensors,
            FunctionalOptimizer.of(first),
            self._parameters,
            lambda grads: grads[without:] if sketch is None else sketch(grads[without:]),
        )
        self.series = [BinnedSeries() for _ in configs]
        # Whole batches on several workers: the gradients that are averaged are the rows.
        self._gradients_are_rows = (
            first.unit == first.batch_size and first.workers > 1 and sketch is None
        )
        self._batch_order_bytes = [
            batch_order_bytes(config, len(split.train[0]))
            if needs and self._gradients_are_rows
            else 0
            for config, needs in zip(self._configs, needs_rows, strict=True)
        ]
        steps = -(-self.sharding.length * first.unit // first.batch_size)
        self._tracks_prefix_sums = can_track_prefix_sums(steps, size)

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
        for at, batch in enumerate(batches):
            # The largest group that still gives every row: fewer groups are less work.
            group = config.unit if self._first_with_rows < runs else batch[0].numel()
            # Contiguous, as traces expect it.
            rows, mean = self._step(lrs[at], batch.reshape(runs, -1, group).contiguous())
            if self._tracks_prefix_sums:
                means[at] = mean
            shape = (len(rows), capacity, *rows.shape[1:])
            if self._rows.shape != shape:
                self._rows = rows.new_empty(shape)
            self._rows[:, buffered].copy_(rows)
            buffered += 1
            # The last batch may be shorter, so it never shares a buffer with others.
            if buffered == capacity or at >= count - 2:
                self._observe(buffered, counters)
                on_step(buffered * runs)
                buffered = 0
        for coordination, own in zip(self._coordination, counters, strict=True):
            since = time.perf_counter()
            coordination.end_epoch()
            own.ordering_seconds += time.perf_counter() - since
        self._set_herding_bounds(means, counters)
        seconds = time.perf_counter() - begin
        # Measured per run; everything else happens for all runs at once.
        separate = sum(own.ordering_seconds for own in counters)
        for at, own in enumerate(counters):
            own.steps = count
            # Time that the runs spent together is divided evenly.
            own.seconds = (seconds - separate) / runs + own.ordering_seconds
            own.data_seconds = data_seconds / runs
            own.ordering_bytes = self._coordination[at].bytes - sent_before[at]
            # Counted in advance: these rows are observed directly, without the exchange that would
            # count them.
            own.ordering_bytes += self._batch_order_bytes[at]
            own.bytes = own.ordering_bytes + count * mean_bytes(self._size, config.workers)
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

    def _buffered_steps(self, examples: int) -> int:
        """Return how many steps of rows are buffered."""
        units = self._configs[0].workers * max(1, examples // self._configs[0].unit)
        most = _MAX_GPU_ELEMENTS if self._parameters.is_cuda else _MAX_ELEMENTS
        elements = (len(self._configs) - self._first_with_rows) * self._columns * units
        # At least one step, even if its rows alone are over the limit.
        return max(1, min(_MAX_STEPS, most // max(1, elements)))

    def _observe(self, steps: int, counters: list[EpochCounters]) -> None:
        """Pass the buffered rows of `steps` steps to the orders."""
        workers = self._configs[0].workers
        for at, stored in enumerate(self._rows[:, :steps], self._first_with_rows):
            begin = time.perf_counter()
            rows = stored.unflatten(1, (workers, -1)).transpose(1, 2)  # (T, U, R, k)
            sizes = [rows.shape[1]] * steps
            rows = rows.flatten(0, 1)
            if self._gradients_are_rows:
                self.orderings[at].observe(rows, finite_batches(rows, sizes))
            else:
                self._coordination[at].gather(rows.transpose(0, 1), sizes)
            counters[at].ordering_seconds += time.perf_counter() - begin

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


def make_sketch(
    rows: RowSettings | None, task: Task, model: nn.Module, tensors: Tensors
) -> Callable[[Tensor], Tensor] | None:
    """Return what makes rows of (..., D) gradients; None if they are the rows."""
    if isinstance(rows, SketchRows):
        return CountSketch(rows.size, rows.seed)
    if not isinstance(rows, TwoSidedRows):
        return None
    model = copy.deepcopy(model)
    capture = Capture(model, rows)
    # Whether a layer has one position per example is known from a batch.
    task.loss(model, *(tensor[:2] for tensor in tensors)).backward()
    capture.pop_rows(2)
    matrix = capture.matrix()  # (D, k)
    return lambda grads: grads @ matrix


def batch_order_bytes(config: RunConfig, examples: int) -> int:
    """Return the bytes that ordering sends in an epoch where whole batches are rows.

    Counted on rows of one element: what is sent are inner products, whatever the rows' length.
    """
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
