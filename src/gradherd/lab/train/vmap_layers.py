"""Layers in a form that many models at once can be taken through.

torch.func stacks most layers well. The gradient of a convolution's weights for each example it
turns into a convolution with a group for each, which libraries do one after the other; as a
product with patches of the images it is one batched product. Recurrent layers it has no rule for;
step by step they are plain arithmetic.

Shapes: B examples, C channels, T steps of a sequence, W width.
"""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# These draw numbers, or carry state from batch to batch.
_NOT_VMAPPABLE = (
    nn.modules.dropout._DropoutNd,
    nn.modules.batchnorm._BatchNorm,  # Without buffers, too: it looks at a whole batch.
    nn.RNNBase,
    nn.RNNCellBase,
)


class _PatchConvFunction(torch.autograd.Function):
    """A convolution whose weights' gradient is a product with patches of the images."""

    generate_vmap_rule = True

    @staticmethod
    def forward(images: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any) -> Tensor:
        return F.conv2d(images, weight, None, stride, padding, dilation)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        images, weight, *ctx.settings = inputs
        ctx.save_for_backward(images, weight)

    @staticmethod
    def backward(ctx: Any, pushed: Tensor) -> tuple[Tensor | None, ...]:
        images, weight = ctx.saved_tensors
        stride, padding, dilation = ctx.settings
        to_images = None
        if ctx.needs_input_grad[0]:
            # Lines at the end that no output sees get no gradient.
            spans = [
                (out - 1) * by - 2 * pad + gap * (k - 1) + 1
                for out, by, pad, gap, k in zip(
                    pushed.shape[-2:], stride, padding, dilation, weight.shape[-2:], strict=True
                )
            ]
            rest = [size - span for size, span in zip(images.shape[-2:], spans, strict=True)]
            to_images = F.conv_transpose2d(
                pushed, weight, None, stride, padding, rest, dilation=dilation
            )
        patches = _patches(images, weight.shape[-2:], pushed.shape[-2:], *ctx.settings)
        # (B, C', H' W') by (B, H' W', C k k), summed over B.
        to_weight = (pushed.flatten(2) @ patches.mT).sum(0).view(weight.shape)
        return to_images, to_weight, None, None, None


def _patches(
    images: Tensor, kernel: Any, out: Any, stride: Any, padding: Any, dilation: Any
) -> Tensor:
    """Return (B, C k k, H' W') the part of the images that each output sees.

    As slices, one for each place in the kernel: torch.nn.functional.unfold cannot be stacked.
    """
    padded = F.pad(images, (padding[1], padding[1], padding[0], padding[0]))
    slices = [
        padded[
            :,
            :,
            dilation[0] * row : dilation[0] * row + stride[0] * (out[0] - 1) + 1 : stride[0],
            dilation[1] * at : dilation[1] * at + stride[1] * (out[1] - 1) + 1 : stride[1],
        ]
        for row in range(kernel[0])
        for at in range(kernel[1])
    ]
    return torch.stack(slices, 2).flatten(1, 2).flatten(2)


class PatchConv2d(nn.Conv2d):
    """A convolution that gives each example's gradient of the weights in one batched product."""

    def forward(self, images: Tensor) -> Tensor:
        """Turn (B, C, H, W) into (B, C', H', W')."""
        scores: Tensor = _PatchConvFunction.apply(  # type: ignore[no-untyped-call]
            images, self.weight, self.stride, self.padding, self.dilation
        )
        return scores if self.bias is None else scores + self.bias.view(-1, 1, 1)


class UnrolledLSTM(nn.LSTM):
    """An LSTM step by step; its state starts at zero."""

    def forward(self, inputs: Tensor, hx: None = None) -> tuple[Tensor, None]:  # type: ignore[override]
        """Turn (B, T, W) into the last layer's (B, T, W') states."""
        if hx is not None:
            raise ValueError("a stacked LSTM starts at zero, got a state")
        steps = inputs.transpose(0, 1) if self.batch_first else inputs
        for layer in range(self.num_layers):
            steps = self._layer(steps, layer)
        return (steps.transpose(0, 1) if self.batch_first else steps), None

    def _layer(self, steps: Tensor, layer: int) -> Tensor:
        within, back = (getattr(self, f"weight_{kind}_l{layer}") for kind in ("ih", "hh"))
        gates = steps @ within.T  # of all steps at once
        if self.bias:
            gates = gates + getattr(self, f"bias_ih_l{layer}") + getattr(self, f"bias_hh_l{layer}")
        cell: Tensor | None = None
        states: list[Tensor] = []
        for gate in gates.unbind(0):
            whole = gate if not states else gate + states[-1] @ back.T
            enter, forget, new, out = whole.chunk(4, -1)
            fresh = enter.sigmoid() * new.tanh()
            cell = fresh if cell is None else torch.addcmul(fresh, forget.sigmoid(), cell)
            states.append(out.sigmoid() * cell.tanh())
        return torch.stack(states)


def why_not_vmappable(model: nn.Module) -> str | None:
    """Return why many models like this one cannot be stacked; None if they can."""
    if any(True for _ in model.buffers()):
        return "it has buffers"
    if not all(parameter.requires_grad for parameter in model.parameters()):
        return "some of its parameters are not trained"
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention) and module.dropout:
            return "it has attention with dropout"
        if isinstance(module, _NOT_VMAPPABLE) and not _plain_lstm(module):
            return f"it has a {type(module).__name__}"
    return None


def prefers_loop(model: nn.Module) -> bool:
    """Return whether models are better not stacked with each other, but each with its examples.

    A convolution of many images with one set of weights is what libraries are made for; with a
    set for each model it is not.
    """
    return any(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules())


def make_vmappable(model: nn.Module) -> nn.Module:
    """Return a copy whose layers have a form to be stacked; names of parameters stay."""
    model = copy.deepcopy(model)
    for module in model.modules():
        # The form has the layer's own parameters and settings, and computes them otherwise.
        if _plain_conv(module):
            module.__class__ = PatchConv2d
        elif _plain_lstm(module):
            module.__class__ = UnrolledLSTM
    return model


def _plain_conv(module: nn.Module) -> bool:
    return (
        type(module) is nn.Conv2d
        and module.groups == 1
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
    )


def _plain_lstm(module: nn.Module) -> bool:
    return (
        type(module) is nn.LSTM
        and not module.bidirectional
        and not module.proj_size
        and not module.dropout
    )
