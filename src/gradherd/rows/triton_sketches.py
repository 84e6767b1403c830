"""Count sketches on a GPU: of a table of columns, and of a model's whole gradient.

The gradient of a batch is the flat vector of all parameters, cut into blocks of k coordinates;
every p.grad is read once, where it lies. A piece is what one block and one parameter have in
common. A program adds up some of the pieces for some of the buckets, so a second sum over the
programs' shares completes the sketch. No two programs write to the same place: the bits are the
same in every run.

Letters: B examples, N columns of a table, D parameters, K buckets, S shares of the pieces.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from gradherd.gpu import Launch, launch

TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
"""Triton's names of the dtypes that kernels read."""
_SKETCH_BLOCK = 512
_BLOCK = 1024
# Twice what an H200 runs at once at 64 ranges of buckets; fewer if pieces are few.
_MOST_SHARES, _LEAST_PIECES = 32, 4
_TABLES = 2  # torch's allocator gives a loop the same memory again, or that of two steps in turn
_LONGEST = 1 << 31
"""Elements of a parameter, whose positions are 32-bit integers in the kernel."""


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
    launch(
        _sketch_kernel, grid, columns, shifts, block_signs, signs, sketch, *numbers, _SKETCH_BLOCK
    )
    return sketch


@triton.jit
def _gradient_kernel(
    gradients, pieces, signs, parts, begins, count, per_share, K,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up one share of the pieces for a range of buckets."""
    share = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    first = share * per_share
    # Piece by piece in the same order: equal bits in every run.
    for piece in range(first, tl.minimum(first + per_share, count)):
        field = pieces + piece * 6
        gradient = gradients + tl.load(field).to(tl.int64) * 3
        begin, place, length = tl.load(field + 1), tl.load(field + 2), tl.load(field + 3)
        address = tl.load(gradient)
        # A parameter that a backward has not used has no gradient and no address.
        length = tl.where(address != 0, length, 0)
        # As in `count_sketch`: a block is rotated as a whole, and has a sign.
        source = at - tl.load(field + 4)
        source = tl.where(source < 0, source + K, source)
        element = source - place
        inside = (at < K) & (element >= 0) & (element < length)
        element += begin
        channels, positions = tl.load(gradient + 1).to(tl.int32), tl.load(gradient + 2).to(tl.int32)
        if positions > 1:  # channels last: from the logical position to the one in memory
            rest = element % (channels * positions)
            element += (rest % positions) * channels + rest // positions - rest
        value = tl.load(address.to(tl.pointer_type(KIND)) + element, mask=inside, other=0.0)
        sign = tl.load(signs + source, mask=inside, other=0) * tl.load(field + 5)
        total += value.to(tl.float32) * sign.to(tl.float32)
    tl.store(parts + (begins + share).to(tl.int64) * K + at, total, mask=at < K)


class GradientSketcher:
    """Sketches the gradients of some parameters as one vector, in the order of the parameters."""

    def __init__(self, parameters: Sequence[Tensor], hashed: tuple[Tensor, Tensor, Tensor]) -> None:
        """Cut the parameters into pieces.

        Args:
            parameters: The parameters, all on one device.
            hashed: `CountSketch.hashes` of all blocks that the flat vector of them has.
        """
        size = self._size = len(hashed[2])
        self._device = parameters[0].device
        self._shapes = [p.shape for p in parameters]
        counts = [p.numel() for p in parameters]
        self._signs = hashed[2].to(torch.int8)  # read for every element, from the cache
        self._pieces = _pieces(counts, size, *(one.cpu().numpy() for one in hashed[:2]))
        # Of parameters without a gradient; the others' are looked up.
        self._usual = [_readable(p.dtype) for p in parameters]
        self._kinds: list[torch.dtype] = []
        self._launches: list[tuple[Launch, Tensor]] = []  # each with its pieces
        self._shares = 0
        # Where gradients were in the last steps, and the same on the device; the latest at the end.
        self._known: list[tuple[Any, Tensor]] = []
        # What `_layout` says of each parameter's gradients, by strides, dtype and bytes.
        self._layouts: list[dict[Any, tuple[int, int]]] = [{} for _ in parameters]

    def sketch(self, grads: Sequence[Tensor | None]) -> Tensor:
        """Return the `count_sketch` (k,) of the flat gradient, in which None is zero.

        Args:
            grads: One for each parameter; dense or sparse, any layout.
        """
        if self._device.type == "cuda" and torch.cuda.current_device() != self._device.index:
            with torch.cuda.device(self._device):  # Triton launches on the current device only
                return self._sketch(grads)
        return self._sketch(grads)

    def _sketch(self, grads: Sequence[Tensor | None]) -> Tensor:
        try:
            described = _described(grads)
        except RuntimeError:  # sparse ones (Embedding(sparse=True)) have no address
            grads = [g.to_dense() if g is not None and g.is_sparse else g for g in grads]
            described = _described(grads)
        # The stream as well: on another one the table might not have arrived yet.
        now = (_stream(self._device), described)
        copies: list[Tensor] = []  # held until the kernels are launched
        table = next((table for known, table in reversed(self._known) if known == now), None)
        if table is None:
            try:
                layouts = [
                    (0, 1, 1) if one is None else (one[0], *memo[one[1:]])
                    for one, memo in zip(described, self._layouts, strict=True)
                ]
            except KeyError:
                layouts, copies = self._examine(grads)
            on_gpu = self._device.type == "cuda"
            # Pinned memory and no waiting: torch does not use it again before it is copied.
            table = torch.tensor(layouts, dtype=torch.int64, pin_memory=on_gpu)
            table = table.to(self._device, non_blocking=True)
            if not copies:  # they would be elsewhere the next time
                self._known = [*self._known[1 - _TABLES :], (now, table)]
        parts = self._signs.new_empty(self._shares, self._size, dtype=torch.float32)
        for one, pieces in self._launches:
            one(table, pieces, self._signs, parts)
        return parts.sum(0)

    def _examine(
        self, grads: Sequence[Tensor | None]
    ) -> tuple[list[tuple[int, int, int]], list[Tensor]]:
        """Return where gradients lie, and how, and copies of those that have to be copied."""
        kinds = [
            (usual if grad is None else _readable(grad.dtype))
            for grad, usual in zip(grads, self._usual, strict=True)
        ]
        if kinds != self._kinds:
            self._cut(kinds)
        layouts, copies = [], []
        for grad, shape, kind, memo in zip(grads, self._shapes, kinds, self._layouts, strict=True):
            if grad is None:
                layouts.append((0, 1, 1))
                continue
            if grad.shape != shape:
                raise RuntimeError(
                    f"a gradient has shape {tuple(grad.shape)}, but its parameter had "
                    f"{tuple(shape)} when it was attached: call detach() and attach() again"
                )
            layout = _layout(grad)
            if layout is None or grad.dtype != kind:
                grad, layout = grad.to(kind).contiguous(), (1, 1)
                copies.append(grad)
            else:
                memo[grad.stride(), grad.dtype, grad.nbytes] = layout
            layouts.append((grad.data_ptr(), *layout))
        return layouts, copies

    def _cut(self, kinds: list[torch.dtype]) -> None:
        """Prepare a launch for the pieces of each dtype: every program adds up a share of them."""
        self._kinds, self._launches, self._known = kinds, [], []
        self._shares, size = 0, self._size
        self._layouts = [{} for _ in kinds]  # of gradients that these launches can read
        for kind in dict.fromkeys(kinds):
            own = self._pieces[np.array([one == kind for one in kinds])[self._pieces[:, 0]]]
            if not len(own):  # parameters may be empty
                continue
            per_share = triton.cdiv(
                len(own), min(_MOST_SHARES, triton.cdiv(len(own), _LEAST_PIECES))
            )
            shares = triton.cdiv(len(own), per_share)
            numbers = (self._shares, len(own), per_share, size, TYPES[kind], _BLOCK)
            made = Launch(_gradient_kernel, (shares, triton.cdiv(size, _BLOCK), 1), *numbers)
            self._launches.append((made, torch.from_numpy(own).to(self._device)))
            self._shares += shares


def _stream(device: torch.device) -> int:
    """Return the stream that kernels are launched on."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def can_sketch(parameters: Sequence[Tensor]) -> bool:
    """Say whether the kernel can read the gradients of these parameters."""
    here = parameters[0].device
    # Subclasses, such as DTensor, do not tell where their elements are.
    plain = all(type(p.detach()) is Tensor and p.numel() < _LONGEST for p in parameters)
    return plain and all(p.device == here for p in parameters)


def _described(grads: Sequence[Tensor | None]) -> list[Any]:
    """Return what a kernel has to know of gradients, to be compared with another step's."""
    return [None if g is None else (g.data_ptr(), g.stride(), g.dtype, g.nbytes) for g in grads]


def _readable(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the kernel reads gradients of a dtype."""
    return dtype if dtype in TYPES else torch.float32


def _layout(grad: Tensor) -> tuple[int, int] | None:
    """Return the sizes of the two dimensions that memory swaps; None if it is another layout.

    >>> _layout(torch.zeros(4, 3, 2, 2)), _layout(torch.zeros(3, 2).T)
    ((1, 1), None)
    >>> _layout(torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last))
    (3, 4)
    """
    if grad.is_contiguous():
        return 1, 1
    if grad.dim() < 3 or not grad.movedim(1, -1).is_contiguous():
        return None
    return grad.shape[1], math.prod(grad.shape[2:])


def _pieces(
    counts: Sequence[int], size: int, shifts: "np.ndarray[Any, Any]", signs: "np.ndarray[Any, Any]"
) -> "np.ndarray[Any, np.dtype[np.int32]]":
    """Return what each block of `size` coordinates has in common with each parameter.

    Args:
        counts: Elements of the parameters.
        size: k.
        shifts: Rotation of each block.
        signs: Sign of each block.

    Returns:
        (n, 6): parameter, first element, its place in the block, elements, shift, sign.
    """
    pieces, start = [], 0
    for which, count in enumerate(counts):
        end = start + count
        for block in range(start // size, -(-end // size)):
            low, high = max(start, block * size), min(end, (block + 1) * size)
            place = low - block * size
            pieces.append((which, low - start, place, high - low, shifts[block], signs[block]))
        start = end
    return np.array(pieces, dtype=np.int32).reshape(-1, 6)
