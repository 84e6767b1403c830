"""Two-sided columns of convolutions and transposed convolutions.

Shapes: B examples, C channels, O outputs, q columns of the input side.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor, nn

from gradherd.rows.column_table import LayerColumns
from gradherd.rows.launch_plan import ProductLayer, Strides
from gradherd.rows.layer_sketches import LayerCall, sum_positions
from gradherd.rows.projected_weight import Place, ProjectedWeight, SketchPlan
from gradherd.rows.projections import (
    ConvShape,
    conv_columns,
    conv_inputs,
    kernel_side,
    window_signs,
)
from gradherd.rows.terms import at_least_float32


class ConvSketch(ProjectedWeight):
    """Columns of convolutions and transposed convolutions with 1 to 3 spatial dimensions."""

    def __init__(
        self,
        module: nn.modules.conv._ConvNd,
        names: Mapping[str, str],
        plan: SketchPlan,
        *,
        shared: bool,
    ) -> None:
        # A transposed convolution is a convolution from its output to its input: filters slide
        # over the output gradient, and a 1 there would not give the bias.
        self._transposed = module.transposed
        outputs = module.in_channels if self._transposed else module.out_channels
        may_free = not shared and not self._transposed
        super().__init__(names, plan, outputs, may_free=may_free)
        if self.bias:
            self.widths["bias"] = (module.out_channels, False)
        self._bias_width = module.out_channels
        window = tuple(module.kernel_size)
        padding = module.padding
        self._pad: tuple[list[int], str] | None = None
        if isinstance(padding, str) or module.padding_mode != "zeros":
            mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
            self._pad = (list(module._reversed_padding_repeated_twice), mode)
            padding = (0,) * len(window)
        self._conv = ConvShape(
            window, tuple(module.stride), tuple(padding), tuple(module.dilation), module.groups
        )
        self._channels = module.weight.shape[1]

    def write(self, call: LayerCall, out: LayerColumns) -> None:
        """Write the columns from inputs (B, C, ...) and output gradients (B, O, ...)."""
        inputs, grads = call.batch.require_first(call.inputs), call.batch.require_first(call.grads)
        out.table.start(len(grads))
        # `small` is what filters slide over.
        small, large = (grads, inputs) if self._transposed else (inputs, grads)
        if self._pad is not None:
            small = F.pad(small, self._pad[0], mode=self._pad[1])
        if self._launch(small, large, out):
            return
        if self.weight:
            small = small.to(large.dtype)
            thin = conv_inputs(small, self.key(small), self._conv)
            self.put(conv_columns(thin, large), out)
        if self.bias and not self.free:
            out.put("bias", sum_positions(grads.flatten(2), 2))

    def _launch(self, small: Tensor, large: Tensor, out: LayerColumns) -> bool:
        """Let kernels write the columns; say whether they can."""
        # Kernels know one group only; grouped convolutions take torch's own.
        if self._conv.groups > 1 or not self.can_launch(small, large, out.table):
            return False
        is_projected = not self._fits_kernels()
        inputs = small
        if is_projected:
            # The convolution with random filters is torch's own; kernels then only multiply.
            # In the dtype of the gradients, which kernels multiply it with: autocast may have left
            # the input in float32.
            small = small.to(large.dtype)
            inputs = self._conv.apply(small, *self._conv.side(self.key(small), self._channels))
        key = (
            inputs.shape, inputs.stride(), large.stride(), inputs.dtype, large.dtype,
            inputs.data_ptr() % 16, large.data_ptr() % 16,
        )  # fmt: skip

        def make(row: int, add: bool) -> ProductLayer | None:
            grad_strides = _strides(large)
            strides = _strides(inputs)
            if grad_strides is None or strides is None:
                return None
            sizes = (len(inputs), inputs[0, 0].numel(), strides)
            products = (large[0, 0].numel(), self.outputs, grad_strides)
            if is_projected:
                return self.product_layer(sizes, products, inputs, large, None, row, add)
            side_matrix = kernel_side(self.key(large), self._channels)
            layer = self.product_layer(sizes, products, inputs, large, side_matrix, row, add)
            if layer is None or not self._slides():
                return layer
            return replace(
                layer,
                window=self._conv.kernel_window(inputs.shape[2:], large.shape[2:]),
                signs=window_signs(self.key(large), math.prod(self._conv.window)),
            )

        return self.launch(key, make, (inputs, large), out)

    def _slides(self) -> bool:
        """Say whether an output depends on another position than its own."""
        conv = self._conv
        return any(size > 1 for size in (*conv.window, *conv.stride)) or any(conv.padding)

    def _fits_kernels(self) -> bool:
        """Say whether kernels can project the input, too."""
        conv = self._conv
        is_product = conv.is_product(self.columns, self._channels)
        return len(conv.window) <= 2 and (is_product or math.prod(conv.window) == 1)

    def project(self, local: str, grad: Tensor) -> Tensor:
        """Return the columns of a whole gradient."""
        if local == "bias":
            return self.project_bias(grad)
        grad = at_least_float32(grad).flatten(1)
        return self.project_weight(
            grad, self._conv.side(self.key(grad), self._channels)[0].flatten(1)
        )

    def where(self, local: str) -> Place:
        """Say where the columns of a parameter are."""
        if local == "bias" and not self.free:
            return Place("bias", 0, self._bias_width)
        return self.projected_place(local)


def _strides(images: Tensor) -> Strides | None:
    """Return the strides of (B, C, ...) over examples, positions, channels; None without one."""
    sizes, strides = images.shape[2:], images.stride()[2:]
    if any(strides[at] != sizes[at + 1] * strides[at + 1] for at in range(len(sizes) - 1)):
        return None
    return (images.stride(0), strides[-1], images.stride(1))
