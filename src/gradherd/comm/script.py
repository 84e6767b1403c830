"""Write what ranks say to each other once; run it on real ranks, or on many in one process.

A script is a generator: it yields what it wants to ask of the others and is sent the answer.
`run` asks through a process group. `run_together` runs the scripts of all workers of a world in
one process, in step. Both give the same answers to the bit, and count the same bytes.

    def total(mine):
        rows = yield Gather(mine)
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
class Gather:
    """Stack everybody's `tensor`, all of one shape: answers (R, ...)."""

    tensor: Tensor


@dataclass(frozen=True)
class GatherUneven:
    """Lay everybody's (n_r,) `tensor` end to end: answers (sum of `sizes`,).

    Everybody knows the lengths beforehand, so only what is needed travels.
    """

    tensor: Tensor
    sizes: Sequence[int]


@dataclass(frozen=True)
class Deal:
    """Send row r of `tensor` (R, ...) to rank r: answers (R, ...), row i from rank i."""

    tensor: Tensor


@dataclass(frozen=True)
class Spread:
    """Give rank `source`'s `tensor` to everybody; the others tell its shape and kind."""

    tensor: Tensor
    source: int


@dataclass(frozen=True)
class Pass:
    """Give `tensor` to rank `to` and take one like `like` from rank `source`; None is nobody.

    Answers what was taken, or None. Everybody takes part in a round, also who does neither.
    """

    tensor: Tensor | None = None
    to: int | None = None
    like: Tensor | None = None
    source: int | None = None


Request: TypeAlias = Gather | GatherUneven | Deal | Spread | Pass
T = TypeVar("T")
Script: TypeAlias = Generator[Request, Any, T]


class Told(NamedTuple):
    """What a script returned, and the bytes its rank sent."""

    value: Any
    bytes: int


def run(script: Script[Any], world: World) -> Told:
    """Run this rank's script; all ranks must run theirs at the same point."""
    answer: Any = None
    sent = 0
    while True:
        try:
            request = script.send(answer)
        except StopIteration as end:
            return Told(end.value, sent)
        answer, cost = _ask(request, world)
        sent += cost


def _ask(request: Request, world: World) -> tuple[Any, int]:
    match request:
        case Gather(tensor):
            return collectives.all_gather(tensor, world)
        case GatherUneven(tensor, sizes):
            return collectives.all_gather_sized(tensor, sizes, world)
        case Deal(tensor):
            return collectives.all_to_all(tensor, world)
        case Spread(tensor, source):
            return collectives.broadcast(tensor.clone(), world, source=source)
        case Pass(tensor, to, like, source):
            return collectives.pass_on(tensor, to, like, source, world)


def run_together(scripts: Sequence[Script[Any]]) -> list[Told]:
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
            return [Told(value, cost) for value, cost in zip(ends, sent, strict=True)]
        kinds = {type(request) for request in requests}
        if ends or len(kinds) > 1:
            asked = sorted(kind.__name__ for kind in kinds)
            raise RuntimeError(f"workers fell out of step: {len(ends)} ended, others ask {asked}")
        results = _answer_all(requests)
        answers = [result.value for result in results]
        sent = [cost + result.bytes for cost, result in zip(sent, results, strict=True)]


def _answer_all(requests: Sequence[Any]) -> list[Told]:
    size = len(requests)
    tensors = [request.tensor for request in requests]
    match requests[0]:
        case Gather():
            rows = torch.stack(tensors)
            return [Told(rows, collectives.gather_bytes(t, size)) for t in tensors]
        case GatherUneven():
            sizes = [len(tensor) for tensor in tensors]
            _alike([list(request.sizes) for request in requests] + [sizes], "lengths")
            joined = torch.cat(tensors)
            return [Told(joined, collectives.gather_bytes(t, size)) for t in tensors]
        case Deal():
            _alike([len(tensor) for tensor in tensors] + [size], "rows")
            return [
                Told(torch.stack([t[rank] for t in tensors]), collectives.deal_bytes(own, size))
                for rank, own in enumerate(tensors)
            ]
        case Spread():
            _alike([request.source for request in requests], "sources")
            if not 0 <= requests[0].source < size:
                raise RuntimeError(f"there is no rank {requests[0].source} to spread from")
            value = tensors[requests[0].source]
            return [Told(value, collectives.spread_bytes(value, size)) for _ in tensors]
        case _:
            return _pass_all(requests)


def _alike(said: Sequence[Any], what: str) -> None:
    """Raise where real ranks would fail or wait for ever."""
    if any(one != said[0] for one in said):
        raise RuntimeError(f"workers do not agree on {what}: {list(said)}")


def _pass_all(requests: Sequence[Pass]) -> list[Told]:
    results = []
    for rank, request in enumerate(requests):
        taken = None
        if request.to is not None and requests[request.to].source != rank:
            raise RuntimeError(f"rank {request.to} does not take what rank {rank} gives")
        if request.source is not None:
            giver = requests[request.source]
            if giver.to != rank or giver.tensor is None or request.like is None:
                raise RuntimeError(f"rank {rank} waits for rank {request.source} in vain")
            taken = giver.tensor
        given = request.tensor if request.to is not None else None
        results.append(Told(taken, 0 if given is None else collectives.nbytes(given)))
    return results
