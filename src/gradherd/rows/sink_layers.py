"""The layers that have rows by the sink: how each computes them from its input and gradient.

Shapes: n examples of this batch, T positions, I inputs, O outputs, C channels, c columns.
"""

from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradherd.rows.outer_rows import products
from gradherd.rows.sink import (
    SHARED,
    TAP,
    KernelForm,
    Pair,
    SinkPool,
    SketchedLayer,
    Tapped,
    Use,
    as_autocast,
    at_least_float32,
    trained_parameter,
)
from gradherd.rows.sink_maps import MatrixMap, OuterMap, WholeMap


def examples_first(tensor: Tensor, dim: int, features: int) -> Tensor:
    """Return a tensor (..., *features) as (n, T, *features)."""
    moved = tensor.movedim(dim, 0) if dim else tensor
    leading = tensor.dim() - features
    if leading == 2:
        return moved
    return moved.reshape(moved.shape[0], -1, *tensor.shape[leading:])


class LinearLayer(SketchedLayer):
    """nn.Linear, and transformers' Conv1D, whose weight is transposed."""

    def __init__(self, name: str, pool: SinkPool, *, transposed: bool = False) -> None:
        super().__init__(name, pool)
        self.transposed, self.casts = transposed, True

    def columns(self, inputs: Tensor, grads: Tensor, use: Use, *saved: Tensor) -> Pair:
        """Return the columns from inputs (..., I) and gradients (..., O)."""
        dim, part, single, *wanted = use
        left, matrix = examples_first(grads, dim, 1), None
        if wanted[0]:
            right = examples_first(inputs, dim, 1)
            one = self.single if single else self.matrix
            matrix = linear_columns(one, left, right, self.transposed, part)
        total = None
        if wanted[1]:
            dtype = self.pool.like.dtype  # also of sums over positions
            # Nothing is copied where it is kept as it is.
            single = single or (self.pool.keeps_factors and left.shape[1] == 1)
            total = left[:, 0].to(dtype) if single else left.sum(1, dtype=dtype)
            if part is not None:
                total = F.pad(total, (part[0], self.vector.size - part[1]))
        return matrix, total

    def kernel_form(self, use: Use) -> KernelForm | None:
        """Leave it to kernels if examples come first."""
        dim, part, single, *_ = use
        if dim or single or part is not None:
            return None
        return (self.matrix.keep == 1) != self.transposed, None


def linear_columns(
    matrix: MatrixMap | OuterMap | WholeMap,
    left: Tensor,
    right: Tensor,
    transposed: bool,
    part: tuple[int, int] | None,
) -> Tensor:
    """Return the columns of a weight from gradients (n, T, O) and inputs (n, T, I).

    If `transposed`, the weight is (I, O). `part` are the outputs that `left` is about, if not all.
    """
    first, second = (right, left) if transposed else (left, right)
    # No union of types, nor `all`: torch before 2.10 cannot trace them.
    if isinstance(matrix, (OuterMap, WholeMap)):
        return matrix.columns_of(first, second)
    projected, kept = (first, second) if matrix.keep == 1 else (second, first)
    if part is None:
        return matrix.columns_of(projected, kept)
    # Projections of attention: weights of queries, keys and values are one parameter.
    side = matrix.tensor_for("side", projected)[part[0] : part[1]]
    return matrix.combine(projected @ side, kept)


