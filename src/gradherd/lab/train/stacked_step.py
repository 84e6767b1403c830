"""One training step of many models at once, in one graph.

Runs that differ in seed, order or learning rate take the same steps on different values. Their
parameters are stacked, gradients of groups of examples come from torch.func, and the graph of a
step is built once: a small model spends its time in Python calls, not in arithmetic. On the CPU a
traced graph runs in C++; on a GPU a captured graph runs without the host.

Letters: S runs, K steps, G groups of a step (of all workers), B examples of a group, D parameters.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradherd.flat import FlatSpec
from gradherd.lab.tasks.task import Task, Tensors, augments
from gradherd.lab.train.cuda_graphs import GraphedFunction, SideBySide
from gradherd.lab.train.optimizers import FunctionalOptimizer
from gradherd.lab.train.vmap_layers import make_vmappable, prefers_loop

Step = Callable[..., tuple[Tensor, ...]]


class StackedStep:
    """Steps S runs at once: gradients of every group, their mean, and the optimizer update."""

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        tensors: Tensors,
        optimizer: FunctionalOptimizer,
        parameters: Tensor,
        rows_of: Callable[[Tensor], Tensor] = lambda grads: grads,
    ) -> None:
        """Prepare the step on training data that is on the device.

        Every step updates the (S, D) parameters in place; `rows_of` makes of the (S, G, D)
        gradients what orders need of them.
        """
        self._state = (parameters, *optimizer.init(parameters))
        gradients = _make_gradients(task, model, tensors)
        linear = linear_form(task, gradients, tensors)
        if linear is not None:
            tensors, gradients = linear.tensors, linear.gradients
        self.takes_several = linear is not None
        """Whether several steps in a call are faster than one by one.

        Those of a linear model are: a step is all overhead. For other models tracing so many steps
        takes longer than it saves.
        """

        def steps(lrs: Tensor, indices: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
            # Indexed inside the graph: only indices are copied to the static input. Three times as
            # fast as tensor[indices] on a CPU.
            flat = indices.flatten()
            found = [
                one.index_select(0, flat).view(*indices.shape, *one.shape[1:]) for one in tensors
            ]
            means, rows = [], []
            for lr, *examples in zip(lrs.unbind(), *(one.unbind() for one in found), strict=True):
                grads = gradients(state[0], tuple(examples))
                mean = grads.mean(1)
                # Nothing is updated in place here: tracing drops in-place writes in some versions.
                updated, optimizer_state = optimizer.update(state[0], state[1:], lr, mean)
                state = (updated, *optimizer_state)
                means.append(mean)
                rows.append(rows_of(grads))
            return (torch.stack(rows), torch.stack(means), *state)

        self._steps = _GraphCache(steps)

    def __call__(self, lrs: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Take K steps: one, or more where `takes_several`.

        Args:
            lrs: (K, S, 1) learning rates.
            indices: (K, S, G, B) examples of each run.

        Returns:
            The rows of each step, and (K, S, D) mean gradients; on a GPU the next call overwrites
            both.
        """
        rows, means, *state = self._steps(lrs, indices, *self._state)
        # Copied back, so that parameters stay at the addresses that the graph reads.
        for tensor, value in zip(self._state, state, strict=True):
            tensor.copy_(value)
        return rows, means


class _GraphCache:
    """A function whose graph is built once for each input shape."""

    def __init__(self, function: Step) -> None:
        self._function = function
        self._graphed = GraphedFunction(function)
        self._traced: dict[tuple[torch.Size, ...], Step] = {}

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        if tensors[0].is_cuda:
            return self._graphed(*tensors)
        # A trace fixes shapes; the last batch of an epoch may be shorter.
        shapes = tuple(tensor.shape for tensor in tensors)
        if shapes not in self._traced:
            self._traced[shapes] = _trace(self._function, tensors)
        return self._traced[shapes](*tensors)


def _make_gradients(
    task: Task, model: nn.Module, tensors: Tensors
) -> Callable[[Tensor, tuple[Tensor, ...]], Tensor]:
    spec, vmappable = FlatSpec.of(model), make_vmappable(model)

    def loss_of_group(flat: Tensor, *examples: Tensor) -> Tensor:
        # One flat vector per run: the optimizer and the exchange then take one operation, not one
        # per parameter.
        pieces = torch.split(flat, list(spec.numels))
        named = {n: p.view(s) for n, p, s in zip(spec.names, pieces, spec.shapes, strict=True)}
        return task.loss(FunctionalModel(vmappable, named), *examples)  # type: ignore[arg-type]

    of_groups = vmap(grad(loss_of_group), in_dims=(None, *(0 for _ in tensors)))
    # vmap over models turns a convolution into one with a group per model, which is slow.
    of_runs = vmap(of_groups)
    if prefers_loop(model):
        of_runs = _loop_over_runs(of_groups, on_gpu=tensors[0].is_cuda)

    def gradients(parameters: Tensor, examples: tuple[Tensor, ...]) -> Tensor:
        """Return (S, G, D) gradients of (S, D) parameters on (S, G, B) examples."""
        with sdpa_kernel(SDPBackend.MATH):  # vmap has no rule for the fused kernels.
            grads: Tensor = of_runs(parameters, *examples)
        return grads

    return gradients


