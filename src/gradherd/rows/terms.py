"""What one use of one parameter adds to every example's gradient, in the form it came in.

A term stands for a (B, N) matrix, the per-example gradients of one parameter, without forming it
where its layer allows. `DenseTerm` holds the matrix, `OuterTerm` the two factors of nn.Linear and
nn.Embedding, `ConvTerm` input and output gradient of a convolution: there inner products take one
forward convolution and weighted sums one weight gradient, and only the Gram matrix forms the
gradients of single examples.

Shapes: B examples, N elements of the parameter, T positions (all leading dimensions but the
batch), O rows and I columns of a weight (N = O * I). Of convolutions: C input and O output
channels, H groups, P output positions, W elements of one filter (C / H times the kernel), N = O W.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_weight

MAX_TEMPORARY = 1 << 24
"""Elements of the largest temporary; larger work is cut into pieces."""
# With fewer positions, putting gradients into the weight's order takes longer than unfolding.
_MANY_POSITIONS = 16


class GramCache:
    """Remember x x^T while one Gram matrix is computed: a weight and its bias share a factor."""

    def __init__(self) -> None:
        self._entries: dict[object, tuple[Tensor, Tensor]] = {}

    def gram(self, matrix: Tensor) -> Tensor:
        """Return matrix (B, N) times its transpose: (B, B). Do not write to the result."""
        key = (matrix.data_ptr(), matrix.shape, matrix.stride(), matrix.dtype)
        if key not in self._entries:
            # Hold on to the matrix as well, so that its address is not reused.
            self._entries[key] = (matrix, matrix @ matrix.T)
        return self._entries[key][1]


class Term(Protocol):
    """The operations of every term: the same as on the (B, N) matrix that it stands for."""

    def dot(self, vector: Tensor) -> Tensor:
        """Return the inner product of each example's gradient with vector (N,): (B,)."""
        ...

    def gram(self, cache: GramCache) -> Tensor:
        """Return the inner products between examples: (B, B). Do not write to the result."""
        ...

    def combine(self, weights: Tensor, onto: Tensor) -> None:
        """Add the sum of the gradients, weighted by weights (B,), to `onto` (N,), in place."""
        ...

    def dense(self) -> Tensor:
        """Return the gradients themselves: (B, N)."""
        ...


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return `tensor` in float32 or better: half precision is too coarse for sums."""
    if tensor.dtype in (torch.float32, torch.float64):
        return tensor
    return tensor.float()


@dataclass(frozen=True)
class DenseTerm:
    """Gradients that are small enough to hold: those of biases, norms and replayed modules."""

    grads: Tensor
    """(B, N) gradient of each example."""

    def dot(self, vector: Tensor) -> Tensor:
        """Return the inner product of each example's gradient with vector (N,): (B,)."""
        return at_least_float32(self.grads) @ vector

    def gram(self, cache: GramCache) -> Tensor:
        """Return the inner products between examples: (B, B)."""
        return cache.gram(at_least_float32(self.grads))

    def combine(self, weights: Tensor, onto: Tensor) -> None:
        """Add the sum of the gradients, weighted by weights (B,), to `onto` (N,), in place."""
        onto += weights @ at_least_float32(self.grads)

    def dense(self) -> Tensor:
        """Return the gradients themselves: (B, N)."""
        return at_least_float32(self.grads)


