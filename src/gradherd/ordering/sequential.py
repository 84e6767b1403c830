"""Sign vectors one after the other: one product with the running sum and one update each.

Letters: W streams, P vectors of a stream in visiting order, D dimension.
"""

import math

import numpy as np
import torch
from torch import Tensor

from gradherd.ordering.sign_rules import Floats, Greedy, SignRule
from gradherd.ordering.signed import Numbers, Signed, Signs

# Up to this many columns numpy's lower call overhead counts; beyond, its products start threads,
# which ranks on one machine would fight over.
_NUMPY_COLUMNS = 10_000
# From this many streams on, a step of all of them together is faster than one after the other.
_MANY_STREAMS = 8


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
    on_numpy = vectors.device.type == "cpu" and columns <= _NUMPY_COLUMNS
    if on_numpy and streams >= _MANY_STREAMS:
        return _walk_together(vectors, running, rule, draws, carry)
    signs = np.zeros((streams, count), dtype=np.int8)
    running, carry = running.clone(), carry.copy()
    for w in range(streams):
        # numpy and torch spell these operations alike; numpy works in the tensors' own memory.
        z: Tensor | Numbers = vectors[w].numpy() if on_numpy else vectors[w]
        total: Tensor | Numbers = running[w].numpy() if on_numpy else running[w]
        with np.errstate(invalid="ignore", over="ignore"):  # what is not finite is left out
            signs[w], carry[:, w] = _walk_alone(z, total, rule, draws[w], carry[:, w])
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
    vectors: Tensor | Numbers,
    total: Tensor | Numbers,
    rule: SignRule,
    draws: Floats,
    carry: Floats,
) -> tuple[Signs, Floats]:
    """One stream of (P, D) vectors; adds into `total` (D,), no temporaries."""
    signs = np.zeros(len(vectors), dtype=np.int8)
    greedy = isinstance(rule, Greedy)
    carry = carry[:, np.newaxis]
    for p, vector in enumerate(vectors):
        inner = float(total @ vector)
        square = float(vector @ vector) if rule.chance else 0.0
        if not math.isfinite(inner + square):
            continue
        if greedy:  # the common case, without building arrays
            plus = inner <= 0
        else:
            decided, carry = rule.decide(
                np.array([inner]), np.array([square]), draws[p : p + 1], carry
            )
            plus = bool(decided[0])
        signs[p] = 1 if plus else -1
        if plus:
            total += vector
        else:
            total -= vector
    return signs, carry[:, 0]
