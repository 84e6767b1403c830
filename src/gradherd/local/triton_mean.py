"""One bit for each coordinate, as Triton kernels: a pass before the messages, and one after them.

`send` reads own and shared weights and writes bits and levels. `own` sums what arrived for a slice.
`apply` reads what was sent and what came back, and writes shared weights, momentum and own weights.
Nothing waits for the host: if a worker's difference was not finite, `apply` finds a 0 on the device
and leaves all as it was.

Letters: G groups of 256 coordinates that one program takes.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradherd.comm.message_sizes import GROUP
from gradherd.gpu import launch
from gradherd.local.outer import OuterOptimizer

_GROUPS = 8
_SIZE = tl.constexpr(GROUP)


@triton.jit
def _levels(values):
    """Return the (G,) mean magnitudes of (G, 256) values, as bf16 holds them."""
    return (tl.sum(tl.abs(values), axis=1) / _SIZE).to(tl.bfloat16)


@triton.jit
def _store_bits(values, codes, group, inside, G: tl.constexpr):
    negative = (values < 0).to(tl.int32).reshape(G, _SIZE // 8, 8)
    packed = tl.sum(negative << tl.arange(0, 8)[None, None, :], axis=2)
    byte = group[:, None] * (_SIZE // 8) + tl.arange(0, _SIZE // 8)[None, :]
    tl.store(codes + byte, packed.to(tl.uint8), mask=inside[:, None])


@triton.jit
def _load_bits(codes, levels, group, inside):
    """Return the (G, 256) values of a message."""
    level = tl.load(levels + group, mask=inside, other=0).to(tl.float32)
    lane = group[:, None] * _SIZE + tl.arange(0, _SIZE)[None, :]
    byte = tl.load(codes + lane // 8, mask=inside[:, None], other=0).to(tl.int32)
    sign = (byte >> (lane % 8).to(tl.int32)) & 1
    return tl.where(sign == 1, -level[:, None], level[:, None])


@triton.jit
def _difference(own, shared, owed, at, inside, OWES: tl.constexpr):
    values = tl.load(shared + at, mask=inside, other=0) - tl.load(own + at, mask=inside, other=0)
    if OWES:
        values += tl.load(owed + at, mask=inside, other=0)
    return values


@triton.jit
def _send(
    own, shared, owed, codes, levels, largest, dim, length, code_row, level_row,
    OWES: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    owner = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0).to(tl.int64) * G + tl.arange(0, G)
    inside = group < length // _SIZE
    at = owner * length + group[:, None] * _SIZE + tl.arange(0, _SIZE)[None, :]
    values = _difference(own, shared, owed, at, inside[:, None] & (at < dim), OWES)
    level = _levels(values)
    tl.store(levels + owner * level_row + group, level, mask=inside)
    _store_bits(values, codes + owner * code_row, group, inside, G)
    # As bits, which order floats from 0 up to infinity and then NaN.
    found = tl.max(tl.where(inside, level.to(tl.float32).to(tl.int32, bitcast=True), 0), axis=0)
    tl.atomic_max(largest, found)


@triton.jit
def _own(
    received, arrived, codes, levels, error, ok, real, length, code_row, level_row, workers,
    G: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0).to(tl.int64) * G + tl.arange(0, G)
    inside = group < length // _SIZE
    lane = group[:, None] * _SIZE + tl.arange(0, _SIZE)[None, :]
    before = tl.load(error + lane, mask=lane < real, other=0)
    total = before
    for worker in range(workers):
        row = tl.cast(worker, tl.int64)
        total += _load_bits(received + row * code_row, arrived + row * level_row, group, inside)
    total = tl.where(lane < real, total, 0.0)
    level = _levels(total)
    tl.store(levels + group, level, mask=inside)
    _store_bits(total, codes, group, inside, G)
    rounded = tl.where(total < 0, -level.to(tl.float32)[:, None], level.to(tl.float32)[:, None])
    kept = tl.where(tl.load(ok) == 1, total - rounded, before)
    tl.store(error + lane, kept, mask=lane < real)


@triton.jit
def _apply(
    own, shared, owed, momentum, codes, levels, gathered, arrived, squares, ok,
    dim, length, code_row, level_row, workers, lr, mu,
    OWES: tl.constexpr, KEEPS: tl.constexpr, MOVES: tl.constexpr, DELTA: tl.constexpr,
    LAST: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    owner = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0).to(tl.int64) * G + tl.arange(0, G)
    inside = group < length // _SIZE
    at = owner * length + group[:, None] * _SIZE + tl.arange(0, _SIZE)[None, :]
    real = inside[:, None] & (at < dim)
    good, finite = tl.load(ok) == 1, tl.load(ok + 1) == 1
    before = tl.load(own + at, mask=real, other=0)
    old = tl.load(shared + at, mask=real, other=0)
    unsent = _difference(own, shared, owed, at, real, OWES)
    unsent -= _load_bits(codes + owner * code_row, levels + owner * level_row, group, inside)
    mean = _load_bits(gathered + owner * code_row, arrived + owner * level_row, group, inside)
    mean = mean / workers
    if MOVES:
        old_speed = tl.load(momentum + at, mask=real, other=0)
        speed = old_speed * mu + mean
        if LAST:
            tl.store(momentum + at, tl.where(good, speed, old_speed), mask=real)
        mean = mean + speed * mu
    new = old - mean * lr
    if LAST:
        tl.store(shared + at, tl.where(good, new, old), mask=real)
    start = new - unsent if KEEPS else new
    if not KEEPS:
        # What was owed before, if nothing was sent: the difference is in the own weights still.
        waits = tl.load(owed + at, mask=real, other=0) if OWES else tl.zeros_like(unsent)
        tl.store(owed + at, tl.where(good, unsent, waits), mask=real)
    if DELTA:
        start = tl.where(good, start - before, 0.0)
    else:
        # A worker whose weights are not finite starts again from the shared ones.
        start = tl.where(good, start, tl.where(finite, before, old))
    tl.store(own + at, start, mask=real)
    total = tl.sum(tl.sum(tl.where(real, unsent * unsent, 0.0), axis=1), axis=0)
    tl.store(squares + owner * tl.num_programs(0) + tl.program_id(0), total)


def _rows(messages: Any) -> tuple[int, int]:
    """Return how many codes and levels lie between two messages."""
    return messages.codes.stride(0), messages.levels.stride(0)


def _grid(few: Any) -> tuple[int, int]:
    return int(triton.cdiv(few.slice, GROUP * _GROUPS)), few.size


# Products are rounded before they are added, as torch's operations on a CPU do.
_OPTIONS: dict[str, Any] = {"G": _GROUPS, "num_warps": 4, "enable_fp_fusion": False}


def send(few: Any, own: Tensor, shared: Tensor, owed: Tensor | None) -> Tensor:
    """Write the messages of `FewBitMean.send`; return the () largest level."""
    largest = torch.zeros((), dtype=torch.int32, device=own.device)
    if few.slice:
        launch(
            _send, _grid(few), own, shared, own if owed is None else owed, few.sent.codes,
            few.sent.levels, largest, few.dim, few.slice, *_rows(few.sent),
            OWES=owed is not None, **_OPTIONS,
        )  # fmt: skip
    return largest.view(torch.float32)


def own(few: Any, ok: Tensor | None) -> None:
    """Write the message of `FewBitMean.own`."""
    if few.slice:
        ok = torch.ones(2, dtype=torch.int32, device=few.error.device) if ok is None else ok
        launch(
            _own, _grid(few)[:1], few.received.codes, few.received.levels, few.sum.codes,
            few.sum.levels, few.error, ok, few._real, few.slice, *_rows(few.received), few.size,
            **_OPTIONS,
        )  # fmt: skip


def apply(
    few: Any, gathered: Any, outer: OuterOptimizer, own: Tensor, owed: Tensor | None, ok: Tensor,
    *, owes: bool, keeps: bool, delta: bool, last: bool,
) -> Tensor:  # fmt: skip
    """Move the shared weights, and write to `own` where this worker goes on from.

    Args:
        few: The worker's mean.
        gathered: The messages about it from all owners.
        outer: Shared weights and their optimizer.
        own: Weights that were sent; become the new ones, or what to add to them if `delta`.
        owed: What was owed before, if it `owes`; receives what is unsent unless `keeps`.
        ok: Whether the exchange counts, and whether this worker's difference was finite.
        owes: See `owed`.
        keeps: Whether what is unsent stays in the own weights.
        delta: See `own`.
        last: Whether no other worker needs the shared weights of before: only then they move.

    Returns:
        () sum of squares of what is unsent.
    """
    grid, settings = _grid(few), outer.settings
    squares = torch.zeros(max(1, grid[0] * grid[1]), device=own.device)
    if few.slice:
        momentum = outer.shared if outer.momentum is None else outer.momentum
        launch(
            _apply, grid, own, outer.shared, own if owed is None else owed, momentum,
            few.sent.codes, few.sent.levels, gathered.codes, gathered.levels, squares, ok,
            few.dim, few.slice, *_rows(few.sent), few.size,
            settings.outer_lr, settings.outer_momentum,
            OWES=owes, KEEPS=keeps, MOVES=outer.momentum is not None, DELTA=delta, LAST=last,
            **_OPTIONS,
        )  # fmt: skip
    return squares.sum()
