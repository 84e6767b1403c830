"""The loss over the full training set, shared out to ranks, the same number for any of them."""

import math

import torch
from torch import nn

from gradherd.comm.collectives import all_reduce, broadcast
from gradherd.comm.world import World
from gradherd.lab.tasks.evaluate import evaluating
from gradherd.lab.tasks.task import Task, Tensors
from gradherd.lab.train.record import finite

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
    with evaluating(model):
        for at in range(world.rank, len(parts), world.size):
            sums[at] = task.loss(model, *parts[at]).double() * len(parts[at][0])
    totals = all_reduce(sums, world).value.tolist()
    if not all(map(math.isfinite, totals)):
        return None
    return math.fsum(totals) / len(columns[0])


def metric(task: Task, model: nn.Module, columns: Tensors) -> float | None:
    """Return the task's metric, None if it is not finite."""
    return finite(float(task.metric(model, *columns)))


def share_buffers(model: nn.Module, world: World) -> None:
    """Give all ranks rank 0's buffers (BatchNorm's averages), as DDP does before a forward."""
    for buffer in model.buffers():
        broadcast(buffer, world)
