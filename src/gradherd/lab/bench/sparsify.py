"""What sparsifying costs: picking on one rank, and a whole exchange over real ranks.

Picking, cases on a vector of `dim`: `copy` is the floor (every number read and written once);
`eager` adds the residual, finds what lies above a threshold and clears it, as one would write it
in torch; `topk` does so with `torch.topk`; `fused` is gradherd's. On a GPU that is the one pass of
`kernels.add_select`, and `tally` is that pass when it also counts all magnitudes (is everything
finite?) and tells the next floor. The ceiling of all but `copy` is a copy of as many bytes as they
must move: residual and gradient, read and written.

Exchange, cases on a gradient of `dim` in buckets as DDP makes them: `dense` is torch's all-reduce
hook, `fp16` its compressing one, `powersgd` its low-rank one; `exdyna` is gradherd's hook with
everything it does: residuals, picking, exchange, and writing the mean.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP

from gradherd.attach.sparse_hook import SparseHook
from gradherd.comm.collectives import all_gather, all_reduce
from gradherd.comm.world import World
from gradherd.lab.bench.memory import Peak
from gradherd.lab.bench.timing import against, seconds
from gradherd.sparsify.choice import target
from gradherd.sparsify.exdyna import ExDyna
from gradherd.sparsify.feedback import Feedback
from gradherd.sparsify.kernels import above, add_select
from gradherd.sparsify.settings import Sparsify
from gradherd.sparsify.tally import Tally

_SIDE = 1000  # of the matrices that the gradient consists of
_BUCKET = 25 * 2**20  # bytes, as DDP's
_GRADIENTS = 5
_WARM = 12  # steps until residuals are as in the middle of a training
# Its second all-reduce starts when the first one ends, in any order of buckets: gloo would hang.
_IN_TURN = {"powersgd"}


def bench_select(dim: int, density: float, device: torch.device) -> list[dict[str, Any]]:
    """Measure what a rank does with a vector by itself, before anything is sent."""
    generator = torch.Generator(device).manual_seed(0)
    fresh = torch.randn(dim, generator=generator, device=device)
    grad, residual = torch.empty_like(fresh), torch.zeros_like(fresh)
    k = target(density, dim)
    threshold = float(fresh.abs().topk(k).values[-1])
    feedback = Feedback(dim, dtype=fresh.dtype, device=device)

    def before() -> None:
        grad.copy_(fresh)
        for kept in (residual, feedback.kept):
            kept.zero_()

    def copy() -> None:
        residual.copy_(grad)

    def eager() -> None:
        residual.add_(grad)
        picked = (residual.abs() >= threshold).nonzero().view(-1)
        residual[picked] = 0
        grad.zero_()

    def topk() -> None:
        residual.add_(grad)
        picked = residual.abs().topk(k).indices
        residual[picked] = 0
        grad.zero_()

    def fused() -> None:
        feedback.add(0, grad, 1.0)
        grad.zero_()
        feedback.finite()
        feedback.commit(above(feedback.acc, threshold), None)

    floor = torch.tensor(threshold, device=device)
    counted = Tally.around(floor)

    def one_pass(tally: Tally | None = None) -> None:
        kept, out = feedback.kept, feedback.acc
        add_select(kept, grad, 1.0, out, floor, 2 * k, tally=tally, clear=True)

    def tally() -> None:
        counted.counts.zero_()
        one_pass(counted)
        counted.floor(k)

    cases: dict[str, Callable[[], None]] = {"copy": copy, "eager": eager, "topk": topk}
    cases |= {"fused": one_pass, "tally": tally} if device.type == "cuda" else {"fused": fused}
    rows = []
    for name, case in cases.items():
        taken = seconds(case, device, before=before)
        before()
        with Peak(device) as peak:
            case()
        rows.append(_row(name, 1, dim, taken, 0, peak.bytes))
        # A copy moves two numbers for each coordinate, the others four.
        rows[-1] |= against(rows[0]["seconds"] * (1 if name == "copy" else 2), taken)
    return _with_ratios(rows)


class Gradients:
    """A few gradients in turn: the same one over and over would pile up in the residuals."""

    def __init__(self, sets: list[list[Tensor]]) -> None:
        self._sets = itertools.cycle(sets)

    def following(self) -> list[Tensor]:
        """Return the gradient of the next step, by buckets."""
        return next(self._sets)


class Bucket:
    """A bucket as DDP hands it to a hook."""

    def __init__(self, index: int, count: int, parameters: Sequence[nn.Parameter]) -> None:
        self._index, self._last = index, index == count - 1
        self._parameters = list(parameters)
        self._flat = torch.empty(sum(p.numel() for p in parameters))

    def index(self) -> int:
        """Return which of the buckets this is."""
        return self._index

    def is_last(self) -> bool:
        """Tell whether it is the last."""
        return self._last

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters in it."""
        return self._parameters

    def buffer(self) -> Tensor:
        """Return all gradients in it, flat."""
        return self._flat

    def set_buffer(self, tensor: Tensor) -> None:
        """Replace its gradients."""
        self._flat = tensor

    def gradients(self) -> list[Tensor]:
        """Return the gradients in it."""
        pieces = torch.split(self._flat, [p.numel() for p in self._parameters])
        return [piece.view(p.shape) for piece, p in zip(pieces, self._parameters, strict=True)]


