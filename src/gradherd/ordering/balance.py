"""Sign vectors so that their signed running sum stays short, and turn signs into the next order.

A sign rule decides on scalars only: the inner product of a vector with the running sum before it,
and the vector's squared norm. The same rule therefore drives several forms with equal results:
`sequential` (one vector after the other), `block_gram` (many vectors from their Gram matrix) and
`balance_sharded` (the same for ranks that each hold a shard of the columns). `balance` takes the
first on a CPU, and the second on a GPU.

For a block of vectors Z and the running sum S, u = Z.S and G = Z.Z^T are computed at once. The
recursion inner_k = u_k + sum_{l<k} s_l G_lk runs on scalars, and S += Z^T.s is added once. Up to
rounding this gives the signs of the loop over vectors, with one host sync per block; published
CD-GraB code has one per vector. And u and G add up over shards of the columns, which is how ranks
sign together (`sum_over_shards`) without any of them holding whole gradients of the others. Neither
is part of the papers. On a GPU `triton_gram` computes products and sums if Triton is installed.
Most vectors do not come here then: `device_signs` signs them by the greedy rule without the host.

`reorder` fills the next order from both ends, as in the papers: each unit at the next free slot of
its side. A prefix of the new order is then half an old prefix plus half a signed sum, and a suffix
half an old one minus half a signed sum, which is why short signed sums halve the herding bound from
epoch to epoch.

Shapes: W streams (each with its own running sum), P vectors of a stream in visiting order,
D columns, C values of a rule's carry. Signs are int8: +1, -1, and 0 for a vector that was left out
because it is not finite: added to the running sum, it would decide all later signs.
"""

import logging
import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradherd.comm.script import AllReduceSmall, Script, run
from gradherd.comm.world import World
from gradherd.gpu import has_triton
from gradherd.ordering.sign_rules import Carry, Floats, SignRule

log = logging.getLogger("gradherd")

FloatArray: TypeAlias = NDArray[np.floating]
SignArray: TypeAlias = NDArray[np.int8]

# Up to this many vectors, a matrix product on the CPU is slower than one product for each pair.
_FEW_PRODUCTS = 4
# Looked up without importing it: most processes never need it.
_HAS_TRITON = has_triton()
MOST = 64
"""Vectors of a block that kernels sign: the (P, P) products of more do not fit into registers."""
KERNEL_DEVICES = {"cuda"}
"""Where kernels run; tests add the CPU, on which Triton interprets them."""
# Vectors of one message between ranks that hold columns: more would send more products than rows.
_SHARED_BLOCK = 32
# Up to this many columns numpy's lower call overhead wins; beyond, its products start threads,
# which the ranks of one machine would fight over.
_NUMPY_COLUMNS = 10_000


class Unsigned(NamedTuple):
    """Vectors to sign, and what they are signed against."""

    vectors: Tensor
    """(W, P, D) in visiting order."""
    running: Tensor
    """(W, D) sums before the first vector; not modified unless a function says so."""
    rule: SignRule
    """Decides the signs."""
    draws: Floats
    """(W, P) uniform numbers in [-1, 1), one per vector."""
    carry: Floats
    """(C, W) what the rule carries from vector to vector."""


class Signed(NamedTuple):
    """Signs of some vectors, and the sums after them."""

    signs: Tensor
    """(W, P) int8 on the CPU."""
    running: Tensor
    """(W, D) running sums after the last vector."""
    carry: Floats
    """(C, W) what the rule carries on."""


def balance(given: Unsigned) -> Signed:
    """Sign vectors with the form that is faster on their device.

    >>> from gradherd.ordering.sign_rules import Greedy
    >>> vectors = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [0.0, 2.0]]])
    >>> start, nothing = torch.zeros(1, 2), np.empty((0, 1))
    >>> signed = balance(Unsigned(vectors, start, Greedy(), np.zeros((1, 3)), nothing))
    >>> signed.signs.tolist(), signed.running.tolist()
    ([[1, -1, 1]], [[0.0, 2.0]])
    """
    # On a CPU there is no sync to save: the loop reads each vector once.
    return sequential(given) if given.vectors.device.type == "cpu" else block_gram(given)


