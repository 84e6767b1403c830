"""One rule per layer kind: from input and output gradient to the terms of its parameters.

A rule is a pure function. It gets the tensors as autograd saw them and puts the batch first.

BatchNorm ties the examples of a batch together. There a row is the share of the batch
gradient that flows through this example's activations, with the batch's statistics as they
were; the rows still add up to the batch gradient.

Shapes: B examples, T positions (every other leading dimension), C features or channels.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradherd.rows.conv import Conv
from gradherd.rows.outer import Outer
from gradherd.rows.terms import Dense, Term, full


@dataclass(frozen=True)
class Batch:
    """How to find the examples in the tensors of one module."""

    examples: int
    """B."""
    module: str
    """Name of the module, for errors."""
    dim: int | None = None
    """Dimension tried before the others; None tries them from the first."""

    def find(self, shape: torch.Size, candidates: int | None = None) -> int:
        """Return the batch dimension among the first `candidates` ones of a shape.

        >>> Batch(5, "decoder").find(torch.Size([7, 5, 3]))
        1
        """
        dims = list(range(len(shape) if candidates is None else candidates))
        if self.dim is not None and self.dim in dims:
            dims.insert(0, self.dim)
        for dim in dims:
            if shape[dim] == self.examples:
                return dim
        raise ValueError(
            f"no dimension of shape {tuple(shape)} in module '{self.module}' has the number of "
            f"examples, {self.examples}: give take() the number of examples of the batch; a "
            "module that sees a flattened, broadcast or unbatched tensor has no rows of single "
            "examples (keep the batch dimension, or order whole batches)"
        )

    def first(self, tensor: Tensor, features: int) -> Tensor:
        """Return a tensor (..., *features) as (B, T, *features); a view where strides allow."""
        leading = tensor.dim() - features
        moved = tensor.movedim(self.find(tensor.shape, leading), 0)
        return moved.reshape(len(moved), -1, *tensor.shape[leading:])

    def leads(self, tensor: Tensor) -> Tensor:
        """Return `tensor` if its first dimension is the batch, as channel layers demand."""
        self.find(tensor.shape, 1)
        return tensor


Terms = Iterator[tuple[str, Term]]
Rule = Callable[[nn.Module, Tensor, Tensor, Batch, tuple[Tensor, ...]], Terms]


def wants(parameter: Tensor | None) -> bool:
    """Say whether a parameter is there and trainable."""
    return parameter is not None and parameter.requires_grad


def linear(module: nn.Module, inputs: Tensor, grads: Tensor, batch: Batch, kept: object) -> Terms:
    """Give the terms of nn.Linear: inputs (..., I), grads (..., O), any leading dimensions."""
    assert isinstance(module, nn.Linear)
    left = batch.first(grads, 1)
    if wants(module.weight):
        yield "weight", Outer(left, batch.first(inputs, 1), module.out_features)
    if wants(module.bias):
        # With one position nothing is added up, and the Gram matrix sees the shared factor.
        yield "bias", Dense(left[:, 0] if left.shape[1] == 1 else full(left).sum(1))


def embedding(
    module: nn.Module, inputs: Tensor, grads: Tensor, batch: Batch, kept: object
) -> Terms:
    """Give the term of nn.Embedding: inputs (...) token numbers, grads (..., C)."""
    assert isinstance(module, nn.Embedding)
    tokens = batch.first(inputs, 0).long()
    right = batch.first(grads, 1)
    if module.padding_idx is not None:
        right = right * (tokens != module.padding_idx).unsqueeze(-1)
    if wants(module.weight):
        yield "weight", Outer(tokens, right, module.num_embeddings)


def conv(module: nn.Module, inputs: Tensor, grads: Tensor, batch: Batch, kept: object) -> Terms:
    """Give the terms of nn.Conv1d and nn.Conv2d: inputs (B, C, ...), grads (B, O, ...)."""
    assert isinstance(module, nn.Conv1d | nn.Conv2d)
    inputs, grads = batch.leads(inputs), batch.leads(grads)
    if wants(module.bias):
        yield "bias", Dense(full(grads).flatten(2).sum(2))
    if not wants(module.weight):
        return
    padding = module.padding
    if isinstance(padding, str) or module.padding_mode != "zeros":
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        inputs = F.pad(inputs, module._reversed_padding_repeated_twice, mode=mode)
        padding = (0,) * len(module.kernel_size)
    if isinstance(module, nn.Conv1d):
        inputs, grads = inputs.unsqueeze(2), grads.unsqueeze(2)
    yield (
        "weight",
        Conv(
            inputs,
            grads,
            kernel=_pair(module.kernel_size, 1),
            stride=_pair(module.stride, 1),
            padding=_pair(padding, 0),
            dilation=_pair(module.dilation, 1),
            groups=module.groups,
        ),
    )


def _pair(sizes: tuple[int, ...], height: int) -> tuple[int, int]:
    """Return (height, width) sizes; a one-dimensional layer gets the given height."""
    return (sizes[0], sizes[1]) if len(sizes) == 2 else (height, sizes[0])


def layer_norm(
    module: nn.Module, inputs: Tensor, grads: Tensor, batch: Batch, kept: object
) -> Terms:
    """Give the terms of nn.LayerNorm and nn.RMSNorm: inputs and grads (..., *normalized)."""
    assert isinstance(module, nn.LayerNorm | nn.RMSNorm)
    shape = list(module.normalized_shape)
    grads = full(batch.first(grads, len(shape)))
    if wants(module.weight):
        inputs = full(batch.first(inputs, len(shape)))
        if isinstance(module, nn.LayerNorm):
            normal = F.layer_norm(inputs, shape, eps=module.eps)
        else:
            normal = F.rms_norm(inputs, shape, eps=module.eps)
        yield "weight", Dense((grads * normal).sum(1).flatten(1))
    if wants(getattr(module, "bias", None)):
        yield "bias", Dense(grads.sum(1).flatten(1))


def group_norm(
    module: nn.Module, inputs: Tensor, grads: Tensor, batch: Batch, kept: object
) -> Terms:
    """Give the terms of nn.GroupNorm: inputs and grads (B, C, ...)."""
    assert isinstance(module, nn.GroupNorm)
    inputs, grads = full(batch.leads(inputs)), full(batch.leads(grads))
    yield from _affine(module, F.group_norm(inputs, module.num_groups, eps=module.eps), grads)


def batch_norm(
    module: nn.Module, inputs: Tensor, grads: Tensor, batch: Batch, kept: tuple[Tensor, ...]
) -> Terms:
    """Give the terms of BatchNorm: inputs and grads (B, C, ...), statistics of the batch.

    In evaluation mode `kept` holds the running mean and variance of the time of the forward.
    """
    assert isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)
    inputs, grads = full(batch.leads(inputs)), full(batch.leads(grads))
    mean, var = (full(kept[0]), full(kept[1])) if kept else (None, None)
    normal = F.batch_norm(inputs, mean, var, training=not kept, eps=module.eps)
    yield from _affine(module, normal, grads)


def _affine(
    module: nn.GroupNorm | nn.modules.batchnorm._BatchNorm, normal: Tensor, grads: Tensor
) -> Terms:
    """Give the terms of a scale and shift per channel: normal and grads (B, C, ...)."""
    if wants(module.weight):
        scaled = grads * normal
        yield "weight", Dense(scaled.flatten(2).sum(2) if scaled.dim() > 2 else scaled)
    if wants(module.bias):
        yield "bias", Dense(grads.flatten(2).sum(2) if grads.dim() > 2 else grads)


RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: linear,
    nn.Conv1d: conv,
    nn.Conv2d: conv,
    nn.Embedding: embedding,
    nn.LayerNorm: layer_norm,
    nn.RMSNorm: layer_norm,
    nn.GroupNorm: group_norm,
    nn.BatchNorm1d: batch_norm,
    nn.BatchNorm2d: batch_norm,
}


def rule_for(module: nn.Module) -> Rule | None:
    """Return the rule whose layer computes exactly what `module` computes, or None.

    A subclass counts only while it keeps the forward of its layer and adds no parameters.
    """
    for kind, rule in RULES.items():
        if isinstance(module, kind) and type(module).forward is kind.forward:
            if not set(module._parameters) <= {"weight", "bias"}:
                return None
            if getattr(module, "scale_grad_by_freq", False):
                return None
            return rule
    return None


def keep(module: nn.Module) -> tuple[Tensor, ...]:
    """Return what a rule needs of the module's state at the time of the forward."""
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        if not module.training and module.running_mean is not None:
            assert module.running_var is not None
            return (module.running_mean.clone(), module.running_var.clone())
    return ()
