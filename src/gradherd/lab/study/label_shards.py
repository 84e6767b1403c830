"""Workers with different data: training examples sorted by label, each worker a contiguous shard.

Orders assign unit g to worker g mod W, which gives every worker a fair sample. To give each worker
few labels instead, the training set is permuted such that this round-robin assignment yields one
contiguous shard of the sorted examples per worker; nothing else changes, no example is dropped.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradherd.lab.tasks.task import Defaults, Split, Task


def permutation_by_label(labels: Tensor, workers: int) -> Tensor:
    """Return the (n,) permutation after which round-robin assignment gives contiguous shards.

    Args:
        labels: (n,) labels.
        workers: W; examples are assigned one at a time.

    >>> order = permutation_by_label(torch.tensor([1, 0, 1, 0, 2]), workers=2)
    >>> order[0::2].tolist(), order[1::2].tolist()  # labels 0, 0, 1 and 1, 2
    ([1, 3, 0], [2, 4])
    """
    # Stable: otherwise equal labels could be ordered differently on another machine.
    by_label = torch.sort(labels, stable=True).indices
    order = torch.empty_like(by_label)
    first = 0
    for worker in range(workers):
        # What round-robin assigns to this worker; the first ones get one more if it is uneven.
        count = len(range(worker, len(by_label), workers))
        order[worker::workers] = by_label[first : first + count]
        first += count
    return order


@dataclass(frozen=True)
class LabelShardedTask:
    """A task whose workers have few labels each; the last column of its data is the label."""

    task: Task
    workers: int
    """Number of workers it is permuted for; a run must have as many, and units of one example."""

    @property
    def name(self) -> str:
        """The task's name with a suffix."""
        return f"{self.task.name}-by-label-{self.workers}"

    @property
    def description(self) -> str:
        """The task's description, and what is different."""
        return f"{self.task.description}; each of {self.workers} workers holds few labels"

    @property
    def data(self) -> tuple[str, ...]:
        """The task's data sets."""
        return self.task.data

    @property
    def metric_name(self) -> str:
        """The task's metric."""
        return self.task.metric_name

    @property
    def higher_is_better(self) -> bool:
        """As in the task."""
        return self.task.higher_is_better

    @property
    def defaults(self) -> Defaults:
        """The task's defaults, with the workers it is permuted for."""
        return replace(self.task.defaults, workers=self.workers)

    def load(self, data_dir: Path | None = None, limit: int | None = None) -> Split:
        """Load the examples, permuted by label."""
        split = self.task.load(data_dir, limit)
        order = permutation_by_label(split.train[-1], self.workers)
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


def sharded_by_label(task: Callable[[], Any], workers: int) -> Callable[[], LabelShardedTask]:
    """Return a factory of the sharded task, for use in a file of tasks."""
    return lambda: LabelShardedTask(task(), workers)
