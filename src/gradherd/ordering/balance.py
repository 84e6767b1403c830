"""Sign vectors so that their signed running sum stays short, and turn signs into the next order.

A sign rule decides on scalars only: the inner product of a vector with the running sum before it,
and the vector's squared norm. The same rule therefore drives two forms with equal results:
`sequential` (one vector after the other) and `blocks` (many vectors from their Gram matrix, of
which every rank may hold a shard of the columns). `balance` chooses.

For a block of vectors Z and the running sum S, u = Z.S and G = Z.Z^T are computed at once. The
recursion inner_k = u_k + sum_{l<k} s_l G_lk runs on scalars, and S += Z^T.s is added once. Up to
rounding this gives the signs of the loop over vectors, with one host sync per block; published
CD-GraB code has one per vector. And u and G add up over shards of the columns, which is how ranks
sign together (`sum_over_shards`) without any of them holding whole gradients of the others. Neither
is part of the papers. On a GPU `triton_gram` computes products and sums if Triton is installed.
Most vectors take `sign_on_device` then, which signs by the greedy rule without the host.

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
from functools import cache, partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradherd.comm.script import AllReduceSmall, Script
from gradherd.gpu import captured, has_triton
from gradherd.ordering.sign_rules import Carry, Floats, Greedy, SignRule

log = logging.getLogger("gradherd")

FloatArray: TypeAlias = NDArray[np.floating]
SignArray: TypeAlias = NDArray[np.int8]

# A product of long rows takes BLAS twice as long as many of short ones, which are tiles of them.
_TILE, _LONG = 2000, 100_000
# Looked up without importing it: most processes never need it.
_HAS_TRITON = has_triton()
MOST = 64
"""Vectors of a block that kernels sign: the (P, P) products of more do not fit into registers."""
KERNEL_DEVICES = {"cuda"}
"""Where kernels run, which sign rows without the host waiting; tests add the CPU, on which Triton
interprets them."""
_MOST_ELEMENTS = 1 << 24
"""Elements of all rows that are copied at a time: sketches are, whole gradients are not."""
_MOST_ROWS = 128
_RUNS_BEFORE_GRAPH = 3  # batch sizes that do not come again are not worth one
_MOST_SIZES = 4
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
    """(W, D) sums before the first vector, to which signed vectors are added."""
    rule: SignRule
    """Decides the signs."""
    draws: Floats
    """(W, P) uniform numbers in [-1, 1), one per vector."""
    carry: Floats
    """(C, W) what the rule carries from vector to vector; updated."""


def balance(given: Unsigned, *, step: int | None = None) -> Script[Tensor]:
    """Sign vectors with the form that is fastest where they are.

    Args:
        given: What to sign.
        step: If D is this rank's shard of the columns: how many vectors of a stream belong to one
            time step. All ranks then run the script together and get the same signs.

    Returns:
        (W, P) int8 signs, on the CPU.

    >>> from gradherd.comm.script import run
    >>> from gradherd.comm.world import World
    >>> vectors = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [0.0, 2.0]]])
    >>> running, nothing = torch.zeros(1, 2), np.empty((0, 1))
    >>> given = Unsigned(vectors, running, Greedy(), np.zeros((1, 3)), nothing)
    >>> run(balance(given), World.single()).value.tolist(), running.tolist()
    ([[1, -1, 1]], [[0.0, 2.0]])
    """
    if step is None:
        # On a CPU there is no sync to save: the loop reads each vector once.
        if given.vectors.device.type == "cpu":
            return sequential(given)
        return (yield from blocks(given, block=MOST))
    # If one vector of a time step is not finite, so is the mean gradient of the step, and the
    # optimizer skips it on every rank: no worker may learn from it. That is how whole batches come.
    # Rows of single examples come many steps at a time, and those that are not finite are marked
    # already: a block then covers several steps, which share one message.
    one = given.vectors.shape[1] <= step
    block = step if one else step * max(1, _SHARED_BLOCK // step)
    return (yield from blocks(given, block=block, sharded=True, all_or_none=one))


def sequential(given: Unsigned) -> Tensor:
    """Sign the vectors one after the other."""
    vectors, running, rule, draws, carry = given
    streams, count, columns = vectors.shape
    use_numpy = vectors.device.type == "cpu" and columns <= _NUMPY_COLUMNS
    # Short vectors take less time than to ask a rule: the common one is spelled out.
    greedy = type(rule) is Greedy
    signs = np.zeros((streams, count), dtype=np.int8)
    for w in range(streams):
        # numpy and torch spell these operations alike. The arrays share the tensors' memory, so
        # the sum in `running` is updated in place, and without temporaries.
        z: Tensor | FloatArray = vectors[w].numpy() if use_numpy else vectors[w]
        total: Tensor | FloatArray = running[w].numpy() if use_numpy else running[w]
        own: Carry = carry[:, w]
        taken = [0] * count
        with np.errstate(invalid="ignore", over="ignore"):  # non-finite vectors are left out
            for p, vector in enumerate(z):
                inner = float(total.dot(vector))
                # Norms cost another read of the vector: only if the rule uses them. Without them,
                # a vector that is not finite still shows in `inner`.
                square = 0.0 if greedy or not rule.randomized else float(vector @ vector)
                if not math.isfinite(inner + square):
                    continue
                if greedy:
                    plus = inner <= 0
                else:
                    plus, own = rule.decide(inner, square, draws[w, p], own)
                if plus:
                    taken[p] = 1
                    total += vector
                else:
                    taken[p] = -1
                    total -= vector
        signs[w], carry[:, w] = taken, own
    return torch.from_numpy(signs)


def blocks(
    given: Unsigned, *, block: int, sharded: bool = False, all_or_none: bool = False
) -> Script[Tensor]:
    """Sign all streams together, with one host sync per block.

    A Gram matrix is of `block` vectors of a stream. If `sharded`, D is this rank's shard of the
    columns, and ranks add up products. `all_or_none` leaves out the whole block if one of its
    vectors is not finite.
    """
    vectors, running, rule, draws, carry = given
    streams, count, _ = vectors.shape
    signs = np.zeros((streams, count), dtype=np.int8)
    for start in range(0, count, block):
        span = slice(start, start + block)
        z = vectors[:, span]
        inner, gram = yield from _products(z, running, sharded)
        # If sharded these are sums over ranks. So all ranks see the same and take the same
        # branch, even if only one rank's columns hold the value that is not finite.
        finite = np.isfinite(np.einsum("wpp->wp", gram)) & np.isfinite(inner)
        if all_or_none and not finite.all():
            finite[:] = False
        if not finite.all():
            z = torch.where(torch.from_numpy(finite).to(z.device).unsqueeze(-1), z, 0)
            # The recursion adds rows of G to the products of all later vectors, so a row that is
            # not finite would spoil them: compute the products again.
            inner, gram = yield from _products(z, running, sharded)
        signs[:, span] = finite * signs_from_products(inner, gram, rule, draws[:, span], carry)
        taken = torch.from_numpy(signs[:, span]).to(z.device)
        if fast := fast_form(z, running):
            fast.add_signed(z, taken.contiguous(), running)
        else:
            running.unsqueeze(1).baddbmm_(taken.to(z.dtype).unsqueeze(1), z)
    return torch.from_numpy(signs)


def fast_form(vectors: Tensor, running: Tensor) -> Any:
    """Return the `triton_gram` module if it can sign (W, P, D) vectors against (W, D) sums."""
    ready = _HAS_TRITON and vectors.device.type in KERNEL_DEVICES and vectors.numel()
    if not ready or vectors.device != running.device:
        return None
    for one in (vectors, running):
        if one.dtype != torch.float32 or one.stride(-1) != 1:
            return None
    # Imported here: Triton is optional, and absent where there is no GPU.
    from gradherd.ordering import triton_gram

    return triton_gram


def give_up_kernels(error: Exception) -> None:
    """Sign without Triton from now on, since it has refused to build or launch a kernel here."""
    global _HAS_TRITON
    _HAS_TRITON = False
    log.warning("signs are computed without Triton, which has failed: %s", error)


def _products(z: Tensor, running: Tensor, sharded: bool) -> Script[tuple[Floats, Floats]]:
    """Return u (W, P) and G (W, P, P) on the host."""
    if (fast := fast_form(z, running)) and z.shape[1] <= MOST:
        both = fast.products(z, running).cpu()
    elif len(z) == 1 and (rows := stacked(running, z[0])) is not None:
        both = inner_products(z, rows.unsqueeze(0)).to("cpu", torch.float64)
    else:
        # u and G in one tensor: one copy to the host, one all-reduce.
        parts = [inner_products(z, running.unsqueeze(1)), inner_products(z, z)]
        both = torch.cat(parts, dim=-1).to("cpu", torch.float64)
    host = both.numpy()
    if sharded:
        host = yield from sum_over_shards(host)
    return host[..., 0].copy(), host[..., 1:]  # a copy: the recursion overwrites u


def stacked(above: Tensor, below: Tensor) -> Tensor | None:
    """Return (n, D) and (m, D) rows as (n + m, D) if they lie so in memory, else None.

    >>> rows = torch.arange(6).view(3, 2)
    >>> stacked(rows[:1], rows[1:]).equal(rows), stacked(rows[1:], rows[:1])
    (True, None)
    """
    same = above.untyped_storage().data_ptr() == below.untyped_storage().data_ptr()
    end = above.storage_offset() + above.numel()
    dense = above.is_contiguous() and below.is_contiguous()
    if not (same and dense and end == below.storage_offset() and above.dtype == below.dtype):
        return None
    return above.as_strided((len(above) + len(below), above.shape[1]), above.stride())


def sum_over_shards(both: Floats) -> Script[Floats]:
    """Return (W, P, 1 + P) products summed over ranks.

    G is symmetric: each product of two vectors is sent once, and stored where the recursion reads
    it, in the row of the earlier vector. What it does not read stays zero.
    """
    sent = _sent(both.shape[1])
    # The sum has the same bits on all ranks, so all ranks decide the same signs without another
    # exchange. That holds near a tie, too, where a single bit makes the difference.
    total: Tensor = yield AllReduceSmall(torch.from_numpy(both[:, sent].ravel()))
    summed = np.zeros_like(both)
    summed[:, sent] = total.view(len(both), -1).numpy()
    return summed


@cache
def _sent(count: int) -> NDArray[np.bool_]:
    """Return where u and the upper triangle of G lie in a (P, 1 + P) matrix, P = `count`."""
    sent = np.triu(np.ones((count, 1 + count), dtype=bool), 1)
    sent[:, 0] = True
    return sent


def inner_products(left: Tensor, right: Tensor) -> Tensor:
    """Return the (W, P, Q) inner products of (W, P, D) and (W, Q, D) rows."""
    columns = left.shape[-1]
    if columns < _LONG or len(left) > 1:  # tiles of several streams would be copied
        return left @ right.mT
    whole = columns // _TILE * _TILE
    rest = left[..., whole:] @ right[..., whole:].mT
    # (n, P, tile) and (n, Q, tile) views
    a, b = (x[0, :, :whole].unflatten(-1, (-1, _TILE)).transpose(0, 1) for x in (left, right))
    return torch.add(rest, (a @ b.mT).sum(0, dtype=torch.float64))


def signs_from_products(
    inner: Floats, gram: Floats, rule: SignRule, draws: Floats, carry: Floats
) -> SignArray:
    """Run the sign recursion on scalars; return (W, P) signs.

    `inner` (W, P) are products with the running sums before the block, and are overwritten; `gram`
    (W, P, P) those among the vectors. Draws and carry, which is updated, are as in `Unsigned`.

    >>> inner, gram = np.array([[0.0, 0.0]]), np.array([[[1.0, 1.0], [1.0, 1.0]]])
    >>> signs_from_products(inner, gram, Greedy(), np.zeros((1, 2)), np.empty((0, 1)))
    array([[ 1, -1]], dtype=int8)
    """
    signs = np.ones(inner.shape, dtype=np.int8)
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
    return signs


class DeviceSigner:
    """Signs rows of single examples on a GPU, one batch after the other, without waiting for any.

    Steps are alike: as many rows of the same length. So everything lies in fixed memory, and after
    a few batches their kernels are a CUDA graph, which is launched in a tenth of the time. The host
    reads the signs at the end of the epoch (`SignState.sync_sides`).

    Shapes: b rows of a worker in a call, M workers, each with its own mean and running sum.
    """

    def __init__(self, like: Tensor) -> None:
        """Reserve memory for sums of the shape (M, D) of `like`."""
        # Contiguous, which kernels rely on and a slice of gathered rows is not.
        self.running, self.total, self.mean = like.new_zeros(3, *like.shape)
        self._most = _rows_at_a_time(like)
        self._uses_graphs = like.is_cuda
        self._blocks: dict[int, _Block] = {}
        self._stream: torch.cuda.Stream | None = None

    def sign(self, rows: Tensor, state: Any) -> Tensor | None:
        """Sign rows (b, M, D) and add them up; arguments and result as in `sign_on_device`."""
        parts = rows.split(self._most)
        # All blocks before the first part is signed: one that is refused later would leave sums in
        # which the rows before it count already.
        try:
            blocks = [self._block_for(part) for part in parts]
        except Exception as error:  # of Triton or its compiler, which have many kinds
            give_up_kernels(error)
            return None
        self._take(state)
        sums, signs = (self.mean, self.running, self.total), []
        for part, block in zip(parts, blocks, strict=True):
            # Centring copies the rows to fixed memory at the same time.
            torch.sub(part.transpose(0, 1), self.mean.unsqueeze(1), out=block.z)
            block.run(*sums)
            if self._uses_graphs and block.runs == _RUNS_BEFORE_GRAPH:
                self._uses_graphs = block.capture(*sums)
            # The next part has the same memory.
            signs.append(block.signs.T if len(parts) == 1 else block.signs.T.clone())
        return torch.cat(signs) if len(signs) > 1 else signs[0]

    def _take(self, state: Any) -> None:
        """Continue with the sums of a state, after whatever the batch before was signed on."""
        if self.running.is_cuda:
            now = torch.cuda.current_stream(self.running.device)
            if self._stream is not None and self._stream != now:
                now.wait_stream(self._stream)
            self._stream = now
        for name in ("running", "total", "mean"):
            own, value = getattr(self, name), getattr(state, name, None)
            if value is not None and value is not own:
                own.copy_(value)
                setattr(state, name, own)

    def _block_for(self, rows: Tensor) -> "_Block":
        """Return memory for the rows; raise what the device raises if it refuses the kernels."""
        if len(rows) not in self._blocks:
            block = _Block(rows)
            if len(self._blocks) >= _MOST_SIZES:
                self._blocks.clear()
            self._blocks[len(rows)] = block
        return self._blocks[len(rows)]


class _Block:
    """The vectors of a batch in fixed memory, and the kernels that sign them."""

    def __init__(self, rows: Tensor) -> None:
        count, workers, columns = rows.shape
        self.z = rows.new_zeros(workers, count, columns)
        self.signs = rows.new_zeros(workers, count, dtype=torch.int8)
        self.runs = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        # A first run for nothing: if a kernel is refused, no sum has changed yet.
        self._launch(*rows.new_zeros(3, workers, columns))

    def run(self, *sums: Tensor) -> None:
        """Sign the vectors and add them up; arguments as in `triton_gram.sign_greedily`."""
        self.runs += 1
        if self._graph is not None:
            self._graph.replay()
        else:
            self._launch(*sums)

    def _launch(self, *sums: Tensor) -> None:
        fast = fast_form(self.z, self.z[:, 0])
        for z, signs in zip(self.z.split(MOST, 1), self.signs.split(MOST, 1), strict=True):
            fast.sign_greedily(z, signs, *sums)

    def capture(self, *sums: Tensor) -> bool:
        """Make the kernels a CUDA graph on this memory; say whether graphs can be made here."""
        if torch.cuda.is_current_stream_capturing():  # by the user
            return True
        launches = [partial(self._launch, *sums)]
        self._graph = next(iter(captured(launches, "signs", self.z.device) or ()), None)
        return self._graph is not None


def sign_on_device(rule: SignRule, rows: Tensor, state: Any) -> Tensor | None:
    """Sign rows (b, M, D) minus the mean where they are, without the host waiting.

    The `running` sums (M, D) of the state, a `SignState`, its plain sums `total` if the order uses
    them, and `mean` if it has one, are then those of its `signer`, which outlives the epoch.

    Returns:
        (b, M) int8 on the device, overwritten by the next call, 0 where a row is not finite; None
        if it cannot be done here, and then nothing has changed.
    """
    if rows.device.type not in KERNEL_DEVICES or not rows.numel() or not isinstance(rule, Greedy):
        return None
    own = rows[0] if state.signer is None else state.signer.running
    if fast_form(rows, own) is None or not _rows_at_a_time(own):
        state.signer = None
    elif state.signer is None or own.shape != rows.shape[1:]:
        state.signer = DeviceSigner(rows[0])
    return None if state.signer is None else state.signer.sign(rows, state)


def _rows_at_a_time(row: Tensor) -> int:
    """Return how many rows (M, D) like this one are signed in one go; 0 if it is too long."""
    return min(_MOST_ROWS, _MOST_ELEMENTS // max(1, row.numel()) // MOST * MOST)


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
