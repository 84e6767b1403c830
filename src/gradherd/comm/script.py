"""Write a protocol between ranks once; run it on real ranks or on many in one process.

A script is a generator: it yields a collective and is sent the result. `run` executes one script
per rank through a process group. `run_together` executes the scripts of all workers of a world in
one process, in lockstep. Both give results equal to the bit and count the same bytes.
`SharedRunner` runs a single script on behalf of all workers of a process, for state that every
rank holds alike; `RankRunner` is its counterpart on a real rank.

    >>> def total(own):
    ...     rows = yield AllGather(own)
    ...     return rows.sum(0)
    >>> run_together([total(torch.tensor([1.0])), total(torch.tensor([2.0]))])[0]
    ScriptResult(value=tensor([3.]), bytes=4)

Shapes: R ranks.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from gradherd.comm import collectives, sliced_mean
from gradherd.comm.world import World


@dataclass(frozen=True)
class AllGather:
    """Stack the tensors of all ranks, which have the same shape: results in (R, ...)."""

    tensor: Tensor


@dataclass(frozen=True)
class AllGatherUneven:
    """Concatenate the (n_r,) tensors of all ranks: results in (sum of `sizes`,).

    All ranks know all lengths beforehand, so nothing is padded.
    """

    tensor: Tensor
    sizes: Sequence[int]


@dataclass(frozen=True)
class AllReduceSmall:
    """Sum a small tensor over all ranks: results in a tensor of its shape, equal on all ranks."""

    tensor: Tensor


@dataclass(frozen=True)
class AllToAll:
    """Send row r of `tensor` (R, ...) to rank r: results in (R, ...), row i from rank i."""

    tensor: Tensor


@dataclass(frozen=True)
class ScatterColumns:
    """Send each rank C = D / R columns of `tensor` (n, D), padded: results in (R, n, C)."""

    tensor: Tensor


@dataclass(frozen=True)
class Broadcast:
    """Send the tensor of rank `src` to all ranks; the others give one of its shape and dtype."""

    tensor: Tensor
    src: int


@dataclass(frozen=True)
class SendRecv:
    """Send `tensor` to rank `dst` and receive one like `like` from rank `src`.

    Results in the received tensor, or None. A None rank is no peer; a rank that neither sends nor
    receives in a round yields `SendRecv()`, so that scripts stay in lockstep.
    """

    tensor: Tensor | None = None
    dst: int | None = None
    like: Tensor | None = None
    src: int | None = None


Request: TypeAlias = (
    AllGather | AllGatherUneven | AllReduceSmall | AllToAll | ScatterColumns | Broadcast | SendRecv
)
T = TypeVar("T")
Script: TypeAlias = Generator[Request, Any, T]


class ScriptResult(NamedTuple):
    """The value that a script returned, and the bytes its rank sent."""

    value: Any
    bytes: int


def check_script(returned: object, method: object, name: str) -> None:
    """Raise ValueError unless what a user's `method.name(...)` returned is a script."""
    if not isinstance(returned, Generator):
        raise ValueError(
            f"{type(method).__name__}.{name} must be a generator: add `yield from ()`, got "
            f"{type(returned).__name__}"
        )


def run(script: Script[Any], world: World, *, answer: Any = None) -> ScriptResult:
    """Run the script of this rank. All ranks must call it at the same point.

    Args:
        script: A generator.
        world: The ranks that take part.
        answer: To the request that the script has made, if it was started already.

    Returns:
        What the script returned, and the bytes this rank sent.
    """
    total = 0
    while True:
        try:
            request = script.send(answer)
        except StopIteration as end:
            return ScriptResult(end.value, total)
        answer, sent = _run_collective(request, world)
        total += sent


