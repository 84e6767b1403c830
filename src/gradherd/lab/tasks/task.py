"""The interface of a task: its data, its model, its loss and metric, and its default settings."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradherd.comm.checks import check_whole
from gradherd.lab.tasks.defaults import Defaults as Defaults
from gradherd.lab.tasks.metrics import accuracy
from gradherd.lab.text import counted

Tensors = tuple[Tensor, ...]
"""Tensors with one entry per example along the first dimension."""


class BadTask(ValueError):
    """A task does not do what it must: wrong input; one sentence says what."""


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
            columns: list[object] = [*tensors] if isinstance(tensors, tuple | list) else [tensors]
            if odd := [one for one in columns if not isinstance(one, Tensor)]:
                raise BadTask(
                    f"{name} must be a tuple of tensors, one for each column, got a "
                    f"{type(odd[0]).__name__}"
                )
            sizes = [len(tensor) for tensor in tensors]
            # An empty part would only fail in the first mean over its examples.
            if len(set(sizes)) != 1 or sizes[0] == 0:
                raise BadTask(
                    f"{name} needs tensors of one length, at least 1, got lengths {sizes}"
                )

    def to(self, device: torch.device) -> "Split":
        """Return the examples on a device."""
        return self._each(lambda tensor: tensor.to(device))

    def first(self, limit: int | None) -> "Split":
        """Return the first `limit` examples of each part; None returns all of them."""
        if limit is None:
            return self
        check_limit(limit)
        return self._each(lambda tensor: tensor[:limit])

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Split":
        return Split(tuple(map(change, self.train)), tuple(map(change, self.test)))


class Task:
    """Something to train: data, a model, a loss and a metric.

    A task is a frozen dataclass without state; whatever is learned is in the model. A class of
    one's own need not inherit from this one: `find_task` adds what it lacks of the second half.
    """

    name: ClassVar[str]
    """Name on the command line."""
    description: ClassVar[str]
    """One-line description."""
    data: ClassVar[tuple[str, ...]]
    """Names of the data sets it needs; empty if it needs none or ships with a package."""
    metric_name: ClassVar[str]
    """Name of the metric, with its unit."""
    higher_is_better: ClassVar[bool]
    """Whether a larger metric is better."""
    defaults: ClassVar[Defaults]
    """Default settings."""

    def load(self, data_dir: Path | None = None, limit: int | None = None) -> Split:
        """Load the examples.

        Args:
            data_dir: Folder to search first; then come GRADHERD_DATA and the cache folder.
            limit: Load only the first `limit` examples of each part.
        """
        raise NotImplementedError

    def model(self) -> nn.Module:
        """Return a new model, initialised from torch's global generator."""
        raise NotImplementedError

    def loss(self, model: nn.Module, *tensors: Tensor) -> Tensor:
        """Return the mean loss over the examples of a batch; calls the model once."""
        raise NotImplementedError

    def metric(self, model: nn.Module, *tensors: Tensor) -> float:
        """Return the metric over these examples; leave the model unchanged."""
        raise NotImplementedError

    # The rest is optional.

    evaluation_chunk: ClassVar[int] = 64
    """Examples of a large model that are evaluated at once on a GPU."""

    def augment(self, generator: torch.Generator, *tensors: Tensor) -> Tensors:
        """Return all training examples, transformed at random; not overridden, there is no way."""
        raise NotImplementedError


REQUIRED = (*(name for name in Task.__annotations__ if name != "evaluation_chunk"),)
REQUIRED += ("load", "model", "loss", "metric")
"""Members that a task must have."""


def as_task(found: Any) -> Task:
    """Return an object as a task: optional members that its class lacks become those of `Task`."""
    if not isinstance(found, Task):
        kind = type(found)
        # Not a wrapper: whoever asks for other members, or for its class, gets the user's own.
        object.__setattr__(found, "__class__", type(kind.__name__, (kind, Task), {}))
    task: Task = found
    return task


def augments(task: Task) -> bool:
    """Return whether a task can transform its examples at random.

    >>> augments(Classifier())
    False
    """
    return getattr(task.augment, "__func__", task.augment) is not Task.augment


class Classifier(Task):
    """A task with inputs and labels: cross-entropy, and accuracy in percent."""

    metric_name: ClassVar[str] = "test accuracy (%)"
    higher_is_better: ClassVar[bool] = True
    metric_chunk: ClassVar[int] = 1000
    """Examples of the test set that are classified at once."""

    def prepare(self, inputs: Tensor) -> Tensor:
        """Turn stored inputs into those of the model, chunk by chunk."""
        return inputs

    def loss(self, model: nn.Module, *tensors: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        inputs, labels = tensors
        return F.cross_entropy(model(self.prepare(inputs)), labels)

    def metric(self, model: nn.Module, *tensors: Tensor) -> float:
        """Return the accuracy in percent."""
        chunk = self.evaluation_chunk if tensors[0].is_cuda else self.metric_chunk
        return accuracy(model, *tensors, prepare=self.prepare, chunk=max(chunk, self.metric_chunk))


def load_split(task: Task, data_dir: Path | None, limit: int | None) -> Split:
    """Return the examples of a task; raise BadTask if `load` returns anything else."""
    split: object = task.load(data_dir, limit)
    if not isinstance(split, Split):
        raise BadTask(
            f"task {task.name!r}: load() must return a gradherd.lab.tasks.Split, "
            f"got a {type(split).__name__}"
        )
    check_call(task, "loss(model, *train)", None, *split.train)
    check_call(task, "metric(model, *test)", None, *split.test)
    return split


def check_call(task: Task, call: str, *arguments: object) -> None:
    """Raise BadTask unless a task has a method that can be called like that."""
    member = call.partition("(")[0]
    method: object = getattr(task, member)
    if not callable(method):
        raise BadTask(
            f"task {task.name!r}: {member} must be a method, got a {type(method).__name__}"
        )
    try:
        inspect.signature(method).bind(*arguments)
    except TypeError as error:
        raise BadTask(
            f"task {task.name!r}: {call} must be possible, with "
            f"{counted(len(arguments), 'argument')}: {error}"
        ) from None


def new_model(task: Task) -> nn.Module:
    """Return a new model of a task; raise BadTask if there is nothing to train."""
    model: object = task.model()
    if not isinstance(model, nn.Module):
        raise BadTask(
            f"task {task.name!r}: model() must return a torch.nn.Module, "
            f"got a {type(model).__name__}"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise BadTask(f"task {task.name!r}: its model has no parameter that is trained")
    return model


def check_loss(task: Task, loss: object) -> None:
    """Raise BadTask unless a loss is one real number."""
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point():
        return
    shape = None
    if isinstance(loss, Tensor):
        shape = f"tensor of shape {tuple(loss.shape)} of {loss.dtype}"
    raise BadTask(
        f"task {task.name!r}: loss() must return one number, the mean over the examples of a "
        f"batch, got a {shape or type(loss).__name__}"
    )


def as_metric(task: Task, value: Any) -> float:
    """Return what the metric of a task returned as a number; raise BadTask if it is none."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several elements
        raise BadTask(
            f"task {task.name!r}: metric() must return one number, got a {type(value).__name__}"
        ) from None


def check_limit(limit: int | None) -> None:
    """Raise ValueError if a limit leaves no example."""
    if limit is not None:
        check_whole("limit", limit, 1)
