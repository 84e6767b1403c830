"""A table of all layers' columns, which is sketched once for a whole batch.

Every layer has slots in the table and writes its columns there when its gradient arrives, in place
and without a launch of its own for the sketch. The table is kept from batch to batch.

Shapes: B examples, W columns of the table, k elements of a row.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from gradherd.rows.launch_group import KernelLayer, LaunchGroup
from gradherd.rows.sketch import sketch_columns


class Slot(NamedTuple):
    """Columns of one layer: table[:, begin : begin + width]."""

    begin: int
    width: int


class KnownLaunch(NamedTuple):
    """A slot that kernels have written, and what they need to know to do it again."""

    slot: Slot
    number: int
    layer: KernelLayer
    tensors: tuple[Tensor, ...]
    size: int
    """Bytes of input and output gradient."""


class KnownUse:
    """A use of a layer that kernels have served, by which others like it are recognised."""

    __slots__ = (
        "begin",
        "examples",
        "grads",
        "inputs",
        "layer",
        "number",
        "saved",
        "shape",
        "size",
        "slot",
    )

    def __init__(self, launch: KnownLaunch, inputs: Tensor, grads: Tensor) -> None:
        """Remember it, but not its tensors, which would be kept alive.

        Args:
            launch: How kernels were launched for it.
            inputs: Input of the layer, as it is held.
            grads: Its output gradient, as it arrives.
        """
        self.shape = inputs.shape
        self.inputs = inputs.shape, inputs.stride(), inputs.dtype
        self.grads = grads.shape, grads.stride(), grads.dtype
        self.saved = 4 if len(launch.tensors) == 4 else 0
        self.slot, self.number, self.size = launch.slot, launch.number, launch.size
        self.begin = 4 * launch.slot.begin  # tables of kernels are float32
        self.layer, self.examples = launch.layer, launch.layer.examples


class ColumnTable:
    """The columns of one batch."""

    def __init__(
        self, width: int, exact: int, like: Tensor, group: LaunchGroup | None = None
    ) -> None:
        """Prepare an empty table.

        Args:
            width: W.
            exact: How many columns at the start are those of biases and norms. The rest is for
                projected weights, which some models do not have.
            like: A tensor of the rows' dtype and device.
            group: Layers that wait for their kernels, on a GPU.
        """
        self.group = group
        self._width, self._exact, self._like = width, exact, like
        self._table = like.new_zeros(0, width)
        self._examples = self._address = 0  # of the table, at hand for every layer
        self._used: set[Slot] = set()  # in this batch
        self._dirty: set[Slot] = set()  # not zero, since a batch before
        self.finals: dict[int, Tensor] = {}
        """(B, k) sketches of parameters, by index, that are not made from columns."""
        self.launched: KnownLaunch | None = None
        """What `launch` did last; whoever reads it sets it to None, since it holds tensors."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the columns."""
        return self._like.dtype

    @property
    def is_empty(self) -> bool:
        """Whether nothing was written in this batch."""
        return not self._used and not self.finals

    def start(self, examples: int) -> None:
        """Make room for a batch of `examples` examples, if it is the first to write."""
        if not self.is_empty:
            return
        if examples != len(self._table):
            # Allocated anew for another batch size only: the last, short batch of an epoch, mostly.
            self._table = self._like.new_zeros(examples, self._width)
            self._examples, self._address = examples, self._table.data_ptr()
            self._dirty = set()
        if self.group is not None:
            self.group.begin()

    @property
    def width(self) -> int:
        """W."""
        return self._width

    @property
    def examples(self) -> int:
        """B."""
        return len(self._table)

    def launch(
        self,
        slot: Slot,
        key: Hashable,
        make: Callable[[bool], KernelLayer | None],
        tensors: tuple[Tensor, ...],
    ) -> bool:
        """Let kernels write a slot, together with those of other layers.

        Args:
            slot: Where to write.
            key: Stands for everything that `make` depends on.
            make: Returns the layer, given whether to add to the columns of an earlier use.
            tensors: What kernels read; see `LaunchGroup.add`.

        Returns:
            False if kernels cannot do it.
        """
        assert self.group is not None
        add = slot in self._used
        if add:
            self.group.flush()
        out = self._address + 4 * slot.begin  # tables of kernels are float32
        added = self.group.add((slot.begin, add, key), lambda: make(add), tensors, out)
        if added is None:
            return False
        self._used.add(slot)
        size = tensors[0].nbytes + tensors[1].nbytes
        self.launched = None if add else KnownLaunch(slot, *added, tensors, size)
        return True

    def launch_again(
        self, known: KnownUse, inputs: Tensor, grads: Tensor, saved: tuple[Tensor, ...]
    ) -> bool:
        """Let kernels write a slot as before; False if this use is another case.

        All in one call, since it is what the host does for every layer in every step.

        Args:
            known: The use before.
            inputs: Input of the layer.
            grads: Its output gradient.
            saved: What a norm has saved, mean and reciprocal standard deviation last; else nothing.
        """
        at, grads_at, slot = inputs.data_ptr(), grads.data_ptr(), known.slot
        if (
            (inputs.shape, inputs.stride(), inputs.dtype) != known.inputs
            or (grads.shape, grads.stride(), grads.dtype) != known.grads
            or len(saved) != known.saved
            or (at | grads_at) % 16  # kernels may expect aligned addresses
            or known.examples != self._examples
            or slot in self._used
        ):
            return False
        assert self.group is not None
        self._used.add(slot)
        out, tensors = self._address + known.begin, (inputs, grads, *saved)
        addresses = (at, grads_at, at, at, out)
        if saved:
            addresses = (at, grads_at, saved[2].data_ptr(), saved[3].data_ptr(), out)
        self.group.add_known(known.number, known.layer, addresses, tensors, known.size)
        return True

    def put(self, slot: Slot, columns: Tensor) -> None:
        """Write columns (B, width), or add them to those of earlier uses."""
        view = self._table[:, slot.begin : slot.begin + slot.width]
        if slot in self._used:
            self._launch()
            view += columns
        else:
            view.copy_(columns)
        self._used.add(slot)

    def _launch(self) -> None:
        """Let the layers that wait write their columns."""
        if self.group is not None:
            self.group.flush()

    def add_final(self, parameter: int, rows: Tensor) -> None:
        """Add sketches (B, k) of a parameter."""
        before = self.finals.get(parameter)
        self.finals[parameter] = rows if before is None else before + rows

    def columns(self, slot: Slot, lo: int, hi: int) -> Tensor | None:
        """Return columns lo to hi of a slot, or None if it was not written in this batch."""
        if slot not in self._used:
            return None
        self._launch()
        return self._table[:, slot.begin + lo : slot.begin + hi]

    def sketch(
        self,
        k: int,
        seed: int,
        leave_out: Iterable[tuple[Slot, int, int]] = (),
        *,
        scale: float = 1.0,
    ) -> Tensor:
        """Return the rows, (B, k), times `scale`, and empty the table.

        Args:
            k: Elements of a row.
            seed: Seed of the hash.
            leave_out: Parts of slots that do not count.
            scale: What rows are multiplied by.
        """
        self._launch()
        for slot, lo, hi in leave_out:
            self._table[:, slot.begin + lo : slot.begin + hi].zero_()
        # Zeroed only where needed: filling the whole table would cost as much as the sketch.
        if self._dirty != self._used:  # compared first, which is faster than a difference
            for slot in self._dirty - self._used:  # a layer that this batch has not used
                self._table[:, slot.begin : slot.begin + slot.width].zero_()
        projected = any(slot.begin >= self._exact for slot in self._used)
        # Columns of projected weights are the largest part; a model of biases and norms has none.
        end = self._width if projected else self._exact
        if end and self._used:
            columns = self._table if end == self._width else self._table[:, :end]
            total = sketch_columns(columns, k, seed, "columns", scale=scale)
        else:
            total = self._like.new_zeros(len(self._table), k)
        # In a fixed order, so that sums have the same bits on every rank.
        for parameter in sorted(self.finals) if self.finals else ():
            total = torch.add(total, self.finals[parameter].to(total.dtype), alpha=scale)
        self._dirty, self._used, self.finals = self._used, set(), {}
        return total

    def clear(self) -> None:
        """Forget this batch."""
        if self.group is not None:
            self.group.clear()
        if not self.is_empty:  # as it is after `sketch`
            self._dirty |= self._used
            self._used, self.finals = set(), {}


