"""Exact rows: per-example gradients through the few operations that balancing needs.

Balancing never needs the (B, D) matrix itself, only inner products and weighted sums of its rows.
What one use of one parameter adds to every row is a term. `DenseTerm` holds the gradients
themselves. `OuterTerm` holds the two factors of a layer with one or few positions, such as those
of an MLP, where that takes less time: nothing then has the size B x D. `TableTerm` holds the
gradients of those rows of a table that the batch has looked up.

Shapes: B examples, D elements of all trainable parameters in the order of `model.parameters()`,
N elements of one parameter, K vectors at once (few), U units. Of a weight: O rows and I columns,
T positions.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gradherd.flat import FlatSpec


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return `tensor` in float32 or better: half precision is too coarse for sums."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


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

    def norms(self) -> Tensor:
        """Return the norm of each gradient, or a little more: (B,)."""
        ...

    def dense(self) -> Tensor:
        """Return the gradients themselves: (B, N)."""
        ...


@dataclass(frozen=True)
class DenseTerm:
    """Gradients that are held as they are."""

    grads: Tensor
    """(B, N) gradient of each example, in float32 or better."""

    def dot(self, vector: Tensor) -> Tensor:
        """Return the inner product of each example's gradient with vector (N,): (B,)."""
        return self.grads @ vector

    def gram(self, cache: GramCache) -> Tensor:
        """Return the inner products between examples: (B, B)."""
        return cache.gram(self.grads)

    def combine(self, weights: Tensor, onto: Tensor) -> None:
        """Add the sum of the gradients, weighted by weights (B,), to `onto` (N,), in place."""
        onto += weights @ self.grads

    def norms(self) -> Tensor:
        """Return the norm of each gradient: (B,)."""
        norms: Tensor = torch.linalg.vector_norm(self.grads, dim=1)
        return norms

    def dense(self) -> Tensor:
        """Return the gradients themselves: (B, N)."""
        return self.grads


@dataclass(frozen=True)
class TableTerm(DenseTerm):
    """Gradients of some rows of a table; all others are zero. `grads` has those rows alone."""

    tokens: Tensor
    """(V,) the rows, each once."""
    shape: tuple[int, int]
    """Of the table."""

    def dot(self, vector: Tensor) -> Tensor:
        """Return the inner product of each example's gradient with vector (N,): (B,)."""
        return self.grads @ vector.view(self.shape)[self.tokens].flatten()

    def combine(self, weights: Tensor, onto: Tensor) -> None:
        """Add the sum of the gradients, weighted by weights (B,), to `onto` (N,), in place."""
        sums = (weights @ self.grads).view(len(self.tokens), -1)
        onto.view(self.shape).index_add_(0, self.tokens, sums)

    def dense(self) -> Tensor:
        """Return the gradients themselves: (B, N)."""
        grads = self.grads.view(len(self.grads), len(self.tokens), -1)
        dense = grads.new_zeros(len(grads), *self.shape)
        return dense.index_copy_(1, self.tokens, grads).flatten(1)


