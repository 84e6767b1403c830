"""gTop-k: sum sparse vectors up a tree, keeping the k largest sums at every merge.

Shi et al., "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low
Bandwidth Networks", ICDCS 2019, arXiv:1901.04359. Every worker starts with its own k largest
coordinates. In round j worker r, if r mod 2^(j+1) is 2^j, sends its sparse vector to worker
r - 2^j, which adds it to its own and keeps the k largest sums. The result on worker 0 is sent
back down the tree. The number of workers need not be a power of two.

On the way down each parent also sends one bit per entry that it received on the way up: whether
that entry is still part of the result. So every worker knows which of its values were applied,
even where its own value was dropped on the way and another worker's value at the same coordinate
was not. Dropped values stay in the residual of the worker that selected them.

Letters: R workers, k entries of a sparse vector, B bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gradherd.comm.collectives import PendingCollective, nbytes
from gradherd.comm.message_sizes import DEFAULT_DENSITY
from gradherd.comm.script import Request, Script, ScriptResult
from gradherd.sparsify.kernels import topk_indices
from gradherd.sparsify.selector import (
    Proposal,
    Selection,
    Selector,
    Step,
    StepContext,
    check_density,
)

# Keeps these messages apart from the user's own, whose tag is 0 by default.
_TAG = 0x6774


@dataclass(frozen=True)
class SendRecv(Request):
    """Send `tensor` to rank `dst` and receive one like `like` from rank `src`.

    Results in the received tensor, or None. A None rank is no peer; a rank that neither sends nor
    receives in a round yields `SendRecv()`, so that scripts stay in lockstep.
    """

    tensor: Tensor | None = None
    dst: int | None = None
    like: Tensor | None = None
    src: int | None = None

    def start(self, world: Any) -> PendingCollective:
        """Start to send and to receive."""
        received: Any = None
        operations, sent = [], 0
        message = partial(dist.P2POp, group=world.group, tag=_TAG)
        if self.src is not None and self.like is not None:
            received = torch.empty_like(self.like)
            operations.append(message(dist.irecv, received, group_peer=self.src))
        if self.dst is not None and self.tensor is not None:
            operations.append(message(dist.isend, self.tensor.contiguous(), group_peer=self.dst))
            sent = nbytes(self.tensor)
        # In one batch: nccl deadlocks if two ranks both send first and receive second.
        works = dist.batch_isend_irecv(operations) if operations else []
        return PendingCollective(received, sent, tuple(works))

    @staticmethod
    def answer_all(requests: Sequence["SendRecv"]) -> list[ScriptResult]:
        """Hand every message over; raise where real ranks would wait for ever."""
        results = []
        for rank, request in enumerate(requests):
            received = None
            if request.dst is not None and requests[request.dst].src != rank:
                raise RuntimeError(
                    f"rank {rank} sends to rank {request.dst}, which does not receive"
                )
            if request.src is not None:
                sender = requests[request.src]
                if sender.dst != rank or sender.tensor is None or request.like is None:
                    raise RuntimeError(
                        f"rank {rank} receives from rank {request.src}, which does not send to it"
                    )
                received = sender.tensor
            message = request.tensor if request.dst is not None else None
            results.append(ScriptResult(received, 0 if message is None else nbytes(message)))
        return results


@dataclass(frozen=True)
class GTopK(Selector):
    """Send the k largest sums, merged pair by pair up a tree of workers.

    Shi et al., ICDCS 2019, arXiv:1901.04359. Raises ValueError if the density is out of range.
    """

    density: float = DEFAULT_DENSITY
    """Share of the coordinates that each worker selects, and that is sent."""

    sums_values = True

    def __post_init__(self) -> None:
        check_density(self.density)

    def propose(self, step: Step) -> Proposal:
        """Select the k largest; the header is empty, as every worker selects k."""
        own = topk_indices(step.acc, step.k) if step.k < step.dim else step.everything()
        return Proposal.without_header(step, own)

    def agree(self, step: Step, own: Any, headers: Tensor) -> Script[Selection]:
        """Reduce up the tree, then receive the result and which own entries are part of it."""
        counts = [len(own)] * step.size
        if step.k >= step.dim:
            # Nothing can be dropped, so the ordinary exchange sums the values.
            return Selection(own, counts, None)
        result, alive = yield from _tree_reduce(SparseVector(own, step.acc[own]), step)
        sent = torch.zeros(step.k, dtype=torch.bool, device=own.device)
        sent[torch.searchsorted(result.indices, own[alive])] = True
        kept = step.acc[result.indices].masked_fill(sent, 0)
        return Selection(result.indices, counts, None, sums=result.values, kept=kept)


class SparseVector(NamedTuple):
    """Partial sums on their way through the tree."""

    indices: Tensor
    """(k,) int64, ascending."""
    values: Tensor
    """(k,) sums over some of the workers."""


def merge(mine: SparseVector, theirs: SparseVector) -> tuple[SparseVector, Tensor, Tensor]:
    """Add two sparse vectors and keep the k largest sums; ties go to the lower index.

    Args:
        mine: (k,) entries of the worker that merges.
        theirs: (k,) entries that it received.

    Returns:
        The merged vector, and for each operand the (k,) positions of its entries in the merged
        vector, -1 for those that were dropped.
    """
    k = len(mine.indices)
    union, inverse = torch.unique(torch.cat([mine.indices, theirs.indices]), return_inverse=True)
    values = torch.cat([mine.values, theirs.values])
    # index_add_ adds in any order on a GPU, but an index has two summands at most, and a + b is b +
    # a: the bits are the same in every run.
    sums = values.new_zeros(len(union)).index_add_(0, inverse, values)
    top = sums.abs().argsort(descending=True, stable=True)[:k].sort().values
    positions = torch.full_like(union, -1)
    positions[top] = torch.arange(k, device=union.device)
    my_positions, their_positions = positions[inverse].split(k)
    return SparseVector(union[top], sums[top]), my_positions, their_positions


def _tree_reduce(vector: SparseVector, context: StepContext) -> Script[tuple[SparseVector, Tensor]]:
    """Return the result on worker 0, and (k,) which of this worker's entries are part of it."""
    k, rank = len(vector.indices), context.rank
    gaps = [1 << j for j in range((context.size - 1).bit_length())]
    merges: dict[int, tuple[Tensor, Tensor]] = {}
    message = _pack(vector)
    for gap in gaps:
        if rank % (2 * gap) == gap:
            yield SendRecv(message, dst=rank - gap)
        elif rank % (2 * gap) == 0 and rank + gap < context.size:
            received: Tensor = yield SendRecv(like=message, src=rank + gap)
            vector, mine, theirs = merge(vector, _unpack(received, k, vector.values.dtype))
            merges[gap] = mine, theirs
            message = _pack(vector)
        else:
            yield SendRecv()  # Every worker takes part in every round, to stay in lockstep.

    # Down again: the root's entries are all part of the result. Each parent looks up which of the
    # entries that it merged are still there, its own and its child's.
    alive = torch.ones(k, dtype=torch.bool, device=message.device)
    size = len(message)
    for gap in reversed(gaps):
        if rank % (2 * gap) == gap:
            like = message.new_empty(size + -(-k // 8))
            received = yield SendRecv(like=like, src=rank - gap)
            message, alive = received[:size], _unpack_bits(received[size:], k)
        elif gap in merges:
            mine, theirs = merges[gap]
            bits = _pack_bits(_survives(alive, theirs))
            yield SendRecv(torch.cat([message, bits]), dst=rank + gap)
            alive = _survives(alive, mine)
        else:
            yield SendRecv()
    return _unpack(message, k, vector.values.dtype), alive


def _survives(alive: Tensor, positions: Tensor) -> Tensor:
    """Return which entries survive, given where they went and which of those survive."""
    # A dropped entry has position -1, which reads the last flag; the first condition masks it.
    return (positions >= 0) & alive[positions]


def _pack(vector: SparseVector) -> Tensor:
    """Return (B,) uint8. Values come first, so that float64 values stay aligned."""
    values, indices = vector.values, vector.indices.int()
    return torch.cat([values.view(torch.uint8), indices.view(torch.uint8)])


def _unpack(message: Tensor, k: int, dtype: torch.dtype) -> SparseVector:
    border = k * dtype.itemsize
    # Aligned, since values take four or eight bytes each.
    indices = message[border:].view(torch.int32).long()
    # Clone: in one process, other workers hold the same message.
    return SparseVector(indices, message[:border].view(dtype).clone())


def _pack_bits(flags: Tensor) -> Tensor:
    """Pack flags eight to a byte: (k,) bool -> (B,) uint8."""
    padded = torch.zeros(-(-len(flags) // 8), 8, dtype=torch.uint8, device=flags.device)
    padded.view(-1)[: len(flags)] = flags
    return (padded << torch.arange(8, dtype=torch.uint8, device=flags.device)).sum(1).byte()


def _unpack_bits(packed: Tensor, k: int) -> Tensor:
    """Return the k flags that were packed: (B,) uint8 -> (k,) bool."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(1) >> shifts) & 1).bool().view(-1)[:k]
