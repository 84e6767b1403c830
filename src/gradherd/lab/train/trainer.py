"""What the trainers share: their protocol, the counters of an epoch, and evaluation."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from gradherd.comm.collectives import all_reduce, broadcast
from gradherd.comm.world import World
from gradherd.lab.tasks.metrics import eval_mode
from gradherd.lab.tasks.task import Task, Tensors
from gradherd.lab.train.measurements import BinnedSeries
from gradherd.lab.train.record import finite_or_none


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
    """Steps that were sparse; the sums below are over these."""
    density: float = 0.0
    padding: float = 0.0
    load: list[float] = field(default_factory=list)
    """Picked by each worker."""
    load_steps: int = 0
    """Steps that `load` is the sum of: fewer where the number of workers has changed."""

    def add_sparse(self, told: Mapping[str, Any]) -> None:
        """Count a sparse step: its density, padding and per_rank."""
        if not told:
            return
        self.sparse_steps += 1
        self.density += told["density"]
        self.padding += told["padding"]
        self.load_steps += 1
        before = self.load or [0.0] * len(told["per_rank"])
        self.load = [sum(pair) for pair in zip(before, told["per_rank"], strict=True)]


@dataclass(frozen=True)
class Evaluation:
    """What a model is worth; None where a number is not finite."""

    loss: float | None
    metric: float | None


class StepCallback(Protocol):
    """Is told that steps were done."""

    def __call__(self, steps: int = 1) -> None:
        """Move on by so many steps."""
        ...


class Trainer(Protocol):
    """Workers that train one or more runs side by side, an epoch at a time."""

    model: nn.Module
    """A model of the kind that is trained."""
    series: list[BinnedSeries]
    """Densities of all steps so far, for each run."""

    def epoch(self, number: int, tick: StepCallback) -> list[EpochCounters]:
        """Train one epoch, counted from 1; return what it cost, for each run."""
        ...

    def quality(self) -> list[Evaluation]:
        """Return what the models of all runs are worth now."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


# Small models take many examples at once; for large ones a chunk is what a few steps would take.
# A GPU has the memory for more, and would wait for the host otherwise.
_SMALL, _MANY, _STEPS = 100_000, 1000, 8
_GPU_MANY, _GPU_LARGE = 10_000, 64


def chunk_size(model: nn.Module, batch_size: int) -> int:
    """Return how many examples are looked at together."""
    small = sum(p.numel() for p in model.parameters()) < _SMALL
    if next(model.parameters()).is_cuda:
        return _GPU_MANY if small else _GPU_LARGE
    return _MANY if small else min(256, max(8, _STEPS * batch_size))


def full_loss(
    task: Task, model: nn.Module, columns: Tensors, world: World, chunk: int
) -> float | None:
    """Return the mean loss over all examples, None if it is not finite.

    Each rank takes every R-th chunk; chunks are added up in their order, so the result does not
    depend on the number of ranks.
    """
    parts = list(zip(*(column.split(chunk) for column in columns), strict=True))
    sums = torch.zeros(len(parts), dtype=torch.float64, device=columns[0].device)
    with eval_mode(model):
        for at in range(world.rank, len(parts), world.size):
            sums[at] = task.loss(model, *parts[at]).double() * len(parts[at][0])
    totals = all_reduce(sums, world).value.tolist()
    if not all(map(math.isfinite, totals)):
        return None
    return math.fsum(totals) / len(columns[0])


def finite_metric(task: Task, model: nn.Module, columns: Tensors) -> float | None:
    """Return the task's metric, None if it is not finite."""
    return finite_or_none(float(task.metric(model, *columns)))


def broadcast_buffers(model: nn.Module, world: World) -> None:
    """Give all ranks rank 0's buffers (BatchNorm's averages), as DDP does before a forward."""
    for buffer in model.buffers():
        broadcast(buffer, world)
