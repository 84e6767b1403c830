"""Sign vectors one after the other: one product with the running sum and one update each.

Letters: W streams, P vectors of a stream in visiting order, D dimension.
"""

import math

import numpy as np
import torch
from torch import Tensor

from gradherd.ordering.rules import Floats, SignRule
from gradherd.ordering.signed import Signed, Signs

# Numbers per step below which numpy's lower call overhead beats torch's threads.
_NUMPY_NUMBERS = 65_536


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
