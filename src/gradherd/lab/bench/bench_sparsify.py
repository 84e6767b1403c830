"""Time sparsification: selection on one rank, and whole exchanges over real ranks.

Selection, on a vector of `dim` elements: `copy` reads and writes every element once; `eager` adds
the residual, finds what is above a threshold and clears it, as one would write it in torch; `topk`
does the same with `torch.topk`; `fused` is what gradherd's hook does. On a GPU these are a kernel
that adds, checks, clears and marks (`kernels.add`), and one that reads the marks. The
ceiling of all but `copy` is a copy of the bytes they must move: residual and gradient, each read
and written.

Exchange, DDP's backward on gradients of `dim` elements that are given: `dense` is its own
all-reduce, `fp16` torch's compressing hook, `powersgd` its low-rank hook; `exdyna` is gradherd's
hook with everything it does: residuals, selection, exchange, and writing the mean.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from gradherd.comm.collectives import all_gather, all_reduce
from gradherd.comm.world import World
from gradherd.hooks.attach import attach
from gradherd.lab.bench.timing import (
    Rows,
    ceiling_keys,
    elapsed_seconds,
    make_rows,
    measure_cases,
    medians_in_turns,
    peak_memory,
)
from gradherd.sparsify.kernels import add, indices_above, marked, marks_for
from gradherd.sparsify.marks import TILE
from gradherd.sparsify.partitioned import ExDyna
from gradherd.sparsify.selector import target_count
from gradherd.sparsify.worker import ErrorFeedback

_SIDE = 1000  # rows and columns of the matrices that make up the gradient
_GRADIENTS = 5
_EXCHANGES_BEFORE = 12  # until residuals are as large as in the middle of training
_CPU = torch.device("cpu")


def bench_select(dim: int, density: float, device: torch.device) -> Rows:
    """Measure what a rank does with its own vector before anything is sent.

    With one thread: a local rank has one core as well, so that rows compare. Ratios are to `copy`.
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

    def in_torch(select: Callable[[Tensor], Tensor]) -> None:
        residual.add_(grad)
        residual[select(residual.abs())] = 0
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

    cases: dict[str, Callable[[], None]] = {
        "copy": copy,
        "eager": partial(in_torch, lambda sizes: (sizes >= threshold).nonzero().view(-1)),
        "topk": partial(in_torch, lambda sizes: sizes.topk(k).indices),
        "fused": one_pass if device.type == "cuda" else fused,
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for case in cases.values():  # code loaded on first use must not count as memory
            reset()
            case()
        nothing = dict.fromkeys(cases, 0)
        rows = measure_cases(cases, device, setup=reset, workers=1, dim=dim, sent=nothing)
    finally:
        torch.set_num_threads(threads)
    copied = rows[0]["seconds"]
    # A copy reads and writes one vector, the others two.
    ceilings = [copied] + [2 * copied] * (len(rows) - 1)
    return [
        row | ceiling_keys(ceiling, row["seconds"])
        for row, ceiling in zip(rows, ceilings, strict=True)
    ]


def ddp_with_hook(model: nn.Module, exchange: str) -> DDP:
    """Return a model in DDP that exchanges with torch's `fp16` or `powersgd` hook, or densely."""
    size = sum(p.numel() for p in model.parameters())
    # One bucket for PowerSGD: it starts a second all-reduce when the first one ends, whose order
    # differs between ranks where several buckets are in flight, and gloo would hang.
    ddp = DDP(model, bucket_cap_mb=1 + 4 * size // 2**20 if exchange == "powersgd" else None)
    if exchange == "fp16":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif exchange == "powersgd":
        # start_powerSGD_iter is at least 2 in torch; the steps before it are dense, and the
        # warm-up covers them.
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=1, start_powerSGD_iter=2
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return ddp


def ring_bytes(exchange: str, parameters: Iterable[Tensor], ranks: int) -> int:
    """Return what a rank sends in a step; torch's hooks do not count it."""
    low_rank = exchange == "powersgd"  # two factors of each matrix, and biases as they are
    elements = sum(sum(p.shape) if low_rank else p.numel() for p in parameters)
    return 2 * (2 if exchange == "fp16" else 4) * elements * (ranks - 1) // ranks


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


def bench_exchange(dim: int, density: float, repeats: int) -> Rows:
    """Measure DDP's backward with each hook on this rank, from given gradients to their mean.

    The median of `repeats` exchanges counts; ratios are to `dense`.
    """
    world = World.detect()
    names = ("dense", "fp16", "powersgd", "exdyna")
    models = {name: ddp_with_hook(_Matrices(dim), name) for name in names}
    herd = attach(models["exdyna"], sparsify=ExDyna(density=density))
    parameters = list(models["dense"].parameters())
    generator = torch.Generator().manual_seed(world.rank)
    # A few gradients in rotation: the same one every step would pile up in the residuals.
    grads = itertools.cycle(
        [[torch.randn(p.shape, generator=generator) for p in parameters] for _ in range(_GRADIENTS)]
    )

    def exchange(name: str) -> float:
        models[name].zero_grad()
        loss = models[name](next(grads))
        all_reduce(torch.zeros(1), world)  # a barrier: start together
        took = elapsed_seconds(loss.backward, _CPU)
        # A step takes as long as its slowest rank.
        return float(all_gather(torch.tensor([took]), world).value.max())

    exchanges = {name: partial(exchange, name) for name in names}
    peaks: dict[str, int | None] = {}
    for name, call in exchanges.items():
        for _ in range(_EXCHANGES_BEFORE):
            call()
        peaks[name] = peak_memory(call, _CPU)
    seconds = medians_in_turns(exchanges, repeats)
    sent = {name: ring_bytes(name, parameters, world.size) for name in names}
    sent["exdyna"] = int(herd.metrics()["bytes"])
    return make_rows(seconds, peaks, workers=world.size, dim=dim, sent=sent)
