"""What the trainers share: their protocol, the counters of an epoch, and evaluation."""

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradherd.comm.collectives import all_reduce
from gradherd.comm.world import World
from gradherd.lab.tasks.metrics import eval_mode
from gradherd.lab.tasks.task import (
    BadTask,
    Split,
    Task,
    Tensors,
    as_metric,
    augments,
    check_loss,
    new_model,
)
from gradherd.lab.train.config import RunConfig
from gradherd.lab.train.record import EpochRow, finite

# Examples evaluated at once. Small models take many; for large ones a chunk is about as large as a
# few training steps. A GPU has the memory for more, and would wait for the host otherwise.
_SMALL_MODEL, _CHUNK, _BATCHES = 100_000, 1000, 8
# A model of a few parameters has activations as small as its inputs: calls are what it costs.
_TINY_MODEL, _TINY_CHUNK = 1000, 16_384
_GPU_CHUNK = 10_000
# Without cuDNN's kernels, which torch prefers for bfloat16 on Hopper GPUs and which return NaN for
# some shapes (pytorch/pytorch#196678).
_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

_ROW_FIELDS = [one.name for one in fields(EpochRow)]


@dataclass
class EpochCounters:
    """What one epoch of one run has cost so far."""

    steps: int = 0
    seconds: float = 0.0
    data_seconds: float = 0.0
    ordering_seconds: float = 0.0
    exchange_seconds: float = 0.0
    saving_seconds: float = 0.0
    bytes: int = 0
    ordering_bytes: int = 0
    skipped_steps: int = 0
    residual_norm: float | None = None
    herding_bound: float | None = None
    sparse_steps: int = 0
    """Number of sparse steps; `density` and `padding` are sums over these."""
    density: float = 0.0
    padding: float = 0.0

    def add_sparse(self, metrics: Mapping[str, Any]) -> None:
        """Count a sparse step by its density and padding; a dense step has no metrics."""
        if metrics:
            self.sparse_steps += 1
            self.density += metrics["density"]
            self.padding += metrics["padding"]

    def row(self, number: int, lr: float, evaluation: "Evaluation", seconds: float) -> EpochRow:
        """Return the epoch as a record has it; the evaluation after it took these seconds."""
        # What is left is compute. On a GPU, measuring it would need a host sync in every step.
        not_compute = self.data_seconds + self.ordering_seconds + self.exchange_seconds
        not_compute += self.saving_seconds
        # Costs have the same names here and there.
        same = {name: getattr(self, name) for name in _ROW_FIELDS if hasattr(self, name)}
        means = {
            "density": self.density / self.sparse_steps if self.sparse_steps else 1.0,
            "padding": self.padding / self.sparse_steps if self.sparse_steps else None,
            "residual_norm": finite(self.residual_norm),
            "herding_bound": finite(self.herding_bound),
            "compute_seconds": max(0.0, self.seconds - not_compute),
        }
        return EpochRow(
            **same | means,
            epoch=number,
            lr=lr,
            train_loss=evaluation.loss,
            metric=evaluation.metric,
            evaluation_seconds=seconds,
        )


@dataclass(frozen=True)
class Evaluation:
    """Loss and metric of a model; None where a value is not finite."""

    loss: float | None
    metric: float | None


StepCallback = Callable[..., None]
"""Is called after training steps, with their number if it is not 1."""


class Trainer(ABC):
    """Trains one or more runs side by side, an epoch at a time."""

    def __init__(self, config: RunConfig, task: Task, split: Split) -> None:
        """Put the examples where they are needed, and build the model from the seed of the run."""
        self._config, self._task, self._device = config, task, torch.device(config.device)
        self._split = split.to(self._device)
        self._examples = EpochExamples(config, task, self._split.train)
        torch.manual_seed(config.seed)
        self.model = new_model(task).to(self._device)
        """A model of the task; where several runs are trained, a template."""

    @abstractmethod
    def train_epoch(self, number: int, on_step: StepCallback) -> list[EpochCounters]:
        """Train one epoch; return what it has cost, for each run."""

    @abstractmethod
    def evaluate(self) -> list[Evaluation]:
        """Evaluate the current model of each run."""

    def close(self) -> None:
        """Release hooks, if there are any."""


