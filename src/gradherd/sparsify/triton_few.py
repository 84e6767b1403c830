"""Small programs beside the passes of `triton_select`: a floor from counts, and scattering a mean.

What they do is little, but in torch it takes a dozen kernels, and a wait for each bucket.

Letters: K coordinates that travelled.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradherd.sparsify.tally import BINS, SHIFT


@triton.jit(do_not_specialize=["k"])
def _floor_pass(counts, window, floor, k, BINS: tl.constexpr, SHIFT: tl.constexpr):
    bins = tl.arange(0, BINS)
    reach = tl.cumsum(tl.load(counts + bins, mask=bins < BINS - 1, other=0), axis=0, reverse=True)
    at = tl.sum(((reach >= k) & (bins < BINS - 1)).to(tl.int32), axis=0) - 1
    border = ((at + tl.load(window)) << SHIFT).to(tl.float32, bitcast=True)
    tl.store(floor, tl.where(at > 0, border, 0.0))


@triton.jit(do_not_specialize=["count"])
def _put_pass(flat, number, own, at, values, held, limit, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = tl.load(number + i, mask=i < count, other=-1) == own
    value = tl.load(values + i, mask=mine, other=0)
    # NaN stays NaN: minimum and maximum would drop it.
    value = tl.where(value > limit, limit, tl.where(value < -limit, -limit, value))
    value = value.to(flat.dtype.element_ty)
    tl.store(flat + tl.load(at + i, mask=mine, other=0), value, mask=mine)
    tl.store(held + i, value.to(held.dtype.element_ty), mask=mine)


def floor(counts: Tensor, window: Tensor, k: int) -> Tensor:
    """Do what `Tally.floor` does."""
    found = torch.empty((), dtype=torch.float32, device=counts.device)
    _floor_pass[(1,)](counts, window, found, k, BINS=BINS, SHIFT=SHIFT, num_warps=1)
    return found


def put(flat: Tensor, number: Tensor, own: int, at: Tensor, values: Tensor, held: Tensor) -> None:
    """Write values where number == own to flat[at], and what its type could hold to `held`."""
    if not len(values):
        return
    block, limit = 512, torch.finfo(flat.dtype).max
    _put_pass[(triton.cdiv(len(values), block),)](
        flat, number, own, at, values, held, limit, len(values), BLOCK=block
    )
