"""Two-sided sketches: the per-example gradients of a layer, projected from both sides.

The gradient of example i is G_i, the sum over positions t of g_t x_t^T. The input side is projected
by a matrix Q of random signs: Q^T G_i^T is the sum of (Q^T x_t) g_t^T, two thin products that read
inputs and output gradients once, so that nothing of batch x parameters is ever formed. Outputs that
are W apart are added up with random signs, so that W are left (`fold`), and the q x W columns are
hashed when they are added to the row (`sketch.count_sketch`). Inner products are right on average:
all signs are independent, and columns of Q have unit second moment.

Their variance is |G_i^T G_j|^2 / q + |G_i G_j^T|^2 / W, about (Frobenius norms). Both are largest
for gradients of low rank, such as those of a text whose tokens have much in common.

A layer's bias has a gradient of G_i's form, with x_t = 1: one column of Q is replaced by this 1,
and the same product yields the gradient of the bias exactly.

A convolution's input side is the same convolution with q random filters. With many channels a
filter is the outer product of signs for channels and signs for places in the window: then each
position is projected first, as in a linear layer, and the window is added up over few columns.
Products of independent signs are uncorrelated, too, so inner products stay right on average.

Equal seeds and names give equal signs on every rank and device (`sketch.hashes`).

Shapes: B examples, T positions, I inputs and O outputs of a layer, q columns of the input side,
W columns of the output side, C channels, G groups of a convolution.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gradherd.rows.sketch import buckets_and_signs, hashes

_BITS = 64
_MAX_TEMPORARY = 1 << 24


def random_signs(seed: int, name: str, rows: int, columns: int) -> Tensor:
    """Return a (rows, columns) matrix of random signs, the same on every machine.

    >>> bool((random_signs(0, "w", 5, 3)[:2] == random_signs(0, "w", 2, 3)).all())
    True
    """
    parts = []
    for first in range(0, columns, _BITS):
        bits = np.arange(min(_BITS, columns - first), dtype=np.uint64)
        # 64 independent bits for each row: one hash serves 64 columns.
        values = hashes(seed, f"{name}/{first}", 0, rows)
        parts.append((values[:, None] >> bits) & np.uint64(1))
    return torch.from_numpy(1.0 - 2.0 * np.concatenate(parts, 1).astype(np.float32))


@dataclass(frozen=True)
class SideKey:
    """Names the random matrix of a parameter's input side, as it is used on one device."""

    seed: int
    name: str
    """Of the parameter."""
    columns: int
    dtype: torch.dtype
    device: torch.device
    with_one: bool = False
    """Whether the last column is left free for the bias."""
    is_whole: bool = False
    """Whether there is a column for every row, so that nothing is projected."""


