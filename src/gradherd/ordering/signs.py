"""Sign vectors so that their running sum stays short: one by one, or from a Gram block.

A rule decides on scalars only: the inner product of a vector with the running sum before it,
and its squared norm. So the same rule serves two forms with equal results:

- `sequential` walks over the vectors, one product and one update each;
- `block_gram` takes u = Z.S and G = Z.Z^T of a whole block at once, runs the recursion
  inner_k = u_k + sum_{l<k} s_l G_lk on scalars, and updates S += Z^T.s once. Exact, with one
  host sync per block instead of one per vector, and u and G can be completed across shards.

Letters: W streams (each with its own running sum), P vectors of a stream in visiting order,
D dimension. Signs are int8: +1, -1, and 0 for a vector that was left out (not finite).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradherd.ordering.chance import Chance
from gradherd.ordering.rules import Floats, Greedy, SignRule

Numbers = NDArray[np.floating]
Signs = NDArray[np.int8]
Reduce = Callable[[Tensor], Tensor]
"""Completes partial products: a flat float64 tensor on the CPU in, its sum over shards out."""

# On the CPU a Gram block only pays for few columns: its arithmetic grows with the block's size,
# while the loop reads each vector once. `gradherd bench signs` shows both.
_BLOCK_COLUMNS = 512
# On a GPU (H200) it pays from a few vectors on, up to where library products of so few and so
# long rows fall behind.
_GPU_VECTORS, _GPU_COLUMNS = 8, 4_000_000
# From this many streams on, a step of all of them together costs less than their blocks.
_MANY_STREAMS = 8
# Up to this many vectors, a matrix product on the CPU is slower than one product for each pair.
_FEW_VECTORS = 4
# Numbers per step below which numpy's lower call overhead beats torch's threads.
_NUMPY_NUMBERS = 65_536


class Signed(NamedTuple):
    """What signing gives back."""

    signs: Tensor
    """(W, P) int8 on the CPU."""
    running: Tensor
    """(W, D) running sums after the last vector."""
    carry: Floats
    """(C, W) what the rule remembers."""


def sequential(
    vectors: Tensor, running: Tensor, rule: SignRule, draws: Floats, carry: Floats
) -> Signed:
    """Sign the vectors one after the other.

    Args:
        vectors: (W, P, D) in visiting order.
        running: (W, D) sums before the first vector; not changed.
        rule: Decides the signs.
        draws: (W, P) uniform numbers in [-1, 1), one per vector.
        carry: (C, W) what the rule remembers.
    """
    streams, count, columns = vectors.shape
    if vectors.device.type == "cpu" and streams * columns < _NUMPY_NUMBERS:
        return _walk_together(vectors, running, rule, draws, carry)
    signs = np.zeros((streams, count), dtype=np.int8)
    running, carry = running.clone(), carry.copy()
    for w in range(streams):
        signs[w], carry[:, w] = _walk_alone(vectors[w], running[w], rule, draws[w], carry[:, w])
    return Signed(torch.from_numpy(signs), running, carry)


def _walk_together(
    vectors: Tensor, running: Tensor, rule: SignRule, draws: Floats, carry: Floats
) -> Signed:
    """All streams take a step at once: for many streams of few columns."""
    z, total = vectors.numpy(), running.numpy().copy()
    scratch = np.empty_like(total)
    signs = np.zeros(z.shape[:2], dtype=np.int8)
    square = np.zeros(len(z))
    for p in range(z.shape[1]):
        vector = z[:, p]
        with np.errstate(invalid="ignore", over="ignore"):  # looked at below
            inner = np.multiply(total, vector, out=scratch).sum(1, dtype=np.float64)
            if rule.chance:
                square = np.multiply(vector, vector, out=scratch).sum(1, dtype=np.float64)
            plus, after = rule.decide(inner, square, draws[:, p], carry)
            all_finite = math.isfinite((inner + square).sum())
        if all_finite:
            carry = after
            signs[:, p] = 2 * plus - 1
        else:  # Leave out the streams whose vector is not finite.
            finite = np.isfinite(inner) & np.isfinite(square)
            carry = np.where(finite, after, carry)
            signs[:, p] = (2 * plus - 1) * finite
            vector = np.where(finite[:, np.newaxis], vector, 0)
        total += np.multiply(vector, signs[:, p, np.newaxis], out=scratch)
    return Signed(torch.from_numpy(signs), torch.from_numpy(total), carry)


def _walk_alone(
    vectors: Tensor, total: Tensor, rule: SignRule, draws: Floats, carry: Floats
) -> tuple[Signs, Floats]:
    """One stream of (P, D) vectors of many columns; adds into `total` (D,), no temporaries."""
    signs = np.zeros(len(vectors), dtype=np.int8)
    carry = carry[:, np.newaxis]
    for p, vector in enumerate(vectors):
        inner = np.array([(total @ vector).item()])
        square = np.array([(vector @ vector).item()]) if rule.chance else np.abs(inner)
        if not np.isfinite(inner + square):
            continue
        plus, carry = rule.decide(inner, square, draws[p : p + 1], carry)
        signs[p] = 1 if plus[0] else -1
        total.add_(vector, alpha=int(signs[p]))
    return signs, carry[:, 0]


def block_gram(
    vectors: Tensor,
    running: Tensor,
    rule: SignRule,
    draws: Floats,
    carry: Floats,
    *,
    block: int = 64,
    reduce: Reduce | None = None,
) -> Signed:
    """Sign the vectors block by block from their inner products.

    Args:
        vectors: (W, P, D) in visiting order.
        running: (W, D) sums before the first vector; not changed.
        rule: Decides the signs.
        draws: (W, P) uniform numbers in [-1, 1), one per vector.
        carry: (C, W) what the rule remembers.
        block: Vectors of a stream in one Gram matrix.
        reduce: Completes the products where D is only one shard of the columns.
    """
    if vectors.device.type != "cpu" or reduce is not None:
        return _blocks_together(vectors, running.clone(), rule, draws, carry, block, reduce)
    z, total = vectors.numpy(), running.numpy().copy()
    signs, carry = np.zeros(z.shape[:2], dtype=np.int8), carry.copy()
    for w in range(len(z)):
        signs[w], carry[:, w] = _blocks_alone(z[w], total[w], rule, draws[w], carry[:, w], block)
    return Signed(torch.from_numpy(signs), torch.from_numpy(total), carry)


def _blocks_alone(
    vectors: Numbers, total: Numbers, rule: SignRule, draws: Floats, carry: Floats, block: int
) -> tuple[Signs, Floats]:
    """One stream of (P, D) vectors on the CPU; adds into `total` (D,)."""
    signs, carry = np.zeros(len(vectors), dtype=np.int8), carry[:, np.newaxis]
    for start in range(0, len(vectors), block):
        span = slice(start, start + block)
        z, finite = vectors[span], None
        with np.errstate(invalid="ignore", over="ignore"):
            gram = z @ z.T
        if not math.isfinite(gram.trace()):  # Leave those vectors out: zeros take no part.
            finite = np.isfinite(gram.diagonal())
            z = np.where(finite[:, np.newaxis], z, 0)
            gram = z @ z.T
        inner = (z @ total)[np.newaxis].astype(np.float64, copy=False)
        gram = gram[np.newaxis].astype(np.float64, copy=False)
        taken, carry = signs_from_products(inner, gram, rule, draws[np.newaxis, span], carry)
        signs[span] = taken[0] if finite is None else taken[0] * finite
        total += signs[span].astype(z.dtype) @ z
    return signs, carry[:, 0]


def _blocks_together(
    vectors: Tensor,
    running: Tensor,
    rule: SignRule,
    draws: Floats,
    carry: Floats,
    block: int,
    reduce: Reduce | None,
    all_or_none: bool = False,
) -> Signed:
    """All streams at once, with one sync (and one `reduce`) per block; adds into `running`."""
    streams, count, _ = vectors.shape
    signs = np.zeros((streams, count), dtype=np.int8)
    for start in range(0, count, block):
        span = slice(start, start + block)
        z = vectors[:, span]
        inner, gram = _products(z, running, reduce, rule)
        finite = np.isfinite(np.einsum("wpp->wp", gram)) & np.isfinite(inner)
        if all_or_none and not finite.all():
            finite[:] = False
        if not finite.all():
            z = torch.where(torch.from_numpy(finite).to(z.device).unsqueeze(-1), z, 0)
            inner, gram = _products(z, running, reduce, rule)
        taken, carry = signs_from_products(inner, gram, rule, draws[:, span], carry)
        signs[:, span] = taken * finite
        weights = torch.from_numpy(signs[:, span]).to(z.device, z.dtype)
        running.unsqueeze(1).baddbmm_(weights.unsqueeze(1), z)
    return Signed(torch.from_numpy(signs), running, carry)


def _products(
    z: Tensor, running: Tensor, reduce: Reduce | None, rule: SignRule
) -> tuple[Floats, Floats]:
    """Return u (W, P) and G (W, P, P) on the host.

    Of a few vectors the squares are left out (zero) where the rule does not ask for them: a
    vector that is not finite shows in its product with the running sum, too.
    """
    if z.device.type == "cpu" and len(z) == 1 and z.shape[1] <= _FEW_VECTORS:
        both = _few_products(z[0], running[0], squares=rule.chance).unsqueeze(0)
    else:
        both = torch.cat([z @ running.unsqueeze(-1), z @ z.mT], dim=-1).to("cpu", torch.float64)
    if reduce is not None:
        both = reduce(both.flatten()).view(both.shape)
    host = both.numpy()
    return host[..., 0].copy(), host[..., 1:]


def _few_products(z: Tensor, running: Tensor, *, squares: bool) -> Tensor:
    """Return (P, 1 + P) products of a few long vectors, each pair once."""
    both = np.zeros((len(z), 1 + len(z)))
    for i, vector in enumerate(z):
        both[i, 0] = (vector @ running).item()
        for j in range(i + squares):
            both[i, 1 + j] = both[j, 1 + i] = (vector @ z[j]).item()
    return torch.from_numpy(both)


def signs_from_products(
    inner: Floats, gram: Floats, rule: SignRule, draws: Floats, carry: Floats
) -> tuple[Signs, Floats]:
    """Run the sign recursion on scalars.

    Args:
        inner: (W, P) products with the running sums before the block; overwritten.
        gram: (W, P, P) products among the vectors.
        rule: Decides the signs.
        draws: (W, P) uniform numbers in [-1, 1).
        carry: (C, W) what the rule remembers.

    Returns:
        (W, P) signs and the new carry.
    """
    streams, count = inner.shape
    if streams == 1 and isinstance(rule, Greedy):
        return _greedy_recursion(inner[0], gram[0])[np.newaxis], carry
    signs = np.empty((streams, count), dtype=np.int8)
    for p in range(count):
        plus, carry = rule.decide(inner[:, p], gram[:, p, p], draws[:, p], carry)
        signs[:, p] = 2 * plus - 1
        inner += signs[:, p, np.newaxis] * gram[:, p]
    return signs, carry


def _greedy_recursion(inner: Floats, gram: Floats) -> Signs:
    """The common case, a microsecond per sign."""
    signs = np.ones(len(inner), dtype=np.int8)
    for p, row in enumerate(gram):
        if inner[p] <= 0:
            inner += row
        else:
            inner -= row
            signs[p] = -1
    return signs


def draws_for(rule: SignRule, chance: Chance, epoch: int, steps: int, workers: int) -> Floats:
    """Return an epoch's (steps, workers) uniform numbers; zeros where the rule wants none."""
    if rule.chance:
        return chance.draws(steps, workers, epoch)
    return np.broadcast_to(np.float64(0), (steps, workers))


def balance(
    vectors: Tensor,
    running: Tensor,
    rule: SignRule,
    draws: Floats,
    carry: Floats,
    *,
    reduce: Reduce | None = None,
    step: int = 1,
) -> Signed:
    """Sign the vectors by the form that is faster here; arguments as in `block_gram`.

    With `reduce`, the `step` vectors of a stream that belong to one time step are left out
    together if one vector of any stream is not finite then: the mean gradient is not, so the
    optimizer skips that step on all ranks. `running` may be overwritten.
    """
    if reduce is not None:
        return _blocks_together(
            vectors, running, rule, draws, carry, step, reduce, all_or_none=True
        )
    streams, count, columns = vectors.shape
    if vectors.device.type == "cpu":
        blocks, block = streams < _MANY_STREAMS and columns <= _BLOCK_COLUMNS, 64
    else:  # One block: the sync is what costs, until the products do.
        blocks, block = count >= _GPU_VECTORS and columns <= _GPU_COLUMNS, 1024
    if blocks:
        return block_gram(vectors, running, rule, draws, carry, block=block)
    return sequential(vectors, running, rule, draws, carry)
