"""One step of many models at once, in one graph.

Runs that differ in seed, order or learning rate take the same steps on different numbers. Their
parameters are stacked, the gradients of groups of examples come from torch.func, and the graph of
a step is made once: a small model spends its time in calls, not in arithmetic. On the CPU a traced
graph makes them in C++, on a GPU a captured one makes them without the host.

Letters: S runs, G groups of a step (of all workers), B examples of a group, R workers,
D parameters.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradherd.lab.tasks.task import Task, Tensors
from gradherd.lab.train.cuda_graphs import GraphedFunction
from gradherd.lab.train.optimizers import FunctionalOptimizer
from gradherd.lab.train.vmap_layers import make_vmappable, prefers_loop
from gradherd.rows.flat import FlatSpec

# Kernels of small models fill a part of a GPU: runs that go one by one share it.
_STREAMS = 8

Step = Callable[..., tuple[Tensor, ...]]
RowSelector = Callable[[Tensor], tuple[Tensor, ...]]
"""What orders are shown of (S, G, D) gradients."""


class StackedStep:
    """Takes steps of S runs: gradients of every group, their mean, and the optimizer's move."""

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        columns: Tensors,
        rule: FunctionalOptimizer,
        parameters: Tensor,
        keep: RowSelector = lambda rows: (rows,),
        workers: int = 1,
    ) -> None:
        """Start.

        Args:
            task: Whose loss.
            model: A model of the task.
            columns: The training data, where they are to be used.
            rule: How the optimizer moves.
            parameters: (S, D), moved by every step.
            keep: What is returned of the gradients, as several tensors.
            workers: R, whose gradients `gradients` tells apart.
        """
        self.parameters = parameters
        self._rule = rule
        self._state = rule.start(parameters)
        gradients = _make_gradients(task, model, columns)

        def step(rate: Tensor, indices: Tensor, *now: Tensor) -> tuple[Tensor, ...]:
            rows = gradients(now[0], indices)
            mean = rows.mean(1)
            moved, state = rule.move(now[0], now[1:], rate, mean)
            # Nothing is moved in place here: some versions of torch lose that when they trace.
            return (mean, moved, *state, *keep(rows))

        def worker_means(indices: Tensor, parameters: Tensor) -> tuple[Tensor, ...]:
            rows = gradients(parameters, indices)
            return rows.unflatten(1, (workers, -1)).mean(2), *keep(rows)

        self._step, self._worker_means = _GraphCache(step), _GraphCache(worker_means)

    def __call__(self, rate: Tensor, indices: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Step.

        Args:
            rate: (S, 1) learning rates.
            indices: (S, G, B) examples of each run.

        Returns:
            What is kept of the gradients, and (S, D) their mean; on a GPU the next call writes
            to the same memory.
        """
        now = self._now
        mean, *after = self._step(rate, indices, *now)
        self._put(after[: len(now)])
        return tuple(after[len(now) :]), mean

    def gradients(self, indices: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Take the gradients of a step alone.

        Args:
            indices: (S, G, B) examples of each run; each worker's groups stand together.

        Returns:
            What is kept of the gradients, and (S, R, D) the workers'; on a GPU the next call
            writes to the same memory.
        """
        workers, *kept = self._worker_means(indices, self.parameters)
        return tuple(kept), workers

    def move(self, rate: Tensor, mean: Tensor) -> None:
        """Let the optimizer move by (S, D) averaged gradients."""
        moved, state = self._rule.move(self.parameters, self._state, rate, mean)
        self._put([moved, *state])

    @property
    def _now(self) -> tuple[Tensor, ...]:
        return self.parameters, *self._state

    def _put(self, after: Sequence[Tensor]) -> None:
        for tensor, value in zip(self._now, after, strict=True):
            tensor.copy_(value)


class _GraphCache:
    """A function whose graph is made once for each shape."""

    def __init__(self, function: Step) -> None:
        self._function = function
        self._captured = GraphedFunction(function)
        self._traced: dict[tuple[torch.Size, ...], Step] = {}

    def __call__(self, *given: Tensor) -> tuple[Tensor, ...]:
        if given[0].is_cuda:
            return self._captured(*given)
        shapes = tuple(tensor.shape for tensor in given)
        if shapes not in self._traced:
            self._traced[shapes] = _trace(self._function, given)
        return self._traced[shapes](*given)


def _make_gradients(
    task: Task, model: nn.Module, columns: Tensors
) -> Callable[[Tensor, Tensor], Tensor]:
    spec, stacked = FlatSpec.of(model), make_vmappable(model)

    def loss_of_group(flat: Tensor, *examples: Tensor) -> Tensor:
        pieces = torch.split(flat, list(spec.numels))
        named = {n: p.view(s) for n, p, s in zip(spec.names, pieces, spec.shapes, strict=True)}
        return task.loss(_FunctionalModel(stacked, named), *examples)  # type: ignore[arg-type]

    of_groups = vmap(grad(loss_of_group), in_dims=(None, *(0 for _ in columns)))
    of_runs = _loop_over_runs(of_groups) if prefers_loop(model) else vmap(of_groups)

    def gradients(parameters: Tensor, indices: Tensor) -> Tensor:
        """Return (S, G, D) gradients of (S, D) parameters on (S, G, B) examples."""
        examples = tuple(column[indices] for column in columns)
        with sdpa_kernel(SDPBackend.MATH):  # The other forms of attention cannot be stacked.
            rows: Tensor = of_runs(parameters, *examples)
        return rows

    return gradients


def _loop_over_runs(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return what `vmap` would, but one after the other; on a GPU in several streams."""
    streams: list[torch.cuda.Stream] = []

    def stacked(*tensors: Tensor) -> Tensor:
        runs = list(zip(*tensors, strict=True))
        if len(runs) == 1 or not tensors[0].is_cuda:
            return torch.stack([function(*run) for run in runs])
        while len(streams) < min(_STREAMS, len(runs)):
            streams.append(torch.cuda.Stream())
        now, found = torch.cuda.current_stream(), []
        for stream in streams:
            stream.wait_stream(now)
        for at, run in enumerate(runs):
            with torch.cuda.stream(streams[at % len(streams)]):
                found.append(function(*run))
        for stream in streams:
            now.wait_stream(stream)
        for one in found:
            one.record_stream(now)
        return torch.stack(found)

    return stacked


class _FunctionalModel:
    """Stands in for a model whose parameters come from elsewhere."""

    training = True

    def __init__(self, model: nn.Module, named: dict[str, Tensor]) -> None:
        self._model, self._named = model, named

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return functional_call(self._model, self._named, args, kwargs)


def _trace(step: Step, given: Sequence[Tensor]) -> Step:
    """Return the graph of a step for tensors of these shapes, if it does the same as the step."""
    # Some versions of torch take no gradients in inference mode, and say nothing.
    with torch.inference_mode(False), warnings.catch_warnings():
        # Deprecated in favour of torch.compile, which needs a compiler and many seconds for this.
        warnings.simplefilter("ignore")
        copies = tuple(tensor.clone() for tensor in given)
        graph = make_fx(step)(*copies)
        traced: Step = torch.jit.trace(graph, copies, check_trace=False)
        pairs = list(zip(traced(*copies), step(*copies), strict=True))
    if all(torch.allclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True) for a, b in pairs):
        return traced
    raise RuntimeError("a traced step differs from the step itself: train without --virtual")
