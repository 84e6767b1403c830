"""Workers whose data differ: training examples sorted by label, each worker a run of them.

Orders deal unit g to worker g mod W, so that every worker gets a fair share. To deal unfairly, the
training set is put in such an order that dealing in turn gives each worker one contiguous shard of
the sorted examples; nothing else changes, and nothing is left out.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradherd.lab.tasks.task import Defaults, Split, Task


def by_label(labels: Tensor, workers: int) -> Tensor:
    """Return (n,) where dealing in turn finds its examples.

    Args:
        labels: (n,) numbers.
        workers: W; examples are dealt one by one.

    >>> order = by_label(torch.tensor([1, 0, 1, 0, 2]), workers=2)
    >>> order[0::2].tolist(), order[1::2].tolist()  # labels 0, 0, 1 and 1, 2
    ([1, 3, 0], [2, 4])
    """
    rising = torch.sort(labels, stable=True).indices
    order = torch.empty_like(rising)
    first = 0
    for worker in range(workers):
        own = len(range(worker, len(rising), workers))
        order[worker::workers] = rising[first : first + own]
        first += own
    return order


@dataclass(frozen=True)
class Unshared:
    """A task whose workers hold different labels; the last column is the label."""

    task: Task
    workers: int
    """The number of workers that it is dealt for; a run must have as many, and units of one."""

    @property
    def name(self) -> str:
        """Tell it from the task itself."""
        return f"{self.task.name}-by-label-{self.workers}"

    @property
    def description(self) -> str:
        """Tell what is different."""
        return f"{self.task.description}; each of {self.workers} workers holds few labels"

    @property
    def data(self) -> tuple[str, ...]:
        """That of the task."""
        return self.task.data

    @property
    def metric_name(self) -> str:
        """That of the task."""
        return self.task.metric_name

    @property
    def higher_is_better(self) -> bool:
        """As in the task."""
        return self.task.higher_is_better

    @property
    def defaults(self) -> Defaults:
        """Those of the task, with the workers that it is dealt for."""
        return replace(self.task.defaults, workers=self.workers)

    def load(self, data_dir: Path | None = None, limit: int | None = None) -> Split:
        """Read the examples, in the order that deals them unfairly."""
        split = self.task.load(data_dir, limit)
        order = by_label(split.train[-1], self.workers)
        return Split(tuple(column[order] for column in split.train), split.test)

    def model(self) -> nn.Module:
        """Return the task's model."""
        return self.task.model()

    def loss(self, model: nn.Module, *tensors: Tensor) -> Tensor:
        """Return the task's loss."""
        return self.task.loss(model, *tensors)

    def metric(self, model: nn.Module, *tensors: Tensor) -> float:
        """Return the task's metric."""
        return self.task.metric(model, *tensors)


def unshared(task: Callable[[], Any], workers: int) -> Callable[[], Unshared]:
    """Return what makes such a task, for a file of tasks."""
    return lambda: Unshared(task(), workers)