@dataclass(frozen=True)
class OuterTerm:
    """Gradients that are sums of outer products over few positions, held as their two factors.

    The gradient of example i is the sum over t of left[i, t] right[i, t]^T. For nn.Linear, left
    is the gradient of the output and right the input.
    """

    left: Tensor
    """(B, T, O) factor, in float32 or better."""
    right: Tensor
    """(B, T, I) factor, likewise."""

    @staticmethod
    def saves_time(positions: int, rows: int, columns: int) -> bool:
        """Say whether inner products cost less by pairs of positions than by whole gradients.

        >>> OuterTerm.saves_time(1, 1024, 1024), OuterTerm.saves_time(512, 64, 64)
        (True, False)
        """
        return positions**2 * (rows + columns) <= rows * columns

    def dot(self, vector: Tensor) -> Tensor:
        """Return the inner product of each example's gradient with vector (N,): (B,)."""
        left, right = self.left, self.right
        matrix = vector.view(left.shape[-1], right.shape[-1])
        # The matrix may be multiplied to either factor; the smaller result needs less memory.
        one, two = (
            (right @ matrix.T, left) if len(matrix) <= len(matrix.T) else (left @ matrix, right)
        )
        # bmm, not a product and a sum: no temporary of the size of the factors.
        return torch.bmm(one.flatten(1).unsqueeze(1), two.flatten(1).unsqueeze(2)).view(-1)

    def combine(self, weights: Tensor, onto: Tensor) -> None:
        """Add the sum of the gradients, weighted by weights (B,), to `onto` (N,), in place."""
        left, right = self.left, self.right
        # The weights may scale either factor; scale the smaller one.
        if left.shape[-1] <= right.shape[-1]:
            left = left * weights[:, None, None]
        else:
            right = right * weights[:, None, None]
        left, right = left.flatten(0, 1), right.flatten(0, 1)
        onto.view(left.shape[-1], right.shape[-1]).addmm_(left.T, right)

    def gram(self, cache: GramCache) -> Tensor:
        """Return the inner products between examples: (B, B)."""
        # <l r^T, l' r'^T> = <l, l'> <r, r'>, summed over both positions.
        examples, positions = self.left.shape[:2]
        if positions == 1:
            return cache.gram(self.left[:, 0]) * cache.gram(self.right[:, 0])
        products = cache.gram(self.left.flatten(0, 1)) * cache.gram(self.right.flatten(0, 1))
        return products.view(examples, positions, examples, positions).sum((1, 3))

    def norms(self) -> Tensor:
        """Return the norm of each gradient; of several positions the sum of their norms: (B,)."""
        norm = torch.linalg.vector_norm
        norms: Tensor = (norm(self.left, dim=2) * norm(self.right, dim=2)).sum(1)
        return norms

    def dense(self) -> Tensor:
        """Return the gradients themselves: (B, N)."""
        return torch.bmm(self.left.transpose(1, 2), self.right).flatten(1)


class Rows(Protocol):
    """Per-example gradients as a (B, D) matrix that need not be formed."""

    def __len__(self) -> int:
        """Return B."""
        ...

    def dot(self, vectors: Tensor) -> Tensor:
        """Return inner products with vectors (K, D): (K, B)."""
        ...

    def gram(self) -> Tensor:
        """Return inner products between rows: (B, B)."""
        ...

    def combine(self, weights: Tensor) -> Tensor:
        """Return sums of rows weighted by weights (K, B): (K, D)."""
        ...

    def dense(self) -> Tensor:
        """Return the rows themselves, for small models and checks: (B, D)."""
        ...


@dataclass(frozen=True)
class DenseRows:
    """Rows held as a matrix.

    >>> rows = DenseRows(torch.tensor([[1.0, 0.0], [1.0, 2.0]]))
    >>> rows.gram()
    tensor([[1., 1.],
            [1., 5.]])
    """

    matrix: Tensor
    """(B, D)."""

    def __post_init__(self) -> None:
        if self.matrix.dim() != 2:
            raise ValueError(f"matrix must have shape (B, D), got {tuple(self.matrix.shape)}")

    def __len__(self) -> int:
        return len(self.matrix)

    def dot(self, vectors: Tensor) -> Tensor:
        """Return inner products with vectors (K, D): (K, B)."""
        return vectors.to(self.matrix) @ self.matrix.T

    def gram(self) -> Tensor:
        """Return inner products between rows: (B, B)."""
        return self.matrix @ self.matrix.T

    def combine(self, weights: Tensor) -> Tensor:
        """Return sums of rows weighted by weights (K, B): (K, D)."""
        return weights.to(self.matrix) @ self.matrix

    def dense(self) -> Tensor:
        """Return the rows themselves: (B, D)."""
        return self.matrix