@dataclass(frozen=True)
class OuterTerm:
    """Gradients that are sums of outer products over positions, held as their two factors.

    The gradient of example i is the sum over t of left[i, t] right[i, t]^T. For nn.Linear, left
    is the gradient of the output and right the input. For nn.Embedding, left is one-hot and held
    as token ids, and right is the gradient of the output. So both uses of a tied weight have the
    same form.
    """

    left: Tensor
    """(B, T, O) factor, or (B, T) int64 token ids that stand for one-hot rows."""
    right: Tensor
    """(B, T, I) factor."""
    out_features: int
    """O."""

    @property
    def one_hot(self) -> bool:
        """Whether `left` holds token ids."""
        return self.left.dim() == 2

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return both factors ready for arithmetic; token ids stay as they are."""
        left = self.left if self.one_hot else at_least_float32(self.left)
        return left, at_least_float32(self.right)

    def dot(self, vector: Tensor) -> Tensor:
        """Return the inner product of each example's gradient with vector (N,): (B,)."""
        left, right = self.factors()
        matrix = vector.view(self.out_features, right.shape[-1])
        if self.one_hot:  # A one-hot row times the matrix is a lookup.
            return _dot_per_example(matrix[left], right)
        if left.is_cuda and left.shape[1] == 1:  # The same in fewer kernels.
            left, right = left[:, 0], right[:, 0]
            if self.out_features <= right.shape[-1]:
                return (right @ matrix.T * left).sum(1)
            return (left @ matrix * right).sum(1)
        # The matrix may be multiplied to either factor; the smaller result needs less memory.
        if self.out_features <= right.shape[-1]:
            return _dot_per_example(right @ matrix.T, left)
        return _dot_per_example(left @ matrix, right)

    def combine(self, weights: Tensor, onto: Tensor) -> None:
        """Add the sum of the gradients, weighted by weights (B,), to `onto` (N,), in place."""
        left, right = self.factors()
        columns = right.shape[-1]
        if self.one_hot:
            scaled = (right * weights[:, None, None]).reshape(-1, columns)
            onto.view(self.out_features, columns).index_add_(0, left.reshape(-1), scaled)
            return
        # The weights may scale either factor; scale the smaller one.
        if self.out_features <= columns:
            left = left * weights[:, None, None]
        else:
            right = right * weights[:, None, None]
        flat = left.reshape(-1, self.out_features).T
        onto.view(self.out_features, columns).addmm_(flat, right.reshape(-1, columns))

    def gram(self, cache: GramCache) -> Tensor:
        """Return the inner products between examples: (B, B)."""
        if self.right.shape[1] == 1 and not self.one_hot:
            # <l r^T, l' r'^T> = <l, l'> <r, r'>: two small Gram matrices, multiplied elementwise.
            left, right = self.factors()
            return cache.gram(left[:, 0]) * cache.gram(right[:, 0])
        return outer_gram([self])

    def dense(self) -> Tensor:
        """Return the gradients themselves: (B, N)."""
        return self.dense_rows(0, self.out_features)

    def dense_rows(self, lo: int, hi: int) -> Tensor:
        """Return rows lo .. hi - 1 of the weight in every gradient: (B, (hi - lo) * I)."""
        left, right = self.factors()
        if not self.one_hot:
            return (left[..., lo:hi].transpose(1, 2) @ right).flatten(1)
        examples, positions = ((left >= lo) & (left < hi)).nonzero(as_tuple=True)
        grads = right.new_zeros(len(left) * (hi - lo), right.shape[-1])
        index = examples * (hi - lo) + left[examples, positions] - lo
        grads.index_add_(0, index, right[examples, positions])
        return grads.view(len(left), -1)


def _dot_per_example(one: Tensor, two: Tensor) -> Tensor:
    """Return the inner product of (B, T, X) with (B, T, X) per example: (B,)."""
    # bmm, not a product and a sum: no temporary of the size of the factors.
    return torch.bmm(one.flatten(1).unsqueeze(1), two.flatten(1).unsqueeze(2)).view(-1)


def outer_gram(terms: Sequence[OuterTerm]) -> Tensor:
    """Return the Gram matrix of the sum of several uses of one weight: (B, B).

    It includes all cross terms, also those between an embedding and a linear layer.
    """
    # A linear use touches all rows of the weight, so ids are renumbered for embeddings only.
    if all(term.one_hot for term in terms):
        terms = _renumber_tokens(terms)
    examples, columns = len(terms[0].right), terms[0].right.shape[-1]
    positions = sum(term.right.shape[1] for term in terms)
    if pairs_are_cheaper(examples, positions, terms[0].out_features, columns):
        return gram_by_pairs(terms)
    return gram_by_blocks(terms)


