"""One rule per layer type: from input and output gradient to the terms of its parameters.

A rule is a pure function. It gets the tensors as autograd saw them and moves the batch first.

BatchNorm couples the examples of a batch. There a row is the part of the batch gradient that
flows through this example's activations, with the statistics of the batch held constant; the
rows still add up to the batch gradient.

Shapes: B examples, T positions (all other leading dimensions), C features or channels.
"""

import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradherd.rows.exact_rows import DenseTerm, OuterTerm, TableTerm, Term, at_least_float32

MAX_TEMPORARY = 1 << 24
"""Elements of the largest temporary; larger work is cut into pieces."""

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d
NamedTerms = Iterator[tuple[str, Term]]
Rule = Callable[..., NamedTerms]
"""(module, inputs, output gradients, batch dimension, names of parameters, *statistics) to terms.

Inputs are missing (empty) where no weight is among the names.
"""


def is_trainable(parameter: Tensor | None) -> bool:
    """Say whether a parameter exists and requires a gradient."""
    return parameter is not None and parameter.requires_grad


def examples_first(tensor: Tensor, dim: int, features: int) -> Tensor:
    """Return a tensor (..., *features) as (B, T, *features), in float32 or better."""
    leading = tensor.dim() - features
    moved = at_least_float32(tensor).movedim(dim, 0)
    return moved.reshape(len(moved), -1, *tensor.shape[leading:])


def linear(
    module: Any, inputs: Tensor, grads: Tensor, dim: int, wanted: Collection[str]
) -> NamedTerms:
    """Yield the terms of nn.Linear: inputs (..., I), grads (..., O), any leading dimensions."""
    left = examples_first(grads, dim, 1)
    if "weight" in wanted:
        yield "weight", weight_term(left, examples_first(inputs, dim, 1))
    if "bias" in wanted:
        # With one position there is nothing to sum, and a view lets GramCache recognise the
        # factor that weight and bias share.
        yield "bias", DenseTerm(left[:, 0] if left.shape[1] == 1 else left.sum(1))


def weight_term(left: Tensor, right: Tensor) -> Term:
    """Return the term of a weight from its factors (B, T, O) and (B, T, I)."""
    if OuterTerm.saves_time(left.shape[1], left.shape[2], right.shape[2]):
        # A copy: what the model was given may be overwritten before rows are used.
        return OuterTerm(left, right.clone())
    return DenseTerm(OuterTerm(left, right).dense())


def embedding(
    module: Any, inputs: Tensor, grads: Tensor, dim: int, wanted: Collection[str]
) -> NamedTerms:
    """Yield the term of nn.Embedding: inputs (...) token ids, grads (..., C)."""
    right = examples_first(grads, dim, 1)
    tokens = inputs.long().movedim(dim, 0).reshape(len(right), -1)
    if module.padding_idx is not None:  # torch gives the padding token no gradient
        right = right * (tokens != module.padding_idx).unsqueeze(-1)
    # Tokens that do not occur cost nothing.
    found, places = torch.unique(tokens, return_inverse=True)
    examples, width = len(right), right.shape[-1]
    places = places + torch.arange(examples, device=places.device)[:, None] * len(found)
    sums = right.new_zeros(examples * len(found), width)
    sums.index_add_(0, places.flatten(), right.reshape(-1, width))
    shape = (module.num_embeddings, module.embedding_dim)
    yield "weight", TableTerm(sums.view(examples, -1), found, shape)


