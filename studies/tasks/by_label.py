"""Tasks whose workers have different labels: examples sorted by label, each worker a shard of them.

Orders assign unit g to worker g mod W, which gives every worker a fair sample. To give each worker
few labels instead, the training set is permuted such that this round-robin assignment yields one
contiguous shard of the sorted examples per worker; nothing else changes, no example is dropped.
"""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from gradherd.lab.tasks.digits import Digits
from gradherd.lab.tasks.images import Cifar10LeNet
from gradherd.lab.tasks.task import Split


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


def few_labels(task: type, workers: int) -> type:
    """Return a task whose workers have few labels each; the last column of its data is the label.

    A run must have as many workers as it is permuted for, and units of one example.
    """

    class FewLabels(task):
        name = f"{task.name}-by-label-{workers}"
        description = f"{task.description}; each of {workers} workers holds few labels"
        defaults = replace(task.defaults, workers=workers)

        def load(self, data_dir: Path | None = None, limit: int | None = None) -> Split:
            """Load the examples, permuted by label."""
            split = super().load(data_dir, limit)
            order = permutation_by_label(split.train[-1], workers)
            return Split(tuple(column[order] for column in split.train), split.test)

    return FewLabels


LeNet16 = few_labels(Cifar10LeNet, 16)
Digits4 = few_labels(Digits, 4)
