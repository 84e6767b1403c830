"""Layers that wait for each other, so that one launch serves many of them.

A layer hands over the addresses of its input and output gradient when the gradient arrives. When
enough layers wait, or what they keep alive takes too much memory, all their columns are computed
by the kernels of `triton_rows`. What stays the same from step to step (sizes, strides, who works
on what) lies on the device already; addresses are copied if they are new. So the kernels of a group
that comes again and again are a CUDA graph, which is launched in a tenth of the time.

Shapes: B examples, T positions, q columns of the input side.
"""

import itertools
from collections.abc import Callable, Hashable
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor

from gradherd.rows.launch_graph import LaunchPlan, capture_graph
from gradherd.rows.launch_plan import NormLayer, ProductLayer, make_plan

MOST = 16
"""Layers of a group."""
_MEMORY_SHARE = 0.03
"""Share of the memory in use when a backward begins that waiting layers may keep alive, and that
scratch memory may take."""
KernelLayer = ProductLayer | NormLayer
KERNEL_DEVICES = {"cuda"}
"""Where kernels run; tests add the CPU, on which Triton interprets them."""
_HAS_TRITON = find_spec("triton") is not None
_RING = 1024
_RUNS_BEFORE_GRAPH = 3  # lengths that do not come again are not worth one
_MOST_PLANS = 512


