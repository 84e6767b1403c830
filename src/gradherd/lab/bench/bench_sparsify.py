"""Time sparsification: selection on one rank, and whole exchanges over real ranks.

Selection, on a vector of `dim` elements: `copy` reads and writes every element once; `eager` adds
the residual, finds what is above a threshold and clears it, as one would write it in torch; `topk`
does the same with `torch.topk`; `fused` is what gradherd's hook does. On a GPU these are a kernel
that adds, checks, clears and marks (`kernels.add`), and one that reads the marks. The
ceiling of all but `copy` is a copy of the bytes they must move: residual and gradient, each read
and written. What a whole training step with the hook takes is in `bench_hook`.

Exchange, on a gradient of `dim` elements in DDP's buckets: `dense` is torch's all-reduce hook,
`fp16` its compressing hook, `powersgd` its low-rank hook; `exdyna` is gradherd's hook with
everything it does: residuals, selection, exchange, and writing the mean.
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

from gradherd.comm.collectives import all_gather, all_reduce
from gradherd.comm.world import World
from gradherd.hooks.sparse_hook import SparseHook
from gradherd.lab.bench.timing import PeakMemory, ceiling_keys, median_seconds
from gradherd.sparsify.kernels import add, indices_above, marked, marks_for
from gradherd.sparsify.marks import TILE
from gradherd.sparsify.partitioned import ExDyna
from gradherd.sparsify.selector import target_count
from gradherd.sparsify.settings import Sparsify
from gradherd.sparsify.worker import ErrorFeedback

_SIDE = 1000  # rows and columns of the matrices that make up the gradient
_BUCKET_BYTES = 25 * 2**20  # DDP's default
_GRADIENTS = 5
_WARMUP_STEPS = 12  # until residuals are as large as in the middle of training
# PowerSGD starts a second all-reduce when the first one ends. With several buckets in flight the
# order of these differs between ranks, and gloo would hang.
_ONE_BUCKET_AT_A_TIME = {"powersgd"}


def bench_select_on_one_core(
    dim: int, density: float, device: torch.device
) -> list[dict[str, Any]]:
    """Run `bench_select` with one thread: a local rank has one core as well, so rows compare."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return bench_select(dim, density, device)
    finally:
        torch.set_num_threads(threads)


