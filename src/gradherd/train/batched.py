"""Many virtual runs of a small model side by side: seeds and orders of one comparison.

The maths of `virtual`, but gradients come from other kernels, so numbers differ from it in their
last bits and orders may part after some time where a sign hangs on them.

Letters: S runs, R workers, B examples of a worker in a step, U units of them, D parameters.
"""

import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gradherd.comm.world import World
from gradherd.rows.flat import FlatSpec
from gradherd.rows.settings import BatchRows, ExactRows
from gradherd.tasks.task import Split, Task
from gradherd.train.config import RunConfig
from gradherd.train.evaluate import chunk_size, full_loss, metric
from gradherd.train.fleet import Quality, Tally, Tick
from gradherd.train.mean import mean_bytes
from gradherd.train.stacked import Rule, StackedStep, unfit
from gradherd.train.turns import Portions
from gradherd.train.virtual import make_ordering, row_settings
from gradherd.train.watch import Bins, cheap, prefix_bound

# Rows of several steps are shown to the orders together, up to so many steps and numbers.
_STEPS, _NUMBERS = 512, 8_000_000
# Beyond this many parameters arithmetic counts, not calls, and rows get large.
_SMALL = 20_000


def why_not(config: RunConfig, model: nn.Module) -> str | None:
    """Return why runs like this one cannot go side by side; None if they can."""
    size = FlatSpec.of(model).size
    if config.density is not None:
        return "it is sparsified"
    if size > _SMALL:
        return f"{size:,} parameters are many"
    if config.optimizer != "sgd" or config.clip is not None:
        return "only plain SGD can be stacked"
    if not isinstance(row_settings(config, True, size), ExactRows | BatchRows):
        return "its rows are sketches"
    return unfit(model)


class BatchedFleet:
    """S runs of R workers each; settings may differ in order and seed only."""

    def __init__(self, configs: Sequence[RunConfig], task: Task, split: Split) -> None:
        self._configs, self._task = list(configs), task
        first, device = self._configs[0], torch.device(configs[0].device)
        self._split = split.to(device)
        self.series = [Bins() for _ in configs]
        starts = []
        for config in self._configs:
            torch.manual_seed(config.seed)
            self.model = task.model().to(device)
            starts.append(nn.utils.parameters_to_vector(self.model.parameters()).detach())
        self._parameters = torch.stack(starts)
        self._velocity = torch.zeros_like(self._parameters)
        rule = Rule(momentum=first.momentum, weight_decay=first.weight_decay)
        self._step = StackedStep(task, self.model, self._split.train, rule)
        dealt = [make_ordering(config, len(split.train[0])) for config in self._configs]
        self.deal, self.orderings = dealt[0][0], [ordering for _, ordering in dealt]
        self._portions = [Portions(ordering, first.workers) for ordering in self.orderings]
        # Whole batches of several workers: what is exchanged is the row.
        self._rides = first.unit == first.batch_size and first.workers > 1
        numbers = self._parameters.numel() * first.workers * first.batch_size
        self._together = max(1, min(_STEPS, _NUMBERS // numbers))
        batches = -(-self.deal.length * first.unit // first.batch_size)
        self._watches = cheap(batches, self._parameters.shape[1])

    @torch.inference_mode()
    def epoch(self, number: int, tick: Tick) -> list[Tally]:
        """Train one epoch of all runs."""
        config, runs = self._configs[0], len(self._configs)
        tallies = [Tally() for _ in self._configs]
        begin = time.perf_counter()
        indices = self._indices()
        rate = torch.tensor(config.lr_at(number), device=self._parameters.device)
        rows: list[Tensor] = []
        means: list[Tensor] = []
        sent_before = [portion.bytes for portion in self._portions]
        data_seconds = time.perf_counter() - begin
        batches = [b.reshape(runs, -1) for b in indices.split(config.batch_size, dim=2)]
        for done, batch in enumerate(batches, 1):
            found, mean = self._step(self._parameters, self._velocity, rate, batch)
            rows.append(found)
            if self._watches:
                means.append(mean)
            # The last batch may be a short one: it goes by itself.
            if len(rows) == self._together or done >= len(batches) - 1:
                self._show(rows, tallies)
                tick(len(rows) * runs)
                rows = []
        self._end(tallies)
        seconds = time.perf_counter() - begin
        ordering = sum(tally.ordering_seconds for tally in tallies)
        visited = torch.stack(means) if means else torch.empty(0)
        for at, tally in enumerate(tallies):
            tally.steps = len(batches)
            # What the runs did together is shared out evenly.
            tally.seconds = (seconds - ordering) / runs + tally.ordering_seconds
            tally.data_seconds = data_seconds / runs
            tally.ordering_bytes = self._portions[at].bytes - sent_before[at]
            size = self._parameters.shape[1]
            tally.bytes = tally.ordering_bytes + len(batches) * mean_bytes(size, config.workers)
            if means:
                examples = config.batch_size * config.workers
                tally.herding_bound = prefix_bound(visited[:, at], examples)
        return tallies

    def _indices(self) -> Tensor:
        """Return (S, R, L) the examples of all runs in the order of this epoch."""
        return torch.stack(
            [
                torch.stack([self.deal.indices(r, own) for r, own in enumerate(ordering.orders)])
                for ordering in self.orderings
            ]
        ).to(self._parameters.device)

    def _show(self, rows: list[Tensor], tallies: list[Tally]) -> None:
        """Show rows, (S, R * B, D) of each step, to the orders that look at them."""
        unit, workers = self._configs[0].unit, self._configs[0].workers
        steps = torch.stack(rows, dim=1).unflatten(2, (workers, -1, unit))  # (S, T, R, U, unit, D)
        of_units = steps.mean(4) if unit > 1 else steps.squeeze(4)
        for at, (ordering, portion) in enumerate(zip(self.orderings, self._portions, strict=True)):
            if ordering.policy.needs_rows:
                begin = time.perf_counter()
                own = of_units[at].transpose(1, 2)  # (T, U, R, D)
                if self._rides:
                    for step in own:
                        portion.ride(step[0])
                else:
                    portion.show(own.flatten(0, 1), [own.shape[1]] * len(own))
                tallies[at].ordering_seconds += time.perf_counter() - begin

    def _end(self, tallies: list[Tally]) -> None:
        for portion, tally in zip(self._portions, tallies, strict=True):
            begin = time.perf_counter()
            portion.end_epoch()
            tally.ordering_seconds += time.perf_counter() - begin

    def quality(self) -> list[Quality]:
        """Measure the models one after the other."""
        found, single = [], World.single()
        chunk = chunk_size(self.model, self._configs[0].batch_size)
        for flat in self._parameters:
            nn.utils.vector_to_parameters(flat, self.model.parameters())
            loss = full_loss(self._task, self.model, self._split.train, single, chunk)
            found.append(Quality(loss, metric(self._task, self.model, self._split.test)))
        return found

    def close(self) -> None:
        """Nothing is held."""
