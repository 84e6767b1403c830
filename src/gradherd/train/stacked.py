"""One step of many small models at once, as one traced graph.

Runs that differ in seed or order take the same steps on different numbers. Their parameters are
stacked, per-example gradients come from torch.func, and the graph of a step is traced once: a
model of a few dozen parameters spends its time in calls, not in arithmetic, and a traced graph
makes them in C++.

Letters: S runs, N examples of a step (of all workers), D parameters.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from gradherd.rows.flat import FlatSpec
from gradherd.tasks.task import Task, Tensors

# These draw numbers or carry state, or torch.func has no rule for them.
_UNFIT = (nn.modules.dropout._DropoutNd, nn.RNNBase, nn.RNNCellBase)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The settings of SGD that do not change."""

    momentum: float
    weight_decay: float


def unfit(model: nn.Module) -> str | None:
    """Return why a model cannot be stacked; None if it can."""
    if any(True for _ in model.buffers()):
        return "it has buffers"
    odd = [type(module).__name__ for module in model.modules() if isinstance(module, _UNFIT)]
    return f"it has a {odd[0]}" if odd else None


class StackedStep:
    """Takes a step of S runs: gradients of every example, their mean, and SGD."""

    def __init__(self, task: Task, model: nn.Module, columns: Tensors, rule: Rule) -> None:
        self._columns = columns
        self._step = _step(task, model, rule)
        self._traced: dict[tuple[int, ...], Callable[..., tuple[Tensor, ...]]] = {}

    def __call__(
        self, parameters: Tensor, velocity: Tensor, rate: Tensor, indices: Tensor
    ) -> tuple[Tensor, ...]:
        """Step in place.

        Args:
            parameters: (S, D), moved.
            velocity: (S, D), moved.
            rate: () learning rate.
            indices: (S, N) examples of each run.

        Returns:
            (S, N, D) gradient of every example, and (S, D) their mean.
        """
        given = (parameters, velocity, rate, indices, *self._columns)
        shape = tuple(indices.shape)
        if shape not in self._traced:
            self._traced[shape] = _trace(self._step, given)
        moved, pushed, rows, mean = self._traced[shape](*given)
        parameters.copy_(moved)
        velocity.copy_(pushed)
        return rows, mean


def _step(task: Task, model: nn.Module, rule: Rule) -> Callable[..., tuple[Tensor, ...]]:
    spec = FlatSpec.of(model)

    def loss_of_one(flat: Tensor, *example: Tensor) -> Tensor:
        pieces = torch.split(flat, list(spec.numels))
        named = {n: p.view(s) for n, p, s in zip(spec.names, pieces, spec.shapes, strict=True)}
        batch = (column.unsqueeze(0) for column in example)
        return task.loss(_Stand(model, named), *batch)  # type: ignore[arg-type]

    def step(
        parameters: Tensor, velocity: Tensor, rate: Tensor, indices: Tensor, *columns: Tensor
    ) -> tuple[Tensor, ...]:
        examples = tuple(column[indices] for column in columns)
        of_examples = vmap(grad(loss_of_one), in_dims=(None, *(0 for _ in columns)))
        rows = vmap(of_examples)(parameters, *examples)
        mean = rows.mean(1)
        push = mean.add(parameters, alpha=rule.weight_decay) if rule.weight_decay else mean
        pushed = velocity * rule.momentum + push
        # Nothing is moved in place here: some versions of torch lose that when they trace.
        return parameters - rate * pushed, pushed, rows, mean

    return step


class _Stand:
    """Stands in for a model whose parameters come from elsewhere."""

    training = True

    def __init__(self, model: nn.Module, named: dict[str, Tensor]) -> None:
        self._model, self._named = model, named

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return functional_call(self._model, self._named, args, kwargs)


def _trace(
    step: Callable[..., tuple[Tensor, ...]], given: Sequence[Tensor]
) -> Callable[..., tuple[Tensor, ...]]:
    """Return the graph of a step for tensors of these shapes, if it does the same as the step."""
    # Some versions of torch take no gradients in inference mode, and say nothing.
    with torch.inference_mode(False), warnings.catch_warnings():
        # Deprecated in favour of torch.compile, which needs a compiler and many seconds for this.
        warnings.simplefilter("ignore")
        copies = tuple(tensor.clone() for tensor in given)
        graph = make_fx(step)(*copies)
        traced: Callable[..., tuple[Tensor, ...]] = torch.jit.trace(
            graph, copies, check_trace=False
        )
        pairs = list(zip(traced(*copies), step(*copies), strict=True))
    if all(torch.allclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True) for a, b in pairs):
        return traced
    raise RuntimeError("a traced step differs from the step itself: train without --virtual")
