"""Sign rows that are never formed: balancing needs three kinds of products only.

Inner products with a dense vector, the Gram matrix and weighted sums follow from a layer's inputs
and output gradients at the cost of a backward pass, without a (batch x parameters) matrix. What
balancing signs (differences of pairs, gradients minus a mean) is linear in the rows, so it is
described by coefficients instead of computed. This works for one worker: rows of another process
would have to be formed to be sent.

Shapes: B rows of a call, P vectors to sign, D columns, e extra vectors.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from gradherd.ordering.gram import Signed, signs_from_products
from gradherd.ordering.sign_rules import Floats, SignRule


class ImplicitRows(Protocol):
    """A (B, D) matrix that is known only through its products. See `rows.exact_rows`."""

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


@dataclass(frozen=True)
class LinearCombination:
    """The vectors A.rows + C.extra, described by their coefficients."""

    rows: ImplicitRows
    """(B, D), not formed."""
    a: Tensor
    """(P, B) weights of the rows."""
    extra: Tensor
    """(e, D) dense vectors; e may be 0."""
    c: Tensor
    """(P, e) weights of the extra vectors."""

    def dot(self, vectors: Tensor) -> Tensor:
        """Return inner products with vectors (K, D): (K, P)."""
        return self.rows.dot(vectors) @ self.a.T + vectors @ self.extra.T @ self.c.T

    def gram(self) -> Tensor:
        """Return inner products between the vectors: (P, P)."""
        # (A R + C E)(A R + C E)^T, term by term; the two mixed terms are transposes.
        own = self.a @ self.rows.gram() @ self.a.T
        if not len(self.extra):
            return own
        cross = self.a @ self.rows.dot(self.extra).T @ self.c.T
        return own + cross + cross.T + self.c @ (self.extra @ self.extra.T) @ self.c.T

    def combine(self, weights: Tensor) -> Tensor:
        """Return sums weighted by weights (K, P): (K, D)."""
        return self.rows.combine(weights @ self.a) + weights @ self.c @ self.extra


def balance_implicit(
    vectors: LinearCombination, running: Tensor, rule: SignRule, draws: Floats, carry: Floats
) -> Signed:
    """Sign the vectors of one stream as one Gram block; all are left out if one is not finite.

    Args:
        vectors: The vectors to sign.
        running: (1, D) sum before the first vector.
        rule: Decides the signs.
        draws: (1, P) uniform numbers in [-1, 1).
        carry: (C, 1) what the rule carries from vector to vector.

    Returns:
        The (1, P) signs, the new sum and the new carry.
    """
    products = torch.cat([vectors.dot(running), vectors.gram()])  # (1 + P, P), one sync
    host = products.to("cpu", torch.float64).numpy()
    # All or none: they come from one batch, whose mean gradient is not finite either.
    if not np.isfinite(host).all():
        return Signed(torch.zeros((1, host.shape[1]), dtype=torch.int8), running, carry)
    # Copied because the recursion overwrites it.
    array, carry = signs_from_products(host[:1].copy(), host[np.newaxis, 1:], rule, draws, carry)
    signs = torch.from_numpy(array)
    return Signed(signs, running + vectors.combine(signs.to(running)), carry)