def _run_collective(request: Request, world: World) -> tuple[Any, int]:
    match request:
        case AllGather(tensor):
            return collectives.all_gather(tensor, world)
        case AllGatherUneven(tensor, sizes):
            return collectives.all_gather_uneven(tensor, sizes, world)
        case AllReduceSmall(tensor):
            return collectives.all_reduce_small(tensor, world)
        case AllToAll(tensor):
            return collectives.all_to_all(tensor, world)
        case ScatterColumns(tensor):
            return sliced_mean.scatter_columns_start(tensor, world).finished()
        case Broadcast(tensor, src):
            # A broadcast writes into its tensor; that of a request belongs to the script.
            return collectives.broadcast(tensor.clone(), world, src=src)
        case SendRecv(tensor, dst, like, src):
            return collectives.send_recv(tensor, dst, like, src, world)


class Runner(Protocol):
    """Runs scripts one after the other and counts the bytes that one rank sends for them."""

    bytes: int

    def start(self, script: Script[None]) -> None:
        """Finish the script before, then begin this one."""
        ...

    def finish(self) -> None:
        """Return when the last script is done. All ranks must call it at the same point."""
        ...


class RankRunner:
    """Runs scripts on this process's rank; the first collective of each overlaps with training.

    Only the first can: what comes after it depends on its result.
    """

    def __init__(self, world: World, *, later: World | None = None) -> None:
        """Start without a script.

        Args:
            world: The ranks that take part.
            later: The same ranks with a group for the host, for all collectives after the first.
        """
        self._world, self._later = world, world if later is None else later
        self._pending: tuple[Script[None], collectives.PendingCollective] | None = None
        self.bytes = 0

    def start(self, script: Script[None]) -> None:
        """Finish the script before, then begin this one, which must gather or scatter first."""
        # First the script before, on all ranks: collectives must be issued in the same order.
        self.finish()
        request = next(script)
        assert isinstance(request, AllGather | ScatterColumns), request
        if isinstance(request, ScatterColumns):
            pending = sliced_mean.scatter_columns_start(request.tensor, self._world)
        elif self._world.size == 1:
            # Without a copy of what may be a whole gradient: scripts do not write to answers.
            pending = collectives.PendingCollective(request.tensor.unsqueeze(0), 0)
        else:
            pending = collectives.all_gather_start(request.tensor, self._world)
        self.bytes += pending.bytes
        self._pending = script, pending

    def finish(self) -> None:
        """Return when the last script is done. All ranks must call it at the same point."""
        if self._pending is None:
            return
        # Cleared first: after an error, `finish` must not wait for the same collective again.
        (script, pending), self._pending = self._pending, None
        self.bytes += run(script, self._later, answer=pending.wait()).bytes


