"""Every collective gradherd uses; each reports the bytes this rank sends for it.

The bytes are those of the bandwidth-optimal algorithm, which gloo and nccl run for large tensors,
so that methods compare on equal terms. With R ranks and b bytes per rank:

    all-reduce   2b(R-1)/R   a reduce-scatter, then an all-gather of the reduced shards
    all-gather   b(R-1)
    all-to-all   b(R-1)/R
    broadcast    b           each rank forwards the tensor once
    send/recv    b

A world of one rank sends nothing and needs no process group.

Shapes: R ranks.
"""

import time
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gradherd.comm.background_thread import in_background
from gradherd.comm.checks import check_in
from gradherd.comm.world import World

# torch 2.13 renamed the function and warns about the old name.
_gather_into = (
    dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
)
_all_to_all = partial(dist.all_to_all_single, async_op=True)
# Over gloo, so many bytes for all ranks together are gathered by an all-to-all of copies, in
# gloo's own thread, a third of the CPU time of messages that each wake the thread that sent them.
_COPIED_BYTES = 2**20
# Keeps our point-to-point messages apart from the user's own, whose tag is 0 by default ("gh").
_TAG = 0x6768
_SHORTEST_PAUSE, _LONGEST_PAUSE = 5e-5, 2e-3  # seconds between two looks at a collective


class CollectiveResult(NamedTuple):
    """The result of a finished collective, and the bytes this rank sent for it."""

    value: Tensor
    bytes: int


class CollectiveError(RuntimeError):
    """A collective failed: a rank has died, is late, or has started another one."""

    def __init__(self, reason: str) -> None:
        self.reason = " ".join(reason.split())
        """What the backend says, in one line."""
        super().__init__(
            f"ranks did not meet: one has died, is late or out of reach ({self.reason})"
        )


class PendingCollective(NamedTuple):
    """A collective in progress: `value` is valid after `wait()`, `bytes` at once."""

    value: Tensor
    bytes: int
    works: tuple[dist.Work, ...] = ()
    """Empty where nothing has to be sent."""

    def wait(self) -> Tensor:
        """Wait for the collective to finish and return its result.

        With nccl it is the current CUDA stream that waits; the host does not, but in a thread of
        the background, where it then never waits in C++ for a rank that may have died.

        Raises:
            CollectiveError: A rank did not take part.
        """
        try:
            if len(self.works) == 1 and in_background():
                self._poll()
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            raise CollectiveError(str(error)) from error
        return self.value

    def _poll(self) -> None:
        """Wait in Python.

        A thread that comes back from C++ while the interpreter shuts down takes the process with
        it ("terminate called without an active exception"). Messages from rank to rank (several
        works) tell of their end only to those who wait in C++.
        """
        pause = _SHORTEST_PAUSE
        while not self.works[0].is_completed():
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE)

    def finished(self) -> CollectiveResult:
        """Wait, and return the result with its bytes."""
        return CollectiveResult(self.wait(), self.bytes)


class Stopwatch:
    """Adds up the seconds that training waits inside `with stopwatch:`; nested use counts once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0
        self._started = 0.0

    def __enter__(self) -> "Stopwatch":
        # Hooks call each other; without the depth, the inner one's time would count twice.
        if self._depth == 0:
            self._started = time.perf_counter()
        self._depth += 1
        return self

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.seconds += time.perf_counter() - self._started


def nbytes(tensor: Tensor) -> int:
    """Return the size of a tensor's elements in bytes; of a sparse one, its indices and values."""
    if tensor.is_sparse:
        return nbytes(tensor._indices()) + nbytes(tensor._values())
    return tensor.numel() * tensor.element_size()


def all_gather_bytes(tensor: Tensor, size: int) -> int:
    """Return the bytes a rank sends to all-gather `tensor` among `size` ranks.

    >>> all_gather_bytes(torch.zeros(10), 4)
    120
    """
    return nbytes(tensor) * (size - 1)


def all_to_all_bytes(tensor: Tensor, size: int) -> int:
    """Return the bytes a rank sends for an all-to-all of the R rows of `tensor`."""
    return nbytes(tensor) * (size - 1) // size


def broadcast_bytes(tensor: Tensor, size: int) -> int:
    """Return the bytes a rank sends to forward a broadcast `tensor` once."""
    return nbytes(tensor) if size > 1 else 0


def all_reduce_bytes(tensor: Tensor, size: int) -> int:
    """Return the bytes a rank sends to all-reduce `tensor`.

    >>> all_reduce_bytes(torch.zeros(10), 4)
    60
    """
    if tensor.is_sparse:  # Rows of several ranks seldom coincide: backends gather them.
        return all_gather_bytes(tensor, size)
    return 2 * nbytes(tensor) * (size - 1) // size


def all_reduce(tensor: Tensor, world: World) -> CollectiveResult:
    """Sum `tensor` over all ranks, in place. The result has the same bits on every rank."""
    return all_reduce_start(tensor, world).finished()


def all_reduce_start(tensor: Tensor, world: World) -> PendingCollective:
    """Start to sum `tensor` over all ranks, in place; leave it alone until that has finished.

    All ranks must start their collectives in the same order.
    """
    if world.size == 1:
        return PendingCollective(tensor, 0)
    work = dist.all_reduce(tensor, group=world.group, async_op=True)
    return PendingCollective(tensor, all_reduce_bytes(tensor, world.size), (work,))


def all_gather(tensor: Tensor, world: World) -> CollectiveResult:
    """Stack the tensors of all ranks, which must have the same shape: (...) to (R, ...)."""
    return all_gather_start(tensor, world).finished()


