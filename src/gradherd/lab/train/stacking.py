"""Which runs are stacked, that is, trained side by side in one process."""

import copy
import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from gradherd.flat import FlatSpec
from gradherd.lab.tasks.task import Task, carries_state
from gradherd.lab.train.config import RunConfig
from gradherd.ordering.registry import make_policy

# Beyond this many parameters a step is bound by arithmetic, not by launches: stacking is no faster.
_MAX_SIZE = {"cpu": 100_000, "cuda": 20_000_000}
# Gradients of all groups in a step of a stack, in elements.
_MAX_GRADIENTS = {"cpu": 1 << 24, "cuda": 1 << 29}
# Activations that autograd saves in a step of a stack, in elements. A GPU needs about twice as much
# temporarily, and beyond this size arithmetic dominates as well.
_MAX_SAVED = 1 << 30
# On a CPU, parameters of all runs of a stack: their averaged gradients of an epoch are stored.
_MAX_PARAMETERS = 1 << 20
# Examples on which a task's loss is probed.
_SAMPLES = 16
# With so few groups, or elements of their gradients, a run that needs none of them costs little
# beside those that do.
_FEW_GROUPS, _FEW_ELEMENTS = 8, 1024


# These draw random numbers, or carry state from batch to batch.
_NOT_VMAPPABLE = (
    nn.modules.dropout._DropoutNd,
    nn.modules.batchnorm._BatchNorm,  # Even without buffers: its statistics span a batch.
)


def why_not_stackable(config: RunConfig, model: nn.Module) -> str | None:
    """Return why runs like this one cannot be stacked; None if they can."""
    if config.local_steps is not None:
        return "each of its workers has weights of its own"
    if config.autocast is not None:
        return "its precision is mixed"
    if config.density is not None:
        return "what its workers send is selected worker by worker"
    size, device = FlatSpec.of(model).size, config.device.partition(":")[0]
    if size > _MAX_SIZE[device]:
        return f"{size:,} parameters are too many"
    return why_not_vmappable(model)


def why_not_vmappable(model: nn.Module) -> str | None:
    """Return why copies of this model cannot be batched with vmap; None if they can.

    >>> why_not_vmappable(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    'it has buffers'
    """
    # Buffers carry state from batch to batch, and stacked runs have one template model.
    if any(True for _ in model.buffers()):
        return "it has buffers"
    if not all(parameter.requires_grad for parameter in model.parameters()):
        return "some of its parameters are not trained"
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention) and module.dropout:
            return "it has attention with dropout"
        # vmap could batch a layer that is unrolled over time, but that is slower: a step of an
        # LSTM of width 32 on an H200 takes 1.23 ms in cuDNN, and 8.3 ms unrolled for three runs.
        if isinstance(module, nn.RNNBase | nn.RNNCellBase):
            return f"vmap has no rule for its recurrent layer ({type(module).__name__})"
        if isinstance(module, _NOT_VMAPPABLE):
            return f"it has a {type(module).__name__}"
    return None


def why_not_mean_loss(task: Task, model: nn.Module, tensors: Sequence[Tensor]) -> str | None:
    """Return why the loss of a batch is not the mean over its examples; None if it is.

    Stacked runs derive the gradients of workers and units from one pass over all their examples:
    with a loss that weights examples relative to each other, or draws random numbers, the gradients
    would differ.

    Args:
        task: The task; its loss is called on a few examples.
        model: A model of it; a perturbed copy is used.
        tensors: The training examples.
    """
    if carries_state(task):
        return "its loss carries a state from batch to batch"
    sample, model = _sample_indices(tensors), copy.deepcopy(model)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        # Perturbed: a newly initialised model may give every example the same loss.
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        try:
            # A task may be a user's own, so the property is tested, not declared.
            whole = task.loss(model, *(tensor[sample] for tensor in tensors))
            each = [task.loss(model, *(tensor[at : at + 1] for tensor in tensors)) for at in sample]
            mean = torch.stack(each).mean()
            # Sums in another order differ in the last bits.
            same = bool(torch.isclose(whole, mean, rtol=1e-4, atol=1e-6))
        except Exception as error:  # The evaluation before training says what is wrong.
            return f"its loss fails: {type(error).__name__}: {error}"
    if same:
        return None
    return f"the loss of {len(sample)} examples is {whole:.6g}, the mean of their losses {mean:.6g}"


def _sample_indices(tensors: Sequence[Tensor]) -> Tensor:
    """Return the indices of a few examples, spaced evenly: adjacent ones may be alike."""
    indices: Tensor = torch.linspace(0, len(tensors[0]) - 1, _SAMPLES).long().unique()
    return indices


def saved_per_example(task: Task, model: nn.Module, tensors: Sequence[Tensor]) -> int:
    """Return how many elements autograd saves per example for the backward pass.

    For a language model these are mostly the logits over the vocabulary: many more than parameters.
    """
    model = copy.deepcopy(model)
    own = {parameter.data_ptr() for parameter in model.parameters()}
    sample, saved = _sample_indices(tensors), 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal saved
        # Weights are saved as well, but they are shared by all examples.
        saved += 0 if tensor.data_ptr() in own else tensor.numel()
        return tensor

    with torch.random.fork_rng(devices=[]), saved_tensors_hooks(count, lambda tensor: tensor):
        try:
            task.loss(model, *(tensor[sample] for tensor in tensors))
        except Exception:  # `why_not_mean_loss` reports it, and such a run is trained alone.
            return 0
    return saved // len(sample)


def stack_runs(configs: Sequence[RunConfig], model: nn.Module, saved: int = 0) -> list[list[int]]:
    """Return the indices of runs that are stacked together, and of each other run alone.

    The runs of a stack differ in order, seed and learning rate; those whose orders need rows come
    last.

    Args:
        configs: The runs.
        model: A model of their task.
        saved: Result of `saved_per_example`; 0 if memory is no concern.
    """
    size = FlatSpec.of(model).size
    alike: dict[str, list[int]] = {}
    alone: list[list[int]] = []
    needs_rows = [make_policy(config.order).needs_rows for config in configs]
    for at, config in enumerate(configs):
        if why_not_stackable(config, model) is not None:
            alone.append([at])
            continue
        # What is left must be equal for one graph to serve all runs of a stack.
        # Examples that were transformed at random are those of a seed.
        seed = config.seed if config.augment else 0
        shared = dataclasses.replace(config, order="d-rr", seed=seed, lr=1.0)
        units = _units(config)
        # With many units, orders that need no rows would pay for those that do.
        few = units <= _FEW_GROUPS or units * size <= _FEW_ELEMENTS
        alike.setdefault(f"{shared} {few or needs_rows[at]}", []).append(at)
    stacks = []
    for indices in alike.values():
        indices.sort(key=needs_rows.__getitem__)
        first = configs[indices[0]]
        groups = _units(first) if needs_rows[indices[-1]] else 1
        device = first.device.partition(":")[0]
        # Memory decides how many runs fit; the rest form the next stack.
        most = max(1, _MAX_GRADIENTS[device] // (groups * size))
        if device == "cpu":
            most = min(most, max(8, _MAX_PARAMETERS // size))
        elif saved:
            most = min(most, max(1, _MAX_SAVED // (saved * first.workers * first.batch_size)))
        stacks += [indices[at : at + most] for at in range(0, len(indices), most)]
    return [*stacks, *alone]


def _units(config: RunConfig) -> int:
    """Return how many gradients a step computes for orders that need rows."""
    return config.workers * (config.batch_size // config.unit)