class SharedRunner:
    """Runs a script on behalf of all `size` workers of this process.

    For state that all ranks hold alike, such as orders: one copy of it serves all workers. So a
    request already holds the contribution of every worker: an `AllGather` the stacked (R, ...)
    tensors, `ScatterColumns` all (R, n, D) columns, an `AllReduceSmall` the total. It is its own
    answer; bytes are those of one rank.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.bytes = 0

    def start(self, script: Script[None]) -> None:
        """Run the script."""
        try:
            request = next(script)
            while True:
                self.bytes += self._bytes(request)
                assert isinstance(request, AllGather | AllReduceSmall | ScatterColumns)
                request = script.send(request.tensor)
        except StopIteration:
            return

    def _bytes(self, request: Request) -> int:
        match request:
            case AllGather(tensor):
                return collectives.all_gather_bytes(tensor[0], self._size)
            case AllReduceSmall(tensor):
                return collectives.all_reduce_small_bytes(tensor, self._size)
            case ScatterColumns(tensor):
                return sliced_mean.scatter_columns_bytes(tensor[0], self._size)
        raise RuntimeError(f"a script for all workers cannot ask for {type(request).__name__}")

    def finish(self) -> None:
        """Do nothing: scripts are run when they are started."""


def run_together(scripts: Sequence[Script[Any]]) -> list[ScriptResult]:
    """Run the scripts of all workers of a world in this process, in lockstep.

    Workers share the tensors they are sent: a script must not write into a result.

    Args:
        scripts: One for each worker, in the order of ranks.

    Returns:
        The result of each script, with the bytes that its rank would send.

    Raises:
        RuntimeError: The scripts would hang or fail on real ranks.
    """
    size = len(scripts)
    answers: list[Any] = [None] * size
    totals = [0] * size
    while True:
        requests: list[Request] = []
        returned: list[Any] = []
        for script, answer in zip(scripts, answers, strict=True):
            try:
                requests.append(script.send(answer))
            except StopIteration as end:
                returned.append(end.value)
        if not requests:
            return [ScriptResult(value, sent) for value, sent in zip(returned, totals, strict=True)]
        # Real ranks would hang or mix up messages here; one process can see it and say so.
        kinds = {type(request) for request in requests}
        if returned or len(kinds) > 1:
            names = sorted(kind.__name__ for kind in kinds)
            raise RuntimeError(
                f"workers are out of step: {len(returned)} of {size} have returned, the others "
                f"request {', '.join(names)}"
            )
        results = _run_all(requests)
        answers = [result.value for result in results]
        totals = [total + result.bytes for total, result in zip(totals, results, strict=True)]


def _run_all(requests: Sequence[Any]) -> list[ScriptResult]:
    """Return what the same collective on real ranks would give each of them."""
    size = len(requests)
    tensors = [request.tensor for request in requests]
    match requests[0]:
        case ScatterColumns():
            slices = [sliced_mean.column_slices(tensor, size) for tensor in tensors]
            return _run_all([AllToAll(each) for each in slices])
        case AllGather():
            rows = torch.stack(tensors)
            return [ScriptResult(rows, collectives.all_gather_bytes(t, size)) for t in tensors]
        case AllReduceSmall():
            # The same expression as in `all_reduce_small`, and so the same bits. In a world too
            # large for that, the backend chooses the order of summation.
            total = torch.stack(tensors).sum(0)
            sent_small = collectives.all_reduce_small_bytes(tensors[0], size)
            return [ScriptResult(total, sent_small) for _ in tensors]
        case AllGatherUneven():
            # As gloo does it, without padding; nccl would send more.
            lengths = [len(tensor) for tensor in tensors]
            _check_equal([list(request.sizes) for request in requests] + [lengths], "lengths")
            joined = torch.cat(tensors)
            return [ScriptResult(joined, collectives.all_gather_bytes(t, size)) for t in tensors]
        case AllToAll():
            _check_equal([len(tensor) for tensor in tensors] + [size], "number of rows")
            columns = torch.stack(tensors, dim=1)
            sent = [collectives.all_to_all_bytes(tensor, size) for tensor in tensors]
            return [ScriptResult(*pair) for pair in zip(columns, sent, strict=True)]
        case Broadcast():
            _check_equal([request.src for request in requests], "src")
            src = requests[0].src
            if not 0 <= src < size:
                raise RuntimeError(f"src must be in [0, {size}), got {src}")
            sent_once = collectives.broadcast_bytes(tensors[src], size)
            return [ScriptResult(tensors[src], sent_once)] * size
        case _:
            return _send_recv_all(requests)


def _check_equal(values: Sequence[Any], name: str) -> None:
    """Raise where real ranks would fail or wait for ever."""
    if any(value != values[0] for value in values):
        raise RuntimeError(f"workers do not agree on {name}: {list(values)}")


def _send_recv_all(requests: Sequence[SendRecv]) -> list[ScriptResult]:
    results = []
    for rank, request in enumerate(requests):
        received = None
        if request.dst is not None and requests[request.dst].src != rank:
            raise RuntimeError(f"rank {rank} sends to rank {request.dst}, which does not receive")
        if request.src is not None:
            sender = requests[request.src]
            if sender.dst != rank or sender.tensor is None or request.like is None:
                raise RuntimeError(
                    f"rank {rank} receives from rank {request.src}, which does not send to it"
                )
            received = sender.tensor
        message = request.tensor if request.dst is not None else None
        sent = 0 if message is None else collectives.nbytes(message)
        results.append(ScriptResult(received, sent))
    return results