def pairs_are_cheaper(examples: int, positions: int, rows: int, columns: int) -> bool:
    """Say whether a Gram matrix costs less by pairs of positions than by gradients in blocks.

    By pairs it takes (B T)^2 (O + I) multiplications; by blocks B T O I to form the gradients and
    B^2 O I to multiply them. Both are cut to bounded memory, so only time matters.

    >>> pairs_are_cheaper(256, 1, 1024, 1024), pairs_are_cheaper(8, 512, 64, 64)
    (True, False)
    """
    by_pairs = (examples * positions) ** 2 * (rows + columns)
    return by_pairs <= examples * (positions + examples) * rows * columns


def _renumber_tokens(terms: Sequence[OuterTerm]) -> list[OuterTerm]:
    """Number the tokens that occur from 0, so that unused rows of the table cost nothing."""
    tokens, ids = torch.unique(
        torch.cat([term.left.flatten() for term in terms]), return_inverse=True
    )
    parts = torch.split(ids, [term.left.numel() for term in terms])
    return [
        replace(term, left=part.view_as(term.left), out_features=len(tokens))
        for term, part in zip(terms, parts, strict=True)
    ]


def gram_by_blocks(terms: Sequence[OuterTerm]) -> Tensor:
    """Compute `outer_gram` from the gradients, a few rows of the weight at a time."""
    examples, rows, columns = len(terms[0].right), terms[0].out_features, terms[0].right.shape[-1]
    step = max(1, MAX_TEMPORARY // (examples * columns))
    total = at_least_float32(terms[0].right).new_zeros(examples, examples)
    for lo in range(0, rows, step):
        hi = min(rows, lo + step)
        grads = terms[0].dense_rows(lo, hi)
        for term in terms[1:]:
            grads += term.dense_rows(lo, hi)
        total.addmm_(grads, grads.T)
    return total


def gram_by_pairs(terms: Sequence[OuterTerm]) -> Tensor:
    """Compute `outer_gram` from inner products of factors, over all pairs of positions."""
    examples = len(terms[0].right)
    positions = max(term.right.shape[1] for term in terms)
    step = max(1, MAX_TEMPORARY // (examples * positions**2))
    total = at_least_float32(terms[0].right).new_zeros(examples, examples)
    for lo in range(0, examples, step):
        hi = min(examples, lo + step)
        for one in terms:
            for two in terms:
                # The matrix is symmetric: strips of its upper half are enough.
                total[lo:hi, lo:] += _pair_products(one, slice(lo, hi), two, slice(lo, None))
    upper = total.triu()
    return upper + upper.triu(1).T


def _pair_products(one: OuterTerm, rows: slice, two: OuterTerm, columns: slice) -> Tensor:
    """Return inner products between some examples of one use and some of another.

    <l r^T, l' r'^T> = <l, l'> <r, r'>, summed over both positions.
    """
    left, right = (factor[rows] for factor in one.factors())
    left2, right2 = (factor[columns] for factor in two.factors())
    shape = (len(right), right.shape[1], len(right2), right2.shape[1])
    products = right.flatten(0, 1) @ right2.flatten(0, 1).T
    left, left2 = left.flatten(0, 1), left2.flatten(0, 1)
    if one.one_hot and two.one_hot:
        products *= left[:, None] == left2  # one-hot rows: 1 for equal tokens, else 0
    elif one.one_hot:
        products *= left2[:, left].T
    elif two.one_hot:
        products *= left[:, left2]
    else:
        products *= left @ left2.T
    if shape[1] == shape[3] == 1:
        return products
    return products.view(shape).sum((1, 3))


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
