"""Sign rows of one worker that are not formed: from their products, as sums of their factors.

Signs are decided as in `balance.blocks`, on the products of a whole batch, so they are those of
formed rows up to rounding. What is signed are combinations of rows and of a few vectors that are
formed (the first half of a pair, a mean): products of combinations are combinations of products.

Shapes: b rows of a call, D columns, P vectors to sign, e formed vectors, K vectors.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from gradherd.ordering.balance import signs_from_products
from gradherd.ordering.sign_rules import Floats, SignRule


class ImplicitRows(Protocol):
    """Rows (b, 1, D) that are not formed: see `rows.factored_rows`."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(b, 1, D)."""

    @property
    def dtype(self) -> torch.dtype:
        """Precision."""

    @property
    def device(self) -> torch.device:
        """Where they are."""

    @property
    def gram(self) -> Tensor:
        """(b, b) inner products of the rows."""

    def __len__(self) -> int:
        """Return b."""

    def to(self, dtype: torch.dtype) -> "ImplicitRows":
        """Return the rows in another precision."""

    def dot(self, vectors: Tensor) -> Tensor:
        """Return inner products with vectors (K, D): (K, b)."""

    def combine(self, weights: Tensor) -> Tensor:
        """Return sums of rows weighted by (K, b): (K, D)."""

    def columns(self, index: Tensor) -> Tensor:
        """Return the columns (b, c) that `index` (c,), which ascends, says."""

    def dense(self) -> Tensor:
        """Return the rows themselves: (b, D)."""


def are_finite(rows: ImplicitRows) -> bool:
    """Return whether all rows are finite."""
    return bool(rows.gram.diagonal().isfinite().all())


@dataclass(frozen=True)
class Combined:
    """Vectors (P, D) that are weighted sums of formed vectors and of rows that are not."""

    weights: Tensor
    """(P, e + b)."""
    formed: Tensor
    """(e, D)."""
    rows: ImplicitRows

    def sign(self, running: Tensor, rule: SignRule, draws: Floats, carry: Floats) -> Tensor:
        """Sign the vectors and add them to the (1, D) sum; draws (1, P) and carry as in `Unsigned`.

        Returns:
            (P,) int8 signs, all 0 if a product is not finite.
        """
        count = len(self.formed)
        known = torch.cat([self.formed, running])
        with_rows = self.rows.dot(known)
        gram = torch.cat([with_rows[:count].T, self.rows.gram], 1)
        above = torch.cat([known @ self.formed.T, with_rows], 1)  # the last row is of the sum
        gram = torch.cat([above[:count], gram])
        inner = above[count:] @ self.weights.T
        both = torch.cat([inner, self.weights @ gram @ self.weights.T])
        host = both.to("cpu", torch.float64).numpy()
        if not np.isfinite(host).all():
            return torch.zeros(len(self.weights), dtype=torch.int8)
        found = signs_from_products(host[:1].copy(), host[None, 1:], rule, draws, carry)
        signs = torch.from_numpy(found)
        of_formed, of_rows = (signs.to(running) @ self.weights).tensor_split([count], 1)
        running += self.rows.combine(of_rows)
        running += of_formed @ self.formed
        return signs[0]
