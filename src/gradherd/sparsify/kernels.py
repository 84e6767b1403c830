"""Passes over whole vectors, each as fast as the libraries of this machine allow.

On a CPU, torch is slow at comparing (five times numpy's time) and at `nonzero` (ten times), so
numpy does both there, on the same memory. On a GPU, float32 vectors use `triton_kernels` if Triton
is installed. The torch code here does the same everywhere else.

Letters: D coordinates, C capacity of a selection, K coordinates that are sent.
"""

from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

_HAS_TRITON = find_spec("triton") is not None
# Elements that `topk_indices` samples for its first guess of a threshold.
_SAMPLES = 8192
# Elements to compare at a time: both buffers fit a core's cache and are allocated once.
_CHUNK = 131_072
BINS = 128
"""The first bin also counts everything below the others; the last counts what is not finite."""
SHIFT = 19
"""Low bits of a float32 that bins ignore; the exponent and four bits of the mantissa remain."""
_INFINITY_BITS = 0x7F800000  # As integers, the bits of NaN are larger, those of numbers smaller.


class MagnitudeHistogram(NamedTuple):
    """Count magnitudes, for a threshold of the next step without sorting or waiting for the host.

    Bins are a sixteenth of an octave wide and reach four octaves below and above a threshold, so
    the histogram of one step gives a good threshold for the next. Everything stays on the device.

    >>> histogram = MagnitudeHistogram.around(torch.tensor(1.0))
    >>> histogram.add(torch.tensor([1.5, -0.3, 3.0]))
    >>> histogram.topk_threshold(2)
    tensor(1.5000)
    """

    counts: Tensor
    """(BINS,) int32."""
    window: Tensor
    """() int32, not negative: leading bits of the magnitudes in the first bin."""
    shift: int = SHIFT
    """Low bits that bins ignore; a field because the Triton kernels get the fields only."""

    @classmethod
    def around(cls, threshold: Tensor) -> "MagnitudeHistogram":
        """Return an empty histogram with bins around a () threshold, on the same device."""
        # The bits of a float that is not negative, as an integer, sort as the float does. Cut
        # short, they number bins whose width grows with the magnitude.
        middle = threshold.abs().float().view(torch.int32) >> SHIFT
        counts = torch.zeros(BINS, dtype=torch.int32, device=threshold.device)
        return cls(counts, (middle - BINS // 2).clamp_(min=0))

    def add(self, values: Tensor) -> None:
        """Count (D,) values; on a GPU, `kernels.add` does this while it adds."""
        bits = values.abs().float().view(torch.int32)
        bins = ((bits >> self.shift) - self.window).clamp_(0, BINS - 2)
        bins = torch.where(bits >= _INFINITY_BITS, BINS - 1, bins)
        self.counts.add_(torch.bincount(bins, minlength=BINS).int())

    def topk_threshold(self, k: int) -> Tensor:
        """Return the highest lower edge of a bin that at least k finite magnitudes reach.

        `kernels.topk_threshold` does the same in one kernel on a GPU.

        Returns:
            () float32; zero if fewer than k magnitudes are in the bins above the first.
        """
        reach = self.counts[:-1].flip(0).cumsum(0).flip(0)
        at = (reach >= k).sum() - 1  # `reach` never grows, so this is the last bin with enough.
        edge = ((at + self.window) << self.shift).int().view(torch.float32)
        return torch.where(at > 0, edge, torch.zeros_like(edge))

    def finite(self) -> Tensor:
        """Return whether everything that was counted is finite: () bool."""
        return self.counts[-1] == 0


class FixedSizeSelection(NamedTuple):
    """Selected coordinates in memory of a fixed size, so that the host need not know the count."""

    indices: Tensor
    """(C,) int64, ascending; zeros beyond `total`."""
    values: Tensor
    """(C,) their values; zeros beyond `total`."""
    total: Tensor
    """() integer, how many reached the threshold; if more than C, the last did not fit."""


def add(
    residual: Tensor,
    grad: Tensor,
    scale: float,
    out: Tensor,
    *,
    histogram: MagnitudeHistogram | None = None,
    clear: bool = False,
) -> None:
    """Write residual + scale * grad to `out`; one kernel on a GPU.

    Args:
        residual: (D,).
        grad: (D,) gradient, of the same or a narrower dtype.
        scale: Factor of the gradient.
        out: (D,) result, may be `residual`.
        histogram: Counts the magnitudes of the result.
        clear: Whether to set `grad` to zero.
    """
    if triton := _triton_for(residual, grad, out):
        triton.add(residual, grad, scale, out, histogram, None, clear=clear)
        return
    torch.add(residual, grad, alpha=scale, out=out)
    if histogram is not None:
        histogram.add(out)
    if clear:
        grad.zero_()


def select(
    values: Tensor, threshold: Tensor, capacity: int, *, clear: bool = False
) -> FixedSizeSelection:
    """Select the first of (D,) values whose magnitude reaches the threshold.

    Args:
        values: (D,).
        threshold: () of the same dtype, on the same device.
        capacity: C. What does not fit is left alone.
        clear: Whether to set the selected values to zero.
    """
    if triton := _triton_for(values):
        bitmap = triton.mark(values, threshold)
        return FixedSizeSelection(*triton.compact(values, bitmap, capacity, clear=clear))
    # On a GPU `nonzero` waits for the device, but only where there is no Triton.
    reaching = (values.abs() >= threshold).nonzero().view(-1)
    fitting = reaching[:capacity]
    indices, selected = reaching.new_zeros(capacity), values.new_zeros(capacity)
    indices[: len(fitting)], selected[: len(fitting)] = fitting, values[fitting]
    if clear:
        values[fitting] = 0
    count = torch.tensor(len(reaching), device=values.device)
    return FixedSizeSelection(indices, selected, count)


def add_select(
    residual: Tensor,
    grad: Tensor,
    scale: float,
    out: Tensor,
    threshold: Tensor,
    capacity: int,
    *,
    histogram: MagnitudeHistogram | None = None,
    clear: bool = False,
) -> FixedSizeSelection:
    """Do `add`, then `select` from its result and clear what was selected; one pass on a GPU."""
    if triton := _triton_for(residual, grad, out):
        bitmap = triton.add(residual, grad, scale, out, histogram, threshold, clear=clear)
        return FixedSizeSelection(*triton.compact(out, bitmap, capacity, clear=True))
    add(residual, grad, scale, out, histogram=histogram, clear=clear)
    return select(out, threshold, capacity, clear=True)


def topk_threshold(histogram: MagnitudeHistogram, k: int) -> Tensor:
    """Return `histogram.topk_threshold(k)`, with one kernel instead of a dozen on a GPU."""
    counts = histogram.counts
    # Not `_triton_for`, which asks for float32: counts are int32.
    if _HAS_TRITON and counts.is_cuda and counts.get_device() == torch.cuda.current_device():
        from gradherd.sparsify import triton_kernels

        return triton_kernels.topk_threshold(histogram, k)
    return histogram.topk_threshold(k)


def scatter_to_bucket(
    flat: Tensor, buckets: Tensor, number: int, offsets: Tensor, values: Tensor, written: Tensor
) -> None:
    """Write those of the values that belong to one bucket, clamped to the range of its dtype.

    Args:
        flat: The bucket's buffer, in its own dtype.
        buckets: (K,) int64 number of the bucket that each value belongs to.
        number: Number of this bucket.
        offsets: (K,) int64 offsets in the buckets.
        values: (K,).
        written: (K,) receives the values as the bucket's dtype holds them.
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
    """Return where |values| >= threshold, ascending: (D,) -> (k,) int64.

    >>> indices_above(torch.tensor([0.5, -3.0, 2.0]), 1.0)
    tensor([1, 2])
    """
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

    A sample gives a threshold that most likely leaves slightly more than k candidates; if it
    leaves fewer, the whole vector is searched. The result is exact either way.

    >>> topk_indices(torch.tensor([0.5, -3.0, 2.0]), 2)
    tensor([1, 2])
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
    ready = _HAS_TRITON and vectors[0].is_cuda and vectors[0].dtype == torch.float32
    if not ready or not all(vector.is_contiguous() for vector in vectors):
        return None
    # Triton launches kernels on the current device, wherever the tensors are.
    if any(vector.get_device() != torch.cuda.current_device() for vector in vectors):
        return None
    # Imported late: it takes a second, and machines without Triton cannot.
    from gradherd.sparsify import triton_kernels

    return triton_kernels
