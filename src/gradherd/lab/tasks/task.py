"""The interface of a task: its data, its model, its loss and metric, and its default settings."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

Tensors = tuple[Tensor, ...]
"""Tensors with one entry per example along the first dimension."""


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


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """The settings that a task is trained with unless others are given."""

    workers: int
    """Number of workers."""
    batch_size: int
    """Examples per worker and step."""
    unit: int = 1
    """Consecutive examples that are ordered as one unit; `batch_size` orders whole batches."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """Optimizer."""
    lr: float
    """Learning rate."""
    momentum: float = 0.0
    """Momentum of SGD."""
    weight_decay: float = 0.0
    """Weight decay."""
    clip: float | None = None
    """Largest norm of the averaged gradient; None disables clipping."""
    lr_drop: float | None = None
    """Factor by which the learning rate drops; None keeps it constant."""
    lr_drop_every: int | None = None
    """Epochs between two drops."""
    epochs: int
    """Number of epochs."""
    seeds: int
    """Number of seeds in an experiment."""
    source: str
    """Where these settings come from, in one sentence."""

    def __post_init__(self) -> None:
        # Here rather than in RunConfig, which builds one of these: a task and a run obey the same
        # rules.
        for name in ("workers", "batch_size", "unit", "epochs", "seeds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.batch_size % self.unit:
            raise ValueError(f"unit must divide batch_size {self.batch_size}, got {self.unit}")
        # Literal is checked by mypy only, and tasks come from files of users.
        if self.optimizer not in ("sgd", "adamw"):
            raise ValueError(f"optimizer must be sgd or adamw, got {self.optimizer!r}")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be positive and finite, got {self.lr}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum}")
        if self.optimizer == "adamw" and self.momentum:
            raise ValueError(f"momentum {self.momentum} has no effect on adamw: leave it at 0")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must be at least 0 and finite, got {self.weight_decay}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip must be positive or None, got {self.clip}")
        # One without the other would be ignored in silence.
        if (self.lr_drop is None) != (self.lr_drop_every is None):
            raise ValueError(
                "lr_drop and lr_drop_every go together, "
                f"got {self.lr_drop} and {self.lr_drop_every}"
            )
        if self.lr_drop is not None and not 0 < self.lr_drop < 1:
            raise ValueError(f"lr_drop must be in (0, 1), got {self.lr_drop}")
        if self.lr_drop_every is not None and self.lr_drop_every < 1:
            raise ValueError(f"lr_drop_every must be at least 1, got {self.lr_drop_every}")


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


def check_limit(limit: int | None) -> None:
    """Raise ValueError if a limit leaves no example."""
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1 or None, got {limit}")
