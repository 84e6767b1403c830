"""Rows: what each example's gradient was, told through the few verbs that balancing needs.

Shapes: B examples, D trainable parameters in the order of `model.parameters()`, K vectors
asked for at once (few), U units.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gradherd.rows import outer
from gradherd.rows.flat import FlatSpec
from gradherd.rows.terms import Products, Term


class Rows(Protocol):
    """Per-example gradients as a (B, D) matrix that need not exist."""

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
    """Rows that are held as they are.

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
    """Rows held as the factors that the layers left behind; nothing of size B x D."""

    spec: FlatSpec
    """Where each parameter lies in a row."""
    terms: tuple[tuple[Term, ...], ...]
    """For each parameter of `spec`, one term per use; their sum is its part of the rows."""
    examples: int
    """B."""
    scale: float
    """What the terms are multiplied by to be the rows."""
    like: Tensor
    """An empty tensor with the rows' dtype and device."""

    def __len__(self) -> int:
        return self.examples

    def dot(self, vectors: Tensor) -> Tensor:
        """Return inner products with vectors (K, D): (K, B)."""
        vectors = self._checked("vectors", vectors, self.spec.size)
        sums = self.like.new_zeros(len(vectors), self.examples)
        for terms, part in zip(self.terms, self.spec.split(vectors), strict=True):
            for term in terms:
                for k, vector in enumerate(part):
                    sums[k] += term.dot(vector)
        return sums.mul_(self.scale)

    def gram(self) -> Tensor:
        """Return inner products between rows: (B, B)."""
        total = self.like.new_zeros(self.examples, self.examples)
        products = Products()
        for terms in self.terms:
            if terms:
                total += _gram(terms, products)
        return total.mul_(self.scale**2)

    def combine(self, weights: Tensor) -> Tensor:
        """Return sums of rows weighted by weights (K, B): (K, D)."""
        weights = self._checked("weights", weights, self.examples) * self.scale
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

    def _checked(self, name: str, given: Tensor, width: int) -> Tensor:
        if given.dim() != 2 or given.shape[1] != width:
            raise ValueError(f"{name} must have shape (K, {width}), got {tuple(given.shape)}")
        return given.to(self.like)


def _gram(terms: tuple[Term, ...], products: Products) -> Tensor:
    """Return the Gram matrix of one parameter with all its uses, cross terms included: (B, B)."""
    if len(terms) == 1:
        return terms[0].gram(products)
    factored = [term for term in terms if isinstance(term, outer.Outer)]
    if len(factored) == len(terms):
        return outer.gram(factored)
    # Uses of different kinds have no common form; only this one parameter is written out.
    grads = terms[0].dense().clone()
    for term in terms[1:]:
        grads += term.dense()
    return grads @ grads.T


@dataclass(frozen=True)
class Grouped:
    """Rows of units: the mean row of every `unit` consecutive examples.

    A short last unit is the mean of the examples it has.

    >>> Grouped(DenseRows(torch.tensor([[1.0], [3.0], [7.0]])), 2).dense()
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
        single = self.rows.dot(vectors)
        return single @ self._means(single).T

    def gram(self) -> Tensor:
        """Return inner products between units: (U, U)."""
        single = self.rows.gram()
        means = self._means(single)
        return means @ single @ means.T

    def combine(self, weights: Tensor) -> Tensor:
        """Return sums of units weighted by weights (K, U): (K, D)."""
        return self.rows.combine(weights @ self._means(weights))

    def dense(self) -> Tensor:
        """Return the mean rows themselves: (U, D)."""
        single = self.rows.dense()
        return self._means(single) @ single

    def _means(self, like: Tensor) -> Tensor:
        return unit_means(len(self.rows), self.unit, like)


def unit_means(examples: int, unit: int, like: Tensor) -> Tensor:
    """Return the (U, B) matrix that averages every `unit` consecutive examples.

    Args:
        examples: B.
        unit: Examples in a unit; the last one may have fewer.
        like: Gives dtype and device.
    """
    place = torch.arange(examples, device=like.device) // unit
    units = -(-examples // unit)
    member = (torch.arange(units, device=like.device)[:, None] == place).to(like.dtype)
    return member / member.sum(1, keepdim=True)
