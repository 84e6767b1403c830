"""What waits for the end of a backward: rows of layers, and on a GPU whole layers.

Rows are added up as they come, in place, which autograd would not do. Where kernels serve a layer,
its input and gradient wait, so that one launch serves several layers: launching costs more than
computing.

Shapes: n examples, T positions, N elements of a sink.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradherd.rows.sink_maps import FilterMap, MatrixMap, VectorMap

MOST_HELD = 16
"""Layers of one kind that wait for each other."""
_FREE_BYTES = 1 << 25
"""Bytes that waiting layers may keep alive from the beginning of a backward."""
_MOST_KNOWN = 1024
CHANGED_IN_PLACE = (
    "an input of a layer, or the gradient of its output, was changed in place, so rows of single "
    "examples cannot be read: replace the in-place operation by its plain form, or order whole "
    "batches"
)


Plan = Callable[[Tensor], Tensor]
"""Launches the kernels of some layers, whose addresses it is given."""


class HeldMemory:
    """What the waiting layers of a model keep alive, and what is known from earlier steps."""

    def __init__(self) -> None:
        self.held, self.room = 0, _FREE_BYTES
        """Bytes of the layers that wait, and how many there may be."""
        self.plans: dict[Hashable, Plan] = {}
        """By the kind of the layers and how many they are."""
        self._tables: dict[Hashable, Tensor] = {}
        self._kinds: dict[Hashable, int] = {}

    def begin(self) -> None:
        """Prepare for a backward."""
        self.held, self.room = 0, _FREE_BYTES
        for known in (self.plans, self._tables):  # of lengths that change from batch to batch
            if len(known) > _MOST_KNOWN:
                known.clear()

    def kind_of(self, alike: Hashable) -> int:
        """Return the number of layers that one launch can serve together."""
        return self._kinds.setdefault(alike, len(self._kinds))

    def add(self, inputs: Tensor, grads: Tensor) -> int:
        """Count what a layer keeps alive; return its bytes."""
        size = inputs.nbytes
        # Memory is fullest when a backward begins. What it lets go of since then is room for layers
        # that wait: inputs, but not all, since several layers may read one.
        self.room += size // 2
        size += grads.nbytes
        self.held += size
        return size

    def table(self, numbers: tuple[int, ...], device: torch.device) -> Tensor:
        """Return addresses on a device: torch's allocator gives a loop the same memory again."""
        on_gpu = device.type == "cuda"
        # The stream as well: on another one the table might not have arrived yet.
        key = (torch.cuda.current_stream(device).cuda_stream if on_gpu else 0, numbers)
        table = self._tables.get(key)
        if table is None:
            # Pinned memory and no waiting: torch does not use it again before it is copied.
            table = torch.tensor(numbers, dtype=torch.int64, pin_memory=on_gpu)
            table = self._tables[key] = table.to(device, non_blocking=True)
        return table


