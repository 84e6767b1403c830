"""Sign a block of vectors from their inner products.

For vectors Z and running sum S compute u = Z.S and G = Z.Z^T at once, run the recursion
inner_k = u_k + sum_{l<k} s_l G_lk on scalars, and update S += Z^T.s once. Up to rounding this gives
the signs of the loop over vectors, with one host sync per block; published CD-GraB code has one
per vector. And u and G add up over shards of the columns, which is how ranks sign together
(`sharded`) without any of them holding whole gradients of the others. Neither is part of the
papers. On a GPU `triton_gram` computes products and sums if Triton is installed, and the greedy
rule's signs as well: then nothing waits for the host.

Shapes: W streams, P vectors of a stream in visiting order, D columns, C values of a rule's carry.
"""

import logging
import math
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradherd.comm.script import AllReduceSmall, Script, run
from gradherd.comm.world import World
from gradherd.gpu import has_triton
from gradherd.ordering.sign_rules import Floats, Greedy, SignRule

log = logging.getLogger("gradherd")

FloatArray: TypeAlias = NDArray[np.floating]
SignArray: TypeAlias = NDArray[np.int8]

# Up to this many vectors, a matrix product on the CPU is slower than one product for each pair.
_FEW_VECTORS = 4
# Looked up without importing it: most processes never need it.
_HAS_TRITON = has_triton()
MOST = 64
"""Vectors of a block that kernels sign: the (P, P) products of more do not fit into registers."""
KERNEL_DEVICES = {"cuda"}
"""Where kernels run; tests add the CPU, on which Triton interprets them."""


class Signed(NamedTuple):
    """Signs of some vectors, and the sums after them."""

    signs: Tensor
    """(W, P) int8 on the CPU."""
    running: Tensor
    """(W, D) running sums after the last vector."""
    carry: Floats
    """(C, W) what the rule carries on."""


def block_gram(
    vectors: Tensor,
    running: Tensor,
    rule: SignRule,
    draws: Floats,
    carry: Floats,
    *,
    block: int = 64,
) -> Signed:
    """Sign the vectors block by block from their inner products.

    Args:
        vectors: (W, P, D) in visiting order.
        running: (W, D) sums before the first vector; not modified.
        rule: Decides the signs.
        draws: (W, P) uniform numbers in [-1, 1), one per vector.
        carry: (C, W) what the rule carries from vector to vector.
        block: Vectors of a stream in one Gram matrix.

    Returns:
        The (W, P) signs, the new sums and the new carry.
    """
    fast = fast_form(vectors, running)
    if fast and isinstance(rule, Greedy):
        signs_on_device, total_on_device = fast.balance_greedy(vectors, running, block)
        return Signed(signs_on_device.cpu(), total_on_device, carry)
    if vectors.device.type != "cpu":
        script = blocks(vectors, running.clone(), rule, draws, carry, block=block)
        signed: Signed = run(script, World.single()).value
        return signed
    # On the CPU there is no sync to save, so streams run one by one: each works on one (P, D)
    # block, and numpy's lower call overhead counts.
    z, total = vectors.numpy(), running.numpy().copy()
    signs, carry = np.zeros(z.shape[:2], dtype=np.int8), carry.copy()
    for w in range(len(z)):
        signs[w], carry[:, w] = _blocks_of_stream(
            z[w], total[w], rule, draws[w], carry[:, w], block
        )
    return Signed(torch.from_numpy(signs), torch.from_numpy(total), carry)


def _blocks_of_stream(
    vectors: FloatArray,
    total: FloatArray,
    rule: SignRule,
    draws: Floats,
    carry: Floats,
    block: int,
) -> tuple[SignArray, Floats]:
    """Sign one stream of (P, D) vectors on the CPU; add into `total` (D,)."""
    signs, carry = np.zeros(len(vectors), dtype=np.int8), carry[:, np.newaxis]
    for start in range(0, len(vectors), block):
        span = slice(start, start + block)
        z, finite = vectors[span], None
        with np.errstate(invalid="ignore", over="ignore"):
            gram = z @ z.T
        # The trace is the sum of the squared norms: one scalar tells whether all is finite. A
        # vector that is not is replaced by zeros, since 0 * inf would still be nan below.
        if not math.isfinite(gram.trace()):
            finite = np.isfinite(gram.diagonal())
            z = np.where(finite[:, np.newaxis], z, 0)
            gram = z @ z.T
        # The recursion adds up to P terms of alternating sign to each entry: in float64.
        inner = (z @ total)[np.newaxis].astype(np.float64, copy=False)
        gram = gram[np.newaxis].astype(np.float64, copy=False)
        block_signs, carry = signs_from_products(inner, gram, rule, draws[np.newaxis, span], carry)
        signs[span] = block_signs[0] if finite is None else block_signs[0] * finite
        total += signs[span].astype(z.dtype) @ z
    return signs, carry[:, 0]