class LayerColumns(NamedTuple):
    """Where one layer writes its columns."""

    table: ColumnTable
    slots: Mapping[str, Slot]
    """By local name."""
    indices: Mapping[str, int]
    """Indices of the layer's trainable parameters by local name."""

    def put(self, slot: str, columns: Tensor) -> None:
        """Write columns (B, width) of a slot, or add them to those of earlier uses."""
        self.table.put(self.slots[slot], columns)


def lay_out(widths: Iterable[tuple[int, bool]]) -> tuple[list[Slot], int, int]:
    """Place slots of some widths, those of projected weights last.

    Args:
        widths: Width of each slot, and whether it is for a projected weight.

    Returns:
        The slots in the order given, the width of the table, and where projected weights begin.
    """
    widths = list(widths)
    slots: list[Slot | None] = [None] * len(widths)
    begin = exact = 0
    # Two passes: exact columns first, so that a prefix of the table can be sketched alone.
    for projected in (False, True):
        for at, (width, is_projected) in enumerate(widths):
            if is_projected == projected:
                slots[at] = Slot(begin, width)
                begin += width
        exact = exact if projected else begin
    return [slot for slot in slots if slot is not None], begin, exact


def empty_like_rows(parameter: Tensor) -> Tensor:
    """Return an empty tensor of the dtype and device of a model's rows."""
    dtype = parameter.dtype if parameter.dtype == torch.float64 else torch.float32
    return torch.empty(0, dtype=dtype, device=parameter.device)
