"""Passes over whole vectors, each as fast as the libraries of this machine allow.

On a CPU, torch is slow at comparing (five times numpy's time) and at `nonzero` (ten times), so
numpy does both there, on the same memory. On a GPU, float32 vectors use `triton_kernels` if Triton
is installed. The torch code here does the same everywhere else.

Letters: D coordinates, C capacity of a selection, K coordinates that are sent.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradherd.gpu import has_triton
from gradherd.sparsify.marks import TILE, Marks

# Elements that `topk_indices` samples for its first guess of a threshold.
_SAMPLES = 8192
# Elements to compare at a time: both buffers fit a core's cache and are allocated once.
_CHUNK = 131_072


def marks_for(values: Tensor) -> Marks:
    """Return memory for the marks of (D,) values, a multiple of TILE, where kernels make them."""
    size = len(values) if _triton_for(values) else 0
    words = values.new_zeros(size // 32, dtype=torch.int32)
    return Marks(words, values.new_zeros(size // TILE, dtype=torch.int32))


def add(
    residual: Tensor,
    grad: Tensor,
    scale: float | Tensor,
    out: Tensor,
    *,
    bad: Tensor | None = None,
    clear: bool = False,
    threshold: Tensor | None = None,
    marks: Marks | None = None,
) -> None:
    """Write residual + scale * grad to `out`; in the same pass on a GPU check, mark and clear.

    Args:
        residual: (D,), or of any shape that all three have.
        grad: (D,) gradient, of the same or a narrower dtype.
        scale: Factor of the gradient, a number or a () tensor on the device.
        out: (D,) result, may be `residual`.
        bad: (1,) int32 that becomes 1 if the result is not finite everywhere.
        clear: Whether to set `grad` to zero.
        threshold: () on the device: values that reach it are marked.
        marks: Those of `out`; None makes none.
    """
    if triton := _triton_for(residual, grad, out):
        flat = [tensor.view(-1) for tensor in (residual, grad)]
        triton.add(
            *flat, scale, out.view(-1), bad=bad, clear=clear, threshold=threshold, marks=marks
        )
        return
    if isinstance(scale, Tensor):
        torch.add(residual, grad.to(residual.dtype) * scale, out=out)
    else:
        torch.add(residual, grad, alpha=scale, out=out)
    if bad is not None:
        bad.copy_(torch.maximum(bad, (~out.isfinite().all()).int()))
    if clear:
        grad.zero_()


def mark_if(condition: Tensor, values: Tensor, threshold: Tensor, marks: Marks) -> None:
    """Mark (D,) values anew if the () bool is true; otherwise the kernel returns at once."""
    if triton := _triton_for(values):
        triton.mark(values, threshold, marks, condition)


def count_marks(values: Tensor, threshold: Tensor, marks: Marks) -> Tensor:
    """Return how many of (D,) values are marked: () integer."""
    if len(marks.counts):
        return marks.counts.sum()
    return (values.abs() >= threshold).sum()


def marked(values: Tensor, threshold: Tensor, marks: Marks, capacity: int) -> tuple[Tensor, Tensor]:
    """Return (C,) ascending positions of values that were marked, and their () number.

    If more than C are marked, the last are left out; if fewer, zeros follow.
    """
    if triton := _triton_for(values):
        found: tuple[Tensor, Tensor] = triton.compact(marks, capacity)
        return found
    # `nonzero` waits for a GPU, but on one there is Triton.
    reaching = (values.abs() >= threshold).nonzero().view(-1)
    positions = reaching.new_zeros(capacity)
    positions[: len(reaching)] = reaching[:capacity]
    return positions, torch.tensor(len(reaching), device=values.device)


def overwrite_unless(ok: Tensor, target: Tensor, source: Tensor | float) -> None:
    """Overwrite (D,) `target` by a vector or a number unless the () bool is true.

    If it is true, the kernel returns at once.
    """
    vectors = (target, source) if isinstance(source, Tensor) else (target,)
    if target.is_cuda and (triton := _triton()) and all(one.is_contiguous() for one in vectors):
        triton.overwrite_unless(ok, target, source)
        return
    target.copy_(torch.where(ok, target, source))


def scatter_to_bucket(
    flat: Tensor, buckets: Tensor, number: int, offsets: Tensor, values: Tensor, written: Tensor
) -> None:
    """Write those of (K,) values that belong to bucket `number`, clamped to the range of its dtype.

    Args:
        flat: The bucket's buffer, in its own dtype.
        buckets: (K,) int64 bucket of each value.
        number: Of this one.
        offsets: (K,) int64 offsets in the buckets.
        values: The values.
        written: (K,) receives them as the bucket's dtype holds them.
    """
    if triton := _triton_for(values, flat, buckets, offsets, written):
        triton.scatter_to_bucket(flat, buckets, number, offsets, values, written)
        return
    # A mean beyond the range of fp16 would become infinite; clamped, the rest stays in the
    # residual, which `written` is for.
    limit = torch.finfo(flat.dtype).max
    mine = buckets == number
    narrowed = values[mine].clamp(-limit, limit).to(flat.dtype)
    flat[offsets[mine]] = narrowed
    written[mine] = narrowed.to(written.dtype)


def indices_above(values: Tensor, threshold: float) -> Tensor:
    """Return where |values| >= threshold, ascending: (D,) -> (k,) int64."""
    triton = _triton_for(values)
    if values.device.type != "cpu" and not triton:
        return (values.abs() >= threshold).nonzero().view(-1)
    limits = np.finfo(np.float32) if triton else np.finfo(values.numpy().dtype)
    # numpy and Triton compare in the dtype of the values, which may not hold the threshold.
    if threshold > float(limits.max):
        return torch.zeros(0, dtype=torch.int64, device=values.device)
    if 0 < threshold < float(limits.smallest_subnormal):
        threshold = float(limits.smallest_subnormal)  # Rounded to zero, it would select zeros.
    if triton:
        indices: Tensor = triton.indices_above(values, threshold)
        return indices
    return _indices_above_on_cpu(values, threshold)


def _indices_above_on_cpu(values: Tensor, threshold: float) -> Tensor:
    array = values.numpy()
    size = min(_CHUNK, len(array))
    magnitudes, hits = np.empty(size, array.dtype), np.empty(size, np.bool_)
    indices = [np.empty(0, np.int64)]
    for begin in range(0, len(array), _CHUNK):
        chunk = array[begin : begin + _CHUNK]
        magnitude, hit = magnitudes[: len(chunk)], hits[: len(chunk)]
        np.abs(chunk, out=magnitude)
        np.greater_equal(magnitude, threshold, out=hit)
        indices.append(np.flatnonzero(hit) + begin)
    return torch.from_numpy(np.concatenate(indices))


def topk_indices(values: Tensor, k: int) -> Tensor:
    """Return where the k largest magnitudes are, ascending: (D,) -> (k,) int64.

    A sample gives a threshold that most likely leaves slightly more than k candidates; if it leaves
    fewer, the whole vector is searched. The result is exact either way.
    """
    stride = len(values) // _SAMPLES
    # Otherwise the sample is hardly smaller than the vector, or much of the vector is wanted.
    if stride > 4 and 8 * k < len(values):
        sample = values[::stride].abs()
        # Half as many again, and a few more for small k, make too few candidates unlikely.
        rank = min(len(sample), int(1.5 * k / stride) + 16)
        candidates = indices_above(values, float(sample.topk(rank).values[-1]))
        if len(candidates) >= k:
            return candidates[values[candidates].abs().topk(k).indices].sort().values
    return values.abs().topk(k).indices.sort().values


def _triton_for(*vectors: Tensor) -> Any:
    """Return the module `triton_kernels` if it can work on these vectors, else None."""
    if not vectors[0].is_cuda or vectors[0].dtype != torch.float32:
        return None
    if not all(vector.is_contiguous() for vector in vectors):
        return None
    if any(vector.device != vectors[0].device for vector in vectors):
        return None
    return _triton()


def _triton() -> Any:
    if not has_triton():
        return None
    # Imported late: it takes a second, and machines without Triton cannot.
    from gradherd.sparsify import triton_kernels

    return triton_kernels
