"""Which runs are trained side by side."""

import copy
import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from gradherd.lab.tasks.task import Task
from gradherd.lab.train.config import RunConfig
from gradherd.lab.train.vmap_layers import why_not_vmappable
from gradherd.ordering.registry import make_policy
from gradherd.rows.flat import FlatSpec

# Beyond this many parameters arithmetic counts, not calls: other kernels would be no faster.
_MAX_SIZE = {"cpu": 100_000, "cuda": 20_000_000}
# Gradients of all groups of a step of all runs of a stack, in numbers.
_MAX_GRADIENTS = {"cpu": 1 << 24, "cuda": 1 << 29}
# What passes over all examples of a step of a stack keep for gradients, in numbers. A GPU takes
# about twice as much for a while, and beyond it arithmetic counts, too.
_MAX_SAVED = 1 << 30
# On a CPU, parameters of all runs of a stack: their averaged gradients of an epoch are kept.
_MAX_PARAMETERS = 1 << 20
_SAMPLES = 16
# With so few groups a run that needs no gradients of groups costs little beside those that do.
_FEW_GROUPS = 8


def why_not_stackable(config: RunConfig, model: nn.Module) -> str | None:
    """Return why runs like this one cannot go side by side; None if they can."""
    size, device = FlatSpec.of(model).size, config.device.partition(":")[0]
    if size > _MAX_SIZE[device]:
        return f"{size:,} parameters are many"
    return why_not_vmappable(model)


def why_not_mean_loss(task: Task, model: nn.Module, columns: Sequence[Tensor]) -> str | None:
    """Return why the loss of a batch is not the mean over its examples; None if it is.

    Gradients of workers and units are taken of one pass over all their examples: with a loss that
    weighs examples against each other, or draws numbers, they would be others.
    """
    some, model = _sample_indices(columns), copy.deepcopy(model)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for parameter in model.parameters():  # Fresh ones may give every example the same loss.
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        try:
            whole = task.loss(model, *(column[some] for column in columns))
            each = [task.loss(model, *(column[at : at + 1] for column in columns)) for at in some]
        except Exception as error:  # Training will fail of it, and write that down.
            return f"its loss fails: {type(error).__name__}: {error}"
    mean = torch.stack(each).mean()
    if torch.isclose(whole, mean, rtol=1e-4, atol=1e-6):
        return None
    return f"the loss of {len(some)} examples is {whole:.6g}, the mean of their losses {mean:.6g}"


def _sample_indices(columns: Sequence[Tensor]) -> Tensor:
    """Return the places of a few examples from all over; neighbours may be alike, or short."""
    places: Tensor = torch.linspace(0, len(columns[0]) - 1, _SAMPLES).long().unique()
    return places


def saved_per_example(task: Task, model: nn.Module, columns: Sequence[Tensor]) -> int:
    """Return how many numbers a pass over an example keeps for its gradient.

    Of a language model, these are mostly scores of the vocabulary: many more than parameters.
    """
    model = copy.deepcopy(model)
    own = {parameter.data_ptr() for parameter in model.parameters()}
    some, kept = _sample_indices(columns), 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += 0 if tensor.data_ptr() in own else tensor.numel()
        return tensor

    with torch.random.fork_rng(devices=[]), saved_tensors_hooks(count, lambda tensor: tensor):
        try:
            task.loss(model, *(column[some] for column in columns))
        except Exception:  # `why_not_mean_loss` tells of it, and such a run goes alone.
            return 0
    return kept // len(some)


def groups_per_step(config: RunConfig) -> int:
    """Return how many gradients are taken in a step of a run: of units, of workers, or one."""
    if make_policy(config.order).needs_rows:
        return config.workers * (config.batch_size // config.unit)
    return 1 if config.density is None else config.workers


def _row_key(config: RunConfig) -> tuple[bool, str, int]:
    needs = make_policy(config.order).needs_rows
    return (needs, config.rows, config.sketch_size or 0) if needs else (False, "", 0)


def stack_runs(configs: Sequence[RunConfig], model: nn.Module, kept: int = 0) -> list[list[int]]:
    """Return the places of runs that go side by side, and of each other run alone.

    Those of a stack differ in order, seed, learning rate and how rows are read.

    Args:
        configs: The runs.
        model: A model of their task.
        kept: What `saved_per_example` tells of it; 0 if memory is no matter.
    """
    size = FlatSpec.of(model).size
    found: dict[str, list[int]] = {}
    alone: list[list[int]] = []
    for at, config in enumerate(configs):
        if why_not_stackable(config, model) is not None:
            alone.append([at])
            continue
        shared = dataclasses.replace(
            config, order="d-rr", seed=0, lr=1.0, rows="auto", sketch_size=None
        )
        units = config.workers * (config.batch_size // config.unit)
        needs = groups_per_step(config) if units > _FEW_GROUPS else None
        found.setdefault(f"{shared} {needs}", []).append(at)
    parts = []
    for places in found.values():
        # Runs that are shown the same of their gradients stand together.
        places.sort(key=lambda at: _row_key(configs[at]))
        most_groups = max(groups_per_step(configs[at]) for at in places)
        device = configs[places[0]].device.partition(":")[0]
        most = max(1, _MAX_GRADIENTS[device] // (most_groups * size))
        if device == "cpu":
            most = min(most, max(8, _MAX_PARAMETERS // size))
        elif kept:
            examples = configs[places[0]].workers * configs[places[0]].batch_size
            most = min(most, max(1, _MAX_SAVED // (kept * examples)))
        parts += [places[at : at + most] for at in range(0, len(places), most)]
    return [*parts, *alone]
