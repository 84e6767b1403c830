"""What a backward has brought so far: rows that wait until it is over.

Where no kernel serves a layer, its rows are added up by sink (`WaitingRows`). Kernels on a GPU add
to the rows of the model themselves, or to those of a sink if it is to be known apart (`Lane`).

Shapes: B examples of a full batch, n of this one, N elements of a sink, k of a row.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class Scratch:
    """Memory that kernels of one stream share: each is done with it before the next begins."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._memory = device, torch.empty(0, dtype=torch.uint8, device=device)
        self.size, self.address = 0, 0

    def grow(self, size: int) -> None:
        """Have at least so many bytes."""
        self._memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        self.size, self.address = size, self._memory.data_ptr()


class Lane:
    """The rows (B, k) that kernels of one stream add to, and their scratch memory."""

    def __init__(self, scratch: Scratch) -> None:
        self.scratch = scratch
        self.rows: Tensor | None = None
        self.address, self.room = 0, 0
        """Where rows begin, and how many there are."""
        self.sizes: set[int] = set()
        """Numbers of examples of the rows."""

    def make_room(self, examples: int, size: int, like: Tensor) -> None:
        """Have rows of `size` elements for so many examples."""
        rows, before = like.new_zeros(examples, size), self.rows
        if before is not None:  # a larger batch than before, in a step that will be refused
            rows[: len(before)] = before
        self.rows, self.address, self.room = rows, rows.data_ptr(), examples


class WaitingRows:
    """Rows of layers that share a sink."""

    def __init__(self, examples: int, like: Tensor) -> None:
        """Begin without rows.

        Args:
            examples: B, rows of the sink.
            like: A tensor of the rows' dtype and device.
        """
        self._examples, self._like = examples, like
        self._total: Tensor | None = None
        self.sizes: set[int] = set()
        """Numbers of examples of the rows."""

    def add(self, rows: Tensor) -> None:
        """Add rows (n, N), which are changed."""
        self.sizes.add(rows.shape[0])
        total = self._total
        if total is None:
            self._total = rows
            return
        if len(rows) > len(total):
            total = self._total = F.pad(total, (0, 0, 0, len(rows) - len(total)))
        total[: len(rows)].add_(rows)

    def open(self, examples: int, size: int) -> int:
        """Return where a kernel may add rows of so many examples, each of `size` elements."""
        self.sizes.add(examples)
        if self._total is None:
            self._total = self._like.new_zeros(max(self._examples, examples), size)
        if examples > len(self._total):
            self._total = F.pad(self._total, (0, 0, 0, examples - len(self._total)))
        self._total = self._total.to(self._like).contiguous()
        return self._total.data_ptr()

    def rows(self) -> Tensor:
        """Return the rows of all layers, (B, N)."""
        total = self._total
        assert total is not None
        short = self._examples - len(total)
        return (F.pad(total, (0, 0, 0, short)) if short > 0 else total).to(self._like.dtype)


class OpenBackward:
    """What a backward has brought so far."""

    def __init__(self, like: Tensor) -> None:
        self.lanes: dict[int, Lane] = {}
        """By stream."""
        self.rows: dict[tuple[int, int], tuple[Tensor, WaitingRows]] = {}
        """Sinks by stream and identity, with what waits for them."""
        self.accumulates = False
        """Whether it accumulates gradients, as `Tensor.backward` does."""
        self.is_watched = False
        """Whether the gradient of a parameter will tell."""
        self._like = like
        self._handle: Any = None

    def rows_for(self, sink: Tensor, stream: int) -> WaitingRows:
        """Return what waits for a sink on a stream."""
        found = self.rows.get((stream, id(sink)))
        if found is None:
            waiting = WaitingRows(len(sink), self._like)
            found = self.rows[stream, id(sink)] = (sink, waiting)
        return found[1]

    def watch(self, parameter: Tensor) -> None:
        """Note if the gradient of a parameter is accumulated; one is enough."""
        self.is_watched = True
        self._handle = parameter.register_post_accumulate_grad_hook(self._accumulated)

    def _accumulated(self, parameter: Tensor) -> None:
        self.accumulates = True

    def unwatch(self) -> None:
        """Leave the parameter as it was."""
        if self._handle is not None:
            self._handle.remove()
