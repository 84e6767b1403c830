"""Layers that torch.func.vmap can batch over models and examples.

vmap handles most layers well, with one exception. It turns per-example weight gradients of a
convolution into a grouped convolution with one group per example, which libraries process one by
one; as a product with image patches it is one batched matrix product.

Shapes: B examples, C channels.
"""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _PatchConvFunction(torch.autograd.Function):
    """A convolution whose weight gradient is a matrix product with image patches."""

    # Makes torch.func derive the rule by vmapping forward and backward, which are plain operators.
    generate_vmap_rule = True

    @staticmethod
    def forward(images: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any) -> Tensor:
        return F.conv2d(images, weight, None, stride, padding, dilation)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        images, weight, *ctx.settings = inputs
        ctx.save_for_backward(images, weight)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        images, weight = ctx.saved_tensors
        stride, padding, dilation = ctx.settings
        grad_images = None
        if ctx.needs_input_grad[0]:
            # Rows and columns at the border that no output covers have no gradient.
            spans = [
                (out - 1) * step - 2 * pad + gap * (k - 1) + 1
                for out, step, pad, gap, k in zip(
                    grad_output.shape[-2:],
                    stride,
                    padding,
                    dilation,
                    weight.shape[-2:],
                    strict=True,
                )
            ]
            uncovered = [size - span for size, span in zip(images.shape[-2:], spans, strict=True)]
            grad_images = F.conv_transpose2d(
                grad_output, weight, None, stride, padding, uncovered, dilation=dilation
            )
        patches = _patches(images, weight.shape[-2:], grad_output.shape[-2:], *ctx.settings)
        # (B, C', H' W') by (B, H' W', C k k), summed over B.
        grad_weight = (grad_output.flatten(2) @ patches.mT).sum(0).view(weight.shape)
        return grad_images, grad_weight, None, None, None


def _patches(
    images: Tensor, kernel: Any, out: Any, stride: Any, padding: Any, dilation: Any
) -> Tensor:
    """Return (B, C k k, H' W') the input patch of each output position.

    One slice per kernel position: vmap has no rule for torch.nn.functional.unfold.
    """
    padded = F.pad(images, (padding[1], padding[1], padding[0], padding[0]))
    slices = [
        padded[
            :,
            :,
            dilation[0] * row : dilation[0] * row + stride[0] * (out[0] - 1) + 1 : stride[0],
            dilation[1] * column : dilation[1] * column + stride[1] * (out[1] - 1) + 1 : stride[1],
        ]
        for row in range(kernel[0])
        for column in range(kernel[1])
    ]
    return torch.stack(slices, 2).flatten(1, 2).flatten(2)


class PatchConv2d(nn.Conv2d):
    """A convolution with per-example weight gradients as one batched matrix product."""

    def forward(self, images: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C', H', W')."""
        out: Tensor = _PatchConvFunction.apply(  # type: ignore[no-untyped-call]
            images, self.weight, self.stride, self.padding, self.dilation
        )
        return out if self.bias is None else out + self.bias.view(-1, 1, 1)


def prefers_loop(model: nn.Module) -> bool:
    """Return whether models should be looped over, with vmap only over each model's examples.

    Libraries are fast at convolving many images with one set of weights, but not with one set
    per model.

    >>> prefers_loop(nn.Conv2d(3, 6, 5)), prefers_loop(nn.Linear(2, 2))
    (True, False)
    """
    return any(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules())


def make_vmappable(model: nn.Module) -> nn.Module:
    """Return a copy with layers that vmap can batch; parameter names stay the same."""
    # A copy: changing the class in place would change the model that evaluates.
    model = copy.deepcopy(model)
    for module in model.modules():
        # Same parameters and settings, another forward: changing the class is enough.
        if _plain_conv(module):
            module.__class__ = PatchConv2d
    return model


def _plain_conv(module: nn.Module) -> bool:
    return (
        type(module) is nn.Conv2d
        and module.groups == 1
        and module.padding_mode == "zeros"
        # "same" and "valid" would have to be turned into numbers first.
        and not isinstance(module.padding, str)
    )
