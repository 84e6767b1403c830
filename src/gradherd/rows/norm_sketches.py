"""Columns from the exact rules of layers, and which layer has which sketch.

Shapes: B examples, C channels, k elements of a row.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradherd.rows.column_table import LayerColumns
from gradherd.rows.conv_sketch import ConvSketch
from gradherd.rows.launch_plan import NormLayer
from gradherd.rows.layer_rules import rule_for, save_statistics
from gradherd.rows.layer_sketches import (
    EmbeddingSketch,
    LayerCall,
    LayerSketch,
    LinearSketch,
)
from gradherd.rows.projected_weight import KERNEL_DTYPES, Place, SketchPlan
from gradherd.rows.sketch import count_sketch
from gradherd.rows.terms import DenseTerm, at_least_float32

_EMPTY = torch.empty(0)


class RuleSketch:
    """Columns from the exact rule of a layer: norms, and convolutions of few channels."""

    def __init__(self, module: nn.Module, names: Mapping[str, str], plan: SketchPlan) -> None:
        rule = rule_for(module)
        assert rule is not None
        self._module, self._rule, self._plan, self._names = module, rule, plan, names
        # Weights of convolutions are large and sketched at once; those of norms are short.
        self._final = {"weight"} if isinstance(module, nn.modules.conv._ConvNd) else set()
        self._sizes = {
            local: parameter.numel()
            for local, parameter in module.named_parameters()
            if local in names and local not in self._final
        }
        # One slot for scale and shift, so that one kernel can write both.
        self.widths = {"all": (sum(self._sizes.values()), False)} if self._sizes else {}

    def write(self, call: LayerCall, out: LayerColumns) -> None:
        """Write the columns of each parameter."""
        saved = call.saved if len(call.saved) == 2 else ()
        dense: dict[str, Tensor] = {}
        for local, term in self._rule(self._module, call.inputs, call.grads, call.batch, saved):
            if local not in self._names:
                continue
            if isinstance(term, DenseTerm) and local not in self._final:
                dense[local] = term.grads.flatten(1)
                out.table.start(len(dense[local]))
            else:
                rows = term.sketch(self._plan.size, self._plan.seed, self._names[local])
                out.table.start(len(rows))
                out.table.add_final(out.indices[local], rows)
        if dense:
            out.put("all", torch.cat([dense[local] for local in self._sizes], 1))

    def project(self, local: str, grad: Tensor) -> Tensor:
        """Return the columns of a whole gradient."""
        flat = at_least_float32(grad).flatten()
        if local not in self._final:
            return flat
        return count_sketch(flat, self._plan.size, self._plan.seed, name=self._names[local])

    def where(self, local: str) -> Place:
        """Say where the columns of a parameter are."""
        if local in self._final:
            return Place("")
        lo = 0
        for name, size in self._sizes.items():
            if name == local:
                return Place("all", lo, lo + size)
            lo += size
        raise KeyError(local)


class NormSketch(RuleSketch):
    """Columns of BatchNorm and LayerNorm, in one kernel on a GPU."""

    def write(self, call: LayerCall, out: LayerColumns) -> None:
        """Write the columns of scale and shift."""
        if not self._launch(call, out):
            super().write(call, out)

    def _launch(self, call: LayerCall, out: LayerColumns) -> bool:
        """Let one kernel write both; say whether it could."""
        table = out.table
        layer_norm = isinstance(self._module, nn.LayerNorm)
        # Four tensors: autograd has saved mean and deviation of this forward.
        if table.group is None or len(call.saved) != 4:
            return False
        if list(self._sizes) != ["weight", "bias"] or call.batch.find(call.inputs.shape) != 0:
            return False
        if layer_norm and len(self._module.normalized_shape) > 1:  # type: ignore[arg-type]
            return False
        inputs, grads, (mean, rstd) = call.inputs, call.grads, call.saved[2:]
        table.start(len(inputs))
        key = (
            inputs.shape, inputs.stride(), grads.stride(), inputs.dtype,
            grads.dtype, mean.dtype, inputs.data_ptr() % 16, grads.data_ptr() % 16,
        )  # fmt: skip
        tensors = (inputs, grads, mean, rstd)
        return table.launch(
            out.slots["all"],
            key,
            lambda add: norm_layer(*tensors, row=table.width, add=add, per_channel=not layer_norm),
            tensors,
        )


def norm_layer(
    inputs: Tensor,
    grads: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *,
    row: int,
    add: bool,
    per_channel: bool,
) -> NormLayer | None:
    """Describe a norm to the kernels; None if they cannot read its tensors.

    Args:
        inputs: (B, C, ...) with a mean for each channel (BatchNorm), or (B, ..., C) with a mean
            for each position (LayerNorm).
        grads: Output gradients of the same shape.
        mean: (C,) or one element for each position.
        rstd: Reciprocal standard deviations of the same shape.
        row: Elements between two examples' columns.
        add: Whether to add to the columns of an earlier use.
        per_channel: Whether there is a mean for each channel.
    """
    # Without positions there is nothing to sum, and a product of torch's is as fast.
    if inputs.dim() < 3 or inputs.shape != grads.shape:
        return None
    if not all(one.dtype in KERNEL_DTYPES for one in (inputs, grads, mean, rstd)):
        return None
    examples, channels = len(inputs), inputs.shape[1 if per_channel else -1]
    positions = inputs.numel() // (examples * channels)
    # Channels-first images: positions of a channel lie side by side, and one program sums them.
    is_first = per_channel and inputs.is_contiguous() and grads.is_contiguous()
    strides: list[tuple[int, int] | None] = [(0, 0), (0, 0)]
    if not is_first:
        if per_channel:
            inputs, grads = inputs.movedim(1, -1), grads.movedim(1, -1)
        elif mean.numel() != examples * positions or not mean.is_contiguous():
            return None
        strides = [_position_strides(one) for one in (inputs, grads)]
    if strides[0] is None or strides[1] is None:
        return None
    return NormLayer(
        examples=examples,
        channels=channels,
        positions=positions,
        row=row,
        add=add,
        input_strides=strides[0],
        grad_strides=strides[1],
        input_dtype=inputs.dtype,
        grad_dtype=grads.dtype,
        stats_dtype=mean.dtype,
        is_last=not is_first,
        per_channel=per_channel,
        is_aligned=inputs.data_ptr() % 16 == 0 and grads.data_ptr() % 16 == 0,
    )


def _position_strides(tensor: Tensor) -> tuple[int, int] | None:
    """Return the strides of (B, ..., C) over examples and positions, if one leads over all."""
    sizes, strides = tensor.shape[1:-1], tensor.stride()
    if strides[-1] != 1:
        return None
    inner = strides[1:-1]
    if any(inner[at] != sizes[at + 1] * inner[at + 1] for at in range(len(sizes) - 1)):
        return None
    return strides[0], inner[-1]


def norm_statistics(node: Any, module: nn.Module, *, elsewhere: bool) -> tuple[Tensor, ...]:
    """Return what a norm's columns need besides its input.

    Args:
        node: The node of autograd that computed its output.
        module: The norm.
        elsewhere: Whether autograd may recompute or offload what it saves.

    Returns:
        Copies of running mean and variance of a BatchNorm in evaluation mode. Else two empty
        tensors, mean and reciprocal standard deviation of this forward if autograd has saved them.
    """
    if not module.training and (running := save_statistics(module)):
        return running
    if elsewhere:
        # Inside activation checkpointing, asking for what autograd has saved runs the whole block
        # again, and holds it until the backward.
        return ()
    # The two results of the forward beside the output; both kernels call them so.
    try:
        mean, rstd = node._saved_result1, node._saved_result2
    except AttributeError:
        return ()
    if mean is None or rstd is None or not mean.numel():
        return ()
    if mean.requires_grad or rstd.requires_grad:  # then each would hold the node, which holds us
        mean, rstd = mean.detach(), rstd.detach()
    return (_EMPTY, _EMPTY, mean, rstd)


def make_layer_sketch(
    module: nn.Module, names: Mapping[str, str], plan: SketchPlan, *, shared: bool
) -> LayerSketch | None:
    """Return the sketch of a layer, or None for modules that have none.

    Args:
        module: The module.
        names: Names of its trainable parameters in the model, by their local names.
        plan: Sizes and seed.
        shared: Whether another module uses its weight, too.
    """
    # A parametrized weight is computed before each forward, from parameters of other names.
    if not set(names) <= set(module._parameters) <= {"weight", "bias"}:
        return None
    if is_transformers_conv1d(module):
        weight = module.weight
        assert isinstance(weight, Tensor)
        shape = tuple(weight.shape)
        return LinearSketch(shape, names, plan, shared=shared, transposed=True)
    if isinstance(module, nn.modules.conv._ConvNd) and _is_plain_conv(module):
        # With few channels per group, q filters have more outputs than the layer has inputs.
        few = module.weight[0].numel() <= plan.inside
        few = few or (module.groups > 1 and module.weight.shape[1] < plan.inside)
        if not few:
            return ConvSketch(module, names, plan, shared=shared)
        return RuleSketch(module, names, plan) if rule_for(module) and not shared else None
    if rule_for(module) is None:
        return None
    if isinstance(module, nn.Linear):
        return LinearSketch(tuple(module.weight.shape), names, plan, shared=shared)
    if isinstance(module, nn.Embedding):
        return EmbeddingSketch(module, names, plan)
    if shared:
        return None
    is_norm = isinstance(module, nn.LayerNorm | nn.modules.batchnorm._BatchNorm)
    return (NormSketch if is_norm else RuleSketch)(module, names, plan)


def is_transformers_conv1d(module: nn.Module) -> bool:
    """Say whether a module is the linear layer of GPT-2 in transformers: y = x W + b."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def _is_plain_conv(module: nn.modules.conv._ConvNd) -> bool:
    kinds: tuple[type[nn.Module], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    kinds += (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    return any(isinstance(module, kind) and type(module).forward is kind.forward for kind in kinds)
