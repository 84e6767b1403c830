"""Every collective gradherd uses, each with the bytes this rank sends for it.

Bytes are those of the bandwidth-optimal algorithm, which is what gloo and nccl run for large
tensors, so figures of different methods compare on equal terms. For R ranks and a tensor of
b bytes on each: all-reduce 2b(R-1)/R (reduce-scatter, then all-gather of the averaged slices),
all-gather b(R-1), all-to-all b(R-1)/R, broadcast b (each rank hands it on once).
A world of one rank sends nothing and needs no process group.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gradherd.comm.world import World

# torch 2.13 renamed it and warns of the old name.
_gather_into = (
    dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
)
_FEW_RANKS = 8
_TAG = 0x6768  # of our messages, apart from the user's own


class CollectiveResult(NamedTuple):
    """What a collective gave back, and the bytes this rank sent for it."""

    value: Tensor
    bytes: int


class PendingCollective(NamedTuple):
    """A collective under way: `value` is valid after `wait()`, the bytes are known at once."""

    value: Tensor
    bytes: int
    works: tuple[dist.Work, ...] = ()
    """None where nothing has to travel."""

    def wait(self) -> Tensor:
        """Return the result when it is there."""
        for work in self.works:
            work.wait()
        return self.value


def nbytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's numbers."""
    return tensor.numel() * tensor.element_size()


def all_gather_bytes(tensor: Tensor, size: int) -> int:
    """Return what a rank sends to show `tensor` to all others."""
    return nbytes(tensor) * (size - 1)


def all_to_all_bytes(tensor: Tensor, size: int) -> int:
    """Return what a rank sends to deal the rows of `tensor` to all others."""
    return nbytes(tensor) * (size - 1) // size


def broadcast_bytes(tensor: Tensor, size: int) -> int:
    """Return what a rank sends to hand `tensor` on once."""
    return nbytes(tensor) if size > 1 else 0


def all_reduce_bytes(tensor: Tensor, size: int) -> int:
    """Return what a rank sends to sum `tensor` over all."""
    return 2 * nbytes(tensor) * (size - 1) // size


def all_reduce_small_bytes(tensor: Tensor, size: int) -> int:
    """Return what a rank sends for `all_reduce_small`."""
    return all_gather_bytes(tensor, size) if size <= _FEW_RANKS else all_reduce_bytes(tensor, size)


def all_reduce(tensor: Tensor, world: World) -> CollectiveResult:
    """Sum `tensor` over all ranks, in place. The result has the same bits on every rank."""
    if world.size == 1:
        return CollectiveResult(tensor, 0)
    dist.all_reduce(tensor, group=world.group)
    return CollectiveResult(tensor, all_reduce_bytes(tensor, world.size))


def all_reduce_start(tensor: Tensor, world: World) -> PendingCollective:
    """Begin to sum `tensor` over all ranks, in place."""
    if world.size == 1:
        return PendingCollective(tensor, 0)
    work = dist.all_reduce(tensor, group=world.group, async_op=True)
    return PendingCollective(tensor, all_reduce_bytes(tensor, world.size), (work,))


def all_gather(tensor: Tensor, world: World) -> CollectiveResult:
    """Stack every rank's `tensor`, all of one shape: (...) -> (R, ...)."""
    pending = all_gather_start(tensor, world)
    return CollectiveResult(pending.wait(), pending.bytes)


def all_gather_start(
    tensor: Tensor, world: World, *, out: Tensor | None = None
) -> PendingCollective:
    """Begin an all-gather, into the contiguous (R, ...) `out` where given.

    Every rank must begin its collectives in the same order.
    """
    if out is None:
        out = tensor.new_empty((world.size, *tensor.shape))
    if world.size == 1:
        out.copy_(tensor.unsqueeze(0))
        return PendingCollective(out, 0)
    sent = all_gather_bytes(tensor, world.size)
    if dist.get_backend(world.group) == "gloo" and tensor.numel() and out.is_contiguous():
        slots = list(out.view(world.size, -1))
        return PendingCollective(
            out, sent, _messages([tensor.contiguous()] * world.size, slots, world)
        )
    # Flat views: gloo wants input and output of equal rank, and has no 0-dimensional tensors.
    work = _gather_into(out.view(-1), tensor.reshape(-1), group=world.group, async_op=True)
    return PendingCollective(out, sent, (work,))


