"""Exact rows: per-example gradients through the few operations that balancing needs.

Balancing never needs the (B, D) matrix itself, only inner products and weighted sums of its rows.
Those can be computed from what the layers hold, with memory far below B x D.

Shapes: B examples, D elements of all trainable parameters in the order of `model.parameters()`,
K vectors at once (few), U units.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gradherd.flat import FlatSpec
from gradherd.rows.terms import GramCache, OuterTerm, Term, outer_gram


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
    """Rows held as the terms of the layers; nothing has the size B x D."""

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
    outer_terms = [term for term in terms if isinstance(term, OuterTerm)]
    if len(outer_terms) == len(terms):
        return outer_gram(outer_terms)
    # Terms of different types have no common form: form the gradients of this one parameter.
    grads = terms[0].dense().clone()
    for term in terms[1:]:
        grads += term.dense()
    return grads @ grads.T


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