def _loop_over_runs(function: Callable[..., Tensor], *, on_gpu: bool) -> Callable[..., Tensor]:
    """Return a function like `vmap(function)` that loops, on a GPU beside each other."""
    side_by_side = SideBySide(on_gpu=on_gpu)

    def looped(*tensors: Tensor) -> Tensor:
        results: dict[int, Tensor] = {}

        def one(at: int, *run: Tensor) -> None:
            results[at] = function(*run)

        runs = zip(*tensors, strict=True)
        side_by_side([partial(one, at, *run) for at, run in enumerate(runs)])
        if on_gpu:
            # Else the allocator could reuse their memory while the current stream reads it.
            for result in results.values():
                result.record_stream(torch.cuda.current_stream())
        return torch.stack([results[at] for at in range(len(results))])

    return looped


class LinearForm:
    """Closed-form gradients of a task whose scores are linear in the parameters.

    Seven operations per step, where autograd and vmap take eighty: such a model is all overhead.
    """

    def __init__(self, task: Task, form: tuple[Tensor, Tensor]) -> None:
        self.tensors, self._score_gradient = form, task.score_gradient

    def gradients(self, parameters: Tensor, examples: tuple[Tensor, ...]) -> Tensor:
        """Return (S, G, D) gradients of (S, D) parameters on (S, G, B) examples."""
        features, targets = examples
        scores = torch.bmm(features.flatten(1, 2), parameters.unsqueeze(2)).view(targets.shape)
        grads = features * self._score_gradient(scores, targets).unsqueeze(-1)
        return grads.squeeze(2) if grads.shape[2] == 1 else grads.mean(2)


def linear_form(
    task: Task, gradients: Callable[[Tensor, tuple[Tensor, ...]], Tensor], tensors: Tensors
) -> LinearForm | None:
    """Return the closed form of a task that has one; compare it with autograd's gradients first."""
    # Augmented examples change from epoch to epoch, which features computed once would miss.
    form = None if augments(task) else task.linear_form(*tensors)
    if form is None:
        return None
    linear = LinearForm(task, form)
    size, device = linear.tensors[0].shape[1], tensors[0].device
    flat = torch.linspace(-1, 1, 2 * size, device=device).view(2, size)
    sample = torch.arange(8, device=device).remainder(len(tensors[0])).view(2, 2, 2)
    found = linear.gradients(flat, tuple(tensor[sample] for tensor in linear.tensors))
    expected = gradients(flat, tuple(tensor[sample] for tensor in tensors))
    if not torch.allclose(found, expected, rtol=1e-3, atol=1e-5):
        raise RuntimeError(
            "the task's linear_form() and score_gradient() differ from the gradients of its loss() "
            f"by up to {float((found - expected).abs().max()):.2g}: correct or remove them"
        )
    return linear


class FunctionalModel:
    """Looks like a model to `Task.loss`, with parameters or buffers that are passed in."""

    # What `Task.loss` may ask of a model; stacked models have no other mode.
    training = True

    def __init__(self, model: nn.Module, named: dict[str, Tensor]) -> None:
        self._model, self._named = model, named

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns."""
        return functional_call(self._model, self._named, args, kwargs)


def _trace(step: Step, tensors: Sequence[Tensor]) -> Step:
    """Return a traced graph of a step for these shapes; verify that it computes the same."""
    # Some versions of torch silently compute no gradients in inference mode.
    with torch.inference_mode(False), warnings.catch_warnings():
        # Deprecated in favour of torch.compile, which needs a C++ compiler and takes many seconds.
        warnings.simplefilter("ignore")
        # Clones are ordinary tensors: autograd cannot record those of inference mode.
        copies = tuple(tensor.clone() for tensor in tensors)
        graph = make_fx(step)(*copies)
        # make_fx turns grad and vmap into plain operators, which torch.jit can then run without
        # Python.
        traced: Step = torch.jit.trace(graph, copies, check_trace=False)
        # Tracing bakes in whatever Python decided once; compare before relying on it.
        pairs = list(zip(traced(*copies), step(*copies), strict=True))
    if all(torch.allclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True) for a, b in pairs):
        return traced
    raise RuntimeError("a traced step differs from the step itself: train without --virtual")
