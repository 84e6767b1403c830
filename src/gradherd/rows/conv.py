"""Gradients of convolution weights: nn.Conv1d and nn.Conv2d.

Inner products are one forward convolution, weighted sums one weight gradient; nothing is
unfolded for these. Only the Gram matrix and the sketch look at single gradients.

Shapes: B examples, C input and O output channels, H groups, P output positions, W numbers in
one filter (C / H times the kernel), N = O * W.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_weight

from gradherd.rows import outer
from gradherd.rows.sketch import count_sketch
from gradherd.rows.terms import BUDGET, Products, full


@dataclass(frozen=True)
class Conv:
    """One use of a convolution; a one-dimensional one has height 1."""

    inputs: Tensor
    """(B, C, height, width), already padded where the padding is not plain zeros."""
    grads: Tensor
    """(B, O, height, width) gradient of the output."""
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    @property
    def weight_shape(self) -> tuple[int, int, int, int]:
        """(O, C / H, kernel height, kernel width)."""
        return (self.grads.shape[1], self.inputs.shape[1] // self.groups, *self.kernel)

    def dot(self, vector: Tensor) -> Tensor:
        """Return the inner product of each example's gradient with vector (N,): (B,)."""
        outputs = F.conv2d(
            full(self.inputs),
            vector.view(self.weight_shape),
            None,
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
        )
        return (outputs * full(self.grads)).flatten(1).sum(1)

    def combine(self, weights: Tensor, onto: Tensor) -> None:
        """Add the sum of the gradients, weighted by weights (B,), to `onto` (N,), in place."""
        inputs, grads = full(self.inputs), full(self.grads)
        total: Tensor = conv2d_weight(
            inputs,
            self.weight_shape,
            grads * weights[:, None, None, None],
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
        )
        onto += total.reshape(-1)

    def gram(self, products: Products) -> Tensor:
        """Return the inner products between examples: (B, B)."""
        channels, positions = self.grads.shape[1], self.grads[0, 0].numel()
        if self.groups == 1 and positions < channels:
            # Unfolded inputs are smaller than the gradients: treat it as a linear layer.
            left = full(self.grads).flatten(2).transpose(1, 2)
            right = self._unfolded(slice(None)).squeeze(1).transpose(1, 2)
            return outer.gram([outer.Outer(left, right, channels)])
        grads = self.dense()
        return grads @ grads.T

    def dense(self) -> Tensor:
        """Return the gradients themselves: (B, N)."""
        return torch.cat([self._grads_of(part) for part in self._parts()])

    def sketch(self, k: int, seed: int, name: str) -> Tensor:
        """Return the count sketch of each gradient, a few gradients at a time: (B, k)."""
        return torch.cat(
            [count_sketch(self._grads_of(part), k, seed, name=name) for part in self._parts()]
        )

    def _parts(self) -> list[slice]:
        """Cut the batch so that one part, unfolded, stays within the budget."""
        examples, positions = len(self.grads), self.grads[0, 0].numel()
        filter_size = self.inputs.shape[1] * self.kernel[0] * self.kernel[1]
        step = max(1, BUDGET // max(1, positions * filter_size))
        return [slice(lo, lo + step) for lo in range(0, examples, step)]

    def _unfolded(self, part: slice) -> Tensor:
        """Return the input under each filter position: (B', H, W, P)."""
        columns: Tensor = F.unfold(
            full(self.inputs[part]), self.kernel, self.dilation, self.padding, self.stride
        )
        return columns.view(len(columns), self.groups, -1, columns.shape[-1])

    def _grads_of(self, part: slice) -> Tensor:
        """Return the gradients of some examples: (B', N)."""
        columns = self._unfolded(part)
        grads = full(self.grads[part]).reshape(len(columns), self.groups, -1, columns.shape[-1])
        return torch.matmul(grads, columns.transpose(2, 3)).flatten(1)
