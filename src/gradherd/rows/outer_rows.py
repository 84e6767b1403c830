"""Gradients of single examples of a weight, held as what their layer makes them of.

For a linear map with inputs r_t and output gradients l_t, the gradient of an example is the sum of
l_t r_t^T over its positions. Inner products with a vector, among examples, and weighted sums need
no more than these factors: <S, l r^T> is a product as in a forward, those among examples are
(L L^T) o (R R^T), and a weighted sum is a product as in a backward.

Shapes: B examples, T positions, O rows and I columns of a weight, N = O * I.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_MAX_TEMPORARY = 1 << 22
CHANGED_LATER = (
    "what a layer got or gave was changed in place after its backward, before the rows of single "
    "examples were read: give the model a copy (clone()) of a buffer that is reused"
)


def products(left: Tensor, right: Tensor) -> Tensor:
    """Multiply matrices of each example, (B, c, T) and (B, T, K): (B, c, K)."""
    if not left.is_cuda:
        # Some CPUs take a hundred times as long for thin matrices that are transposed.
        left, right = left.contiguous(), right.contiguous()
    return torch.bmm(left, right)


Squares = dict[Any, Tensor]
"""Products of matrices with themselves, by where the matrices are."""


def square(matrix: Tensor, known: Squares) -> Tensor:
    """Return x x^T of (B, N), computed once: weight and bias of a layer have a factor in common."""
    key = matrix.data_ptr(), matrix.shape, matrix.stride()
    if key not in known:
        known[key] = matrix @ matrix.T
    return known[key]


def padded(rows: Any, before: int, behind: int) -> Any:
    """Put so many zeros before and behind rows (n, N), formed or not."""
    if isinstance(rows, OuterRows):
        left, right = padded(rows.left, before, behind), padded(rows.right, before, behind)
        return OuterRows(left, right, rows.table)
    return F.pad(rows, (*[0, 0] * (rows.ndim - 1), before, behind))


class OuterRows:
    """Rows (B, N) that are not formed. What it has in common with a tensor, it has by that name."""

    def __init__(self, left: Tensor, right: Tensor, table: tuple[int, ...] | None = None) -> None:
        """Hold factors (B, T, O) and (B, T, I).

        Of a `table` (O, I), the first are the numbers (B, T) of the rows that were looked up.
        """
        self.left, self.right, self.table = left, right, table
        self.shape = table or (left.shape[-1], right.shape[-1])
        self._versions = left._version, right._version

    def __len__(self) -> int:
        return len(self.right)

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the rows."""
        return self.right.dtype

    def is_smaller(self) -> bool:
        """Say whether the factors have fewer elements than the rows."""
        return self.left.numel() + self.right.numel() < len(self) * math.prod(self.shape)

    def check(self) -> None:
        """Raise if the factors have changed since."""
        if (self.left._version, self.right._version) != self._versions:
            raise RuntimeError(CHANGED_LATER)

    def __getitem__(self, span: slice) -> "OuterRows":
        return OuterRows(self.left[span], self.right[span], self.table)

    def __add__(self, other: Any) -> Any:
        """Add the rows of another use of the weight: positions side by side."""
        self.check()
        if not isinstance(other, OuterRows) or other.table != self.table:
            return self.dense() + (other.dense() if isinstance(other, OuterRows) else other)
        left, right = (self.left, other.left), (self.right, other.right)
        both = OuterRows(torch.cat(left, 1), torch.cat(right, 1), self.table)
        return both if both.is_smaller() else both.dense()

    __radd__ = __add__

    def record_stream(self, stream: Any) -> None:
        """Keep the memory until a stream has come so far."""
        self.left.record_stream(stream)
        self.right.record_stream(stream)

    def to(self, dtype: torch.dtype) -> "OuterRows":
        """Return the rows in another precision."""
        left = self.left.to(dtype) if self.table is None else self.left
        return OuterRows(left, self.right.to(dtype), self.table)

    def means(self, unit: int) -> Any:
        """Return the (B / unit, N) sums of `unit` examples each, formed if that is smaller."""
        left, right = (f.reshape(len(f) // unit, -1, *f.shape[2:]) for f in (self.left, self.right))
        sums = OuterRows(left, right, self.table)
        return sums if sums.is_smaller() else sums.dense()

    # Products.

    def dot(self, vector: Tensor) -> Tensor:
        """Return the inner product of each row with a vector (N,): (B,)."""
        matrix, left, right = vector.view(self.shape), self.left, self.right
        if self.table:
            thin, other = matrix[left], right
        elif self.shape[0] <= self.shape[1]:
            thin, other = right.flatten(0, 1) @ matrix.T, left
        else:
            thin, other = left.flatten(0, 1) @ matrix, right
        return thin.view_as(other).mul_(other).flatten(1).sum(1)

    def combine(self, weights: Tensor, out: Tensor) -> None:
        """Write the sum of the rows, weighted by (B,), to `out` (N,), which is zero."""
        weights, left, right = weights.view(-1, 1, 1), self.left, self.right
        matrix = out.view(self.shape)
        if self.table:
            matrix.index_add_(0, left.flatten(), (right * weights).flatten(0, 1))
            return
        if self.shape[0] <= self.shape[1]:
            left = left * weights
        else:
            right = right * weights
        torch.mm(left.flatten(0, 1).T, right.flatten(0, 1), out=matrix)

    def sum(self, dim: int) -> Tensor:
        """Return the sum of all rows: (N,)."""
        out = self.right.new_zeros(math.prod(self.shape))
        self.combine(self.right.new_ones(len(self)), out)
        return out

    def gram(self, known: Squares) -> Tensor:
        """Return the inner products of the rows: (B, B)."""
        (count, positions, columns), height = self.right.shape, self.shape[0]
        if positions == 1 and not self.table:
            return square(self.left[:, 0], known) * square(self.right[:, 0], known)
        # Which one takes fewer multiplications.
        by_pairs = count * positions**2 * (height + columns)
        by_blocks = (positions + count) * height * columns
        if self.table or by_pairs <= by_blocks:
            return self._gram_by_pairs()
        total = self.right.new_zeros(count, count)
        step = max(1, _MAX_TEMPORARY // (count * columns))
        for left in self.left.split(step, dim=2):
            block = products(left.transpose(1, 2), self.right).flatten(1)
            total.addmm_(block, block.T)
        return total

    def _gram_by_pairs(self) -> Tensor:
        """Do so from inner products of all positions: those of l r^T are <l, l'> <r, r'>."""
        count, positions, _ = self.right.shape
        left, right = self.left.flatten(0, 1), self.right.flatten(0, 1)
        parts, step = [], max(1, _MAX_TEMPORARY // max(1, count * positions**2)) * positions
        for one, two in zip(left.split(step), right.split(step), strict=True):
            pairs = two @ right.T
            pairs *= one[:, None] == left if self.table else one @ left.T
            parts.append(pairs.view(-1, positions, count, positions).sum((1, 3)))
        return torch.cat(parts)

    def norm(self, dim: int) -> Tensor:
        """Return the norm of each row: (B,)."""
        left, right = self.left, self.right
        of_left = left[:, :, None] == left[:, None] if self.table else left @ left.mT
        return (right @ right.mT).mul_(of_left).sum((1, 2)).clamp_(min=0).sqrt_()

    # The rows themselves.

    def dense(self) -> Tensor:
        """Return the rows themselves: (B, N)."""
        return formed(self.left, self.right, self.table)

    def columns(self, index: Tensor) -> Tensor:
        """Return the columns (B, c) of a row that `index` (c,) says."""
        rows, right = index // self.shape[1], self.right[..., index % self.shape[1]]
        left = self.left.unsqueeze(-1) == rows if self.table else self.left[..., rows]
        return (left * right).sum(1)


def whole_rows(
    left: Tensor, right: Tensor, table: tuple[int, ...] | None = None, *, keeps: bool
) -> Any:
    """Return rows, arguments as of `OuterRows`; if `keeps`, as factors where these are smaller."""
    # What a graph returns are tensors.
    if keeps and not torch.compiler.is_compiling():
        outer = OuterRows(left, right, table)
        if outer.is_smaller():
            return outer
    return formed(left, right, table)


def formed(left: Tensor, right: Tensor, table: tuple[int, ...] | None) -> Tensor:
    """Return the rows (B, N) themselves; arguments as of `OuterRows`."""
    if table is None:
        return products(left.transpose(1, 2), right).flatten(1)
    count, (height, columns) = len(right), table
    places = left + torch.arange(count, device=left.device)[:, None] * height
    sums = right.new_zeros(count * height, columns)
    return sums.index_add(0, places.flatten(), right.reshape(-1, columns)).view(count, -1)