class EpochExamples:
    """The training examples of the current epoch: the task's, or transformed at random.

    Every example is visited once in an epoch, so all of them are transformed before it. They stay
    at one address: traced steps and loaders read them there.

    Raises:
        ValueError: The task has no augmentation.
    """

    def __init__(self, config: RunConfig, task: Task, tensors: Tensors) -> None:
        if config.augment and not augments(task):
            raise ValueError(f"task {task.name!r} has no augmentation: leave out augment")
        self._augment = task.augment if config.augment else None
        self._seed, self._original = config.seed, tensors
        self.tensors = tuple(map(torch.clone, tensors)) if config.augment else tensors

    def begin_epoch(self, number: int) -> None:
        """Transform the examples for an epoch, alike on all ranks."""
        if self._augment is None:
            return
        # From the epoch, not from a generator that goes on: a resumed run has the same crops.
        generator = torch.Generator().manual_seed((self._seed << 20) + number)
        for static, new in zip(
            self.tensors, self._augment(generator, *self._original), strict=True
        ):
            static.copy_(new)


def training_loss(task: Task, model: nn.Module, examples: Iterable[Tensor]) -> Tensor:
    """Return the mean loss on a batch; raise BadTask if it does not depend on the model."""
    loss = task.loss(model, *examples)
    if not loss.requires_grad:
        raise BadTask(f"task {task.name!r}: loss() must depend on the model")
    return loss


@contextlib.contextmanager
def passes(config: RunConfig) -> Iterator[None]:
    """Run forward passes inside, in the precision that the run asks for."""
    if config.autocast is None:
        yield
        return
    device = torch.device(config.device).type
    with torch.autocast(device, torch.bfloat16), sdpa_kernel(_ATTENTION):
        yield


def parameter_count(model: nn.Module) -> int:
    """Return the number of a model's parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def evaluation_chunk(task: Task, model: nn.Module, batch_size: int) -> int:
    """Return how many examples are evaluated at once."""
    size = parameter_count(model)
    small = size < _SMALL_MODEL
    if next(model.parameters()).is_cuda:
        return _GPU_CHUNK if small else task.evaluation_chunk
    if size < _TINY_MODEL:
        return _TINY_CHUNK
    return _CHUNK if small else min(256, max(8, _BATCHES * batch_size))


def full_loss(
    task: Task, model: nn.Module, tensors: Tensors, world: World, chunk: int
) -> float | None:
    """Return the mean loss over all examples, None if it is not finite.

    All ranks must call this: each evaluates every R-th chunk. Chunks are summed in a fixed order,
    so the result has the same bits for any number of ranks.
    """
    chunks = list(zip(*(tensor.split(chunk) for tensor in tensors), strict=True))
    sums = torch.zeros(len(chunks), dtype=torch.float64, device=tensors[0].device)
    with eval_mode(model):
        for at in range(world.rank, len(chunks), world.size):
            loss = task.loss(model, *chunks[at])
            check_loss(task, loss)
            # The loss is a mean over the chunk; the last chunk may be shorter.
            sums[at] = loss.double() * len(chunks[at][0])
    # Every entry is non-zero on one rank only: the all-reduce adds zeros, which is exact.
    totals = all_reduce(sums, world).value.tolist()
    # JSON has no NaN, and a run that diverged is a result.
    if not all(map(math.isfinite, totals)):
        return None
    # Exact, so the order of chunks does not matter.
    return math.fsum(totals) / len(tensors[0])


def evaluate(
    config: RunConfig, task: Task, model: nn.Module, split: Split, world: World | None = None
) -> Evaluation:
    """Evaluate a model, all ranks together; rank 0 alone has the metric.

    That of a run that holds examples out is the loss on these.
    """
    world = World.single() if world is None else world
    chunk = evaluation_chunk(task, model, config.batch_size)
    loss = full_loss(task, model, split.train, world, chunk)
    metric = None
    if config.held_out is not None:
        metric = full_loss(task, model, split.test, world, chunk)
    elif not world.rank:
        # A metric that forgets to would count its examples in the statistics of batch norms.
        with eval_mode(model):
            metric = as_metric(task, task.metric(model, *split.test))
    return Evaluation(loss, finite(metric))
