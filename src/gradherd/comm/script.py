"""Write what ranks say to each other once; run it on real ranks, or on many in one process.

A script is a generator: it yields what it wants to ask of the others and is sent the answer.
`run` asks through a process group. `run_together` runs the scripts of all workers of a world in
one process, in step. Both give the same answers to the bit, and count the same bytes.

    def total(mine):
        rows = yield AllGather(mine)
        return rows.sum(0)

Shapes: R ranks.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from gradherd.comm import collectives
from gradherd.comm.world import World


@dataclass(frozen=True)
class AllGather:
    """Stack everybody's `tensor`, all of one shape: answers (R, ...)."""

    tensor: Tensor


@dataclass(frozen=True)
class AllGatherUneven:
    """Lay everybody's (n_r,) `tensor` end to end: answers (sum of `sizes`,).

    Everybody knows the lengths beforehand, so only what is needed travels.
    """

    tensor: Tensor
    sizes: Sequence[int]


@dataclass(frozen=True)
class AllToAll:
    """Send row r of `tensor` (R, ...) to rank r: answers (R, ...), row i from rank i."""

    tensor: Tensor


@dataclass(frozen=True)
class Broadcast:
    """Give rank `src`'s `tensor` to everybody; the others tell its shape and kind."""

    tensor: Tensor
    src: int


@dataclass(frozen=True)
class SendRecv:
    """Give `tensor` to rank `dst` and take one like `like` from rank `src`; None is nobody.

    Answers what was taken, or None. Everybody takes part in a round, also who does neither.
    """

    tensor: Tensor | None = None
    dst: int | None = None
    like: Tensor | None = None
    src: int | None = None


Request: TypeAlias = AllGather | AllGatherUneven | AllToAll | Broadcast | SendRecv
T = TypeVar("T")
Script: TypeAlias = Generator[Request, Any, T]


class ScriptResult(NamedTuple):
    """What a script returned, and the bytes its rank sent."""

    value: Any
    bytes: int


def run(script: Script[Any], world: World) -> ScriptResult:
    """Run this rank's script; all ranks must run theirs at the same point."""
    answer: Any = None
    sent = 0
    while True:
        try:
            request = script.send(answer)
        except StopIteration as end:
            return ScriptResult(end.value, sent)
        answer, cost = _ask(request, world)
        sent += cost


def _ask(request: Request, world: World) -> tuple[Any, int]:
    match request:
        case AllGather(tensor):
            return collectives.all_gather(tensor, world)
        case AllGatherUneven(tensor, sizes):
            return collectives.all_gather_uneven(tensor, sizes, world)
        case AllToAll(tensor):
            return collectives.all_to_all(tensor, world)
        case Broadcast(tensor, src):
            return collectives.broadcast(tensor.clone(), world, src=src)
        case SendRecv(tensor, dst, like, src):
            return collectives.send_recv(tensor, dst, like, src, world)


def run_together(scripts: Sequence[Script[Any]]) -> list[ScriptResult]:
    """Run the scripts of all workers of a world, in step.

    Answers are shared between workers: a script must not write into one.
    """
    size = len(scripts)
    answers: list[Any] = [None] * size
    sent = [0] * size
    while True:
        requests: list[Request] = []
        ends: list[Any] = []
        for script, answer in zip(scripts, answers, strict=True):
            try:
                requests.append(script.send(answer))
            except StopIteration as end:
                ends.append(end.value)
        if not requests:
            return [ScriptResult(value, cost) for value, cost in zip(ends, sent, strict=True)]
        kinds = {type(request) for request in requests}
        if ends or len(kinds) > 1:
            asked = sorted(kind.__name__ for kind in kinds)
            raise RuntimeError(f"workers fell out of step: {len(ends)} ended, others ask {asked}")
        results = _answer_all(requests)
        answers = [result.value for result in results]
        sent = [cost + result.bytes for cost, result in zip(sent, results, strict=True)]


def _answer_all(requests: Sequence[Any]) -> list[ScriptResult]:
    size = len(requests)
    tensors = [request.tensor for request in requests]
    match requests[0]:
        case AllGather():
            rows = torch.stack(tensors)
            return [ScriptResult(rows, collectives.all_gather_bytes(t, size)) for t in tensors]
        case AllGatherUneven():
            sizes = [len(tensor) for tensor in tensors]
            _alike([list(request.sizes) for request in requests] + [sizes], "lengths")
            joined = torch.cat(tensors)
            return [ScriptResult(joined, collectives.all_gather_bytes(t, size)) for t in tensors]
        case AllToAll():
            _alike([len(tensor) for tensor in tensors] + [size], "rows")
            return [
                ScriptResult(
                    torch.stack([t[rank] for t in tensors]), collectives.all_to_all_bytes(own, size)
                )
                for rank, own in enumerate(tensors)
            ]
        case Broadcast():
            _alike([request.src for request in requests], "sources")
            if not 0 <= requests[0].src < size:
                raise RuntimeError(f"there is no rank {requests[0].src} to spread from")
            value = tensors[requests[0].src]
            return [ScriptResult(value, collectives.broadcast_bytes(value, size)) for _ in tensors]
        case _:
            return _pass_all(requests)


def _alike(said: Sequence[Any], what: str) -> None:
    """Raise where real ranks would fail or wait for ever."""
    if any(one != said[0] for one in said):
        raise RuntimeError(f"workers do not agree on {what}: {list(said)}")


def _pass_all(requests: Sequence[SendRecv]) -> list[ScriptResult]:
    results = []
    for rank, request in enumerate(requests):
        taken = None
        if request.dst is not None and requests[request.dst].src != rank:
            raise RuntimeError(f"rank {request.dst} does not take what rank {rank} gives")
        if request.src is not None:
            giver = requests[request.src]
            if giver.dst != rank or giver.tensor is None or request.like is None:
                raise RuntimeError(f"rank {rank} waits for rank {request.src} in vain")
            taken = giver.tensor
        given = request.tensor if request.dst is not None else None
        results.append(ScriptResult(taken, 0 if given is None else collectives.nbytes(given)))
    return results
