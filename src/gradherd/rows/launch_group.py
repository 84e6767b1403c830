"""Layers that wait for each other, so that one launch serves many of them.

A layer hands over the addresses of its input and output gradient when the gradient arrives. When
enough layers wait, or what they keep alive takes too much memory, all their columns are computed
by the kernels of `triton_rows`. What stays the same from step to step (sizes, strides, who works
on what) lies on the device already; only the addresses are copied.

Shapes: B examples, T positions, q columns of the input side.
"""

import itertools
from collections.abc import Callable, Hashable
from importlib.util import find_spec

import torch
from torch import Tensor

from gradherd.rows.launch_plan import LaunchPlan, NormLayer, ProductLayer, make_plan

MOST = 16
"""Layers of a group."""
_MEMORY_SHARE = 0.08
"""Share of the memory in use that waiting layers may keep alive."""
KERNEL_DEVICES = {"cuda"}
"""Where kernels run; tests add the CPU, on which Triton interprets them."""
_HAS_TRITON = find_spec("triton") is not None
_RING = 1024
_MOST_PLANS = 512


class LaunchGroup:
    """Collects layers and launches their kernels together."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[Hashable, tuple[int, ProductLayer | NormLayer] | None] = {}
        self._numbers = itertools.count()
        self._plans: dict[tuple[int, ...], LaunchPlan] = {}
        self._layers: list[ProductLayer | NormLayer] = []
        self._ids: list[int] = []
        self._addresses: list[int] = []
        self._tensors: list[Tensor] = []  # alive until they are launched
        # A start of 32 MB, until the memory in use was measured.
        self._bytes, self._budget = 0, 1 << 25
        # The host is never so many launches ahead of the device that a row is overwritten early.
        self._ring = torch.zeros(
            _RING, 5 * MOST, dtype=torch.int64, pin_memory=device.type == "cuda"
        )
        self._rows = self._ring.numpy()
        self._at = self._batches = 0

    def begin(self) -> None:
        """Prepare for a batch."""
        self._batches += 1
        # Not often: counting memory takes as long as many launches.
        if self._device.type == "cuda" and self._batches % 100 == 3:
            used = torch.cuda.memory_allocated(self._device)
            self._budget = max(1 << 25, int(used * _MEMORY_SHARE))

    def add(
        self,
        key: Hashable,
        make: Callable[[], ProductLayer | NormLayer | None],
        tensors: tuple[Tensor, ...],
        out: int,
    ) -> bool:
        """Add a layer to the group.

        Args:
            key: Stands for everything that `make` depends on.
            make: Returns the layer, or None if kernels cannot serve it. Called once per key.
            tensors: Input (or projected input), output gradient, and mean and reciprocal standard
                deviation of a norm.
            out: Address of the layer's columns.

        Returns:
            False if kernels cannot serve it.
        """
        if key not in self._known:
            made = make()
            self._known[key] = None if made is None else (next(self._numbers), made)
        known = self._known[key]
        if known is None:
            return False
        self._ids.append(known[0])
        self._layers.append(known[1])
        pointers = [tensor.data_ptr() for tensor in tensors]
        if len(pointers) == 2:
            # A product has no statistics, but every layer has five addresses, so that kernels find
            # theirs.
            pointers += (pointers[0], pointers[0])
        self._addresses += (*pointers, out)
        # Kernels get bare addresses: without a reference the allocator could hand out the memory
        # again.
        self._tensors += tensors
        self._bytes += tensors[0].nbytes + tensors[1].nbytes
        if len(self._ids) == MOST or self._bytes > self._budget:
            self.flush()
        return True

    def flush(self) -> None:
        """Launch the kernels of all layers that wait."""
        if not self._ids:
            return
        key = tuple(self._ids)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MOST_PLANS:  # lengths that change from batch to batch
                self._plans.clear()
                self._known.clear()  # numbers are not used again, so no old plan fits new layers
            plan = self._plans[key] = make_plan(self._layers, self._device)
        count = len(self._addresses)
        row = self._rows[self._at]
        row[:count] = self._addresses
        # From torch's allocator at each launch: it is reused in the order of the stream.
        scratch = torch.empty(plan.scratch, dtype=torch.uint8, device=self._device)
        row[plan.places] = plan.offsets + scratch.data_ptr()
        # Pinned memory and no waiting: the copy is enqueued before the kernels that read it.
        pointers = self._ring[self._at, :count].to(self._device, non_blocking=True)
        self._at = (self._at + 1) % _RING
        for launch in plan.launches:
            launch(pointers)
        self.clear()

    def clear(self) -> None:
        """Forget the layers that wait."""
        self._ids, self._layers, self._addresses, self._tensors = [], [], [], []
        self._bytes = 0


def launch_group(like: Tensor) -> LaunchGroup | None:
    """Return a group for rows like these, or None where there are no kernels for them."""
    if not _HAS_TRITON or like.device.type not in KERNEL_DEVICES or like.dtype != torch.float32:
        return None
    return LaunchGroup(like.device)
