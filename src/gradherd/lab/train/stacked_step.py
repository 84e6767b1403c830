"""One training step of many models at once, in one graph.

Runs that differ in seed, order or learning rate take the same steps on different values. Their
parameters are stacked, gradients of groups of examples come from torch.func, and the graph of a
step is built once: a small model spends its time in Python calls, not in arithmetic. On the CPU
the graph runs in C++.

Letters: S runs, K steps, G groups of a step (of all workers), B examples of a group, N = S G B,
D parameters, I inputs and O outputs of a linear model, C channels.
"""

import copy
import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradherd.flat import FlatSpec
from gradherd.lab.tasks.task import Task, Tensors, check_loss
from gradherd.lab.train.optimizers import FunctionalOptimizer

log = logging.getLogger("gradherd")

Step = Callable[..., tuple[Tensor, ...]]
Gradients = Callable[[Tensor, Tensors], Tensor]
"""Returns (S, G, D) gradients of (S, D) parameters on (S, G, B) examples."""


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

        def steps(
            lrs: Tensor, indices: Tensor, parameters: Tensor, *state: Tensor
        ) -> tuple[Tensor, ...]:
            # Three times as fast as tensor[indices] on a CPU.
            flat = indices.flatten()
            found = [
                one.index_select(0, flat).view(*indices.shape, *one.shape[1:]).unbind()
                for one in tensors
            ]
            rows, means = [], []
            for lr, *examples in zip(lrs.unbind(), *found, strict=True):
                grads = gradients(parameters, tuple(examples))
                means.append(grads.mean(1))
                rows.append(rows_of(grads))
                # Nothing is updated in place here: tracing drops in-place writes in some versions.
                parameters, state = optimizer.update(parameters, state, lr, means[-1])
            return (_stacked(rows), _stacked(means), parameters, *state)

        self._steps = steps
        self._traced: dict[torch.Size, Step] = {}

    def __call__(self, lrs: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Take K steps.

        Args:
            lrs: (K, S, 1) learning rates.
            indices: (K, S, G, B) examples of each run.

        Returns:
            The rows (K, ...), and (K, S, D) mean gradients.
        """
        tensors = (lrs, indices, *self._state)
        # A trace fixes shapes; the last batch of an epoch may be shorter.
        if indices.shape not in self._traced:
            self._traced[indices.shape] = _trace(self._steps, tensors)
        rows, mean, *state = self._traced[indices.shape](*tensors)
        # In place: the caller's parameters are those that step.
        for tensor, value in zip(self._state, state, strict=True):
            tensor.copy_(value)
        return rows, mean


def _stacked(each: list[Tensor]) -> Tensor:
    """Return the tensors of all steps as one; of a single step without a copy."""
    return torch.stack(each) if len(each) > 1 else each[0].unsqueeze(0)


class _LinearRuns:
    """Looks like a model to `Task.loss`: S linear layers, each for an S-th of the examples."""

    training = True

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Take weights (S, O, I) and biases (S, O)."""
        self._weight, self._bias = weight, bias

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the outputs (N, O) of inputs (N, I), from which gradients begin."""
        self.inputs = inputs.view(len(self._weight), -1, inputs.shape[-1])
        if self._bias is None:
            scores = torch.bmm(self.inputs, self._weight.mT)
        else:
            scores = torch.baddbmm(self._bias.unsqueeze(1), self.inputs, self._weight.mT)
        self.scores = scores.view(-1, scores.shape[2]).requires_grad_()
        return self.scores


def _linear_gradients(task: Task, spec: FlatSpec) -> Gradients:
    """Return the gradients of a linear model from those of its outputs.

    A third of the operations that vmap takes: such a step is all overhead. The loss is the mean
    over examples, whichever run they are of.
    """

    def gradients(parameters: Tensor, examples: Tensors) -> Tensor:
        shape, views = examples[0].shape[:3], spec.views(parameters)
        model: Any = _LinearRuns(views["weight"], views.get("bias"))
        with torch.enable_grad():
            loss = task.loss(model, *(one.flatten(0, 2) for one in examples))
        check_loss(task, loss)
        # Of the mean over a group, not over all.
        scale = loss.new_tensor(shape[0] * shape[1])
        (of_scores,) = torch.autograd.grad(loss, model.scores, scale)
        errors, inputs = of_scores.view(*shape, -1), model.inputs.view(*shape, -1)
        if shape[2] == 1:  # one by one, small matrices take longer than an elementwise product
            weight, bias = errors.mT * inputs, errors.squeeze(2)
        else:
            weight, bias = errors.mT @ inputs, errors.sum(2)
        parts = [weight.flatten(2), bias]
        return torch.cat(parts[: len(spec.names)], 2)

    return gradients


def _make_gradients(task: Task, model: nn.Module, tensors: Tensors) -> Gradients:
    spec, vmappable = FlatSpec.of(model), make_vmappable(model)

    def loss_of_group(flat: Tensor, *examples: Tensor) -> Tensor:
        # One flat vector per run: the optimizer and the exchange then take one operation, not one
        # per parameter.
        model = FunctionalModel(vmappable, spec.views(flat))
        return task.loss(model, *examples)  # type: ignore[arg-type]

    of_groups = vmap(grad(loss_of_group), in_dims=(None, *(0 for _ in tensors)))
    loops = prefers_loop(model)

    def gradients(parameters: Tensor, examples: Tensors) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):  # vmap has no rule for the fused kernels.
            if loops:
                runs = zip(parameters, *examples, strict=True)
                return torch.stack([of_groups(*run) for run in runs])
            grads: Tensor = vmap(of_groups)(parameters, *examples)
        return grads

    if type(model) is nn.Linear:
        linear = _linear_gradients(task, spec)
        return linear if _agree(linear, gradients, spec, tensors) else gradients
    return gradients


def _agree(one: Gradients, other: Gradients, spec: FlatSpec, tensors: Tensors) -> bool:
    """Return whether two ways give the same gradients of two runs on a few examples."""
    like = tensors[0]
    parameters = torch.linspace(-1, 1, 2 * spec.size, device=like.device).view(2, -1)
    indices = torch.arange(8, device=like.device).remainder(len(like)).view(2, 2, 2)
    examples = tuple(tensor[indices] for tensor in tensors)
    try:
        found = one(parameters, examples)
    # A loss that asks a model for more than its outputs, or does not depend on it.
    except (AttributeError, TypeError, RuntimeError):
        return False
    return torch.allclose(found, other(parameters, examples), rtol=1e-3, atol=1e-5)


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
        graph.graph.eliminate_dead_code()
        graph.recompile()
        # make_fx turns grad and vmap into plain operators, which torch.jit can then run without
        # Python. Not on a GPU, where it would compile kernels of its own.
        traced: Step = graph
        if not copies[0].is_cuda:
            try:
                traced = torch.jit.trace(graph, copies, check_trace=False)
            except RuntimeError as error:  # it does not know the backward of norms
                log.debug("torch.jit cannot trace a step: %s", error)
        # Tracing bakes in whatever Python decided once; compare before relying on it.
        pairs = list(zip(traced(*copies), step(*copies), strict=True))
    if all(torch.allclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True) for a, b in pairs):
        return traced
    raise RuntimeError("a traced step differs from the step itself: train without --virtual")


class PatchConv2d(nn.Conv2d):
    """A convolution as a matrix product with image patches.

    vmap turns per-example weight gradients of a convolution into a grouped convolution with one
    group per example, which libraries process one by one; of this they are one batched product.
    """

    def forward(self, images: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C', H', W')."""
        (down, across), (gap, side_gap) = self.kernel_size, self.dilation
        (top, left), (step, side_step) = map(int, self.padding), self.stride
        padded = F.pad(images, (left, left, top, top))
        height, width = (
            padded.shape[2] - gap * (down - 1),
            padded.shape[3] - side_gap * (across - 1),
        )
        # A slice per row and per column of the kernel: vmap has no rule for F.unfold.
        rows = [padded[:, :, at : at + height : step] for at in range(0, gap * down, gap)]
        stacked, starts = torch.stack(rows, 2), range(0, side_gap * across, side_gap)
        columns = [stacked[..., at : at + width : side_step] for at in starts]
        patches = torch.stack(columns, 3).flatten(1, 3)  # (B, C k k, H', W')
        out: Tensor = self.weight.flatten(1) @ patches.flatten(2)
        out = out.unflatten(2, patches.shape[2:])
        return out if self.bias is None else out + self.bias.view(-1, 1, 1)


def prefers_loop(model: nn.Module) -> bool:
    """Return whether models should be looped over, with vmap only over each model's examples.

    vmap over models turns a convolution into one with a group per model, and libraries are slow at
    convolving with one set of weights per model.

    >>> prefers_loop(nn.Conv2d(3, 6, 5)), prefers_loop(nn.Linear(2, 2))
    (True, False)
    """
    return any(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules())


def make_vmappable(model: nn.Module) -> nn.Module:
    """Return a copy with layers that vmap can batch; parameter names stay the same."""
    # A copy: changing the class in place would change the model that evaluates.
    model = copy.deepcopy(model)
    for module in model.modules():
        # "same" and "valid" would have to be turned into numbers first.
        if type(module) is nn.Conv2d and not isinstance(module.padding, str):
            if module.groups == 1 and module.padding_mode == "zeros":
                # Same parameters and settings, another forward: changing the class is enough.
                module.__class__ = PatchConv2d
    return model