class LaunchGroup:
    """Collects layers and launches their kernels together."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[Hashable, tuple[int, KernelLayer] | None] = {}
        self._numbers = itertools.count()
        self._plans: dict[Hashable, LaunchPlan] = {}
        self._uses_graphs = device.type == "cuda"
        self._current_stream = stream_getter(device)
        self._scratch: dict[int, Tensor] = {}  # by stream
        self._scratch_at: dict[int, tuple[int, int]] = {}  # address and bytes
        self._layers: list[KernelLayer] = []
        self._ids: list[int] = []
        self._addresses: list[int] = []
        self._tensors: list[Tensor] = []  # alive until they are launched
        # A start of 32 MB, until the memory in use was measured.
        self._bytes, self._budget = 0, 1 << 25
        self._scratch_bytes = 0  # of the layers that wait
        self._released = 0  # bytes of inputs in this batch that autograd has let go of
        # The host is never so many launches ahead of the device that a row is overwritten early.
        self._ring = torch.zeros(
            _RING, 5 * MOST, dtype=torch.int64, pin_memory=device.type == "cuda"
        )
        self._rows, self._sources = self._ring.numpy(), self._ring.unbind()
        self._at = self._batches = 0

    def begin(self) -> None:
        """Prepare for a batch."""
        self._batches += 1
        self._released = 0
        # Not often: counting memory takes as long as many launches.
        if self._device.type == "cuda" and self._batches % 100 == 3:
            used = torch.cuda.memory_allocated(self._device)
            self._budget = max(1 << 25, int(used * _MEMORY_SHARE))

    def add(
        self,
        key: Hashable,
        make: Callable[[], KernelLayer | None],
        tensors: tuple[Tensor, ...],
        out: int,
    ) -> tuple[int, KernelLayer] | None:
        """Add a layer to the group.

        Args:
            key: Stands for everything that `make` depends on.
            make: Returns the layer, or None if kernels cannot serve it. Called once per key.
            tensors: Input (or projected input), output gradient, and mean and reciprocal standard
                deviation of a norm.
            out: Address of the layer's columns.

        Returns:
            The layer's number and the layer, for `add_known`; None if kernels cannot serve it.
        """
        if key not in self._known:
            made = make()
            self._known[key] = None if made is None else (next(self._numbers), made)
        known = self._known[key]
        if known is not None:
            at = [one.data_ptr() for one in tensors]
            # A product has no statistics, but every layer has five addresses, so that kernels find
            # theirs.
            at += [at[0]] * (4 - len(at))
            self.add_known(*known, (*at, out), tensors, tensors[0].nbytes + tensors[1].nbytes)
        return known

    def add_known(
        self,
        number: int,
        layer: KernelLayer,
        addresses: tuple[int, ...],
        tensors: tuple[Tensor, ...],
        size: int,
    ) -> None:
        """Add a layer like one that was added before.

        Args:
            number: That layer's.
            layer: That layer.
            addresses: Of input, output gradient, mean, reciprocal standard deviation and columns.
            tensors: What is read.
            size: Bytes of input and output gradient.
        """
        self._ids.append(number)
        self._layers.append(layer)
        self._addresses += addresses
        # Kernels get bare addresses: without a reference the allocator could hand out the memory
        # again.
        self._tensors += tensors
        self._bytes += size
        self._scratch_bytes += layer.scratch
        # Memory is fullest when a backward begins. What it has let go of since then is room for
        # layers that wait; scratch memory is kept, so it counts from the beginning.
        if (
            len(self._ids) == MOST
            or self._bytes > self._budget + self._released
            or self._scratch_bytes > self._budget
        ):
            self.flush()

    def room(self) -> tuple[int, int]:
        """Return how many layers, and how many bytes of theirs, are waited for before a launch."""
        return MOST - len(self._ids), self._budget + self._released - self._bytes

    def flush(self) -> None:
        """Launch the kernels of all layers that wait."""
        if not self._ids:
            return
        # On another stream an earlier launch may still read the addresses of a plan.
        stream = self._current_stream()
        key = (stream, *self._ids)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MOST_PLANS:  # lengths that change from batch to batch
                self._plans.clear()
                self._known.clear()  # numbers are not used again, so no old plan fits new layers
            plan = self._plans[key] = make_plan(self._layers, self._device, 5 * MOST)
        start, size = self._scratch_at.get(stream, (0, 0))
        if size < plan.scratch:
            start = self._grow_scratch(stream, plan.scratch)
        addresses = self._addresses
        addresses.append(start)
        placed, is_new = plan.place(addresses)
        if is_new:
            row = self._rows[self._at]
            row[: len(addresses) - 1] = addresses[:-1]
            if len(plan.places):
                row[plan.places] = plan.offsets + start
            # Pinned memory and no waiting: the copy is enqueued before the kernels that read it.
            placed.pointers.copy_(self._sources[self._at], non_blocking=True)
            self._at = (self._at + 1) % _RING
        placed.run()
        if self._uses_graphs and placed.runs == _RUNS_BEFORE_GRAPH:
            self._uses_graphs = capture_graph(placed)
        self.clear()

    def _grow_scratch(self, stream: int, size: int) -> int:
        """Make room for scratch memory on a stream; return its address.

        All plans share it: they run one after another. It is kept, since new memory would take as
        long as a launch and have new addresses.
        """
        # The old memory goes back first. It is handed out again in the order of the stream.
        self._scratch.pop(stream, None)
        made = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._scratch[stream] = made
        self._scratch_at[stream] = made.data_ptr(), size
        return made.data_ptr()

    def clear(self) -> None:
        """Forget the layers that wait."""
        if not self._ids:
            return
        self._ids, self._layers, self._addresses, self._tensors = [], [], [], []
        # About half of it are inputs; gradients may live on, as those of a residual connection do.
        self._released += self._bytes // 2
        self._bytes = self._scratch_bytes = 0


def launch_group(like: Tensor) -> LaunchGroup | None:
    """Return a group for rows like these, or None where there are no kernels for them."""
    if not has_kernels(like.device) or like.dtype != torch.float32:
        return None
    return LaunchGroup(like.device)


def has_kernels(device: torch.device) -> bool:
    """Say whether Triton's kernels run on a device."""
    return _HAS_TRITON and device.type in KERNEL_DEVICES


def stream_getter(device: torch.device) -> Callable[[], int]:
    """Return a function that returns the address of the current stream."""
    if device.type != "cuda":
        return lambda: 0
    index = torch.cuda.current_device() if device.index is None else device.index
    # A tenth of the time of torch.cuda.current_stream, which makes an object.
    get: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if get is None:
        return lambda: torch.cuda.current_stream(device).cuda_stream
    return partial(get, index)
