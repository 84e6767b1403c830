"""Sign vectors so that their running sum stays short.

A rule decides on scalars only: the inner product of a vector with the running sum before it,
and its squared norm. So the same rule serves two forms with equal results, `sequential` and
`block_gram`; `balance` takes the one that is faster.

Letters: W streams (each with its own running sum), P vectors of a stream in visiting order,
D dimension. Signs are int8: +1, -1, and 0 for a vector that was left out (not finite).
"""

import numpy as np
from torch import Tensor

from gradherd.ordering.gram import block_gram, blocks_together, fast_form
from gradherd.ordering.seeded_random import SeededRandom
from gradherd.ordering.sequential import sequential
from gradherd.ordering.sign_rules import Floats, SignRule
from gradherd.ordering.signed import Reduce, Signed

# On the CPU a Gram block only pays for few columns: its arithmetic grows with the block's size,
# while the loop reads each vector once. `gradherd bench signs` shows both.
_BLOCK_COLUMNS = 512
# On a GPU (H200) it pays from a few vectors on; without `triton_gram` only up to where a library's
# products of so few and so long rows fall behind.
_GPU_VECTORS, _GPU_COLUMNS = 8, 4_000_000
# From this many streams on, a step of all of them together costs less than their blocks.
_MANY_STREAMS = 8


def draws_for(rule: SignRule, chance: SeededRandom, epoch: int, steps: int, workers: int) -> Floats:
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
        return blocks_together(vectors, running, rule, draws, carry, step, reduce, all_or_none=True)
    streams, count, columns = vectors.shape
    if vectors.device.type == "cpu":
        blocks, block = streams < _MANY_STREAMS and columns <= _BLOCK_COLUMNS, 64
    elif fast := fast_form(vectors, running):
        blocks, block = streams * count >= _GPU_VECTORS, fast.MOST
    else:  # One block: the sync is what costs, until the products do.
        blocks, block = count >= _GPU_VECTORS and columns <= _GPU_COLUMNS, 1024
    if blocks:
        return block_gram(vectors, running, rule, draws, carry, block=block)
    return sequential(vectors, running, rule, draws, carry)