def bench_select(dim: int, density: float, device: torch.device) -> list[dict[str, Any]]:
    """Measure what a rank does with its own vector before anything is sent.

    Args:
        dim: Elements of the vector.
        density: Share of them that is selected.
        device: Where to compute.

    Returns:
        A row for each case, with ratios to `copy`.
    """
    generator = torch.Generator(device).manual_seed(0)
    fresh = torch.randn(dim, generator=generator, device=device)
    grad, residual = torch.empty_like(fresh), torch.zeros_like(fresh)
    k = target_count(density, dim)
    # Computed outside the timed calls: exdyna brings its threshold along from the step before.
    threshold = float(fresh.abs().topk(k).values[-1])
    feedback = ErrorFeedback(dim, dtype=fresh.dtype, device=device)

    # Every call must select the same elements; residuals that grow would change that.
    def reset() -> None:
        grad.copy_(fresh)
        for memory in (residual, feedback.residual):
            memory.zero_()

    def copy() -> None:
        residual.copy_(grad)

    def eager() -> None:
        residual.add_(grad)
        selected = (residual.abs() >= threshold).nonzero().view(-1)
        residual[selected] = 0
        grad.zero_()

    def topk() -> None:
        residual.add_(grad)
        selected = residual.abs().topk(k).indices
        residual[selected] = 0
        grad.zero_()

    def fused() -> None:
        feedback.add(0, grad, 1.0)
        grad.zero_()
        # Part of the hook: a gradient that is not finite must skip the step.
        feedback.finite()
        feedback.commit(indices_above(feedback.acc, threshold), None)

    level, scale = (torch.tensor(x, device=device) for x in (threshold, 1.0))
    bad = torch.zeros(1, dtype=torch.int32, device=device)
    # What one launch of the hook does, and how candidates are read off its marks.
    tiles = -(-dim // TILE) * TILE
    padded = torch.zeros(tiles if device.type == "cuda" else 0, device=device)
    marks = marks_for(padded)

    def one_pass() -> None:
        out, residual = padded[:dim], feedback.residual
        add(residual, grad, scale, out, bad=bad, clear=True, threshold=level, marks=marks)
        marked(padded, level, marks, 2 * k)

    cases: dict[str, Callable[[], None]] = {"copy": copy, "eager": eager, "topk": topk}
    cases["fused"] = one_pass if device.type == "cuda" else fused
    rows = []
    for name, case in cases.items():
        seconds = median_seconds(case, device, setup=reset)
        reset()
        with PeakMemory(device) as peak:
            case()
        rows.append(_row(name, 1, dim, seconds, 0, peak.bytes))
        # A copy reads and writes one vector, the others two.
        rows[-1] |= ceiling_keys(rows[0]["seconds"] * (1 if name == "copy" else 2), seconds)
    return _with_ratios(rows)


class GradientCycle:
    """A few gradients in rotation: the same one every step would pile up in the residuals."""

    def __init__(self, sets: list[list[Tensor]]) -> None:
        self._sets = itertools.cycle(sets)

    def next(self) -> list[Tensor]:
        """Return the gradient of the next step, one tensor per bucket."""
        return next(self._sets)


class BenchBucket:
    """A gradient bucket with the methods of `torch.distributed.GradBucket`."""

    def __init__(self, index: int, count: int, parameters: Sequence[nn.Parameter]) -> None:
        self._index, self._last = index, index == count - 1
        self._parameters = list(parameters)
        self._flat = torch.empty(sum(p.numel() for p in parameters))

    def index(self) -> int:
        """Return the index of this bucket."""
        return self._index

    def is_last(self) -> bool:
        """Return whether this is the last bucket."""
        return self._last

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of this bucket."""
        return self._parameters

    def buffer(self) -> Tensor:
        """Return all gradients of this bucket as one flat tensor."""
        return self._flat

    def set_buffer(self, tensor: Tensor) -> None:
        """Replace the flat tensor of gradients."""
        self._flat = tensor

    def gradients(self) -> list[Tensor]:
        """Return the gradient of each parameter, as views."""
        pieces = torch.split(self._flat, [p.numel() for p in self._parameters])
        return [piece.view(p.shape) for piece, p in zip(pieces, self._parameters, strict=True)]


def bench_exchange(dim: int, density: float, repeats: int) -> list[dict[str, Any]]:
    """Measure on this rank, alternating between the hooks so that noise hits all alike.

    Args:
        dim: Elements of the gradient.
        density: Share of them that exdyna sends.
        repeats: Exchanges measured of each hook; the median counts.

    Returns:
        A row for each hook, with ratios to `dense`.
    """
    world = World.detect()
    model = nn.ParameterList(_matrices(dim))
    buckets = _buckets(list(model))
    generator = torch.Generator().manual_seed(world.rank)
    grads = GradientCycle(
        [
            [torch.randn(len(bucket.buffer()), generator=generator) for bucket in buckets]
            for _ in range(_GRADIENTS)
        ]
    )
    # DDP serves only for its parameters and group: buckets come from this file, so that all hooks
    # see the same ones.
    sparse = SparseHook(DDP(model), Sparsify(method=ExDyna(density=density)))
    # start_powerSGD_iter is at least 2 in torch; the steps before it are dense, and the warm-up
    # covers them.
    low_rank = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    group = dist.group.WORLD
    assert group is not None
    hooks: dict[str, Callable[[Any], Future[Tensor]]] = {
        "dense": lambda bucket: default_hooks.allreduce_hook(group, bucket),
        "fp16": lambda bucket: default_hooks.fp16_compress_hook(group, bucket),
        "powersgd": lambda bucket: powerSGD_hook.powerSGD_hook(low_rank, bucket),
        "exdyna": sparse.on_bucket,
    }
    times: dict[str, list[float]] = {name: [] for name in hooks}
    peaks: dict[str, int | None] = {}
    for name, hook in hooks.items():
        for _ in range(_WARMUP_STEPS):
            _step(hook, buckets, grads, world, name in _ONE_BUCKET_AT_A_TIME)
        with PeakMemory(torch.device("cpu")) as peak:
            _step(hook, buckets, grads, world, name in _ONE_BUCKET_AT_A_TIME)
        peaks[name] = peak.bytes
    for _ in range(repeats):
        for name, hook in hooks.items():
            times[name].append(_step(hook, buckets, grads, world, name in _ONE_BUCKET_AT_A_TIME))
    dense = 2 * 4 * dim * (world.size - 1) // world.size
    # torch's hooks do not count bytes, so these are what a ring all-reduce sends.
    sent = {
        "dense": dense,
        "fp16": dense // 2,
        "powersgd": sum(sum(p.shape) for p in model) * 2 * 4 * (world.size - 1) // world.size,
        "exdyna": sparse.metrics()["bytes"],
    }
    rows = []
    for name, steps in times.items():
        # A step takes as long as its slowest rank.
        slowest = all_gather(torch.tensor(steps), world).value.amax(0)
        rows.append(_row(name, world.size, dim, float(slowest.median()), sent[name], peaks[name]))
    return _with_ratios(rows)


def _matrices(dim: int) -> list[nn.Parameter]:
    whole, rest = divmod(dim, _SIDE * _SIDE)
    shapes = [(_SIDE, _SIDE)] * whole + ([(rest // _SIDE, _SIDE)] if rest >= _SIDE else [])
    shapes += [(1, rest % _SIDE)] if rest % _SIDE else []
    return [nn.Parameter(torch.zeros(shape)) for shape in shapes]


def _buckets(parameters: Sequence[nn.Parameter]) -> list[BenchBucket]:
    groups: list[list[nn.Parameter]] = [[]]
    # DDP fills buckets from the last layer, whose gradients are ready first.
    for parameter in reversed(parameters):
        if groups[-1] and 4 * sum(p.numel() for p in groups[-1]) >= _BUCKET_BYTES:
            groups.append([])
        groups[-1].append(parameter)
    return [BenchBucket(index, len(groups), group) for index, group in enumerate(groups)]


def _step(
    hook: Callable[[Any], Future[Tensor]],
    buckets: Sequence[BenchBucket],
    grads: GradientCycle,
    world: World,
    one_at_a_time: bool = False,
) -> float:
    for bucket, grad in zip(buckets, grads.next(), strict=True):
        bucket.buffer().copy_(grad)
    all_reduce(torch.zeros(1), world)  # a barrier: start together
    begin = time.perf_counter()
    futures = []
    for bucket in buckets:
        futures.append(hook(bucket))
        if one_at_a_time:
            futures[-1].wait()
    # All hooks first, then the waits: buckets are in flight together, as in a backward.
    for future in futures:
        future.wait()
    return time.perf_counter() - begin


def _row(
    case: str, workers: int, dim: int, seconds: float, sent: int, peak: int | None
) -> dict[str, Any]:
    return {
        "case": case,
        "workers": workers,
        "dim": dim,
        "seconds": seconds,
        "bytes": sent,
        "peak_bytes": peak,
    }


def _with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add each row's time and bytes relative to the first row's."""
    for row in rows:
        row["ratio"] = row["seconds"] / rows[0]["seconds"]
        row["bytes_ratio"] = row["bytes"] / rows[0]["bytes"] if rows[0]["bytes"] else 0.0
    return rows
