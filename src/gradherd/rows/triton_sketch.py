"""The count sketch of a table of columns on a GPU, in one launch.

Letters: B examples, N columns of the table, K elements of a row.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

_SKETCH_BLOCK = 512
_MOST_COMPILED = 256
_compiled_sketches: dict[tuple[object, ...], Callable[..., None]] = {}


@triton.jit
def _sketch_kernel(
    columns, shifts, block_signs, signs, sketch, N, K, blocks, row, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a range of the count sketch of one example's columns."""
    example = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < K
    total = tl.zeros((BLOCK,), tl.float32)
    # Block by block in the same order: equal bits in every run.
    for block in range(blocks):
        shift = tl.load(shifts + block).to(tl.int32)
        source = at - shift
        source = tl.where(source < 0, source + K, source)
        index = block * K + source
        value = tl.load(columns + example * row + index, mask=inside & (index < N), other=0.0)
        sign = tl.load(signs + source, mask=inside, other=0.0) * tl.load(block_signs + block)
        total += value.to(tl.float32) * sign
    tl.store(sketch + example * K + at, total, mask=inside)


def sketch_columns(
    columns: Tensor, size: int, shifts: Tensor, block_signs: Tensor, signs: Tensor
) -> Tensor:
    """Return the count sketch of columns (B, N): (B, K).

    Args:
        columns: Any floating dtype; elements of an example lie side by side.
        size: K.
        shifts: (N / K, rounded up) rotation of each block of K columns.
        block_signs: Sign of each block.
        signs: (K,) sign of each column within a block.
    """
    examples, width = columns.shape
    sketch = torch.empty(examples, size, device=columns.device)
    grid = (examples, triton.cdiv(size, _SKETCH_BLOCK), 1)
    numbers = (width, size, len(shifts), columns.stride(0))
    args = (columns, shifts, block_signs, signs, sketch, *numbers, _SKETCH_BLOCK)
    # Triton compiles for numbers and addresses that are multiples of 16. What it has compiled for
    # the same ones is launched without being looked for, which takes longer than launching.
    key = (*numbers, examples, columns.device, *(one.data_ptr() % 16 for one in args[:5]))
    if (compiled := _compiled_sketches.get(key)) is not None:
        compiled(*args)
        return sketch
    done = _sketch_kernel[grid](*args)
    if hasattr(done, "function"):  # Triton's interpreter has none
        if len(_compiled_sketches) >= _MOST_COMPILED:
            _compiled_sketches.clear()
        _compiled_sketches[key] = done[grid]
    return sketch
