"""Gradients of convolution weights: nn.Conv1d and nn.Conv2d.

Inner products take one forward convolution and weighted sums one weight gradient; neither
unfolds the input. Only the Gram matrix and the sketch form the gradients of single examples.

Shapes: B examples, C input and O output channels, H groups, P output positions, W elements of one
filter (C / H times the kernel), N = O * W.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_weight

from gradherd.rows.sketch import count_sketch
from gradherd.rows.terms import (
    MAX_TEMPORARY,
    GramCache,
    OuterTerm,
    at_least_float32,
    outer_gram,
)

# With fewer positions, putting gradients into the weight's order takes longer than unfolding.
_MANY_POSITIONS = 16


@dataclass(frozen=True)
class ConvTerm:
    """Gradients of one use of a convolution; a one-dimensional one has height 1."""

    inputs: Tensor
    """(B, C, height, width), padded already unless the layer pads evenly with zeros."""
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
        # A convolution is linear in its weight: <gradient, v> = <conv(inputs, v), grads>.
        outputs = F.conv2d(
            at_least_float32(self.inputs),
            vector.view(self.weight_shape),
            None,
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
        )
        return (outputs * at_least_float32(self.grads)).flatten(1).sum(1)

    def combine(self, weights: Tensor, onto: Tensor) -> None:
        """Add the sum of the gradients, weighted by weights (B,), to `onto` (N,), in place."""
        inputs, grads = at_least_float32(self.inputs), at_least_float32(self.grads)
        # Output gradients scaled by example: the weight gradient of the batch is then the sum.
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

    def gram(self, cache: GramCache) -> Tensor:
        """Return the inner products between examples: (B, B)."""
        channels, positions = self.grads.shape[1], self.grads[0, 0].numel()
        if self.groups == 1 and positions < channels:
            # Unfolded, this is a linear layer on P positions, and its factors are smaller than
            # the gradients.
            left = at_least_float32(self.grads).flatten(2).transpose(1, 2)
            right = self._unfolded(slice(None)).squeeze(1).transpose(1, 2)
            return outer_gram([OuterTerm(left, right, channels)])
        grads = self.dense()
        return grads @ grads.T

    def dense(self) -> Tensor:
        """Return the gradients themselves: (B, N)."""
        return torch.cat([self._grads_of(chunk) for chunk in self._chunks()])

    def sketch(self, k: int, seed: int, name: str) -> Tensor:
        """Return the count sketch of each gradient, a few gradients at a time: (B, k)."""
        return torch.cat(
            [count_sketch(self._grads_of(chunk), k, seed, name=name) for chunk in self._chunks()]
        )

    def _chunks(self) -> list[slice]:
        """Cut the batch so that one chunk, unfolded, fits into the largest temporary."""
        examples, positions = len(self.grads), self.grads[0, 0].numel()
        filter_size = self.inputs.shape[1] * self.kernel[0] * self.kernel[1]
        # Unfolding copies each input once for every place of the filter, so the batch is cut.
        step = max(1, MAX_TEMPORARY // max(1, positions * filter_size))
        return [slice(lo, lo + step) for lo in range(0, examples, step)]

    def _unfolded(self, chunk: slice) -> Tensor:
        """Return the input under each filter position: (B', H, W, P)."""
        columns: Tensor = F.unfold(
            at_least_float32(self.inputs[chunk]),
            self.kernel,
            self.dilation,
            self.padding,
            self.stride,
        )
        return columns.view(len(columns), self.groups, -1, columns.shape[-1])

    def _grads_of(self, chunk: slice) -> Tensor:
        """Return the gradients of the examples in a chunk: (B', N)."""
        positions = self.grads[0, 0].numel()
        if self.groups == 1 and positions >= _MANY_POSITIONS and not self.inputs.is_cuda:
            return self._grads_by_window(chunk)
        columns = self._unfolded(chunk)
        grads = at_least_float32(self.grads[chunk]).reshape(
            len(columns), self.groups, -1, columns.shape[-1]
        )
        return torch.matmul(grads, columns.transpose(2, 3)).flatten(1)

    def _grads_by_window(self, chunk: slice) -> Tensor:
        """Do the same for one group, with channels side by side.

        What lies under a filter is then a few long runs, which a CPU copies several times as fast
        as `unfold` does, and the product reads both factors in the order of memory.
        """
        (high, wide), (down, right) = self.kernel, self.stride
        rows, columns = self.grads.shape[2:]
        pad_y, pad_x = self.padding
        inputs = F.pad(at_least_float32(self.inputs[chunk]), (pad_x, pad_x, pad_y, pad_y))
        inputs = inputs.permute(0, 2, 3, 1).contiguous()
        example, line, place, _ = inputs.stride()
        windows = inputs.as_strided(
            (len(inputs), rows, columns, high, wide, inputs.shape[3]),
            (
                example,
                line * down,
                place * right,
                line * self.dilation[0],
                place * self.dilation[1],
                1,
            ),
        )
        grads = at_least_float32(self.grads[chunk]).flatten(2)
        product = torch.bmm(grads, windows.reshape(len(inputs), rows * columns, -1))
        # Back to the order of the weight: channels before the places of the filter.
        filters = product.view(*product.shape[:2], high * wide, -1)
        return filters.transpose(2, 3).flatten(1)
