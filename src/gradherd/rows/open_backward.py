"""What a backward has brought so far: rows that wait until it is over.

Shapes: B examples of a full batch, n of those that come, N elements of a row.
"""

from typing import Any

import torch
from torch import Tensor


class Table:
    """Rows (B, N) that layers add to, of one stream."""

    def __init__(self, examples: int, width: int, like: Tensor) -> None:
        """Begin without rows.

        Args:
            examples: B.
            width: N.
            like: A tensor of the rows' dtype and device.
        """
        self._examples, self._width, self._like = examples, width, like
        self._rows: Tensor | None = None
        self.length = self.address = 0
        """Rows that there are, and their memory."""
        self.scratch_size = self.scratch_address = 0
        """Bytes for what kernels of the stream leave each other, and their memory."""

    def room(self, examples: int) -> Tensor:
        """Return the rows: B, or more in a step that will be refused."""
        if self._rows is not None and examples <= len(self._rows):
            return self._rows
        return self._keep(self._like.new_zeros(max(self._examples, examples), self._width))

    def _keep(self, rows: Tensor) -> Tensor:
        self._rows, self.length, self.address = rows, len(rows), rows.data_ptr()
        return rows

    def make_scratch(self, size: int) -> None:
        """Provide so many bytes. Kernels before may still use the old ones: the stream is one."""
        self._scratch = torch.empty(size, dtype=torch.uint8, device=self._like.device)
        self.scratch_size, self.scratch_address = size, self._scratch.data_ptr()

    def add(self, rows: Tensor, start: int, *, may_keep: bool = True) -> None:
        """Add rows (n, ...) from a column on; they may be kept as they are, if they are all."""
        is_all = rows.shape == (self._examples, self._width) and rows.dtype == self._like.dtype
        if self._rows is None and is_all and may_keep:
            self._keep(rows.contiguous())
        else:
            here = self.room(len(rows))[: len(rows), start : start + rows.shape[1]]
            here.add_(rows)


class OpenBackward:
    """What a backward has brought so far."""

    def __init__(self, examples: int, like: Tensor) -> None:
        """Begin with nothing; see `Table`."""
        self._examples, self._like = examples, like
        self.tables: dict[tuple[int, str], Table] = {}
        """By stream and key."""
        self.sizes: set[int] = set()
        """Numbers of examples of what was added; not by compiled layers."""
        self.accumulates = False
        """Whether it accumulates gradients, as `Tensor.backward` does."""
        self.handle: Any = None
        """Of the hook that tells so."""

    def table(self, stream: int, key: str, width: int) -> Table:
        """Return the rows of a stream and a key."""
        found = self.tables.get((stream, key))
        if found is None:
            found = self.tables[stream, key] = Table(self._examples, width, self._like)
        return found

    def watch(self, parameter: Tensor) -> None:
        """Note if the gradient of a parameter is accumulated; one is enough."""
        self.handle = parameter.register_post_accumulate_grad_hook(self._accumulated)

    def _accumulated(self, parameter: Tensor) -> None:
        self.accumulates = True

    def unwatch(self) -> None:
        """Leave the parameter as it was."""
        if self.handle is not None:
            self.handle.remove()
