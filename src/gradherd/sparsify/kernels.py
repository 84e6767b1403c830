"""The passes over whole vectors, each as fast as this machine's libraries allow.

On a CPU torch is slow at comparing (five times numpy's time) and at finding what is true (ten
times), so numpy does that there, on the same memory. On a GPU float32 vectors take the passes of
`triton_kernels`, if Triton is there; what is written here does the same everywhere else.

Letters: D coordinates, C picks there is room for, K those that travel.
"""

from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradherd.sparsify.histogram import Tally

_HAS_TRITON = find_spec("triton") is not None
_SAMPLES = 8192
# Numbers looked at in one go: what fits a core's own cache, and needs no fresh memory.
_CHUNK = 131_072


class Picks(NamedTuple):
    """What was found, in memory of a fixed size: nobody has to wait for its number."""

    indices: Tensor
    """(C,) int64, ascending; zeros beyond `found`."""
    values: Tensor
    """(C,) of them; zeros beyond `found`."""
    found: Tensor
    """() whole number, how many were found; if more than C, the last of them were not taken."""


def add(
    kept: Tensor,
    grad: Tensor,
    unit: float,
    out: Tensor,
    *,
    tally: Tally | None = None,
    clear: bool = False,
) -> None:
    """Write kept + unit * grad to `out`, count it and clear the gradient: one pass on a GPU.

    Args:
        kept: (D,) residual.
        grad: (D,) gradient, of the same or a narrower type.
        unit: What it is multiplied by.
        out: (D,) result, may be `kept`.
        tally: Counts the results' magnitudes.
        clear: Whether `grad` is zero afterwards.
    """
    if fast := _triton(kept, grad, out):
        fast.add(kept, grad, unit, out, tally, None, clear=clear)
        return
    torch.add(kept, grad, alpha=unit, out=out)
    if tally is not None:
        tally.add(out)
    if clear:
        grad.zero_()


def select(values: Tensor, floor: Tensor, room: int, *, clear: bool = False) -> Picks:
    """Return the first of (D,) values whose magnitude reaches the floor, as many as have room.

    Args:
        values: (D,); zero where picked afterwards if `clear`. What finds no room stays.
        floor: () threshold of the same type, on the same device.
        room: C.
        clear: Whether picks are taken out of `values`.
    """
    if fast := _triton(values):
        return Picks(*fast.take(values, fast.mark(values, floor), room, clear=clear))
    found = (values.abs() >= floor).nonzero().view(-1)
    taken = found[:room]
    indices, picked = found.new_zeros(room), values.new_zeros(room)
    indices[: len(taken)], picked[: len(taken)] = taken, values[taken]
    if clear:
        values[taken] = 0
    return Picks(indices, picked, torch.tensor(len(found), device=values.device))


def add_select(
    kept: Tensor,
    grad: Tensor,
    unit: float,
    out: Tensor,
    floor: Tensor,
    room: int,
    *,
    tally: Tally | None = None,
    clear: bool = False,
) -> Picks:
    """Do `add`, then `select` from its result and take the picks out: one pass on a GPU."""
    if fast := _triton(kept, grad, out):
        marks = fast.add(kept, grad, unit, out, tally, floor, clear=clear)
        return Picks(*fast.take(out, marks, room, clear=True))
    add(kept, grad, unit, out, tally=tally, clear=clear)
    return select(out, floor, room, clear=True)


def put(flat: Tensor, number: Tensor, own: int, at: Tensor, values: Tensor, held: Tensor) -> None:
    """Scatter those of the received values that belong to this bucket.

    Args:
        flat: The bucket, in its own type.
        number: (K,) int64 which bucket each value belongs to.
        own: Which one this is.
        at: (K,) int64 places in the bucket.
        values: (K,) numbers.
        held: (K,) gets what the bucket's type could hold of its values.
    """
    if _triton(values, flat, number, at, held):
        from gradherd.sparsify import triton_kernels

        triton_kernels.put(flat, number, own, at, values, held)
        return
    limit = torch.finfo(flat.dtype).max
    mine = number == own
    written = values[mine].clamp(-limit, limit).to(flat.dtype)
    flat[at[mine]] = written
    held[mine] = written.to(held.dtype)


def above(values: Tensor, floor: float) -> Tensor:
    """Return where |values| >= floor, ascending: (D,) -> (k,) int64.

    >>> above(torch.tensor([0.5, -3.0, 2.0]), 1.0)
    tensor([1, 2])
    """
    fast = _triton(values)
    if values.device.type != "cpu" and not fast:
        return (values.abs() >= floor).nonzero().view(-1)
    limits = np.finfo(np.float32) if fast else np.finfo(values.numpy().dtype)
    if floor > float(limits.max):
        return torch.zeros(0, dtype=torch.int64, device=values.device)
    if 0 < floor < float(limits.smallest_subnormal):
        floor = float(limits.smallest_subnormal)  # or zeros would be above it
    return fast.above(values, floor) if fast else _above_on_numpy(values, floor)


def _above_on_numpy(values: Tensor, floor: float) -> Tensor:
    numbers = values.numpy()
    size = min(_CHUNK, len(numbers))
    magnitudes, hits = np.empty(size, numbers.dtype), np.empty(size, np.bool_)
    found = [np.empty(0, np.int64)]
    for begin in range(0, len(numbers), _CHUNK):
        chunk = numbers[begin : begin + _CHUNK]
        magnitude, hit = magnitudes[: len(chunk)], hits[: len(chunk)]
        np.abs(chunk, out=magnitude)
        np.greater_equal(magnitude, floor, out=hit)
        found.append(np.flatnonzero(hit) + begin)
    return torch.from_numpy(np.concatenate(found))


def _triton(*vectors: Tensor) -> Any:
    """Return `triton_kernels` if it is to do a pass over these vectors, else None."""
    ready = _HAS_TRITON and vectors[0].is_cuda and vectors[0].dtype == torch.float32
    if not ready or not all(one.is_contiguous() for one in vectors):
        return None
    if any(one.get_device() != torch.cuda.current_device() for one in vectors):
        return None  # Triton starts its programs on the current device.
    from gradherd.sparsify import triton_kernels

    return triton_kernels


def largest(values: Tensor, k: int) -> Tensor:
    """Return where the k largest magnitudes are, ascending: (D,) -> (k,) int64.

    A sample tells a floor that most likely leaves a few more than k; if it leaves fewer, the
    whole vector is searched. Either way the answer is exact.

    >>> largest(torch.tensor([0.5, -3.0, 2.0]), 2)
    tensor([1, 2])
    """
    stride = len(values) // _SAMPLES
    if stride > 4 and 8 * k < len(values):
        sample = values[::stride].abs()
        rank = min(len(sample), int(1.5 * k / stride) + 16)
        found = above(values, float(sample.topk(rank).values[-1]))
        if len(found) >= k:
            return found[values[found].abs().topk(k).indices].sort().values
    return values.abs().topk(k).indices.sort().values
