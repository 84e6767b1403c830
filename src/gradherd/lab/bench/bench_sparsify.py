"""Time sparsification: selection on one rank, and whole exchanges over real ranks.

Selection, on a vector of `dim` elements: `copy` reads and writes every element once; `eager` adds
the residual, finds what is above a threshold and clears it, as one would write it in torch; `topk`
does the same with `torch.topk`; `fused` is what gradherd's hook does. On a GPU these are a kernel
that adds, checks, clears and marks (`kernels.add`), and one that reads the marks. The
ceiling of all but `copy` is a copy of the bytes they must move: residual and gradient, each read
and written.

Step, a whole DDP step of an MLP on one rank: one rank sends nothing, so what it takes beyond the
dense one is what the hook itself costs: adding to residuals, selecting, writing the mean back, and
waiting for the host where that happens.

Exchange, DDP's backward on gradients of `dim` elements that are given: `dense` is its own
all-reduce, `fp16` torch's compressing hook, `powersgd` its low-rank hook; `exdyna` is gradherd's
hook with everything it does: residuals, selection, exchange, and writing the mean.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from gradherd.comm.collectives import all_gather, all_reduce
from gradherd.comm.world import World
from gradherd.hooks.attach import attach
from gradherd.lab.bench.timing import (
    PeakMemory,
    ceiling_keys,
    elapsed_seconds,
    make_rows,
    median_seconds,
    medians_in_turns,
)
from gradherd.sparsify.kernels import add, indices_above, marked, marks_for
from gradherd.sparsify.marks import TILE
from gradherd.sparsify.partitioned import ExDyna
from gradherd.sparsify.registry import make_sparsifier
from gradherd.sparsify.selector import target_count
from gradherd.sparsify.worker import ErrorFeedback

_SIDE = 1000  # rows and columns of the matrices that make up the gradient
_GRADIENTS = 5
_EXCHANGES_BEFORE = 12  # until residuals are as large as in the middle of training
_LAYERS = 7
_BLOCK = 10  # steps timed together: one alone is shorter than the host's own jitter
_WARMUP_STEPS = 25  # until kernels are compiled, graphs captured and residuals filled


def bench_select(dim: int, density: float, device: torch.device) -> list[dict[str, Any]]:
    """Measure what a rank does with its own vector before anything is sent.

    With one thread: a local rank has one core as well, so that rows compare.

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
    seconds: dict[str, float] = {}
    peaks: dict[str, int | None] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name, case in cases.items():
        seconds[name] = median_seconds(case, device, setup=reset)
        reset()
        with PeakMemory(device) as peak:
            case()
        peaks[name] = peak.bytes
    torch.set_num_threads(threads)
    rows = make_rows(seconds, peaks, workers=1, dim=dim, sent=dict.fromkeys(cases, 0))
    for row in rows:
        # A copy reads and writes one vector, the others two.
        vectors = 1 if row["case"] == "copy" else 2
        row |= ceiling_keys(seconds["copy"] * vectors, row["seconds"])
    return rows