class ConvLayer(SketchedLayer):
    """Convolutions and transposed ones, over one to three dimensions, with groups."""

    def __init__(self, name: str, pool: SinkPool, module: Any) -> None:
        super().__init__(name, pool)
        self.casts = self.batch_is_first = True
        self.features = module.weight.dim() - 1
        self.transposed: bool = module.transposed
        self.groups: int = module.groups
        self.stride, self.dilation = tuple(module.stride), tuple(module.dilation)
        padding, sizes = module.padding, module.kernel_size
        self.pad: tuple[tuple[int, ...], str] | None = None
        if isinstance(padding, str) or module.padding_mode != "zeros":
            mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
            self.pad = (tuple(module._reversed_padding_repeated_twice), mode)
            padding = (0,) * len(sizes)
        self.padding, self.window = tuple(padding), tuple(sizes)
        self.may_be_single = not (self.transposed or self.pad or any(padding)) and self.groups == 1

    def is_single(self, shape: torch.Size) -> bool:
        """Say whether the window fits into the input just once."""
        return tuple(shape[2:]) == self.window

    def columns(self, inputs: Tensor, grads: Tensor, use: Use, *saved: Tensor) -> Pair:
        """Return the columns from inputs (n, C, ...) and gradients (n, O, ...)."""
        vector = grads.flatten(2).sum(2, dtype=self.pool.like.dtype) if use[4] else None
        if not use[3]:
            return None, vector
        if use[2]:
            left, right = grads.flatten(1)[:, None], inputs.flatten(1)[:, None]
            return linear_columns(self.single, left, right, False, None), vector
        # A transposed convolution is a convolution from its output to its input.
        small, large = (grads, inputs) if self.transposed else (inputs, grads)
        if self.pad is not None:
            small = F.pad(small, self.pad[0], mode=self.pad[1])
        matrix, groups, n = self.matrix, self.groups, inputs.shape[0]
        if groups > 1:  # All groups share the filters; outputs tell them apart.
            small = small.reshape(n * groups, -1, *small.shape[2:])
        kept = large.reshape(n * groups, -1, large.shape[2:].numel())
        if isinstance(matrix, WholeMap):
            windows = self.windows(small)
            if groups > 1:
                return products(kept, windows).view(n, -1), vector
            return matrix.columns_of(kept.transpose(1, 2), windows), vector
        thin = matrix.thin(small.to(large.dtype), self.stride, self.padding, self.dilation)
        columns = products(thin.flatten(2), kept.transpose(1, 2))
        if groups > 1:
            columns = columns.unflatten(0, (n, groups)).transpose(1, 2).flatten(2)
        return columns, vector

    def windows(self, small: Tensor) -> Tensor:
        """Return what lies under a filter at each place: (n, T, C * places)."""
        if any(self.padding):
            small = F.pad(small, [side for one in reversed(self.padding) for side in (one, one)])
        dims = len(self.window)
        for at, (size, stride, dilation) in enumerate(
            zip(self.window, self.stride, self.dilation, strict=True), start=2
        ):
            small = small.unfold(at, (size - 1) * dilation + 1, stride)[..., ::dilation]
        return small.movedim(1, 1 + dims).flatten(1 + dims).flatten(1, dims)

    def kernel_form(self, use: Use) -> KernelForm | None:
        """Leave the filters of a plain convolution over two dimensions to kernels."""
        if self.transposed or self.pad or use[2] or self.groups > 1 or len(self.window) != 2:
            return None
        if self.matrix.is_pointwise(self.stride, self.padding):
            return False, None
        return False, (self.window, self.stride, self.padding, self.dilation)


class EmbeddingLayer(SketchedLayer):
    """nn.Embedding. What all examples look up together, as positions, each gets a copy of."""

    def __init__(self, name: str, pool: SinkPool, padding: int | None) -> None:
        super().__init__(name, pool)
        self.features, self.padding = 0, padding
        self.may_share = True
        """Whether all inputs without a batch that were looked at have the shape (1, T) or (T,)."""

    def columns(self, inputs: Tensor, grads: Tensor, use: Use, *saved: Tensor) -> Pair:
        """Return the columns from tokens (..., T) and gradients (..., T, O)."""
        dim, part, *_ = use
        right = examples_first(grads, dim, 1)
        if part is SHARED:
            tokens = inputs.reshape(1, -1).expand(right.shape[0], -1)
        else:
            tokens = examples_first(inputs, dim, 0)
        matrix = self.matrix
        if isinstance(matrix, WholeMap):
            if self.padding is not None:  # torch gives the padding token no gradient
                right = right * (tokens != self.padding).unsqueeze(-1)
            return matrix.looked_up(tokens, right), None
        thin = F.embedding(tokens, matrix.tensor_for("side", right))
        if self.padding is not None:
            thin = thin * (tokens != self.padding).unsqueeze(-1)
        return matrix.combine(thin, right), None

    def tap_shared(self, module: nn.Module, inputs: Tensor, output: Tensor) -> Tensor:
        """Tap a look-up of shape (1, T) or (T,), whose result is broadcast over the examples."""
        pool = self.pool
        fits = inputs.dim() == 1 or (inputs.dim() == 2 and inputs.shape[0] == 1)
        if pool.recorded is not None and not fits:
            self.may_share = False
        if pool.expands() is None or not fits or not self.may_share:
            return super().tap_shared(module, inputs, output)
        if pool.recorded is None and trained_parameter(module, self.trained[0]) is None:
            return output
        return self.expanded(output, inputs, output.dim() > 2)