def bench_exchange(dim: int, density: float, repeats: int) -> list[dict[str, Any]]:
    """Measure all hooks in turn on this rank, so that noise meets them alike."""
    world = World.detect()
    model = nn.ParameterList(_matrices(dim))
    buckets = _buckets(list(model))
    generator = torch.Generator().manual_seed(world.rank)
    grads = Gradients(
        [
            [torch.randn(len(bucket.buffer()), generator=generator) for bucket in buckets]
            for _ in range(_GRADIENTS)
        ]
    )
    sparse = SparseHook(DDP(model), Sparsify(method=ExDyna(density=density)))
    low_rank = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    group = dist.group.WORLD
    assert group is not None
    hooks: dict[str, Callable[[Any], Future[Tensor]]] = {
        "dense": lambda bucket: default_hooks.allreduce_hook(group, bucket),
        "fp16": lambda bucket: default_hooks.fp16_compress_hook(group, bucket),
        "powersgd": lambda bucket: powerSGD_hook.powerSGD_hook(low_rank, bucket),
        "exdyna": sparse.take,
    }
    times: dict[str, list[float]] = {name: [] for name in hooks}
    peaks: dict[str, int | None] = {}
    for name, hook in hooks.items():
        for _ in range(_WARM):
            _step(hook, buckets, grads, world, name in _IN_TURN)
        with Peak(torch.device("cpu")) as peak:
            _step(hook, buckets, grads, world, name in _IN_TURN)
        peaks[name] = peak.bytes
    for _ in range(repeats):
        for name, hook in hooks.items():
            times[name].append(_step(hook, buckets, grads, world, name in _IN_TURN))
    dense = 2 * 4 * dim * (world.size - 1) // world.size
    sent = {
        "dense": dense,
        "fp16": dense // 2,
        "powersgd": sum(sum(p.shape) for p in model) * 2 * 4 * (world.size - 1) // world.size,
        "exdyna": sparse.metrics()["bytes"],
    }
    rows = []
    for name, taken in times.items():
        # The slowest rank counts, at each step.
        slowest = all_gather(torch.tensor(taken), world).value.amax(0)
        rows.append(_row(name, world.size, dim, float(slowest.median()), sent[name], peaks[name]))
    return _with_ratios(rows)


def _matrices(dim: int) -> list[nn.Parameter]:
    whole, rest = divmod(dim, _SIDE * _SIDE)
    shapes = [(_SIDE, _SIDE)] * whole + ([(rest // _SIDE, _SIDE)] if rest >= _SIDE else [])
    shapes += [(1, rest % _SIDE)] if rest % _SIDE else []
    return [nn.Parameter(torch.zeros(shape)) for shape in shapes]


def _buckets(parameters: Sequence[nn.Parameter]) -> list[Bucket]:
    groups: list[list[nn.Parameter]] = [[]]
    for parameter in reversed(parameters):
        if groups[-1] and 4 * sum(p.numel() for p in groups[-1]) >= _BUCKET:
            groups.append([])
        groups[-1].append(parameter)
    return [Bucket(index, len(groups), group) for index, group in enumerate(groups)]


def _step(
    hook: Callable[[Any], Future[Tensor]],
    buckets: Sequence[Bucket],
    grads: "Gradients",
    world: World,
    in_turn: bool = False,
) -> float:
    for bucket, grad in zip(buckets, grads.following(), strict=True):
        bucket.buffer().copy_(grad)
    all_reduce(torch.zeros(1), world)  # start together
    begin = time.perf_counter()
    waiting = []
    for bucket in buckets:
        waiting.append(hook(bucket))
        if in_turn:
            waiting[-1].wait()
    for future in waiting:
        future.wait()
    return time.perf_counter() - begin


def _row(
    case: str, workers: int, dim: int, taken: float, sent: int, peak: int | None
) -> dict[str, Any]:
    return {
        "case": case,
        "workers": workers,
        "dim": dim,
        "seconds": taken,
        "bytes": sent,
        "peak_bytes": peak,
    }


def _with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add each row's time as a part of the first one's, and its bytes."""
    for row in rows:
        row["ratio"] = row["seconds"] / rows[0]["seconds"]
        row["bytes_ratio"] = row["bytes"] / rows[0]["bytes"] if rows[0]["bytes"] else 0.0
    return rows