def conv(
    module: Any, inputs: Tensor, grads: Tensor, dim: int, wanted: Collection[str]
) -> NamedTerms:
    """Yield the terms of convolutions: inputs (B, C, ...), grads (B, O, ...)."""
    grads = at_least_float32(grads)
    if "bias" in wanted:
        yield "bias", DenseTerm(grads.flatten(2).sum(2))
    if "weight" not in wanted:
        return
    inputs, padding = at_least_float32(inputs), padding_of_input(module)
    if any(padding):
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        inputs = F.pad(inputs, padding, mode=mode)
    positions, width = grads[0, 0].numel(), inputs.shape[1] * math.prod(module.kernel_size)
    if module.groups == 1 and OuterTerm.saves_time(positions, grads.shape[1], width):
        right = _windows(module, inputs, grads.shape[2:], channels_first=True)
        left = grads.flatten(2).transpose(1, 2).contiguous()
        yield "weight", OuterTerm(left, right.reshape(len(left), positions, -1))
        return
    # Windows copy each input once for every place of the filter, so the batch is cut.
    step = max(1, MAX_TEMPORARY // max(1, positions * width))
    pieces = zip(inputs.split(step), grads.split(step), strict=True)
    yield "weight", DenseTerm(torch.cat([_filter_grads(module, *piece) for piece in pieces]))


def _filter_grads(module: Any, inputs: Tensor, grads: Tensor) -> Tensor:
    """Return the gradient of a weight for each example, from padded inputs: (B, N)."""
    examples, groups = len(inputs), module.groups
    # With channels side by side, what lies under a filter is a few long runs, which a CPU copies
    # several times as fast as `unfold` does, and the product reads both in the order of memory.
    windows = _windows(module, inputs, grads.shape[2:], channels_first=False)
    left = grads.reshape(examples * groups, grads.shape[1] // groups, -1)
    filters: Tensor = torch.bmm(left, windows.reshape(len(left), left.shape[2], -1))
    # Back to the order of the weight: channels before the places of the filter.
    filters = filters.unflatten(2, (math.prod(module.kernel_size), -1))
    return filters.transpose(2, 3).reshape(examples, -1)


def _windows(module: Any, inputs: Tensor, outputs: torch.Size, *, channels_first: bool) -> Tensor:
    """Return what lies under a filter at each place: (B, H, *outputs, *kernel, C / H) for H groups.

    Args:
        module: The convolution.
        inputs: (B, C, ...), padded.
        outputs: Sizes of the output.
        channels_first: Whether channels come before the kernel, as in the weight.
    """
    examples, channels, groups = len(inputs), inputs.shape[1], module.groups
    inputs = inputs.movedim(1, -1).contiguous()
    between = inputs.stride()[1:-1]
    steps = [one * stride for one, stride in zip(between, module.stride, strict=True)]
    inside = [one * dilation for one, dilation in zip(between, module.dilation, strict=True)]
    window = [*zip(module.kernel_size, inside, strict=True)]
    channel = [(channels // groups, 1)]
    shape, strides = zip(
        (examples, inputs.stride(0)),
        (groups, channels // groups),
        *zip(outputs, steps, strict=True),
        *(channel + window if channels_first else window + channel),
        strict=True,
    )
    return inputs.as_strided(shape, strides)


def padding_of_input(module: Any) -> tuple[int, ...]:
    """Return how a convolution pads its input itself, as `F.pad` takes it: last dimension first."""
    if module.padding == "same":
        around = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        pairs = [(one // 2, one - one // 2) for one in around]
    else:
        valid = (0,) * len(module.kernel_size)
        pairs = [(one, one) for one in (valid if module.padding == "valid" else module.padding)]
    return tuple(side for pair in reversed(pairs) for side in pair)


def layer_norm(
    module: Any, inputs: Tensor, grads: Tensor, dim: int, wanted: Collection[str]
) -> NamedTerms:
    """Yield the terms of nn.LayerNorm and nn.RMSNorm: inputs and grads (..., *normalized)."""
    shape = list(module.normalized_shape)
    grads = examples_first(grads, dim, len(shape))
    if "weight" in wanted:
        norm = F.layer_norm if isinstance(module, nn.LayerNorm) else F.rms_norm
        normalized = norm(examples_first(inputs, dim, len(shape)), shape, eps=module.eps)
        yield "weight", DenseTerm((grads * normalized).sum(1).flatten(1))
    if "bias" in wanted:
        yield "bias", DenseTerm(grads.sum(1).flatten(1))


def group_norm(
    module: Any, inputs: Tensor, grads: Tensor, dim: int, wanted: Collection[str]
) -> NamedTerms:
    """Yield the terms of nn.GroupNorm: inputs and grads (B, C, ...)."""
    if "weight" in wanted:
        # Without scale and shift: the gradient is multiplied by the normalised input.
        inputs = F.group_norm(at_least_float32(inputs), module.num_groups, eps=module.eps)
    yield from _scale_and_shift(inputs, grads, wanted)


def batch_norm(
    module: Any,
    inputs: Tensor,
    grads: Tensor,
    dim: int,
    wanted: Collection[str],
    mean: Tensor | None = None,
    var: Tensor | None = None,
) -> NamedTerms:
    """Yield the terms of BatchNorm: inputs and grads (B, C, ...).

    In evaluation mode there are the running mean and variance as of the forward.
    """
    if "weight" in wanted:
        inputs = at_least_float32(inputs)
        mean, var = (None if one is None else one.to(inputs) for one in (mean, var))
        inputs = F.batch_norm(inputs, mean, var, training=mean is None, eps=module.eps)
    yield from _scale_and_shift(inputs, grads, wanted)


def _scale_and_shift(normalized: Tensor, grads: Tensor, wanted: Collection[str]) -> NamedTerms:
    """Yield the terms of one scale and shift per channel: normalized and grads (B, C, ...)."""
    grads = (
        at_least_float32(grads).flatten(2)
        if grads.dim() > 2
        else at_least_float32(grads)[..., None]
    )
    if "weight" in wanted:
        yield "weight", DenseTerm((grads * normalized.reshape(grads.shape)).sum(2))
    if "bias" in wanted:
        yield "bias", DenseTerm(grads.sum(2))


RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: linear,
    nn.Conv1d: conv,
    nn.Conv2d: conv,
    nn.Conv3d: conv,
    nn.Embedding: embedding,
    nn.LayerNorm: layer_norm,
    nn.RMSNorm: layer_norm,
    nn.GroupNorm: group_norm,
    nn.BatchNorm1d: batch_norm,
    nn.BatchNorm2d: batch_norm,
    nn.BatchNorm3d: batch_norm,
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


def leading_dims(module: nn.Module, ndim: int) -> int:
    """Return how many of the first dimensions of a layer's input may hold the examples."""
    if isinstance(module, nn.Linear):
        return ndim - 1
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return ndim - len(module.normalized_shape)
    return ndim if isinstance(module, nn.Embedding) else 1  # channels come second


def statistics_of(module: nn.Module) -> tuple[Tensor, ...]:
    """Copy the buffers that a rule needs as they are during the forward."""
    # In training the batch has its own statistics. In evaluation the buffers are used, and a later
    # forward in training would change them before the backward.
    if isinstance(module, BatchNorm) and not module.training and module.running_mean is not None:
        assert module.running_var is not None
        return module.running_mean.clone(), module.running_var.clone()
    return ()
