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

import torch
from torch import Tensor, nn

from gradherd.comm.world import World
from gradherd.lab.tasks.task import Split, Task
from gradherd.lab.train.config import RunConfig
from gradherd.lab.train.mean_hook import mean_bytes
from gradherd.lab.train.measurements import BinnedSeries, can_track_prefix_sums, herding_bound
from gradherd.lab.train.optimizers import FunctionalOptimizer
from gradherd.lab.train.stacked_step import StackedStep
from gradherd.lab.train.trainer import (
    EpochCounters,
    Evaluation,
    StepCallback,
    chunk_size,
    finite_metric,
    full_loss,
)
from gradherd.lab.train.virtual_exchange import Portions, SparseAverager
from gradherd.lab.train.virtual_trainer import make_ordering, row_settings
from gradherd.ordering.gather import seen_batches
from gradherd.ordering.registry import make_policy
from gradherd.rows.settings import SketchRows
from gradherd.rows.sketch import count_sketch


class RowBuffer:
    """Rows of some of the runs, kept until there are enough to be shown together."""

    def __init__(self, runs: Sequence[int], sketch: SketchRows | None, size: int) -> None:
        """Start with nothing.

        Args:
            runs: Their places among all runs, rising.
            sketch: How their rows are folded; None keeps all of a row.
            size: D.
        """
        self.runs, self._sketch = list(runs), sketch
        self.columns = size if sketch is None else sketch.size
        self._held = torch.empty(0)

    def fold(self, rows: Tensor) -> Tensor:
        """Return (s, G, k) of the (S, G, D) gradients of all runs."""
        own = rows[self.runs[0] : self.runs[-1] + 1]
        if len(own) > len(self.runs):  # Others stand between them.
            own = torch.stack([rows[run] for run in self.runs])
        if self._sketch is None:
            return own
        return count_sketch(own, self._sketch.size, self._sketch.seed)

    def hold(self, kept: Tensor, at: int, steps: int) -> None:
        """Keep (s, G, k) rows as those of step `at` of `steps`."""
        shape = (len(kept), steps, *kept.shape[1:])
        if self._held.shape != shape:
            self._held = kept.new_empty(shape)
        self._held[:, at].copy_(kept)

    def held(self, steps: int) -> Iterator[tuple[int, Tensor]]:
        """Give each run's place and its (T, G, k) rows of the first so many steps."""
        yield from zip(self.runs, self._held[:, :steps], strict=True)


def make_row_buffers(configs: Sequence[RunConfig], size: int) -> list[RowBuffer]:
    """Return what each kind of runs is shown; runs whose orders need no gradients are in none."""
    runs: dict[SketchRows | None, list[int]] = {}
    for at, config in enumerate(configs):
        if make_policy(config.order).needs_rows:
            settings = row_settings(config, True, size)
            sketch = settings if isinstance(settings, SketchRows) else None
            runs.setdefault(sketch, []).append(at)
    return [RowBuffer(places, sketch, size) for sketch, places in runs.items()]


# Rows of several steps are shown to the orders together, up to so many steps and numbers.
_STEPS, _NUMBERS, _GPU_NUMBERS = 512, 8_000_000, 1 << 30


