"""The seam to what is trained: what a task is, its data and the settings it starts from."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

Tensors = tuple[Tensor, ...]
"""Columns of a table of examples: the first axis of each is the examples."""


@dataclass(frozen=True)
class Split:
    """All examples of a task, in memory."""

    train: Tensors
    """What `loss` takes, for every example that is trained on."""
    test: Tensors
    """What `metric` takes, for every example that is held back."""

    def __post_init__(self) -> None:
        for name, columns in (("train", self.train), ("test", self.test)):
            sizes = [len(column) for column in columns]
            if len(set(sizes)) != 1 or sizes[0] == 0:
                raise ValueError(f"{name} needs columns of one length, at least 1, got {sizes}")

    def to(self, device: torch.device) -> "Split":
        """Return all examples on a device."""
        return Split(
            tuple(column.to(device) for column in self.train),
            tuple(column.to(device) for column in self.test),
        )

    def first(self, limit: int | None) -> "Split":
        """Return the first examples of each part; None keeps them all."""
        if limit is None:
            return self
        check_limit(limit)
        return Split(
            tuple(column[:limit] for column in self.train),
            tuple(column[:limit] for column in self.test),
        )


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """The settings a task is trained with unless others are given."""

    workers: int
    """Number of workers."""
    batch_size: int
    """Examples of one worker in one step."""
    unit: int = 1
    """Consecutive examples that are ordered as one; `batch_size` orders whole batches."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """Rule of the step."""
    lr: float
    """Learning rate."""
    momentum: float = 0.0
    """Momentum of SGD."""
    weight_decay: float = 0.0
    """Weight decay."""
    clip: float | None = None
    """Largest norm of the averaged gradient; None does not clip."""
    lr_drop: float | None = None
    """The learning rate is multiplied by this now and then; None keeps it."""
    lr_drop_every: int | None = None
    """So many epochs apart."""
    epochs: int
    """Number of epochs."""
    seeds: int
    """Number of seeds of an experiment."""
    source: str
    """Where these settings come from, in one sentence."""

    def __post_init__(self) -> None:
        for name in ("workers", "batch_size", "unit", "epochs", "seeds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.batch_size % self.unit:
            raise ValueError(f"unit must divide batch_size {self.batch_size}, got {self.unit}")
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
    """Something to train: data, a model, a loss and a number that says how good it is.

    A task is a frozen dataclass without state; what is learned is in the model.
    """

    @property
    def name(self) -> str:
        """What it is called on the command line."""
        ...

    @property
    def description(self) -> str:
        """One line about it."""
        ...

    @property
    def data(self) -> tuple[str, ...]:
        """Names of the data sets it needs; empty if what it needs is installed."""
        ...

    @property
    def metric_name(self) -> str:
        """What `metric` returns, with its unit."""
        ...

    @property
    def higher_is_better(self) -> bool:
        """Whether a larger metric is a better one."""
        ...

    @property
    def defaults(self) -> Defaults:
        """Settings to start from."""
        ...

    def load(self, data_dir: Path | None = None, limit: int | None = None) -> Split:
        """Read the examples.

        Args:
            data_dir: Folder to look in first; then come GRADHERD_DATA and the cache folder.
            limit: Keep only so many of the first examples of each part.
        """
        ...

    def model(self) -> nn.Module:
        """Return a fresh model, drawn from torch's global generator."""
        ...

    def loss(self, model: nn.Module, *tensors: Tensor) -> Tensor:
        """Return the mean loss over the examples of a batch; calls the model once."""
        ...

    def metric(self, model: nn.Module, *tensors: Tensor) -> float:
        """Return the metric over these examples; changes nothing in the model."""
        ...


def check_limit(limit: int | None) -> None:
    """Raise ValueError if a limit leaves nothing."""
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1 or None, got {limit}")