@contextlib.contextmanager
def one_rank(device: torch.device) -> Iterator[None]:
    """Be a process group of one rank: nccl on a GPU, otherwise gloo."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)  # "cuda" alone has no index
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def bench_hook(
    params: int,
    density: float,
    device: torch.device,
    repeats: int,
    arms: tuple[str, ...] = ("exdyna", "topk"),
) -> list[dict[str, Any]]:
    """Measure steps of an MLP: dense, and with the hook of each arm.

    Args:
        params: Approximate number of parameters.
        density: Share of them that is sent.
        device: Where to train; there must be a process group of one rank.
        repeats: Blocks of steps measured of each arm; the median counts.
        arms: Names of sparsifiers.

    Returns:
        A row for each arm, with the ratio to `dense` and the difference in seconds; `sync_free`
        says whether a step never waited for the device (on a GPU).
    """
    steps = {
        f"step {name}": training_step(params, density, device, name) for name in ("dense", *arms)
    }
    peaks: dict[str, int | None] = {}
    blocks: dict[str, Callable[[], float]] = {}
    for name, step in steps.items():
        with PeakMemory(device) as peak:
            _repeat(step, _WARMUP_STEPS)
        peaks[name] = peak.bytes
        block = functools.partial(_repeat, step, _BLOCK)
        blocks[name] = functools.partial(elapsed_seconds, block, device)
    seconds = {name: took / _BLOCK for name, took in medians_in_turns(blocks, repeats).items()}
    rows = make_rows(seconds, peaks, workers=1, dim=params, sent=dict.fromkeys(steps, 0))
    for row in rows:
        row["added_seconds"] = row["seconds"] - rows[0]["seconds"]
        row["sync_free"] = _is_sync_free(steps[row["case"]], device)
    return rows


def training_step(
    params: int, density: float, device: torch.device, name: str
) -> Callable[[], None]:
    """Return one training step of a model of its own.

    Args:
        params: Approximate number of parameters.
        density: Share of them that is sent.
        device: Where to train.
        name: "dense" for DDP's own exchange, or that of a sparsifier.
    """
    torch.manual_seed(0)
    width = max(8, round(math.sqrt(params / _LAYERS) / 8) * 8)
    layers: list[nn.Module] = []
    for _ in range(_LAYERS):
        layers += [nn.Linear(width, width, device=device), nn.ReLU()]
    model = DDP(nn.Sequential(*layers))
    if name != "dense":
        attach(model, sparsify=make_sparsifier(name, density))
    # Stepping all parameters in one launch: the optimizer is not what is measured.
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)
    # A few inputs in rotation: the same gradient every time would pile up in the residuals.
    inputs = [torch.randn(32, width, device=device) for _ in range(5)]
    taken = 0

    def step() -> None:
        nonlocal taken
        taken += 1
        model(inputs[taken % len(inputs)]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _repeat(step: Callable[[], None], count: int) -> None:
    for _ in range(count):
        step()


def _is_sync_free(step: Callable[[], None], device: torch.device) -> bool | None:
    """Return whether torch notices no wait for the device in a few steps; None on a CPU."""
    if device.type != "cuda":
        return None
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step()
    except RuntimeError:
        return False
    finally:
        torch.cuda.set_sync_debug_mode(before)
        torch.cuda.synchronize(device)
    return True


class _GivenGradients(torch.autograd.Function):
    """A loss whose gradients are given: its backward takes no time of its own."""

    @staticmethod
    def forward(ctx: Any, grads: Sequence[Tensor], *parameters: Tensor) -> Tensor:
        ctx.grads = grads
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.grads)


class _Matrices(nn.Module):
    """Square matrices with `dim` elements in all; the last ones are smaller."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        whole, rest = divmod(dim, _SIDE * _SIDE)
        shapes = [(_SIDE, _SIDE)] * whole + ([(rest // _SIDE, _SIDE)] if rest >= _SIDE else [])
        shapes += [(1, rest % _SIDE)] if rest % _SIDE else []
        self.matrices = nn.ParameterList(torch.zeros(shape) for shape in shapes)

    def forward(self, grads: Sequence[Tensor]) -> Tensor:
        loss: Tensor = _GivenGradients.apply(grads, *self.matrices)  # type: ignore[no-untyped-call]
        return loss


def bench_exchange(dim: int, density: float, repeats: int) -> list[dict[str, Any]]:
    """Measure DDP's backward with each hook on this rank, from given gradients to their mean.

    Args:
        dim: Elements of the gradient.
        density: Share of them that exdyna sends.
        repeats: Exchanges measured of each hook; the median counts.

    Returns:
        A row for each hook, with ratios to `dense`.
    """
    world = World.detect()
    # One bucket for PowerSGD: it starts a second all-reduce when the first one ends, whose order
    # differs between ranks where several buckets are in flight, and gloo would hang.
    caps = {"powersgd": 1 + 4 * dim // 2**20}
    models = {
        name: DDP(_Matrices(dim), bucket_cap_mb=caps.get(name))
        for name in ("dense", "fp16", "powersgd", "exdyna")
    }
    models["fp16"].register_comm_hook(None, default_hooks.fp16_compress_hook)
    # start_powerSGD_iter is at least 2 in torch; the steps before it are dense, and the warm-up
    # covers them.
    low_rank = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    models["powersgd"].register_comm_hook(low_rank, powerSGD_hook.powerSGD_hook)
    herd = attach(models["exdyna"], sparsify=ExDyna(density=density))
    shapes = [p.shape for p in models["dense"].parameters()]
    generator = torch.Generator().manual_seed(world.rank)
    # A few gradients in rotation: the same one every step would pile up in the residuals.
    grads = itertools.cycle(
        [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(_GRADIENTS)]
    )
    times: dict[str, list[float]] = {name: [] for name in models}
    peaks: dict[str, int | None] = {}
    for name, model in models.items():
        for _ in range(_EXCHANGES_BEFORE):
            _exchange_seconds(model, next(grads), world)
        with PeakMemory(torch.device("cpu")) as peak:
            _exchange_seconds(model, next(grads), world)
        peaks[name] = peak.bytes
    for _ in range(repeats):
        for name, model in models.items():
            times[name].append(_exchange_seconds(model, next(grads), world))
    dense = 2 * 4 * dim * (world.size - 1) // world.size
    # torch's hooks do not count bytes, so these are what a ring all-reduce sends.
    sent = {
        "dense": dense,
        "fp16": dense // 2,
        "powersgd": sum(map(sum, shapes)) * 2 * 4 * (world.size - 1) // world.size,
        "exdyna": int(herd.metrics()["bytes"]),
    }
    # A step takes as long as its slowest rank.
    seconds = {
        name: float(all_gather(torch.tensor(steps), world).value.amax(0).median())
        for name, steps in times.items()
    }
    return make_rows(seconds, peaks, workers=world.size, dim=dim, sent=sent)


def _exchange_seconds(model: DDP, grads: Sequence[Tensor], world: World) -> float:
    model.zero_grad()
    loss = model(grads)
    all_reduce(torch.zeros(1), world)  # a barrier: start together
    return elapsed_seconds(loss.backward, torch.device("cpu"))
