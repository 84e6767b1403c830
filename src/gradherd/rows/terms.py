"""What one use of one parameter adds to every example's gradient, in the form it came in.

A term stands for a (B, N) matrix, the per-example gradients of one parameter, without
holding it where its layer allows. `Dense` is the plain one; see `outer` and `conv`.

Shapes: B examples, N numbers in the parameter, K buckets of a sketch.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gradherd.rows.sketch import count_sketch

BUDGET = 1 << 24
"""Numbers a temporary may hold; larger work is cut into pieces."""


class Products:
    """Remembers x x^T while one Gram matrix is made: a weight and its bias share a factor."""

    def __init__(self) -> None:
        self._made: dict[object, tuple[Tensor, Tensor]] = {}

    def of(self, matrix: Tensor) -> Tensor:
        """Return matrix (B, N) times its transpose: (B, B). The result is not to be changed."""
        key = (matrix.data_ptr(), matrix.shape, matrix.stride(), matrix.dtype)
        if key not in self._made:
            # The matrix is kept too, so that its address is not given to another one.
            self._made[key] = (matrix, matrix @ matrix.T)
        return self._made[key][1]


class Term(Protocol):
    """The verbs every term knows; each is the same verb on the (B, N) matrix it stands for."""

    def dot(self, vector: Tensor) -> Tensor:
        """Return the inner product of each example's gradient with vector (N,): (B,)."""
        ...

    def gram(self, products: "Products") -> Tensor:
        """Return the inner products between examples: (B, B). The result is not to be changed."""
        ...

    def combine(self, weights: Tensor, onto: Tensor) -> None:
        """Add the sum of the gradients, weighted by weights (B,), to `onto` (N,), in place."""
        ...

    def dense(self) -> Tensor:
        """Return the gradients themselves: (B, N)."""
        ...

    def sketch(self, k: int, seed: int, name: str) -> Tensor:
        """Return k numbers per example, (B, k), that keep inner products on average."""
        ...


def full(tensor: Tensor) -> Tensor:
    """Return `tensor` in float32 or better: half precision is for the model, not for sums."""
    if tensor.dtype in (torch.float32, torch.float64):
        return tensor
    return tensor.float()


@dataclass(frozen=True)
class Dense:
    """Gradients that are small enough to be held: biases, norms, replayed modules."""

    grads: Tensor
    """(B, N) gradient of each example."""

    def dot(self, vector: Tensor) -> Tensor:
        """Return the inner product of each example's gradient with vector (N,): (B,)."""
        return full(self.grads) @ vector

    def gram(self, products: Products) -> Tensor:
        """Return the inner products between examples: (B, B)."""
        return products.of(full(self.grads))

    def combine(self, weights: Tensor, onto: Tensor) -> None:
        """Add the sum of the gradients, weighted by weights (B,), to `onto` (N,), in place."""
        onto += weights @ full(self.grads)

    def dense(self) -> Tensor:
        """Return the gradients themselves: (B, N)."""
        return full(self.grads)

    def sketch(self, k: int, seed: int, name: str) -> Tensor:
        """Return the count sketch of each gradient: (B, k)."""
        return count_sketch(full(self.grads), k, seed, name=name)
