"""Sums of rows, which wait for the gradient that they should add up to.

A parameter's gradient is passed on once all of its uses in a backward are in it. If the rows of
these uses were read when the gradients of their layers arrived, both sides of the comparison are
there at that moment, and all that is kept of them is two norms.

Shapes: B examples, N elements of a parameter.
"""

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from gradherd.rows.terms import Term

# Correct rows reach about 3 unit roundoffs of the sum of the row norms, wrong ones 5 % of it and
# more. Half precision leaves less room between the two than float32.
TOLERANCES = {
    torch.float64: 1e-9,
    torch.float32: 1e4 * 2**-24,
    torch.float16: 16 * 2**-11,
    torch.bfloat16: 16 * 2**-8,
}
_TF32_TOLERANCE = 16 * 2**-11


class RowSums:
    """Rows that were added up before their gradient arrived, in one batch."""

    def __init__(self) -> None:
        self.incomplete: set[int] = set()
        """Parameters of which some rows are not known when their gradient arrives."""
        self._waiting: dict[tuple[int, int], Tensor] = {}  # by parameter and backward: (N,)
        self._row_norms: dict[int, Tensor] = {}
        self._compared: dict[int, list[Tensor]] = {}  # norms of error and gradient

    @property
    def compared(self) -> set[int]:
        """Parameters whose gradient was compared."""
        return set(self._compared)

    def add(
        self, index: int, task: int, term: Term, size: int, examples: int, like: Tensor
    ) -> None:
        """Add rows of a parameter.

        Args:
            index: Of the parameter.
            task: The backward (autograd's graph task).
            term: Rows of one use of it.
            size: N.
            examples: B.
            like: A tensor of the rows' dtype and device.
        """
        total, norms = sum_and_norms([term], size, examples, like)
        before = self._waiting.get((index, task))
        self._waiting[index, task] = total if before is None else total.add_(before)
        self._row_norms[index] = norms + self._row_norms.get(index, 0.0)

    def compare(self, index: int, task: int, grad: Tensor) -> Tensor | None:
        """Compare the rows of a backward with its gradient.

        Returns:
            What rows that are not known yet have to add up to; None if there are no such rows.
        """
        rows = self._waiting.pop((index, task), None)
        if rows is None:
            return grad
        rows -= grad.reshape(-1).to(rows)
        if index in self.incomplete:
            return rows.neg_().view(grad.shape)
        norms = torch.stack([rows.norm(), torch.linalg.vector_norm(grad).to(rows)])
        self._compared.setdefault(index, []).append(norms)
        return None

    def measured(self, index: int) -> tuple[float, float, float]:
        """Return the norms of error and gradient, and the sum of the norms of the rows."""
        # The rows of each backward add up to its gradient, so errors of several only add up.
        pairs = torch.stack(self._compared[index]).sum(0) if index in self._compared else None
        error, size = (0.0, 0.0) if pairs is None else pairs.tolist()
        return error, size, float(self._row_norms.get(index, 0.0))

    def clear(self) -> None:
        """Forget the batch."""
        self.incomplete = set()
        self._waiting, self._row_norms, self._compared = {}, {}, {}


def sum_and_norms(
    terms: Sequence[Term], size: int, examples: int, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the sum of the rows (N,), and an estimate of the sum of their norms.

    An error is measured against the norms of the rows, not that of their sum: the rows of a bias
    in front of BatchNorm cancel, and what is left is rounding.
    """
    total, ones = like.new_zeros(size), like.new_ones(examples)
    # |<row, v>| is |row| times sqrt(2 / pi) on average for random signs v. Unlike the rows
    # themselves this costs no more than a forward.
    count = 4 if size <= 1 << 14 else 1
    signs = _random_signs(like.dtype, like.device)
    if count * size > len(signs):
        signs = signs.repeat(-(-count * size // len(signs)))
    signs = signs[: count * size].view(count, size)
    norms = like.new_zeros(())
    for term in terms:
        term.combine(ones, total)
        for vector in signs:
            norms += term.dot(vector).abs().sum() * (math.sqrt(math.pi / 2) / count)
    return total, norms


@lru_cache(maxsize=4)
def _random_signs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return signs to repeat over longer vectors; a prime number, so that rows stay unaligned."""
    generator = torch.Generator().manual_seed(0)
    signs = torch.empty(65_537).bernoulli_(0.5, generator=generator).mul_(2).sub_(1)
    return signs.to(dtype=dtype, device=device)


def tolerance(tensors: Iterable[Tensor], autocast: torch.dtype | None = None) -> float:
    """Return the relative error that sums over these tensors may have."""
    widest = 0.0
    for dtype, cuda in {(t.dtype, t.is_cuda) for t in tensors if t.is_floating_point()}:
        widest = max(widest, TOLERANCES.get(dtype, TOLERANCES[torch.bfloat16]))
        matmul = torch.get_float32_matmul_precision()
        if dtype == torch.float32 and matmul == "medium":
            widest = max(widest, TOLERANCES[torch.bfloat16])
        # Convolutions use TF32 by default.
        elif (
            dtype == torch.float32
            and cuda
            and (matmul == "high" or torch.backends.cudnn.allow_tf32)
        ):
            widest = max(widest, _TF32_TOLERANCE)
    if autocast is not None:
        widest = max(widest, TOLERANCES[autocast])
    return widest