class StackedTrainer:
    """S runs of R workers each; settings may differ as `stacks` allows."""

    def __init__(self, configs: Sequence[RunConfig], task: Task, split: Split) -> None:
        self._configs, self._task = list(configs), task
        first, device = self._configs[0], torch.device(configs[0].device)
        self._split = split.to(device)
        starts = []
        for config in self._configs:
            torch.manual_seed(config.seed)
            self.model = task.model().to(device)
            starts.append(nn.utils.parameters_to_vector(self.model.parameters()).detach())
        self._parameters = torch.stack(starts)
        self._size = self._parameters.shape[1]
        dealt = [make_ordering(config, len(split.train[0])) for config in self._configs]
        self.deal, self.orderings = dealt[0][0], [ordering for _, ordering in dealt]
        self._portions = [Portions(ordering, first.workers) for ordering in self.orderings]
        self._shown = shown = make_row_buffers(self._configs, self._size)
        self._step = StackedStep(
            task,
            self.model,
            self._split.train,
            FunctionalOptimizer.of(first),
            self._parameters,
            # Not of `self`: a step that holds on to its fleet keeps a GPU full after the end.
            lambda rows: tuple(one.fold(rows) for one in shown),
            first.workers,
        )
        self._sparse: list[SparseAverager] = []
        if first.density is not None:
            self._sparse = [SparseAverager(config, self.model) for config in self._configs]
        self.series = [one.series for one in self._sparse] or [BinnedSeries() for _ in configs]
        # Whole batches of several dense workers: what is exchanged is the row.
        self._rides = first.unit == first.batch_size and first.workers > 1 and not self._sparse
        self._ride_bytes = [
            batch_order_bytes(config, len(split.train[0])) if self._rides else 0
            for config in self._configs
        ]
        batches = -(-self.deal.length * first.unit // first.batch_size)
        self._watches = not self._sparse and can_track_prefix_sums(batches, self._size)

    def epoch(self, number: int, tick: StepCallback) -> list[EpochCounters]:
        """Train one epoch of all runs."""
        with _no_autograd(self._parameters.device):
            return self._epoch(number, tick)

    def _epoch(self, number: int, tick: StepCallback) -> list[EpochCounters]:
        config, runs = self._configs[0], len(self._configs)
        tallies = [EpochCounters() for _ in self._configs]
        begin = time.perf_counter()
        batches = self._indices().split(config.batch_size, dim=2)
        rates = [[config.lr_at(number)] for config in self._configs]
        rate = torch.tensor(rates, device=self._parameters.device)
        means: list[Tensor] = []
        sent_before = [portion.bytes for portion in self._portions]
        data_seconds = time.perf_counter() - begin
        waiting, together = 0, self._together(batches[0].shape[2])
        for done, batch in enumerate(batches, 1):
            kept, mean = self._advance(rate, batch, tallies)
            if self._watches:
                means.append(mean.clone())
            for shown, rows in zip(self._shown, kept, strict=True):
                shown.hold(rows, waiting, together)
            waiting += 1
            # The last batch may be a short one: it goes by itself.
            if waiting == together or done >= len(batches) - 1:
                self._show(waiting, tallies)
                tick(waiting * runs)
                waiting = 0
        self._end(tallies)
        self._watch(means, tallies)
        seconds = time.perf_counter() - begin
        apart = sum(tally.ordering_seconds + tally.exchange_seconds for tally in tallies)
        for at, tally in enumerate(tallies):
            tally.steps = len(batches)
            # What the runs did together is shared out evenly.
            own = tally.ordering_seconds + tally.exchange_seconds
            tally.seconds = (seconds - apart) / runs + own
            tally.data_seconds = data_seconds / runs
            tally.ordering_bytes = self._portions[at].bytes - sent_before[at]
            tally.ordering_bytes += self._ride_bytes[at]
            tally.bytes += tally.ordering_bytes
            if not self._sparse:
                tally.bytes += len(batches) * mean_bytes(self._size, config.workers)
        return tallies

    def _indices(self) -> Tensor:
        """Return (S, R, L) the examples of all runs in the order of this epoch."""
        return torch.stack(
            [
                torch.stack([self.deal.indices(r, own) for r, own in enumerate(ordering.orders)])
                for ordering in self.orderings
            ]
        ).to(self._parameters.device)

    def _advance(
        self, rate: Tensor, batch: Tensor, tallies: list[EpochCounters]
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """Step on (S, R, B) examples; return what is shown of gradients, and their (S, D) mean."""
        groups = batch.reshape(len(batch), -1, self._group_size(batch))
        if not self._sparse:
            return self._step(rate, groups)
        kept, grads = self._step.gradients(groups)
        found = [
            sparse(own, tally)
            for sparse, own, tally in zip(self._sparse, grads, tallies, strict=True)
        ]
        mean = torch.stack(found)
        self._step.move(rate, mean)
        return kept, mean

    def _group_size(self, batch: Tensor) -> int:
        """Return of how many of (S, R, B) examples a gradient is taken."""
        if self._shown:
            return self._configs[0].unit
        return batch.shape[2] if self._sparse else batch[0].numel()

    def _together(self, examples: int) -> int:
        """Return how many steps' rows wait for each other."""
        units = self._configs[0].workers * max(1, examples // self._configs[0].unit)
        most = _GPU_NUMBERS if self._parameters.is_cuda else _NUMBERS
        numbers = sum(len(shown.runs) * shown.columns for shown in self._shown) * units
        return max(1, min(_STEPS, most // max(1, numbers)))

    def _show(self, steps: int, tallies: list[EpochCounters]) -> None:
        """Show the rows that were kept of so many steps to the orders."""
        workers = self._configs[0].workers
        for shown in self._shown:
            for at, held in shown.held(steps):
                begin = time.perf_counter()
                rows = held.unflatten(1, (workers, -1)).transpose(1, 2)  # (T, U, R, k)
                sizes = [rows.shape[1]] * steps
                rows = rows.flatten(0, 1)
                if self._rides and shown.columns == self._size:
                    self.orderings[at].observe(rows, seen_batches(rows, sizes))
                else:
                    self._portions[at].show(rows, sizes)
                tallies[at].ordering_seconds += time.perf_counter() - begin

    def _end(self, tallies: list[EpochCounters]) -> None:
        for sparse, tally in zip(self._sparse, tallies, strict=bool(self._sparse)):
            sparse.end_epoch(tally)
        for portion, tally in zip(self._portions, tallies, strict=True):
            begin = time.perf_counter()
            portion.end_epoch()
            tally.ordering_seconds += time.perf_counter() - begin

    def _watch(self, means: list[Tensor], tallies: list[EpochCounters]) -> None:
        if means:
            examples = self._configs[0].batch_size * self._configs[0].workers
            for at, tally in enumerate(tallies):
                visited = torch.stack([mean[at] for mean in means])
                tally.herding_bound = herding_bound(visited, examples)

    def quality(self) -> list[Evaluation]:
        """Measure the models one after the other."""
        found, single = [], World.single()
        chunk = chunk_size(self.model, self._configs[0].batch_size)
        for flat in self._parameters:
            nn.utils.vector_to_parameters(flat, self.model.parameters())
            loss = full_loss(self._task, self.model, self._split.train, single, chunk)
            found.append(Evaluation(loss, finite_metric(self._task, self.model, self._split.test)))
        return found

    def close(self) -> None:
        """Nothing is held."""


def batch_order_bytes(config: RunConfig, examples: int) -> int:
    """Return what ordering sends in an epoch where whole batches are rows.

    Counted on rows of one number: what is sent are products of rows, whatever their length.
    """
    if not make_policy(config.order).needs_rows or config.rows == "sketch":
        return 0
    _, ordering = make_ordering(config, examples)
    portions, rows = Portions(ordering, config.workers), torch.zeros(config.workers, 1)
    for _ in range(ordering.length):
        portions.ride(rows)
    return portions.bytes


@contextlib.contextmanager
def _no_autograd(device: torch.device) -> Iterator[None]:
    """Record nothing for gradients; a captured graph cannot be made in inference mode."""
    with torch.inference_mode(device.type == "cpu"), torch.no_grad():
        yield