def blocks(
    vectors: Tensor,
    running: Tensor,
    rule: SignRule,
    draws: Floats,
    carry: Floats,
    *,
    block: int,
    sharded: bool = False,
    all_or_none: bool = False,
) -> Script[Signed]:
    """Sign all streams together, with one host sync per block; add into `running`.

    Args:
        vectors: (W, P, D) in visiting order.
        running: (W, D) sums before the first vector; overwritten.
        rule: Decides the signs.
        draws: (W, P) uniform numbers in [-1, 1), one per vector.
        carry: (C, W) what the rule carries from vector to vector.
        block: Vectors of a stream in one Gram matrix.
        sharded: D is this rank's shard of the columns: sum the products over ranks, one small
            all-reduce per block.
        all_or_none: Leave out the whole block if one of its vectors is not finite.

    Returns:
        The (W, P) signs, `running` and the new carry.
    """
    streams, count, _ = vectors.shape
    signs = np.zeros((streams, count), dtype=np.int8)
    for start in range(0, count, block):
        span = slice(start, start + block)
        z = vectors[:, span]
        inner, gram = yield from _products(z, running, rule, sharded=sharded)
        # With `sharded` these are sums over ranks. So all ranks see the same and take the same
        # branch, even if only one rank's columns hold the value that is not finite.
        finite = np.isfinite(np.einsum("wpp->wp", gram)) & np.isfinite(inner)
        if all_or_none and not finite.all():
            finite[:] = False
        if not finite.all():
            z = torch.where(torch.from_numpy(finite).to(z.device).unsqueeze(-1), z, 0)
            # The recursion adds rows of G to the products of all later vectors, so a row that is
            # not finite would spoil them: compute the products again.
            inner, gram = yield from _products(z, running, rule, sharded=sharded)
        block_signs, carry = signs_from_products(inner, gram, rule, draws[:, span], carry)
        signs[:, span] = block_signs * finite
        _add_signed(z, torch.from_numpy(signs[:, span]).to(z.device), running)
    return Signed(torch.from_numpy(signs), running, carry)


def fast_form(vectors: Tensor, running: Tensor) -> Any:
    """Return the `triton_gram` module if it can sign these vectors, else None.

    Args:
        vectors: (W, P, D) in visiting order.
        running: (W, D) running sums.
    """
    ready = _HAS_TRITON and vectors.device.type in KERNEL_DEVICES
    if not ready or not vectors.dtype == running.dtype == torch.float32:
        return None
    if vectors.stride(-1) != 1 or running.stride(-1) != 1 or not vectors.numel():
        return None
    if vectors.device != running.device:
        return None
    # Imported here: Triton is optional, and absent where there is no GPU.
    from gradherd.ordering import triton_gram

    return triton_gram


def give_up_kernels(error: Exception) -> None:
    """Sign without Triton from now on, since it has refused to build or launch a kernel here."""
    global _HAS_TRITON
    _HAS_TRITON = False
    log.warning("signs are computed without Triton, which has failed: %s", error)


def _add_signed(z: Tensor, signs: Tensor, running: Tensor) -> None:
    """Add (W, P, D) vectors with their (W, P) signs to (W, D), in place."""
    if fast := fast_form(z, running):
        fast.add_signed(z, signs.contiguous(), running, running)
    else:
        running.unsqueeze(1).baddbmm_(signs.to(z.dtype).unsqueeze(1), z)