class HeldUse(ABC):
    """What kernels know of one layer: which others they can serve with it, and how."""

    def __init__(self, one: Any, *kind: Any) -> None:
        self.one, self.kind = one, (type(self), *kind)
        self._fixed: dict[torch.dtype, tuple[int, int, int]] = {}
        self._kept: list[Any] = []  # tensors whose addresses are known
        self.sizes: tuple[Any, ...] | None = None
        """Of the last input and gradient."""
        self.alike = -1
        """The number of this kind of layers, with these sizes."""

    @abstractmethod
    def fits(self, inputs: Tensor, grads: Tensor) -> bool:
        """Say whether kernels can read these."""

    @abstractmethod
    def plan(self, inputs: Tensor, grads: Tensor, count: int, is_aligned: bool) -> Plan:
        """Return what takes addresses of `count` layers to their rows (S, n, ...), summed over S.

        Args:
            inputs: Of one of them; the others have equal shapes and strides.
            grads: The same.
            count: Layers.
            is_aligned: Whether all addresses are multiples of 16 bytes.
        """

    def fixed(self, dtype: torch.dtype) -> tuple[int, int, int]:
        """Return the addresses of the map's tensors that serve factors of a dtype."""
        if dtype not in self._fixed:
            tensors = self.tensors(dtype)
            self._kept += tensors
            at = [0 if one is None else one.data_ptr() for one in tensors]
            self._fixed[dtype] = (at[0], at[1], self.one.signs.data_ptr())
        return self._fixed[dtype]

    def tensors(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """Return the matrix that projects, and the signs of a window."""
        return None, None


class HeldProduct(HeldUse):
    """A weight: one factor is projected and multiplied with the other."""

    def __init__(self, one: MatrixMap, *, projects_grads: bool, window: Any = None) -> None:
        """Keep what kernels need.

        Args:
            one: The map of the weight.
            projects_grads: Whether gradients are projected and inputs kept, or the other way round.
            window: How the window of a convolution moves, if it has one.
        """
        super().__init__(one, one.columns, projects_grads, window, type(one))
        self.projects_grads, self.window = projects_grads, window

    def tensors(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """Return the matrix that projects, and the signs of a window."""
        one = self.one
        like = torch.empty(0, dtype=dtype, device=one.side.device)
        if not isinstance(one, FilterMap):
            return one.side_for(like), None
        places = None
        if self.window is not None:
            signs = one.filters.new_ones(one.columns, 1) if one.places is None else one.places
            places = signs.to(dtype)
        return one.filters.to(dtype), places

    def fits(self, inputs: Tensor, grads: Tensor) -> bool:
        """Say whether both factors can be read."""
        from gradherd.rows.triton_layers import Factor

        factors = Factor.of(inputs), Factor.of(grads)
        return None not in factors and inputs.dtype == grads.dtype

    def plan(self, inputs: Tensor, grads: Tensor, count: int, is_aligned: bool) -> Plan:
        """Prepare the columns of some weights."""
        from gradherd.rows.triton_layers import product_plan

        one = self.one
        is_filter = isinstance(one, FilterMap)
        first, second = (grads, inputs) if self.projects_grads else (inputs, grads)
        # As the layers themselves are told.
        rounds = torch.get_float32_matmul_precision() != "highest"
        return product_plan(
            first, second, one.columns, count,
            first_at=int(self.projects_grads), window=self.window, is_aligned=is_aligned,
            allow_tf32=torch.backends.cudnn.allow_tf32 if is_filter else rounds,
            matrix_strides=(1, one.filters.shape[1]) if is_filter else (one.columns, 1),
        )  # fmt: skip


class HeldPositions(HeldUse):
    """A norm over the last dimension, or a bias, whose gradients are sums over positions."""

    def __init__(
        self, one: VectorMap, *, eps: float = 0.0, scale: bool, rms: bool = False, shift: bool
    ) -> None:
        """Keep what kernels need.

        Args:
            one: The map of scale and shift.
            eps: Of the norm.
            scale: Whether there is a scale.
            rms: Whether nothing is subtracted.
            shift: Whether there is a shift.
        """
        super().__init__(one, one.size, eps, scale, rms, shift)
        self.eps, self.scale, self.rms, self.shift = eps, scale, rms, shift

    def fits(self, inputs: Tensor, grads: Tensor) -> bool:
        """Say whether channels lie side by side and are not too many."""
        from gradherd.rows.triton_layers import MOST_CHANNELS, TYPES

        both = (inputs, grads) if self.scale else (grads,)
        return all(
            one.dim() == 3 and one.stride(2) == 1 and one.dtype in TYPES and one.numel() > 0
            for one in both
        ) and (grads.shape[2] <= MOST_CHANNELS)

    def plan(self, inputs: Tensor, grads: Tensor, count: int, is_aligned: bool) -> Plan:
        """Prepare the rows of some norms or biases."""
        from gradherd.rows.triton_layers import position_plan

        read = inputs if self.scale else None
        return position_plan(
            read, grads, self.eps, count, rms=self.rms, shift=self.shift, is_aligned=is_aligned
        )


class HeldBatchNorm(HeldUse):
    """A BatchNorm in training."""

    def __init__(self, one: VectorMap, eps: float) -> None:
        super().__init__(one, one.size, eps)
        self.eps = eps

    def fits(self, inputs: Tensor, grads: Tensor) -> bool:
        """Say whether positions are one dimension in memory."""
        from gradherd.rows.triton_layers import Factor

        return Factor.of(inputs) is not None and Factor.of(grads) is not None

    def plan(self, inputs: Tensor, grads: Tensor, count: int, is_aligned: bool) -> Plan:
        """Prepare the rows of some norms."""
        from gradherd.rows.triton_layers import batch_norm_plan

        return batch_norm_plan(inputs, grads, self.eps, count, is_aligned=is_aligned)


_Member = tuple[HeldUse, Tensor, Tensor, int, int]
"""A layer that waits, its input and gradient, and how often those were changed in place."""


class WaitingRows:
    """Rows of layers that share a sink, and layers themselves, until all have run."""

    def __init__(self, memory: HeldMemory) -> None:
        self._held: dict[Any, list[_Member]] = {}
        self._bytes: dict[Any, int] = {}  # by the same
        self._total: Tensor | None = None
        self._memory = memory
        self.sizes: set[int] = set()
        """Numbers of examples of the rows."""

    def add(self, rows: Tensor) -> None:
        """Add rows (n, N), which are changed."""
        self.sizes.add(rows.shape[0])
        total = self._total
        if total is None:
            self._total = rows
            return
        if len(rows) > len(total):  # only in a step that will be refused
            total = self._total = F.pad(total, (0, 0, 0, len(rows) - len(total)))
        total[: len(rows)].add_(rows)

    def hold(self, use: HeldUse, inputs: Tensor, grads: Tensor) -> bool:
        """Let a layer wait; return whether kernels can serve it."""
        sizes = (
            inputs.shape, inputs.stride(), inputs.dtype, grads.shape, grads.stride(), grads.dtype
        )  # fmt: skip
        if sizes != use.sizes:
            use.sizes, use.alike = sizes, self._memory.kind_of((use.kind, *sizes))
        alike = use.alike
        group = self._held.get(alike)
        if group is None:
            if not use.fits(inputs, grads):
                return False
            group = self._held[alike] = []
            self._bytes[alike] = 0
        group.append((use, inputs, grads, inputs._version, grads._version))
        self._bytes[alike] += self._memory.add(inputs, grads)
        if len(group) == MOST_HELD:
            self.launch(alike)
        return True

    def largest(self) -> tuple[int, Any]:
        """Return the kind of layers that keeps most alive, behind its bytes; 0 if none waits."""
        alike = max(self._bytes, key=self._bytes.__getitem__, default=None)
        return self._bytes.get(alike, 0), alike

    def launch(self, alike: Any) -> None:
        """Launch the kernels of the layers of one kind."""
        group = self._held.pop(alike)
        self._memory.held -= self._bytes.pop(alike)
        first, inputs, grads, *_ = group[0]
        dtype, aligned = inputs.dtype, 0
        numbers: list[int] = []
        for use, one, other, version, other_version in group:
            if one._version != version or other._version != other_version:
                raise RuntimeError(CHANGED_IN_PLACE)
            at = (one.data_ptr(), other.data_ptr())
            aligned |= at[0] | at[1]
            numbers += (*at, *use.fixed(dtype))
        table, plans = self._memory.table(tuple(numbers), grads.device), self._memory.plans
        key = (alike, len(group), aligned % 16)
        if key not in plans:
            plans[key] = first.plan(inputs, grads, len(group), aligned % 16 == 0)
        found = plans[key](table)
        self.add(first.one.shape_rows(found[0] if len(found) == 1 else found.sum(0)))

    def rows(self, sink: Tensor) -> Tensor:
        """Return the rows of all, in the shape of the sink."""
        for alike in list(self._held):
            self.launch(alike)
        assert self._total is not None
        total = self._total.to(sink.dtype)
        return F.pad(total, (0, 0, 0, len(sink) - len(total))) if len(sink) > len(total) else total
