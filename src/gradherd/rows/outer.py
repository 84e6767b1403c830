"""Gradients that are sums of outer products: nn.Linear and nn.Embedding.

The gradient of example i is the sum over t of left[i, t] right[i, t]^T. For Linear, left is
the gradient of the output and right the input; for Embedding, left is one-hot, held as token
numbers, and right is the gradient of the output. So tied weights meet in one form.

Shapes: B examples, T positions (all leading dimensions but the batch), O lines and I columns
of the weight, N = O * I.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradherd.rows.sketch import (
    kept_on_gpu,
    outer_sketch,
    side_sketch,
    tensor_sketch,
    token_sketch,
)
from gradherd.rows.terms import BUDGET, Products, full


@dataclass(frozen=True)
class Outer:
    """Sum over positions of outer products, kept as its two factors."""

    left: Tensor
    """(B, T, O) numbers, or (B, T) int64 token numbers that stand for one-hot lines."""
    right: Tensor
    """(B, T, I) numbers."""
    lines: int
    """O."""

    @property
    def tokens(self) -> bool:
        """Whether left holds token numbers."""
        return self.left.dim() == 2

    def dot(self, vector: Tensor) -> Tensor:
        """Return the inner product of each example's gradient with vector (N,): (B,)."""
        left, right = full_left(self), full(self.right)
        matrix = vector.view(self.lines, right.shape[-1])
        if self.tokens:
            return _per_example(matrix[left], right)
        if left.is_cuda and left.shape[1] == 1:  # The same with fewer kernels.
            left, right = left[:, 0], right[:, 0]
            if self.lines <= right.shape[-1]:
                return (right @ matrix.T * left).sum(1)
            return (left @ matrix * right).sum(1)
        # Either side may take the product; the smaller one makes the smaller temporary.
        if self.lines <= right.shape[-1]:
            return _per_example(right @ matrix.T, left)
        return _per_example(left @ matrix, right)

    def combine(self, weights: Tensor, onto: Tensor) -> None:
        """Add the sum of the gradients, weighted by weights (B,), to `onto` (N,), in place."""
        left, right = full_left(self), full(self.right)
        columns = right.shape[-1]
        if self.tokens:
            scaled = (right * weights[:, None, None]).reshape(-1, columns)
            onto.view(self.lines, columns).index_add_(0, left.reshape(-1), scaled)
            return
        if self.lines <= columns:
            left = left * weights[:, None, None]
        else:
            right = right * weights[:, None, None]
        flat = left.reshape(-1, self.lines).T
        onto.view(self.lines, columns).addmm_(flat, right.reshape(-1, columns))

    def gram(self, products: Products) -> Tensor:
        """Return the inner products between examples: (B, B)."""
        if self.right.shape[1] == 1 and not self.tokens:
            return products.of(full(self.left)[:, 0]) * products.of(full(self.right)[:, 0])
        return gram([self])

    def dense(self) -> Tensor:
        """Return the gradients themselves: (B, N)."""
        return block(self, 0, self.lines)

    def sketch(self, k: int, seed: int, name: str) -> Tensor:
        """Return the tensor sketch of each gradient, from the factors alone: (B, k)."""
        left, right = full_left(self), full(self.right)
        keys = f"{name}/left", f"{name}/right"
        if not self.tokens and kept_on_gpu(left, k) and kept_on_gpu(right, k):
            return outer_sketch(left, right, k, seed, keys)
        folded = side_sketch(right, k, seed, keys[1])
        if self.tokens:
            lines = token_sketch(left, self.lines, k, seed, keys[0], right.dtype)
        else:
            lines = side_sketch(left, k, seed, keys[0])
        return tensor_sketch(lines, folded)


def full_left(term: Outer) -> Tensor:
    """Return the left factor ready for arithmetic; token numbers stay as they are."""
    return term.left if term.tokens else full(term.left)


def _per_example(one: Tensor, two: Tensor) -> Tensor:
    """Return the inner product of (B, T, X) with (B, T, X) per example: (B,)."""
    return torch.bmm(one.flatten(1).unsqueeze(1), two.flatten(1).unsqueeze(2)).view(-1)


