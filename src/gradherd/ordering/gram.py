"""Sign a block of vectors from their inner products.

For vectors Z and running sum S take u = Z.S and G = Z.Z^T at once, run the recursion
inner_k = u_k + sum_{l<k} s_l G_lk on scalars, and update S += Z^T.s once. Exactly the signs of
the loop over vectors, with one host sync per block instead of one per vector, and u and G can be
completed across shards of the columns. On a GPU `triton_gram` takes the products and the sums, if
Triton is there, and the greedy rule's signs too: then nothing waits for the host.

Letters: W streams, P vectors of a stream in visiting order, D dimension.
"""

import math
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradherd.ordering.sign_rules import Floats, Greedy, SignRule
from gradherd.ordering.signed import Numbers, Reduce, Signed, Signs

# Up to this many vectors, a matrix product on the CPU is slower than one product for each pair.
_FEW_VECTORS = 4
_HAS_TRITON = find_spec("triton") is not None


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
    fast = fast_form(vectors, running)
    if fast and reduce is None and isinstance(rule, Greedy):
        taken, total = fast.balance_greedy(vectors, running, block)
        return Signed(taken.cpu(), total, carry)
    if vectors.device.type != "cpu" or reduce is not None:
        return blocks_together(vectors, running.clone(), rule, draws, carry, block, reduce)
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


def blocks_together(
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
        _add_signed(z, torch.from_numpy(signs[:, span]).to(z.device), running)
    return Signed(torch.from_numpy(signs), running, carry)


def fast_form(vectors: Tensor, running: Tensor) -> Any:
    """Return `triton_gram` if it is to sign these (W, P, D) vectors, else None."""
    ready = _HAS_TRITON and vectors.is_cuda and vectors.dtype == running.dtype == torch.float32
    if not ready or vectors.stride(-1) != 1 or running.stride(-1) != 1 or not vectors.numel():
        return None
    if not vectors.get_device() == running.get_device() == torch.cuda.current_device():
        return None  # Triton starts its programs on the current device.
    from gradherd.ordering import triton_gram

    return triton_gram


def _add_signed(z: Tensor, signs: Tensor, running: Tensor) -> None:
    """Add the sums of (W, P, D) vectors with their (W, P) signs to (W, D), in place."""
    if fast := fast_form(z, running):
        fast.add_signed(z, signs.contiguous(), running, running)
    else:
        running.unsqueeze(1).baddbmm_(signs.to(z.dtype).unsqueeze(1), z)


def _products(
    z: Tensor, running: Tensor, reduce: Reduce | None, rule: SignRule
) -> tuple[Floats, Floats]:
    """Return u (W, P) and G (W, P, P) on the host.

    Of a few vectors the squares are left out (zero) where the rule does not ask for them: a
    vector that is not finite shows in its product with the running sum, too.
    """
    if z.device.type == "cpu" and len(z) == 1 and z.shape[1] <= _FEW_VECTORS:
        both = _few_products(z[0], running[0], squares=rule.chance).unsqueeze(0)
    elif (fast := fast_form(z, running)) and z.shape[1] <= fast.MOST:
        both = fast.products(z, running).cpu()
    else:
        both = torch.cat([z @ running.unsqueeze(-1), z @ z.mT], dim=-1).to("cpu", torch.float64)
    if reduce is not None:
        both = _reduced(both, reduce)
    host = both.numpy()
    return host[..., 0].copy(), host[..., 1:]


def _reduced(both: Tensor, reduce: Reduce) -> Tensor:
    """Return the sums over shards of (W, P, 1 + P) products.

    A product of two vectors is sent once, and stands where the recursion looks for it: in the row
    of the earlier vector.
    """
    count = both.shape[1]
    earlier, later = torch.triu_indices(count, count)
    places = torch.cat([torch.arange(count) * (1 + count), earlier * (1 + count) + 1 + later])
    flat = both.flatten(1)
    whole = torch.zeros_like(flat)
    whole[:, places] = reduce(flat[:, places].flatten()).view(len(flat), -1)
    return whole.view(both.shape)


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