class NormLayer(SketchedLayer):
    """Scale and shift behind a normalisation, which is repeated."""

    def __init__(self, name: str, pool: SinkPool, module: Any) -> None:
        super().__init__(name, pool)
        self.eps = module.eps if hasattr(module, "eps") else module.variance_epsilon
        self.leading = 1
        """First dimensions of a tensor (n, ...) that are no positions; the last are `features`."""

    @abstractmethod
    def normalized(self, inputs: Tensor, saved: tuple[Tensor, ...]) -> Tensor:
        """Return what the scale is multiplied with."""

    def columns(self, inputs: Tensor, grads: Tensor, use: Use, *saved: Tensor) -> Pair:
        """Return the gradients from inputs and gradients of one shape."""
        found = []
        for part in self.vector.parts:
            is_shift = part == "bias"
            if not use[3 + is_shift]:  # frozen since
                found.append(self.summed(grads, use[0]) * 0)
                continue
            each = grads if is_shift else grads * self.normalized(inputs, saved)
            found.append(self.summed(each, use[0]))
        return None, found[0] if len(found) == 1 else torch.cat(found, 1)

    def summed(self, each: Tensor, dim: int) -> Tensor:
        """Add up over the positions of each example."""
        moved, dtype = each.movedim(dim, 0) if dim else each, self.pool.like.dtype
        over = tuple(range(self.leading, moved.dim() - self.features))
        return (moved.sum(over, dtype=dtype) if over else moved.to(dtype)).flatten(1)


class LastDimsNorm(NormLayer):
    """nn.LayerNorm, nn.RMSNorm, and norms of transformers that compute the same."""

    def __init__(self, name: str, pool: SinkPool, module: Any, *, rms: bool) -> None:
        super().__init__(name, pool, module)
        self.shape, self.rms = tuple(module.weight.shape), rms
        self.features = len(self.shape)
        # Those of transformers normalise in float32, whatever the precision of the model.
        self.in_float32 = not isinstance(module, nn.LayerNorm | nn.RMSNorm)

    def normalized(self, inputs: Tensor, saved: tuple[Tensor, ...]) -> Tensor:
        """Normalise the last dimensions."""
        norm = F.rms_norm if self.rms else F.layer_norm
        wide = inputs.float() if self.in_float32 else at_least_float32(inputs)
        return norm(wide, self.shape, eps=self.eps)


class ChannelNorm(NormLayer):
    """nn.GroupNorm and BatchNorm: inputs (n, C, ...)."""

    def __init__(self, name: str, pool: SinkPool, module: Any) -> None:
        super().__init__(name, pool, module)
        self.groups: int = getattr(module, "num_groups", 0)
        self.batch_is_first, self.leading, self.features = True, 2, 0

    def saved(self, module: nn.Module) -> tuple[Tensor, ...]:
        """Return the running statistics that BatchNorm uses in evaluation mode."""
        running = getattr(module, "running_mean", None)
        if self.groups or module.training or running is None:
            return ()
        return running.clone(), module.running_var.clone()  # type: ignore[operator]

    def normalized(self, inputs: Tensor, saved: tuple[Tensor, ...]) -> Tensor:
        """Normalise groups of channels, or channels over the batch."""
        wide = at_least_float32(inputs)
        if self.groups:
            return F.group_norm(wide, self.groups, eps=self.eps)
        mean, var = (one.to(wide) for one in saved) if saved else (None, None)
        return F.batch_norm(wide, mean, var, training=not saved, eps=self.eps)