def block(term: Outer, lo: int, hi: int) -> Tensor:
    """Return lines lo .. hi - 1 of every example's gradient: (B, (hi - lo) * I)."""
    left, right = full_left(term), full(term.right)
    if not term.tokens:
        return (left[..., lo:hi].transpose(1, 2) @ right).flatten(1)
    examples, at = ((left >= lo) & (left < hi)).nonzero(as_tuple=True)
    lines = right.new_zeros(len(left) * (hi - lo), right.shape[-1])
    lines.index_add_(0, examples * (hi - lo) + left[examples, at] - lo, right[examples, at])
    return lines.view(len(left), -1)


def pairs_cheaper(examples: int, positions: int, lines: int, columns: int) -> bool:
    """Say whether a Gram matrix costs less by pairs of positions than by gradients in blocks.

    By pairs it takes (B T)^2 (O + I) multiplications; by blocks B T O I to form the gradients
    and B^2 O I to multiply them. Both are cut to bounded memory, so time decides.

    >>> pairs_cheaper(256, 1, 1024, 1024), pairs_cheaper(8, 512, 64, 64)
    (True, False)
    """
    by_pairs = (examples * positions) ** 2 * (lines + columns)
    return by_pairs <= examples * (positions + examples) * lines * columns


def gram(terms: Sequence[Outer]) -> Tensor:
    """Return the Gram matrix of the sum of several uses of one weight: (B, B).

    All cross terms are in it, also those between an embedding and a linear use.
    """
    if all(term.tokens for term in terms):
        terms = _only_seen(terms)
    examples, columns = len(terms[0].right), terms[0].right.shape[-1]
    positions = sum(term.right.shape[1] for term in terms)
    if pairs_cheaper(examples, positions, terms[0].lines, columns):
        return _gram_by_pairs(terms)
    return _gram_by_blocks(terms)


def _only_seen(terms: Sequence[Outer]) -> list[Outer]:
    """Number the tokens that occur from 0, so that lines nobody touched cost nothing."""
    seen, numbers = torch.unique(
        torch.cat([term.left.flatten() for term in terms]), return_inverse=True
    )
    parts = torch.split(numbers, [term.left.numel() for term in terms])
    return [
        replace(term, left=part.view_as(term.left), lines=len(seen))
        for term, part in zip(terms, parts, strict=True)
    ]


def _gram_by_blocks(terms: Sequence[Outer]) -> Tensor:
    examples, lines, columns = len(terms[0].right), terms[0].lines, terms[0].right.shape[-1]
    step = max(1, BUDGET // (examples * columns))
    total = full(terms[0].right).new_zeros(examples, examples)
    for lo in range(0, lines, step):
        hi = min(lines, lo + step)
        grads = block(terms[0], lo, hi)
        for term in terms[1:]:
            grads += block(term, lo, hi)
        total.addmm_(grads, grads.T)
    return total


def _gram_by_pairs(terms: Sequence[Outer]) -> Tensor:
    examples = len(terms[0].right)
    positions = max(term.right.shape[1] for term in terms)
    step = max(1, BUDGET // (examples * positions**2))
    total = full(terms[0].right).new_zeros(examples, examples)
    for lo in range(0, examples, step):
        hi = min(examples, lo + step)
        for one in terms:
            for two in terms:
                # The matrix is symmetric: strips of its upper half do.
                total[lo:hi, lo:] += _pair_products(one, slice(lo, hi), two, slice(lo, None))
    upper = total.triu()
    return upper + upper.triu(1).T


def _pair_products(one: Outer, rows: slice, two: Outer, columns: slice) -> Tensor:
    """Return inner products between some gradients of one use and some of another."""
    right, other = full(one.right)[rows], full(two.right)[columns]
    shape = (len(right), right.shape[1], len(other), other.shape[1])
    products = right.flatten(0, 1) @ other.flatten(0, 1).T
    left, left_other = full_left(one)[rows].flatten(0, 1), full_left(two)[columns].flatten(0, 1)
    if one.tokens and two.tokens:
        products *= left[:, None] == left_other
    elif one.tokens:
        products *= left_other[:, left].T
    elif two.tokens:
        products *= left[:, left_other]
    else:
        products *= left @ left_other.T
    if shape[1] == shape[3] == 1:
        return products
    return products.view(shape).sum((1, 3))
