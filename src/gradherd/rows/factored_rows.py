"""Rows of a whole model that are not formed: what balancing needs, from the factors of each layer.

Balancing needs inner products and weighted sums of rows only. Nothing here has the size of all
rows: of weights, factors are held (`outer_rows`), of biases and other small parameters the rows.

Shapes: B rows, D elements of all parameters, K vectors.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gradherd.flat import FlatSpec
from gradherd.rows.outer_rows import Squares, square

Part = Any
"""Rows of one parameter: a tensor (B, N), or `OuterRows`."""


class FactoredRows:
    """Rows (B, 1, D) of one worker."""

    def __init__(
        self,
        parts: Mapping[str, Part],
        spec: FlatSpec,
        count: int,
        like: Tensor,
        scale: Tensor | float,
    ) -> None:
        """Take the rows of parameters by name, of which `spec` tells the columns.

        Those that are missing are zero, and the others are multiplied by `scale`. `like` has their
        precision.
        """
        self._parts = parts
        self._spec, self._like, self._scale = spec, like, scale
        self.shape = (count, 1, spec.size)

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """Precision."""
        return self._like.dtype

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self._like.device

    def to(self, dtype: torch.dtype) -> "FactoredRows":
        """Return the rows in another precision."""
        parts = {name: part.to(dtype) for name, part in self._parts.items()}
        return self._with(parts, len(self), self._scale, self._like.to(dtype))

    def means(self, unit: int) -> "FactoredRows":
        """Return the mean row of every `unit` rows."""
        count, parts = len(self) // unit, {}
        for name, part in self._parts.items():
            is_formed = isinstance(part, Tensor)
            parts[name] = part.view(count, unit, -1).sum(1) if is_formed else part.means(unit)
        return self._with(parts, count, self._scale / unit, self._like)

    def _with(self, parts: Any, count: int, scale: Tensor | float, like: Tensor) -> "FactoredRows":
        return FactoredRows(parts, self._spec, count, like, scale)

    def dot(self, vectors: Tensor) -> Tensor:
        """Return inner products with vectors (K, D): (K, B)."""
        sums = self._like.new_zeros(len(vectors), len(self))
        for name, part in self._parts.items():
            for total, vector in zip(sums, vectors[:, self._spec.slices[name]], strict=True):
                total += part @ vector if isinstance(part, Tensor) else part.dot(vector)
        return sums.mul_(self._scale)

    @cached_property
    def gram(self) -> Tensor:
        """Inner products of the rows, (B, B); computed once."""
        total, known = self._like.new_zeros(len(self), len(self)), Squares()
        for part in self._parts.values():
            total += square(part, known) if isinstance(part, Tensor) else part.gram(known)
        return total.mul_(self._scale**2)

    def combine(self, weights: Tensor) -> Tensor:
        """Return sums of rows weighted by (K, B): (K, D)."""
        sums = self._like.new_zeros(len(weights), self.shape[2])
        weights = weights * self._scale
        for name, part in self._parts.items():
            for total, own in zip(sums[:, self._spec.slices[name]], weights, strict=True):
                if isinstance(part, Tensor):
                    torch.mv(part.T, own, out=total)
                else:
                    part.combine(own, total)
        return sums

    def columns(self, index: Tensor) -> Tensor:
        """Return the columns (B, c) of a row that `index` (c,), which ascends, says."""
        found = self._like.new_zeros(len(self), len(index))
        for name, part in self._parts.items():
            span = self._spec.slices[name]
            lo, hi = torch.searchsorted(index, index.new_tensor([span.start, span.stop])).tolist()
            here = index[lo:hi] - span.start
            found[:, lo:hi] = part[:, here] if isinstance(part, Tensor) else part.columns(here)
        return found.mul_(self._scale)

    def dense(self) -> Tensor:
        """Return the rows themselves: (B, D)."""
        rows = self._like.new_zeros(len(self), self.shape[2])
        for name, part in self._parts.items():
            rows[:, self._spec.slices[name]] = part if isinstance(part, Tensor) else part.dense()
        return rows.mul_(self._scale)
