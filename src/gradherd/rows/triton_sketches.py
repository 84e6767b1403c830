"""Count sketches on a GPU: of a table of columns, or of one long vector.

Letters: B vectors, N elements of each, K buckets, S shares of the blocks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradherd.gpu import launch

_BLOCK = 512
# What an H200 keeps busy with a single vector, whose blocks are then shared out; no share has fewer
# blocks than the least.
_PROGRAMS, _LEAST_BLOCKS = 4096, 4


@triton.jit
def _sketch_kernel(
    vectors, shifts, block_signs, signs, parts, N, K, blocks, per_share, lead, row,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a range of the count sketch of one vector, of one share of its blocks."""
    vector, share = tl.program_id(0).to(tl.int64), tl.program_id(2)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < K
    total = tl.zeros((BLOCK,), tl.float32)
    first = share * per_share
    begin = first.to(tl.int64) * K - lead
    # Block by block in the same order: equal bits in every run.
    for block in range(first, tl.minimum(first + per_share, blocks)):
        shift = tl.load(shifts + block).to(tl.int32)
        source = at - shift
        source = tl.where(source < 0, source + K, source)
        index = begin + source
        is_there = inside & (index >= 0) & (index < N)
        value = tl.load(vectors + vector * row + index, mask=is_there, other=0.0)
        sign = tl.load(signs + source, mask=inside, other=0.0) * tl.load(block_signs + block)
        total += value.to(tl.float32) * sign
        begin += K
    tl.store(parts + (vector * tl.num_programs(2) + share) * K + at, total, mask=inside)


def sketch_vectors(
    vectors: Tensor, lead: int, shifts: Tensor, block_signs: Tensor, signs: Tensor
) -> Tensor:
    """Return the count sketch of vectors (B, N): (B, K).

    Args:
        vectors: Any floating dtype; elements of a vector lie side by side.
        lead: Position of the first element in its block.
        shifts: Rotation of each block of K positions.
        block_signs: Sign of each block.
        signs: (K,) sign of each position within a block.
    """
    (count, length), size, blocks = vectors.shape, len(signs), len(shifts)
    grid = (count, triton.cdiv(size, _BLOCK))
    most = min(triton.cdiv(_PROGRAMS, grid[0] * grid[1]), triton.cdiv(blocks, _LEAST_BLOCKS))
    per_share = triton.cdiv(blocks, most)
    shares = triton.cdiv(blocks, per_share)
    parts = torch.empty(count, shares, size, device=vectors.device)
    launch(
        _sketch_kernel, (*grid, shares), vectors, shifts, block_signs, signs, parts,
        length, size, blocks, per_share, lead, vectors.stride(0), BLOCK=_BLOCK,
    )  # fmt: skip
    return parts[:, 0] if shares == 1 else parts.sum(1)
