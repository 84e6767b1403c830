"""Layers whose rows have kernels of their own, on a GPU where a model runs as it is.

Such layers take longer to launch than to compute. So what a launch needs is found when sizes and
strides come for the first time (`KernelPlan`), and kernels add to the rows of a backward themselves
(`WaitingRows`): a layer is served when the gradient of its output comes, and nothing of it waits.

Shapes: n examples, N elements of a sink.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gradherd.rows.sink_maps import FilterMap, MatrixMap, VectorMap

CHANGED_IN_PLACE = (
    "an input of a layer was changed in place before its backward, so rows of single examples "
    "cannot be read: replace the in-place operation by its plain form, or order whole batches"
)


class KernelPlan(NamedTuple):
    """How the rows of one layer are launched."""

    run: Callable[[int, int, int, int, int], None]
    """Takes a stream and the addresses of input, gradient, rows to add to, and scratch memory."""
    scratch: int
    """Bytes of scratch memory."""


class LayerKernels(ABC):
    """What kernels need to know of one parameter, or two, of a layer."""

    def __init__(self, one: Any) -> None:
        self.one = one
        """The map of the parameter."""
        self._tensors: dict[torch.dtype, tuple[Tensor, ...]] = {}

    @abstractmethod
    def plan(self, inputs: Tensor, grads: Tensor, is_aligned: bool) -> KernelPlan | None:
        """Prepare to launch on tensors of these sizes and strides; None if no kernel reads them.

        Args:
            inputs: Of the layer.
            grads: Of its output.
            is_aligned: Whether both begin at multiples of 16 bytes.
        """


class ProductKernels(LayerKernels):
    """A weight: one factor is projected and multiplied with the other."""

    def __init__(self, one: MatrixMap, *, projects_grads: bool, window: Any = None) -> None:
        """Keep what kernels need.

        Args:
            one: The map of the weight.
            projects_grads: Whether gradients are projected and inputs kept, or the other way round.
            window: How the window of a convolution moves, if it has one.
        """
        super().__init__(one)
        self.projects_grads, self.window = projects_grads, window

    def _tensors_for(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the matrix that projects and the signs of a window, kept: addresses are used."""
        if dtype not in self._tensors:
            one = self.one
            like = torch.empty(0, dtype=dtype, device=one.side.device)
            if not isinstance(one, FilterMap):
                self._tensors[dtype] = (one.side_for(like), like)
            elif self.window is None:
                self._tensors[dtype] = (one.filters.to(dtype), like)
            else:
                signs = one.filters.new_ones(one.columns, 1) if one.places is None else one.places
                self._tensors[dtype] = (one.filters.to(dtype), signs.to(dtype))
        return self._tensors[dtype]

    def plan(self, inputs: Tensor, grads: Tensor, is_aligned: bool) -> KernelPlan | None:
        """Prepare the columns of the weight."""
        from gradherd.rows.triton_layers import product_plan

        one = self.one
        is_filter = isinstance(one, FilterMap)
        if inputs.dtype != grads.dtype:
            return None
        # As the layers themselves are told.
        rounds = torch.get_float32_matmul_precision() != "highest"
        return product_plan(
            inputs, grads, one, *self._tensors_for(inputs.dtype),
            projects_grads=self.projects_grads, window=self.window, is_aligned=is_aligned,
            allow_tf32=torch.backends.cudnn.allow_tf32 if is_filter else rounds,
            matrix_strides=(1, one.filters.shape[1]) if is_filter else (one.columns, 1),
        )  # fmt: skip


class PositionKernels(LayerKernels):
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
        super().__init__(one)
        self.eps, self.scale, self.rms, self.shift = eps, scale, rms, shift

    def plan(self, inputs: Tensor, grads: Tensor, is_aligned: bool) -> KernelPlan | None:
        """Prepare the rows of the norm or bias."""
        from gradherd.rows.triton_layers import bias_plan, norm_plan

        if not self.scale:
            return bias_plan(grads, self.one, is_aligned=is_aligned)
        return norm_plan(
            inputs, grads, self.one, self.eps,
            rms=self.rms, shift=self.shift, is_aligned=is_aligned,
        )  # fmt: skip


class BatchNormKernels(LayerKernels):
    """A BatchNorm in training."""

    def __init__(self, one: VectorMap, eps: float) -> None:
        super().__init__(one)
        self.eps = eps

    def plan(self, inputs: Tensor, grads: Tensor, is_aligned: bool) -> KernelPlan | None:
        """Prepare the rows of the norm."""
        from gradherd.rows.triton_layers import batch_norm_plan

        return batch_norm_plan(inputs, grads, self.one, self.eps, is_aligned=is_aligned)


class Scratch:
    """Memory that kernels of one stream share: each is done with it before the next begins."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._memory = device, torch.empty(0, dtype=torch.uint8, device=device)
        self.size, self.address = 0, 0

    def grow(self, size: int) -> None:
        """Have at least so many bytes."""
        self._memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        self.size, self.address = size, self._memory.data_ptr()


class WaitingRows:
    """Rows of layers that share a sink, added up until the backward is over."""

    def __init__(self, examples: int, like: Tensor) -> None:
        """Begin without rows.

        Args:
            examples: B, rows of the sink.
            like: A tensor of the rows' dtype and device.
        """
        self._examples, self._like = examples, like
        self._total: Tensor | None = None
        self.address, self.room = 0, 0
        """Where kernels may add to rows, and to how many."""
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
            self.room = 0
        total[: len(rows)].add_(rows)

    def make_room(self, examples: int, size: int) -> None:
        """Let kernels add rows of so many examples, each of `size` elements."""
        most, total = max(self._examples, examples), self._total
        if total is None:
            total = self._like.new_zeros(most, size)
        else:
            short = most - len(total)
            total = (F.pad(total, (0, 0, 0, short)) if short else total).to(self._like).contiguous()
        self._total, self.address, self.room = total, total.data_ptr(), most

    def rows(self) -> Tensor:
        """Return the rows of all layers, (B, N)."""
        total = self._total
        assert total is not None
        short = self._examples - len(total)
        return (F.pad(total, (0, 0, 0, short)) if short > 0 else total).to(self._like.dtype)