def balance_sharded(given: Unsigned, *, step: int) -> Script[Signed]:
    """Sign vectors of which every rank holds a shard of the columns.

    A script (`comm.script`): all ranks run it together and get the same signs. D is this rank's
    columns, `running` may be overwritten, and `step` vectors of a stream belong to one time step.
    """
    # If one vector of a time step is not finite, so is the mean gradient of the step, and the
    # optimizer skips it on every rank: no worker may learn from it. That is how whole batches come.
    # Rows of single examples come many steps at a time, and those that are not finite are marked
    # already: a block then covers several steps, which share one message.
    one = given.vectors.shape[1] <= step
    block = step if one else step * max(1, _SHARED_BLOCK // step)
    return blocks(given, block=block, total=sum_over_shards, all_or_none=one)


def sequential(given: Unsigned) -> Signed:
    """Sign the vectors one after the other."""
    vectors, running, rule, draws, carry = given
    streams, count, columns = vectors.shape
    use_numpy = vectors.device.type == "cpu" and columns <= _NUMPY_COLUMNS
    signs = np.zeros((streams, count), dtype=np.int8)
    running, carry = running.clone(), carry.copy()
    for w in range(streams):
        # numpy and torch spell these operations alike. The arrays share the tensors' memory, so
        # the sum in `running` is updated in place.
        z: Tensor | FloatArray = vectors[w].numpy() if use_numpy else vectors[w]
        total: Tensor | FloatArray = running[w].numpy() if use_numpy else running[w]
        with np.errstate(invalid="ignore", over="ignore"):  # non-finite vectors are left out
            signs[w], carry[:, w] = _sequential_stream(z, total, rule, draws[w], carry[:, w])
    return Signed(torch.from_numpy(signs), running, carry)


def _sequential_stream(
    vectors: Tensor | FloatArray,
    total: Tensor | FloatArray,
    rule: SignRule,
    draws: Floats,
    carry: Carry,
) -> tuple[SignArray, Carry]:
    """Sign one stream of (P, D) vectors; add into `total` (D,) without temporaries."""
    signs = np.zeros(len(vectors), dtype=np.int8)
    for p, vector in enumerate(vectors):
        inner = float(total @ vector)
        # Norms cost another read of the vector: only if the rule uses them. Without them, a
        # vector that is not finite still shows in `inner`.
        square = float(vector @ vector) if rule.randomized else 0.0
        if not math.isfinite(inner + square):
            continue
        plus, carry = rule.decide(inner, square, draws[p], carry)
        signs[p] = 1 if plus else -1
        if plus:
            total += vector
        else:
            total -= vector
    return signs, carry


def block_gram(given: Unsigned, block: int = MOST) -> Signed:
    """Sign vectors from their inner products, `block` vectors of a stream at a time."""
    script = blocks(given._replace(running=given.running.clone()), block=block)
    signed: Signed = run(script, World.single()).value
    return signed


def blocks(
    given: Unsigned,
    *,
    block: int,
    total: Callable[[Tensor], Script[Tensor]] | None = None,
    all_or_none: bool = False,
) -> Script[Signed]:
    """Sign all streams together, with one host sync per block; add into `running`.

    Args:
        given: What to sign.
        block: Vectors of a stream in one Gram matrix.
        total: If D is this rank's shard of the columns: adds up products over ranks.
        all_or_none: Leave out the whole block if one of its vectors is not finite.
    """
    vectors, running, rule, draws, carry = given
    streams, count, _ = vectors.shape
    signs = np.zeros((streams, count), dtype=np.int8)
    for start in range(0, count, block):
        span = slice(start, start + block)
        z = vectors[:, span]
        inner, gram = yield from _products(z, running, rule, total)
        # With `total` these are sums over ranks. So all ranks see the same and take the same
        # branch, even if only one rank's columns hold the value that is not finite.
        finite = np.isfinite(np.einsum("wpp->wp", gram)) & np.isfinite(inner)
        if all_or_none and not finite.all():
            finite[:] = False
        if not finite.all():
            z = torch.where(torch.from_numpy(finite).to(z.device).unsqueeze(-1), z, 0)
            # The recursion adds rows of G to the products of all later vectors, so a row that is
            # not finite would spoil them: compute the products again.
            inner, gram = yield from _products(z, running, rule, total)
        block_signs, carry = signs_from_products(inner, gram, rule, draws[:, span], carry)
        signs[:, span] = block_signs * finite
        taken = torch.from_numpy(signs[:, span]).to(z.device)
        if fast := fast_form(z, running):
            fast.add_signed(z, taken.contiguous(), running)
        else:
            running.unsqueeze(1).baddbmm_(taken.to(z.dtype).unsqueeze(1), z)
    return Signed(torch.from_numpy(signs), running, carry)


def fast_form(vectors: Tensor, running: Tensor) -> Any:
    """Return the `triton_gram` module if it can sign (W, P, D) vectors against (W, D) sums."""
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


def _products(
    z: Tensor,
    running: Tensor,
    rule: SignRule,
    total: Callable[[Tensor], Script[Tensor]] | None,
) -> Script[tuple[Floats, Floats]]:
    """Return u (W, P) and G (W, P, P) on the host.

    For a few vectors the squares are left out (zero) unless the rule asks for them: a vector that
    is not finite shows in its product with the running sum as well.
    """
    if z.device.type == "cpu" and len(z) == 1 and z.shape[1] <= _FEW_PRODUCTS:
        both = _few_products(z[0], running[0], squares=rule.randomized).unsqueeze(0)
    elif (fast := fast_form(z, running)) and z.shape[1] <= MOST:
        both = fast.products(z, running).cpu()
    else:
        # u and G in one tensor: one copy to the host, one all-reduce.
        both = torch.cat([z @ running.unsqueeze(-1), z @ z.mT], dim=-1).to("cpu", torch.float64)
    if total is not None:
        both = yield from total(both)
    host = both.numpy()
    return host[..., 0].copy(), host[..., 1:]  # a copy: the recursion overwrites u


def sum_over_shards(both: Tensor) -> Script[Tensor]:
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

    >>> from gradherd.ordering.sign_rules import Greedy
    >>> inner, gram = np.array([[0.0, 0.0]]), np.array([[[1.0, 1.0], [1.0, 1.0]]])
    >>> signs_from_products(inner, gram, Greedy(), np.zeros((1, 2)), np.empty((0, 1)))[0]
    array([[ 1, -1]], dtype=int8)
    """
    signs, carry = np.ones(inner.shape, dtype=np.int8), carry.copy()
    for w, products in enumerate(inner):
        own: Carry = carry[:, w]
        for p, row in enumerate(gram[w]):
            plus, own = rule.decide(float(products[p]), float(row[p]), draws[w, p], own)
            # Row p of G: how this vector changes the products of the later ones with the sum.
            if plus:
                products += row
            else:
                products -= row
                signs[w, p] = -1
        carry[:, w] = own
    return signs, carry


def reorder(order: Tensor, sides: Tensor) -> Tensor:
    """Return the next order: fronts as visited, then backs in reverse.

    This one map serves mean balance (GraB: each unit has its own side) and pair balance
    (CD-GraB: the two of a pair have opposite sides, so pair k fills slots k and n-1-k); an odd
    unit comes last among the fronts, which is the middle. Units with side 0 stay where they
    are and the others fill the slots between them.

    Both are (n,), `sides` by position in `order`. The result is a new tensor, since orders that
    were handed out must not change.

    >>> reorder(torch.tensor([4, 5, 6, 7, 8]), torch.tensor([1, -1, -1, 1, 1]))
    tensor([4, 7, 8, 6, 5])
    >>> reorder(torch.tensor([4, 5, 6, 7, 8]), torch.tensor([-1, 1, 0, 0, 1]))
    tensor([5, 8, 6, 7, 4])
    """
    moved = torch.cat([order[sides > 0], order[sides < 0].flip(0)])
    following = order.clone()
    following[sides != 0] = moved
    return following
