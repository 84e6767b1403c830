"""The interface of a task: its data, its model, its loss and metric, and its default settings."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from gradherd.lab.tasks.defaults import Defaults as Defaults

Tensors = tuple[Tensor, ...]
"""Tensors with one entry per example along the first dimension."""


class BadTask(RuntimeError):
    """A task does not do what it must; one sentence says what."""


class UnsuitableSettings(ValueError):
    """Settings that are valid, but not with this task and its examples: wrong input, no failure."""


@dataclass(frozen=True)
class Split:
    """All examples of a task, in memory."""

    train: Tensors
    """The arguments of `loss` for all training examples."""
    test: Tensors
    """The arguments of `metric` for all test examples."""

    def __post_init__(self) -> None:
        for name, tensors in (("train", self.train), ("test", self.test)):
            sizes = [len(tensor) for tensor in tensors]
            # An empty part would only fail in the first mean over its examples.
            if len(set(sizes)) != 1 or sizes[0] == 0:
                raise ValueError(
                    f"{name} needs tensors of one length, at least 1, got lengths {sizes}"
                )

    def to(self, device: torch.device) -> "Split":
        """Return the examples on a device."""
        return Split(
            tuple(tensor.to(device) for tensor in self.train),
            tuple(tensor.to(device) for tensor in self.test),
        )

    def first(self, limit: int | None) -> "Split":
        """Return the first `limit` examples of each part; None returns all of them."""
        if limit is None:
            return self
        check_limit(limit)
        return Split(
            tuple(tensor[:limit] for tensor in self.train),
            tuple(tensor[:limit] for tensor in self.test),
        )


class Task(Protocol):
    """Something to train: data, a model, a loss and a metric.

    A task is a frozen dataclass without state; whatever is learned is in the model.
    """

    @property
    def name(self) -> str:
        """Name on the command line."""
        ...

    @property
    def description(self) -> str:
        """One-line description."""
        ...

    @property
    def data(self) -> tuple[str, ...]:
        """Names of the data sets it needs; empty if it needs none or ships with a package."""
        ...

    @property
    def metric_name(self) -> str:
        """Name of the metric, with its unit."""
        ...

    @property
    def higher_is_better(self) -> bool:
        """Whether a larger metric is better."""
        ...

    @property
    def defaults(self) -> Defaults:
        """Default settings."""
        ...

    def load(self, data_dir: Path | None = None, limit: int | None = None) -> Split:
        """Load the examples.

        Args:
            data_dir: Folder to search first; then come GRADHERD_DATA and the cache folder.
            limit: Load only the first `limit` examples of each part.
        """
        ...

    def model(self) -> nn.Module:
        """Return a new model, initialised from torch's global generator."""
        ...

    def loss(self, model: nn.Module, *tensors: Tensor) -> Tensor:
        """Return the mean loss over the examples of a batch; calls the model once."""
        ...

    def metric(self, model: nn.Module, *tensors: Tensor) -> float:
        """Return the metric over these examples; leave the model unchanged."""
        ...


def load_split(task: Task, data_dir: Path | None, limit: int | None) -> Split:
    """Return the examples of a task; raise BadTask if `load` returns anything else."""
    split: object = task.load(data_dir, limit)
    if not isinstance(split, Split):
        raise BadTask(
            f"task {task.name!r}: load() must return a gradherd.lab.tasks.Split, "
            f"got a {type(split).__name__}"
        )
    return split


def check_loss(task: Task, loss: object) -> None:
    """Raise BadTask unless a loss is one number."""
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return
    shape = f"tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else None
    raise BadTask(
        f"task {task.name!r}: loss() must return one number, the mean over the examples of a "
        f"batch, got a {shape or type(loss).__name__}"
    )


def check_limit(limit: int | None) -> None:
    """Raise ValueError if a limit leaves no example."""
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1 or None, got {limit}")