def _products(
    z: Tensor, running: Tensor, rule: SignRule, *, sharded: bool
) -> Script[tuple[Floats, Floats]]:
    """Return u (W, P) and G (W, P, P) on the host.

    For a few vectors the squares are left out (zero) unless the rule asks for them: a vector that
    is not finite shows in its product with the running sum as well.
    """
    if z.device.type == "cpu" and len(z) == 1 and z.shape[1] <= _FEW_VECTORS:
        both = _few_products(z[0], running[0], squares=rule.randomized).unsqueeze(0)
    elif (fast := fast_form(z, running)) and z.shape[1] <= MOST:
        both = fast.products(z, running).cpu()
    else:
        # u and G in one tensor: one copy to the host, one all-reduce.
        both = torch.cat([z @ running.unsqueeze(-1), z @ z.mT], dim=-1).to("cpu", torch.float64)
    if sharded:
        both = yield from _sum_over_shards(both)
    host = both.numpy()
    return host[..., 0].copy(), host[..., 1:]  # a copy: the recursion overwrites u


def _sum_over_shards(both: Tensor) -> Script[Tensor]:
    """Return (W, P, 1 + P) products summed over ranks.

    G is symmetric: each product of two vectors is sent once, and stored where the recursion reads
    it, in the row of the earlier vector. What it does not read stays zero.
    """
    columns, flat = _sent_columns(both.shape[1]), both.flatten(1)
    # The sum has the same bits on all ranks, so all ranks decide the same signs without another
    # exchange. That holds near a tie, too, where a single bit makes the difference.
    total: Tensor = yield AllReduceSmall(flat[:, columns].flatten())
    summed = torch.zeros_like(flat)
    summed[:, columns] = total.view(len(flat), -1)
    return summed.view(both.shape)


@cache
def _sent_columns(count: int) -> Tensor:
    """Return where u and the upper triangle of G lie in a flat (P, 1 + P) matrix, P = `count`."""
    earlier, later = torch.triu_indices(count, count)
    return torch.cat([torch.arange(count) * (1 + count), earlier * (1 + count) + 1 + later])


def _few_products(z: Tensor, running: Tensor, *, squares: bool) -> Tensor:
    """Return (P, 1 + P) products of a few long vectors, each pair once.

    The diagonal of G is zero without `squares`: greedy signs do not need norms.
    """
    both = np.zeros((len(z), 1 + len(z)))
    for i, vector in enumerate(z):
        both[i, 0] = (vector @ running).item()
        for j in range(i + squares):
            both[i, 1 + j] = both[j, 1 + i] = (vector @ z[j]).item()
    return torch.from_numpy(both)


def signs_from_products(
    inner: Floats, gram: Floats, rule: SignRule, draws: Floats, carry: Floats
) -> tuple[SignArray, Floats]:
    """Run the sign recursion on scalars.

    Args:
        inner: (W, P) products with the running sums before the block; overwritten.
        gram: (W, P, P) products among the vectors.
        rule: Decides the signs.
        draws: (W, P) uniform numbers in [-1, 1).
        carry: (C, W) what the rule carries from vector to vector.

    Returns:
        (W, P) signs and the new carry.

    >>> inner, gram = np.array([[0.0, 0.0]]), np.array([[[1.0, 1.0], [1.0, 1.0]]])
    >>> signs_from_products(inner, gram, Greedy(), np.zeros((1, 2)), np.empty((0, 1)))[0]
    array([[ 1, -1]], dtype=int8)
    """
    streams, count = inner.shape
    if streams == 1 and isinstance(rule, Greedy):
        return _greedy_recursion(inner[0], gram[0])[np.newaxis], carry
    signs = np.empty((streams, count), dtype=np.int8)
    for p in range(count):
        plus, carry = rule.decide(inner[:, p], gram[:, p, p], draws[:, p], carry)
        signs[:, p] = 2 * plus - 1
        # Row p of G: how this vector changes the products of the later ones with the sum.
        inner += signs[:, p, np.newaxis] * gram[:, p]
    return signs, carry


def _greedy_recursion(inner: Floats, gram: Floats) -> SignArray:
    """Run the recursion of the greedy rule on one stream: a microsecond per sign."""
    signs = np.ones(len(inner), dtype=np.int8)
    for p, row in enumerate(gram):
        if inner[p] <= 0:
            inner += row
        else:
            inner -= row
            signs[p] = -1
    return signs