def _messages(
    pieces: Sequence[Tensor], slots: Sequence[Tensor], world: World
) -> tuple[dist.Work, ...]:
    """Begin to send a piece to each rank and to fill a slot from each, as messages between pairs.

    gloo's own all-gather goes round a ring and through a buffer, and its all-to-all leaves links
    idle: this took two thirds of their time on a machine's own network, and on one of 1 Gb/s.
    """
    works: list[dist.Work | None] = []
    for away in range(1, world.size):
        peer = (world.rank - away) % world.size
        if slots[peer].numel():
            works.append(dist.irecv(slots[peer], group=world.group, group_src=peer, tag=_TAG))
    for away in range(1, world.size):
        peer = (world.rank + away) % world.size
        piece = pieces[peer].contiguous().view(-1)
        if piece.numel():
            works.append(dist.isend(piece, group=world.group, group_dst=peer, tag=_TAG))
    own, kept = slots[world.rank], pieces[world.rank].reshape(-1)
    if own.data_ptr() != kept.data_ptr():
        own.copy_(kept)
    return tuple(work for work in works if work is not None)


def all_reduce_small(tensor: Tensor, world: World) -> CollectiveResult:
    """Sum a small tensor over all ranks; the result has the same bits on every rank.

    Among few ranks one gather and a sum in the order of ranks take fewer hops than all-reduce.
    """
    if world.size > _FEW_RANKS:
        return all_reduce(tensor, world)
    parts, sent = all_gather(tensor, world)
    return CollectiveResult(parts.sum(0), sent)


def all_to_all(tensor: Tensor, world: World) -> CollectiveResult:
    """Send row r of `tensor` (R, ...) to rank r; row i of the result came from rank i."""
    pending = all_to_all_start(tensor, world)
    return CollectiveResult(pending.wait(), pending.bytes)


def all_to_all_start(
    tensor: Tensor, world: World, *, out: Tensor | None = None
) -> PendingCollective:
    """Begin an all-to-all; `tensor` must stay as it is until it has arrived."""
    if len(tensor) != world.size:
        raise ValueError(f"tensor must have one row per rank ({world.size}), got {len(tensor)}")
    if out is None:
        out = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    if world.size == 1:
        out.copy_(tensor)
        return PendingCollective(out, 0)
    sent, rows = all_to_all_bytes(tensor, world.size), tensor.contiguous()
    if dist.get_backend(world.group) == "gloo" and out.is_contiguous():
        pieces, slots = (list(one.view(world.size, -1)) for one in (rows, out))
        return PendingCollective(out, sent, _messages(pieces, slots, world))
    work = dist.all_to_all_single(out, rows, group=world.group, async_op=True)
    return PendingCollective(out, sent, (work,))


def broadcast(tensor: Tensor, world: World, *, src: int = 0) -> CollectiveResult:
    """Overwrite `tensor` on every rank with that of rank `src`."""
    if not 0 <= src < world.size:
        raise ValueError(f"src must be in [0, {world.size}), got {src}")
    if world.size == 1:
        return CollectiveResult(tensor, 0)
    dist.broadcast(tensor, group=world.group, group_src=src)
    return CollectiveResult(tensor, broadcast_bytes(tensor, world.size))


def all_gather_uneven(tensor: Tensor, sizes: Sequence[int], world: World) -> CollectiveResult:
    """Lay every rank's (n_r,) `tensor` end to end; all ranks know all lengths `sizes`.

    gloo gets messages of just those lengths; other backends gather rows padded with zeros.
    """
    if len(sizes) != world.size or len(tensor) != sizes[world.rank]:
        raise ValueError(f"tensor has {len(tensor)} numbers, sizes are {list(sizes)}")
    if world.size == 1:
        return CollectiveResult(tensor, 0)
    if dist.get_backend(world.group) == "gloo":
        out = tensor.new_empty(sum(sizes))
        slots = list(torch.split(out, list(sizes)))
        for work in _messages([tensor.contiguous()] * world.size, slots, world):
            work.wait()
        return CollectiveResult(out, all_gather_bytes(tensor, world.size))
    padded = tensor.new_zeros(max(sizes))
    padded[: len(tensor)] = tensor
    rows, sent = all_gather(padded, world)
    return CollectiveResult(
        torch.cat([row[:size] for row, size in zip(rows, sizes, strict=True)]), sent
    )


def send_recv(
    tensor: Tensor | None, dst: int | None, like: Tensor | None, src: int | None, world: World
) -> tuple[Tensor | None, int]:
    """Send `tensor` to rank `dst`, receive one like `like` from rank `src`; None is nobody."""
    taken, moves, sent = None, [], 0
    if src is not None and like is not None:
        taken = torch.empty_like(like)
        moves.append(dist.P2POp(dist.irecv, taken, group=world.group, group_peer=src, tag=_TAG))
    if dst is not None and tensor is not None:
        mine = tensor.contiguous()
        moves.append(dist.P2POp(dist.isend, mine, group=world.group, group_peer=dst, tag=_TAG))
        sent = nbytes(tensor)
    if moves:
        for work in dist.batch_isend_irecv(moves):
            work.wait()
    return taken, sent