@dataclass(frozen=True)
class FactoredRows:
    """Rows held as the terms of the layers."""

    spec: FlatSpec
    """Where each parameter lies in a row."""
    terms: tuple[tuple[Term, ...], ...]
    """For each parameter of `spec`, one term per use; their sum is the parameter's part."""
    examples: int
    """B."""
    scale: float
    """Factor between the terms and the rows."""
    like: Tensor
    """An empty tensor with the rows' dtype and device."""

    def __len__(self) -> int:
        return self.examples

    def dot(self, vectors: Tensor) -> Tensor:
        """Return inner products with vectors (K, D): (K, B)."""
        vectors = self._check("vectors", vectors, self.spec.size)
        sums = self.like.new_zeros(len(vectors), self.examples)
        for terms, part in zip(self.terms, self.spec.split(vectors), strict=True):
            for term in terms:
                # One vector at a time: K is small, and temporaries stay those of one.
                for k, vector in enumerate(part):
                    sums[k] += term.dot(vector)
        return sums.mul_(self.scale)

    def gram(self) -> Tensor:
        """Return inner products between rows: (B, B)."""
        total = self.like.new_zeros(self.examples, self.examples)
        # Weight and bias of a layer share the factor of the output gradient: its products are
        # computed once.
        cache = GramCache()
        for terms in self.terms:
            if terms:
                total += _parameter_gram(terms, cache)
        return total.mul_(self.scale**2)  # each inner product has the scale of two rows

    def combine(self, weights: Tensor) -> Tensor:
        """Return sums of rows weighted by weights (K, B): (K, D)."""
        # The scale is applied to K x B weights, not to K x D sums.
        weights = self._check("weights", weights, self.examples) * self.scale
        sums = self.like.new_zeros(len(weights), self.spec.size)
        for terms, part in zip(self.terms, self.spec.split(sums), strict=True):
            for term in terms:
                for k, weight in enumerate(weights):
                    term.combine(weight, part[k])
        return sums

    def dense(self) -> Tensor:
        """Return the rows themselves, for small models and checks: (B, D)."""
        rows = self.like.new_zeros(self.examples, self.spec.size)
        for terms, part in zip(self.terms, self.spec.split(rows), strict=True):
            for term in terms:
                part += term.dense()
        return rows.mul_(self.scale)

    def _check(self, name: str, tensor: Tensor, width: int) -> Tensor:
        if tensor.dim() != 2 or tensor.shape[1] != width:
            raise ValueError(f"{name} must have shape (K, {width}), got {tuple(tensor.shape)}")
        return tensor.to(self.like)


def _parameter_gram(terms: tuple[Term, ...], cache: GramCache) -> Tensor:
    """Return the Gram matrix of one parameter over all its uses, with cross terms: (B, B)."""
    if len(terms) == 1:
        return terms[0].gram(cache)
    outer = [term for term in terms if isinstance(term, OuterTerm)]
    if len(outer) == len(terms):  # uses are positions, too
        left, right = (torch.cat(factors, 1) for factors in zip(*map(_factors, outer), strict=True))
        if OuterTerm.saves_time(left.shape[1], left.shape[2], right.shape[2]):
            return OuterTerm(left, right).gram(cache)
    # Otherwise form the gradients of this one parameter.
    grads = terms[0].dense().clone()
    for term in terms[1:]:
        grads += term.dense()
    return grads @ grads.T


def _factors(term: OuterTerm) -> tuple[Tensor, Tensor]:
    return term.left, term.right


@dataclass(frozen=True)
class GroupedRows:
    """Rows of units: the mean row of every `unit` consecutive examples.

    The last unit may be short; it is the mean of the examples it has.

    >>> GroupedRows(DenseRows(torch.tensor([[1.0], [3.0], [7.0]])), 2).dense()
    tensor([[2.],
            [7.]])
    """

    rows: Rows
    """Rows of single examples."""
    unit: int
    """Examples in a unit."""

    def __post_init__(self) -> None:
        if self.unit < 1:
            raise ValueError(f"unit must be at least 1, got {self.unit}")

    def __len__(self) -> int:
        return -(-len(self.rows) // self.unit)

    def dot(self, vectors: Tensor) -> Tensor:
        """Return inner products with vectors (K, D): (K, U)."""
        products = self.rows.dot(vectors)
        return products @ self._means(products).T

    def gram(self) -> Tensor:
        """Return inner products between units: (U, U)."""
        products = self.rows.gram()
        means = self._means(products)
        return means @ products @ means.T

    def combine(self, weights: Tensor) -> Tensor:
        """Return sums of units weighted by weights (K, U): (K, D)."""
        return self.rows.combine(weights @ self._means(weights))

    def dense(self) -> Tensor:
        """Return the mean rows themselves: (U, D)."""
        matrix = self.rows.dense()
        return self._means(matrix) @ matrix

    def _means(self, like: Tensor) -> Tensor:
        return unit_mean_matrix(len(self.rows), self.unit, like)


def unit_mean_matrix(examples: int, unit: int, like: Tensor) -> Tensor:
    """Return the (U, B) matrix that averages every `unit` consecutive examples.

    Args:
        examples: B.
        unit: Examples in a unit; the last unit may have fewer.
        like: A tensor of the dtype and device to use.
    """
    unit_of = torch.arange(examples, device=like.device) // unit
    units = -(-examples // unit)
    # As a matrix: products with it are deterministic, unlike index_add_ on a GPU.
    member = (torch.arange(units, device=like.device)[:, None] == unit_of).to(like.dtype)
    return member / member.sum(1, keepdim=True)
