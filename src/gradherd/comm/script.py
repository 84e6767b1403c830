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

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from gradherd.comm import collectives, sliced_mean
from gradherd.comm.collectives import PendingCollective
from gradherd.comm.world import World

SMALL_WORLD = 8
"""Up to this many ranks an all-gather of a small tensor takes fewer hops than an all-reduce."""


class ScriptResult(NamedTuple):
    """The value that a script returned, and the bytes its rank sent."""

    value: Any
    bytes: int


class Request(ABC):
    """A collective that a script asks for; a method of one's own may bring another."""

    @abstractmethod
    def start(self, world: World) -> PendingCollective:
        """Start it on this rank; the result is the script's answer."""

    @staticmethod
    @abstractmethod
    def answer_all(requests: Sequence[Any]) -> list[ScriptResult]:
        """Return what real ranks would get that make these requests, in their order."""

    def bytes_for_all(self, size: int) -> int:
        """Return the bytes of one of `size` ranks, if this request is made once for all of them."""
        raise RuntimeError(f"a script for all workers cannot ask for {type(self).__name__}")


@dataclass(frozen=True)
class AllGather(Request):
    """Stack the tensors of all ranks, which have the same shape: results in (R, ...)."""

    tensor: Tensor

    def start(self, world: World) -> PendingCollective:
        """Gather; without a copy if there is nobody else: it may be a whole gradient."""
        if world.size == 1:
            return PendingCollective(self.tensor.unsqueeze(0), 0)
        return collectives.all_gather_start(self.tensor, world)

    @staticmethod
    def answer_all(requests: Sequence["AllGather"]) -> list[ScriptResult]:
        """Stack."""
        rows = torch.stack([request.tensor for request in requests])
        sent = collectives.all_gather_bytes(rows[0], len(rows))
        return [ScriptResult(rows, sent)] * len(rows)

    def bytes_for_all(self, size: int) -> int:
        """Return the bytes of one of the stacked tensors."""
        return collectives.all_gather_bytes(self.tensor[0], size)


@dataclass(frozen=True)
class AllReduceSmall(Request):
    """Sum a small tensor over all ranks: results in a tensor of its shape, equal on all ranks.

    For a small tensor latency counts, not bandwidth: among few ranks one all-gather and a local
    sum in rank order take fewer hops than an all-reduce.
    """

    tensor: Tensor

    def start(self, world: World) -> PendingCollective:
        """Sum."""
        if world.size > SMALL_WORLD:
            # A copy: the tensor is the script's own, and scripts use theirs again.
            return collectives.all_reduce_start(self.tensor.clone(), world)
        rows, sent = collectives.all_gather(self.tensor, world)
        return PendingCollective(rows.sum(0), sent)

    @staticmethod
    def answer_all(requests: Sequence["AllReduceSmall"]) -> list[ScriptResult]:
        """Sum as `start` does, and so to the same bits.

        In a world too large for that, the backend chooses the order of summation.
        """
        total = torch.stack([request.tensor for request in requests]).sum(0)
        sent = requests[0].bytes_for_all(len(requests))
        return [ScriptResult(total, sent)] * len(requests)

    def bytes_for_all(self, size: int) -> int:
        """Return the bytes of the total."""
        if size > SMALL_WORLD:
            return collectives.all_reduce_bytes(self.tensor, size)
        return collectives.all_gather_bytes(self.tensor, size)


@dataclass(frozen=True)
class AllToAll(Request):
    """Send row r of `tensor` (R, ...) to rank r: results in (R, ...), row i from rank i."""

    tensor: Tensor

    def start(self, world: World) -> PendingCollective:
        """Send all rows."""
        return collectives.all_to_all_start(self.tensor, world)

    @staticmethod
    def answer_all(requests: Sequence["AllToAll"]) -> list[ScriptResult]:
        """Transpose."""
        tensors, size = [request.tensor for request in requests], len(requests)
        check_equal([len(tensor) for tensor in tensors] + [size], "number of rows")
        columns = torch.stack(tensors, dim=1)
        sent = collectives.all_to_all_bytes(tensors[0], size)
        return [ScriptResult(column, sent) for column in columns]


@dataclass(frozen=True)
class ScatterColumns(Request):
    """Send each rank C = D / R columns of `tensor` (n, D), padded: results in (R, n, C)."""

    tensor: Tensor

    def start(self, world: World) -> PendingCollective:
        """Send all slices."""
        return AllToAll(sliced_mean.column_slices(self.tensor, world.size)).start(world)

    @staticmethod
    def answer_all(requests: Sequence["ScatterColumns"]) -> list[ScriptResult]:
        """Send slices as rows."""
        slices = [sliced_mean.column_slices(request.tensor, len(requests)) for request in requests]
        return AllToAll.answer_all([AllToAll(each) for each in slices])

    def bytes_for_all(self, size: int) -> int:
        """Return the bytes of one rank's rows."""
        rows, columns = self.tensor[0], sliced_mean.padded_length(self.tensor.shape[-1], size)
        return len(rows) * columns * rows.element_size() * (size - 1) // size


T = TypeVar("T")
Script: TypeAlias = Generator[Request, Any, T]


def check_script(returned: object, method: object, name: str) -> None:
    """Raise ValueError unless what a user's `method.name(...)` returned is a script."""
    if not isinstance(returned, Generator):
        raise ValueError(
            f"{type(method).__name__}.{name} must be a generator: add `yield from ()`, got "
            f"{type(returned).__name__}"
        )


def run(script: Script[Any], world: World, *, answer: Any = None) -> ScriptResult:
    """Run the script of this rank. All ranks must call it at the same point.

    If the script has made its first request already, `answer` is the answer to it.
    """
    total = 0
    while True:
        try:
            request = script.send(answer)
        except StopIteration as end:
            return ScriptResult(end.value, total)
        answer, sent = request.start(world).finished()
        total += sent


class RankRunner:
    """Runs scripts on this process's rank; the first collective of each overlaps with training.

    Only the first can: what comes after it depends on its result.
    """

    def __init__(self, world: World, *, later: World | None = None) -> None:
        # The same ranks with a group for the host, for all collectives after the first.
        self._world, self._later = world, world if later is None else later
        self._pending: tuple[Script[None], PendingCollective] | None = None
        self.bytes = 0

    def start(self, script: Script[None]) -> None:
        """Finish the script before, then begin this one."""
        # First the script before, on all ranks: collectives must be issued in the same order.
        self.finish()
        pending = next(script).start(self._world)
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
            request: Any = next(script)
            while True:
                self.bytes += request.bytes_for_all(self._size)
                request = script.send(request.tensor)
        except StopIteration:
            return

    def finish(self) -> None:
        """Do nothing: scripts are run when they are started."""


Runner: TypeAlias = RankRunner | SharedRunner
"""Runs scripts one after the other and counts the bytes that one rank sends for them."""


def run_together(scripts: Sequence[Script[Any]]) -> list[ScriptResult]:
    """Run the scripts of all workers of a world in this process, in lockstep.

    Workers share the tensors they are sent: a script must not write into a result.

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
        results = requests[0].answer_all(requests)
        answers = [result.value for result in results]
        totals = [total + result.bytes for total, result in zip(totals, results, strict=True)]


def check_equal(values: Sequence[Any], name: str) -> None:
    """Raise where real ranks would fail or wait for ever."""
    if any(value != values[0] for value in values):
        raise RuntimeError(f"workers do not agree on {name}: {list(values)}")