class DirectLayer(SketchedLayer):
    """A parameter of shape (1, ...) that its module uses itself: a class token, positions.

    All examples share it, so its gradient is a sum over them. While the model runs, the module gets
    it with a copy for each example instead, which broadcasts alike. Whether it does is tried when
    batch dimensions are looked for.
    """

    def columns(self, inputs: Tensor, grads: Tensor, use: Use, *saved: Tensor) -> Pair:
        """Return the gradients of the copies."""
        return None, grads.flatten(1).to(self.pool.like.dtype)

    def read(self, parameter: Tensor) -> Tensor:
        """Return the parameter as the module gets it."""
        pool = self.pool
        if pool.expands() is None:
            return parameter
        is_read = pool.is_open and torch.is_grad_enabled() and parameter.requires_grad
        if pool.recorded is None and not is_read:
            return parameter
        return self.expanded(parameter, parameter, True)


class TappedParameters(Tapped):
    """A module whose own parameters are read through `DirectLayer`."""

    def read(self, name: str) -> Tensor:
        """Return a parameter."""
        layers: dict[str, DirectLayer] = self.__dict__[TAP]
        return layers[name].read(self._parameters[name])  # type: ignore[attr-defined]


class TappedAttention(Tapped):
    """nn.MultiheadAttention whose projections are tapped.

    torch's own forward hands the weights to one function; this one computes the same step by step.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; see `torch.nn.MultiheadAttention`."""
        module: Any = self
        tokens = query.dim() - 2 if module.batch_first else 0  # unbatched inputs are (T, E)
        if query.dim() != 3 or query.is_nested or (is_causal and attn_mask is None):
            options = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
            return super().forward(query, key, value, *options)  # type: ignore[misc, no-any-return]
        layers: dict[str, LinearLayer] = module._gradherd_tap
        size, heads = module.embed_dim, module.num_heads

        def linear(inputs: Tensor, lo: int, hi: int) -> Tensor:
            bias = None if module.in_proj_bias is None else module.in_proj_bias[lo:hi]
            inputs = as_autocast(inputs)
            output = F.linear(inputs, module.in_proj_weight[lo:hi], bias)
            part = None if (lo, hi) == (0, 3 * size) else (lo, hi)
            return layers["in_proj"].tap(module, inputs, output, part)

        if query is key and key is value:
            parts = linear(query, 0, 3 * size).chunk(3, -1)
        elif key is value:
            parts = (linear(query, 0, size), *linear(key, size, 3 * size).chunk(2, -1))
        else:
            each = (query, key, value)
            parts = tuple(linear(one, at * size, (at + 1) * size) for at, one in enumerate(each))
        # (B, heads, T, size of a head), whatever comes first outside.
        order = (0, 2, 1, 3) if tokens else (1, 2, 0, 3)
        q, k, v = (one.unflatten(-1, (heads, size // heads)).permute(order) for one in parts)
        # As torch does it: the mask is not looked at, and the fast kernels know this one.
        is_causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if is_causal else attention_mask(q, k, attn_mask, key_padding_mask)
        dropout = module.dropout if module.training else 0.0
        weights = None
        if need_weights:
            scores = (q * (size // heads) ** -0.5) @ k.transpose(-1, -2)
            weights = (scores if mask is None else scores + mask).softmax(-1)
            weights = F.dropout(weights, dropout) if dropout else weights
            mixed = weights @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
        # As torch lays it out, tokens first: dropout behind it draws in the order of memory.
        mixed = as_autocast(mixed.permute(2, 0, 1, 3).flatten(2))
        out = module.out_proj
        output = F.linear(mixed, out.weight, out.bias)
        if tokens:
            mixed, output = mixed.transpose(0, 1), output.transpose(0, 1)
        output = layers["out_proj"].tap(out, mixed, output)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        return output, weights


def attention_mask(
    q: Tensor, k: Tensor, mask: Tensor | None, padding: Tensor | None
) -> Tensor | None:
    """Return what is added to scores (B, heads, T, S): -inf for places that are masked."""
    if mask is not None:
        mask = additive(mask, q)
        if mask.dim() == 3:
            mask = mask.unflatten(0, (q.shape[0], -1))
    if padding is None:
        return mask
    padding = additive(padding, q)[:, None, None, :]
    return padding if mask is None else mask + padding


def additive(mask: Tensor, like: Tensor) -> Tensor:
    """Return a mask as numbers to add; in a boolean one, True is masked."""
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, float("-inf"))
