"""One rule per layer type: from input and output gradient to the terms of its parameters.

A rule is a pure function. It gets the tensors as autograd saw them and moves the batch first.

BatchNorm couples the examples of a batch. There a row is the part of the batch gradient that
flows through this example's activations, with the statistics of the batch held constant; the
rows still add up to the batch gradient.

Shapes: B examples, T positions (all other leading dimensions), C features or channels.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradherd.rows.terms import ConvTerm, DenseTerm, OuterTerm, Term, at_least_float32


class UnbatchedError(ValueError):
    """A tensor has no batch dimension, so there are no gradients of single examples."""


@dataclass(frozen=True)
class BatchDim:
    """How to find the batch dimension in the tensors of one module."""

    examples: int
    """B."""
    module: str
    """Name of the module, for errors."""
    preferred: int | None = None
    """Batch dimension of the model, if it is not the first."""
    dim: int | None = None
    """Batch dimension of this module, or None if it has none; see `is_known`."""
    is_known: bool = False
    """Whether `dim` was found out; otherwise sizes decide."""

    def find(self, shape: torch.Size, candidates: int | None = None) -> int:
        """Return the batch dimension among the first `candidates` dimensions of a shape.

        >>> BatchDim(5, "decoder").find(torch.Size([7, 5, 3]))
        1

        Raises:
            UnbatchedError: There is none.
        """
        if self.is_known and self.dim is not None and self.dim < (candidates or len(shape)):
            if shape[self.dim] == self.examples:
                return self.dim
        dims = range(len(shape) if candidates is None else candidates)
        fits = [dim for dim in dims if shape[dim] == self.examples]
        if self.is_known:
            fits = [dim for dim in fits if dim == self.dim]
        preferred = self.preferred or 0
        if preferred in fits or len(fits) == 1:
            dim = preferred if preferred in fits else fits[0]
            # (1, T) is broadcast over the examples; T may still equal their number.
            if self.is_known or dim == preferred or shape[preferred] != 1:
                return dim
        raise UnbatchedError(
            f"module '{self.module}' sees a tensor of shape {tuple(shape)}, of which no dimension "
            f"holds the {self.examples} examples of the batch"
        )

    def move_first(self, tensor: Tensor, features: int) -> Tensor:
        """Return a tensor (..., *features) as (B, T, *features); a view where strides allow."""
        leading = tensor.dim() - features
        # Features come last in torch's layers, so all that is left in front are examples and
        # positions.
        moved = tensor.movedim(self.find(tensor.shape, leading), 0)
        return moved.reshape(len(moved), -1, *tensor.shape[leading:])

    def require_first(self, tensor: Tensor) -> Tensor:
        """Return `tensor` if the batch is its first dimension, as layers with channels require."""
        self.find(tensor.shape, 1)
        return tensor


BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d
NamedTerms = Iterator[tuple[str, Term]]
Rule = Callable[[nn.Module, Tensor, Tensor, BatchDim, tuple[Tensor, ...]], NamedTerms]
"""(module, inputs, output gradients, batch dimension, saved statistics) to terms by name."""


def is_trainable(parameter: Tensor | None) -> bool:
    """Say whether a parameter exists and requires a gradient."""
    return parameter is not None and parameter.requires_grad


def linear(
    module: nn.Module, inputs: Tensor, grads: Tensor, batch: BatchDim, saved: object
) -> NamedTerms:
    """Yield the terms of nn.Linear: inputs (..., I), grads (..., O), any leading dimensions."""
    assert isinstance(module, nn.Linear)
    left = batch.move_first(grads, 1)
    if is_trainable(module.weight):
        right = batch.move_first(inputs, 1)
        yield "weight", OuterTerm(left, right, module.out_features)
    if is_trainable(module.bias):
        # With one position there is nothing to sum, and a view lets GramCache recognise the
        # factor that weight and bias share.
        one_position = left.shape[1] == 1
        yield "bias", DenseTerm(left[:, 0] if one_position else at_least_float32(left).sum(1))


def embedding(
    module: nn.Module, inputs: Tensor, grads: Tensor, batch: BatchDim, saved: object
) -> NamedTerms:
    """Yield the term of nn.Embedding: inputs (...) token ids, grads (..., C)."""
    assert isinstance(module, nn.Embedding)
    tokens = batch.move_first(inputs, 0).long()
    right = batch.move_first(grads, 1)
    if module.padding_idx is not None:  # torch gives the padding token no gradient
        right = right * (tokens != module.padding_idx).unsqueeze(-1)
    if is_trainable(module.weight):
        yield "weight", OuterTerm(tokens, right, module.num_embeddings)


def conv(
    module: nn.Module, inputs: Tensor, grads: Tensor, batch: BatchDim, saved: object
) -> NamedTerms:
    """Yield the terms of nn.Conv1d and nn.Conv2d: inputs (B, C, ...), grads (B, O, ...)."""
    assert isinstance(module, nn.Conv1d | nn.Conv2d)
    inputs, grads = batch.require_first(inputs), batch.require_first(grads)
    if is_trainable(module.bias):
        yield "bias", DenseTerm(at_least_float32(grads).flatten(2).sum(2))
    if not is_trainable(module.weight):
        return
    padding = module.padding
    # The functions that ConvTerm calls pad symmetrically and with zeros only.
    if isinstance(padding, str) or module.padding_mode != "zeros":
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        inputs = F.pad(inputs, padding_of_input(module), mode=mode)
        padding = (0,) * len(module.kernel_size)
    if isinstance(module, nn.Conv1d):
        inputs, grads = inputs.unsqueeze(2), grads.unsqueeze(2)
    yield (
        "weight",
        ConvTerm(
            inputs,
            grads,
            kernel=_height_width(module.kernel_size, 1),
            stride=_height_width(module.stride, 1),
            padding=_height_width(padding, 0),
            dilation=_height_width(module.dilation, 1),
            groups=module.groups,
        ),
    )


def padding_of_input(module: Any) -> tuple[int, ...]:
    """Return how a convolution pads its input itself, as `F.pad` takes it: last dimension first."""
    if module.padding == "same":
        around = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        pairs = [(one // 2, one - one // 2) for one in around]
    else:
        valid = (0,) * len(module.kernel_size)
        pairs = [(one, one) for one in (valid if module.padding == "valid" else module.padding)]
    return tuple(side for pair in reversed(pairs) for side in pair)


def _height_width(sizes: tuple[int, ...], height: int) -> tuple[int, int]:
    """Return (height, width); a one-dimensional layer gets the given height."""
    return (sizes[0], sizes[1]) if len(sizes) == 2 else (height, sizes[0])


def layer_norm(
    module: nn.Module, inputs: Tensor, grads: Tensor, batch: BatchDim, saved: object
) -> NamedTerms:
    """Yield the terms of nn.LayerNorm and nn.RMSNorm: inputs and grads (..., *normalized)."""
    assert isinstance(module, nn.LayerNorm | nn.RMSNorm)
    shape = list(module.normalized_shape)
    grads = at_least_float32(batch.move_first(grads, len(shape)))
    if is_trainable(module.weight):
        inputs = at_least_float32(batch.move_first(inputs, len(shape)))
        # Normalised again: hooks see inputs and outputs, not what is between.
        if isinstance(module, nn.LayerNorm):
            normalized = F.layer_norm(inputs, shape, eps=module.eps)
        else:
            normalized = F.rms_norm(inputs, shape, eps=module.eps)
        yield "weight", DenseTerm((grads * normalized).sum(1).flatten(1))
    if is_trainable(getattr(module, "bias", None)):
        yield "bias", DenseTerm(grads.sum(1).flatten(1))


def group_norm(
    module: nn.Module, inputs: Tensor, grads: Tensor, batch: BatchDim, saved: object
) -> NamedTerms:
    """Yield the terms of nn.GroupNorm: inputs and grads (B, C, ...)."""
    assert isinstance(module, nn.GroupNorm)
    inputs = at_least_float32(batch.require_first(inputs))
    grads = at_least_float32(batch.require_first(grads))
    # Without scale and shift: what the output gradient is multiplied by is the normalised input.
    normalized = F.group_norm(inputs, module.num_groups, eps=module.eps)
    yield from _scale_and_shift(module, normalized, grads)


def batch_norm(
    module: nn.Module, inputs: Tensor, grads: Tensor, batch: BatchDim, saved: tuple[Tensor, ...]
) -> NamedTerms:
    """Yield the terms of BatchNorm: inputs and grads (B, C, ...).

    In evaluation mode `saved` holds the running mean and variance as of the forward.
    """
    assert isinstance(module, BatchNorm)
    inputs = at_least_float32(batch.require_first(inputs))
    grads = at_least_float32(batch.require_first(grads))
    mean, var = (at_least_float32(saved[0]), at_least_float32(saved[1])) if saved else (None, None)
    normalized = F.batch_norm(inputs, mean, var, training=not saved, eps=module.eps)
    yield from _scale_and_shift(module, normalized, grads)


def _scale_and_shift(
    module: "nn.GroupNorm | BatchNorm", normalized: Tensor, grads: Tensor
) -> NamedTerms:
    """Yield the terms of one scale and shift per channel: normalized and grads (B, C, ...)."""
    if is_trainable(module.weight):
        scaled = grads * normalized
        yield "weight", DenseTerm(scaled.flatten(2).sum(2) if scaled.dim() > 2 else scaled)
    if is_trainable(module.bias):
        yield "bias", DenseTerm(grads.flatten(2).sum(2) if grads.dim() > 2 else grads)


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
    """Return the rule of the layer type that computes exactly what `module` computes, or None.

    A subclass has a rule only if it keeps the forward of its layer and adds no parameters.
    """
    for kind, rule in RULES.items():
        # The forward decides, not the class: many libraries subclass nn.Linear and change it.
        if isinstance(module, kind) and type(module).forward is kind.forward:
            if not set(dict(module.named_parameters(recurse=False))) <= {"weight", "bias"}:
                return None
            # Embedding: the gradient of a token then depends on how often the batch has it.
            if getattr(module, "scale_grad_by_freq", False):
                return None
            return rule
    return None


def save_statistics(module: nn.Module) -> tuple[Tensor, ...]:
    """Copy the buffers that a rule needs as they were during the forward."""
    if isinstance(module, BatchNorm):
        # In training the batch has its own statistics. In evaluation the buffers are used, and
        # a later forward in training would change them before the rows are read.
        if not module.training and module.running_mean is not None:
            assert module.running_var is not None
            return (module.running_mean.clone(), module.running_var.clone())
    return ()