@lru_cache(maxsize=4096)
def side(key: SideKey, rows: int, places: int = 1) -> tuple[Tensor, Tensor | None]:
    """Return the (columns, rows) matrix, and the (columns,) offset of its free column.

    Scaled by 1 / sqrt(columns): then inner products of projections are right on average.

    Args:
        key: Names the matrix.
        rows: Elements of a filter or inputs of a linear layer.
        places: Places of a window whose signs are independent of those of the channels.
    """
    free = int(key.with_one)
    count = key.columns - free
    if key.is_whole:
        matrix = torch.eye(rows)
    else:
        signs = random_signs(key.seed, key.name, rows // places, count).T
        if places > 1:
            window = random_signs(key.seed, f"{key.name}/window", places, count).T
            signs = (signs.unsqueeze(2) * window.unsqueeze(1)).flatten(1)
        matrix = signs / math.sqrt(count)
    # The free column is zero here; the offset puts its 1 there.
    matrix = F.pad(matrix, (0, 0, 0, free))
    offset = None
    if key.with_one:
        offset = F.pad(torch.zeros(key.columns - 1), (0, 1), value=1.0)
        offset = offset.to(device=key.device, dtype=key.dtype)
    return matrix.contiguous().to(device=key.device, dtype=key.dtype), offset


def kernel_columns(columns: int) -> int:
    """Return the columns that kernels compute, some of them zero: a power of two, 16 or more.

    >>> [kernel_columns(columns) for columns in (5, 16, 100)]
    [16, 16, 128]
    """
    return max(16, 1 << (columns - 1).bit_length())


@lru_cache(maxsize=4096)
def kernel_side(key: SideKey, rows: int) -> Tensor:
    """Return `side` without places as kernels read it: (rows, `kernel_columns`)."""
    matrix, _ = side(key, rows)
    return F.pad(matrix.T, (0, kernel_columns(key.columns) - key.columns)).contiguous()


@lru_cache(maxsize=4096)
def window_signs(key: SideKey, places: int) -> Tensor:
    """Return the signs of a window's places as kernels read them: (places, `kernel_columns`)."""
    count = key.columns - int(key.with_one)
    signs = torch.ones(1, count)
    if places > 1:
        signs = random_signs(key.seed, f"{key.name}/window", places, count)
    return F.pad(signs, (0, kernel_columns(key.columns) - count)).contiguous().to(key.device)


@lru_cache(maxsize=4096)
def output_signs(seed: int, name: str, outputs: int, device: torch.device) -> Tensor:
    """Return the sign of each output, (O,) float32, in `fold`."""
    return random_signs(seed, f"{name}/outputs", outputs, 1)[:, 0].to(device)


def fold(columns: Tensor, width: int, seed: int, name: str) -> Tensor:
    """Add up outputs (..., O) that are `width` apart, with random signs: (..., W).

    Args:
        columns: One column for each output.
        width: W; no more outputs than that are left as they are.
        seed: Seed of the signs.
        name: Of the parameter.
    """
    outputs = columns.shape[-1]
    if outputs <= width:
        return columns
    signs = output_signs(seed, name, outputs, columns.device).to(columns.dtype)
    padded = F.pad(columns * signs, (0, -outputs % width))
    return padded.reshape(*columns.shape[:-1], -1, width).sum(-2)


def linear_columns(inputs: Tensor, grads: Tensor, inside: Tensor, offset: Tensor | None) -> Tensor:
    """Project the gradients of a linear layer on the input side: (B, q, O).

    Args:
        inputs: (B, T, I) inputs.
        grads: (B, T, O) output gradients.
        inside: (q, I) matrix of the input side.
        offset: (q,) 1 in the free column, or None. The free row of the result is the gradient of
            the bias.
    """
    thin = F.linear(inputs, inside, offset)
    return torch.bmm(thin.transpose(1, 2), grads)


def embedding_columns(
    tokens: Tensor, grads: Tensor, inside: Tensor, signs: Tensor | None, width: int
) -> Tensor:
    """Project the gradients of an embedding on the feature side: (B, q, W).

    The same map as `linear_columns` followed by `fold`, so that a linear layer may share the
    weight.

    Args:
        tokens: (B, T) token ids.
        grads: (B, T, C) output gradients.
        inside: (q, C) matrix.
        signs: (O,) signs of the tokens; None if there are no more than W.
        width: W.
    """
    thin = F.linear(grads, inside).transpose(1, 2)
    parts = []
    # One-hot rows are as wide as the folded vocabulary, so the batch is cut.
    step = max(1, _MAX_TEMPORARY // (tokens.shape[1] * width))
    # A product with one-hot rows and not index_add_, whose sums differ from run to run on a GPU.
    for lo in range(0, len(tokens), step):
        part = tokens[lo : lo + step]
        ones = thin.new_ones(1).expand(part.shape) if signs is None else signs[part].to(thin.dtype)
        one_hot = thin.new_zeros(*part.shape, width)
        one_hot.scatter_(2, (part % width).unsqueeze(2), ones.unsqueeze(2))
        parts.append(torch.bmm(thin[lo : lo + step], one_hot))
    return torch.cat(parts)


def project_matrix(grad: Tensor, inside: Tensor, width: int, seed: int, name: str) -> Tensor:
    """Return the columns (q, W) of one (O, I) gradient: what those of its terms add up to."""
    return fold(F.linear(inside.to(grad.dtype), grad), width, seed, name)


@dataclass(frozen=True)
class ConvShape:
    """How a convolution slides over its input; any number of spatial dimensions."""

    window: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def side(self, key: SideKey, channels: int) -> tuple[Tensor, Tensor | None]:
        """Return the filters (q, channels, *window), and the offset of the free one."""
        places = math.prod(self.window)
        is_product = self.is_product(key.columns, channels)
        matrix, offset = side(key, channels * places, places if is_product else 1)
        return matrix.view(key.columns, channels, *self.window), offset

    def is_product(self, columns: int, channels: int) -> bool:
        """Say whether filters are outer products; with few channels there is nothing to save."""
        return math.prod(self.window) > 1 and channels >= columns

    def kernel_window(self, sizes: torch.Size, outputs: torch.Size) -> tuple[int, ...]:
        """Describe a convolution over one or two dimensions; see `ProductLayer.window`."""
        ones = (1,) * (2 - len(self.window))
        zeros = (0,) * (2 - len(self.window))
        return (
            *ones, *sizes, *ones, *outputs, self.window[-1], *ones, *self.stride,
            *zeros, *self.padding, *ones, *self.dilation,
        )  # fmt: skip

    def apply(self, inputs: Tensor, weight: Tensor, offset: Tensor | None) -> Tensor:
        """Convolve the inputs of one group with other filters."""
        conv = (F.conv1d, F.conv2d, F.conv3d)[len(self.stride) - 1]
        result: Tensor = conv(inputs, weight, offset, self.stride, self.padding, self.dilation)
        return result


def conv_inputs(inputs: Tensor, key: SideKey, shape: ConvShape) -> Tensor:
    """Project the inputs of a convolution, (B, C, ...), by random filters: (B, G, q, T)."""
    batch, channels = inputs.shape[0], inputs.shape[1] // shape.groups
    if shape.groups > 1:  # All groups share the filters; outputs tell them apart.
        inputs = inputs.reshape(batch * shape.groups, channels, *inputs.shape[2:])
    out = shape.apply(inputs, *shape.side(key, channels))
    return out.reshape(batch, shape.groups, key.columns, -1)


def conv_columns(inputs: Tensor, grads: Tensor) -> Tensor:
    """Combine projected inputs (B, G, q, T) with output gradients (B, O, ...): (B, q, O)."""
    batch, groups, columns, positions = inputs.shape
    if groups == 1:
        return torch.bmm(inputs[:, 0], grads.flatten(2).transpose(1, 2))
    left = inputs.reshape(batch * groups, columns, positions)
    right = grads.reshape(batch * groups, -1, positions).transpose(1, 2)
    # Each group has filters and outputs of its own; outputs end up side by side.
    result = torch.bmm(left, right).view(batch, groups, columns, -1)
    return result.transpose(1, 2).reshape(batch, columns, -1)


def matrix_tensor_sketch(grad: Tensor, k: int, seed: int, name: str) -> Tensor:
    """Return the tensor sketch (k,) of one (O, I) gradient, as `OuterTerm.sketch` has it."""
    rows, row_signs = buckets_and_signs(seed, f"{name}/left", 0, grad.shape[0], k, grad.device)
    columns, signs = buckets_and_signs(seed, f"{name}/right", 0, grad.shape[1], k, grad.device)
    signed = grad * row_signs.to(grad.dtype)[:, None] * signs.to(grad.dtype)
    buckets = (rows[:, None] + columns) % k
    return grad.new_zeros(k).index_add_(0, buckets.flatten(), signed.flatten())
