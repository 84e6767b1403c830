"""What a backward has brought so far: rows that wait until it is over.

Shapes: B examples of a full batch, n of those that come, N elements of a row.
"""

from typing import Any

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

    def room(self, examples: int) -> Tensor:
        """Return the rows: B, or more in a step that will be refused."""
        before = self._rows
        if before is None or examples > len(before):
            rows = self._rows = self._like.new_zeros(max(self._examples, examples), self._width)
            if before is not None:
                rows[: len(before)] = before
            return rows
        return before

    def add(self, rows: Tensor, start: int) -> None:
        """Add rows (n, ...), which are kept if they are all, from a column on."""
        is_all = rows.shape == (self._examples, self._width) and rows.dtype == self._like.dtype
        if self._rows is None and is_all:
            self._rows = rows.contiguous()
        else:
            here = self.room(len(rows))[: len(rows), start : start + rows.shape[1]]
            here.add_(rows)


class OpenBackward:
    """What a backward has brought so far."""

    def __init__(self) -> None:
        self.tables: dict[tuple[int, str], Table] = {}
        """By stream and key."""
        self.sizes: set[int] = set()
        """Numbers of examples of what was added; not by compiled layers."""
        self.accumulates = False
        """Whether it accumulates gradients, as `Tensor.backward` does."""
        self._handle: Any = None

    def watch(self, parameter: Tensor) -> None:
        """Note if the gradient of a parameter is accumulated; one is enough."""
        if self._handle is None:
            self._handle = parameter.register_post_accumulate_grad_hook(self._accumulated)

    def _accumulated(self, parameter: Tensor) -> None:
        self.accumulates = True

    def unwatch(self) -> None:
        """Leave the parameter as it was."""
        if self._handle is not None:
            self._handle.remove()