def all_gather_start(
    tensor: Tensor, world: World, *, out: Tensor | None = None
) -> PendingCollective:
    """Start an all-gather.

    All ranks must start their collectives in the same order.

    Args:
        tensor: (...) of this rank, of the same shape on all ranks. It may be this rank's row of
            `out`; do not write to it before the collective has finished.
        world: The ranks that take part.
        out: Contiguous (R, ...) for the result; None allocates one.
    """
    # Not filled: every row is overwritten, and none is sent before.
    if out is None:
        out = tensor.new_empty((world.size, *tensor.shape))
    if world.size == 1:
        out.copy_(tensor.unsqueeze(0))
        return PendingCollective(out, 0)
    sent = all_gather_bytes(tensor, world.size)
    if world.backend(tensor.device) == "gloo" and tensor.numel() and out.is_contiguous():
        works = _gather_over_gloo(tensor.reshape(-1), out.view(world.size, -1), world)
        return PendingCollective(out, sent, works)
    # Flat views: gloo requires as many dimensions in the output as in the input, and at least one.
    work = _gather_into(out.view(-1), tensor.reshape(-1), group=world.group, async_op=True)
    return PendingCollective(out, sent, (work,))


def all_to_all(tensor: Tensor, world: World) -> CollectiveResult:
    """Send row r of `tensor` (R, ...) to rank r; row i of the result comes from rank i."""
    return all_to_all_start(tensor, world).finished()


def all_to_all_start(
    tensor: Tensor, world: World, *, out: Tensor | None = None
) -> PendingCollective:
    """Start an all-to-all of `tensor` (R, ...) into `out`; do not write to it before it is done."""
    if len(tensor) != world.size:
        raise ValueError(f"tensor must have one row per rank ({world.size}), got {len(tensor)}")
    if out is None:
        out = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    if world.size == 1:
        out.copy_(tensor)
        return PendingCollective(out, 0)
    # Not all of it is sent: the row of this rank stays.
    sent = all_to_all_bytes(tensor, world.size)
    work = _all_to_all(out, tensor.contiguous(), group=world.group)
    return PendingCollective(out, sent, (work,))


def broadcast(tensor: Tensor, world: World, *, src: int = 0) -> CollectiveResult:
    """Overwrite `tensor`, of one shape and dtype, with that of rank `src` within `world`.

    Raises:
        ValueError: There is no rank `src`.
    """
    check_in(f"[0, {world.size})", src=src)
    if world.size == 1:
        return CollectiveResult(tensor, 0)
    # `group_src`, not `src`: torch counts the latter among all processes, not within the group.
    dist.broadcast(tensor, group=world.group, group_src=src)
    return CollectiveResult(tensor, broadcast_bytes(tensor, world.size))


def all_gather_objects(value: Any, world: World) -> list[Any]:
    """Return the picklable values of all ranks, in rank order; not counted in bytes."""
    values = [value] * world.size
    if world.size > 1:
        dist.all_gather_object(values, value, group=world.group)
    return values


def gather_objects(value: Any, world: World) -> list[Any]:
    """Return the picklable values of all ranks on rank 0, elsewhere []; not counted in bytes."""
    values: list[Any] = [None] * world.size if world.rank == 0 else []
    dist.gather_object(value, values or None, group=world.group, group_dst=0)
    return values


def gather(tensor: Tensor, world: World) -> list[Tensor]:
    """Return the tensors of all ranks, of one shape, on rank 0, elsewhere []; not counted."""
    dense = tensor.contiguous()
    tensors = [torch.empty_like(dense) for _ in range(world.size)] if world.rank == 0 else []
    dist.gather(dense, tensors or None, group=world.group, group_dst=0)
    return tensors


def send_recv(tensor: Tensor, dst: int, src: int, world: World) -> Tensor:
    """Send `tensor` to rank `dst`; return the one of its shape that arrives from rank `src`."""
    received = torch.empty_like(tensor)
    message = partial(dist.P2POp, group=world.group, tag=_TAG)
    sending = message(dist.isend, tensor.contiguous(), group_peer=dst)
    # In one batch: nccl deadlocks if two ranks both send first and receive second.
    for work in dist.batch_isend_irecv([message(dist.irecv, received, group_peer=src), sending]):
        work.wait()
    return received


def _gather_over_gloo(message: Tensor, out: Tensor, world: World) -> tuple[dist.Work, ...]:
    """Start to send a (n,) message to every rank and to receive theirs in `out` (R, n).

    gloo's own all-gather goes round a ring and through a buffer, and takes half as long again.
    """
    if nbytes(out) <= _COPIED_BYTES:
        # To gather is to send everybody the same.
        return (_all_to_all(out.view(-1), message.repeat(world.size), group=world.group),)
    works: list[dist.Work | None] = []  # None: this process is outside of the group
    # Each rank starts with its own neighbour, so that no rank is everybody's first peer.
    for distance in range(1, world.size):
        peer = (world.rank - distance) % world.size
        works.append(dist.irecv(out[peer], group=world.group, group_src=peer, tag=_TAG))
    # After all receives: a gloo send is held up until its peer has posted the receive.
    for distance in range(1, world.size):
        peer = (world.rank + distance) % world.size
        works.append(dist.isend(message, group=world.group, group_dst=peer, tag=_TAG))
    # An all-gather in place has its own shard in `out` already.
    if out[world.rank].data_ptr() != message.data_ptr():
        out[world.rank].copy_(message)
    return tuple(work for work in works if work is not None)
