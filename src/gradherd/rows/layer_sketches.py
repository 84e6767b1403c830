"""One class per layer type: its parameters' per-example gradients as a few columns.

`write` takes a layer's input and output gradient to columns and writes them to the table. `project`
applies the same linear map to the gradient of the whole batch, so that rows can be checked against
it, and `where` says which columns those are.

Gradients of biases and norms are exact. Weights with one position per example (the layers of an
MLP) have gradients of rank one, which a thin projection of the input distorts: those use the
tensor sketch (`OuterTerm.sketch`), whose cost is small there.

Shapes: B examples, T positions, O outputs, q columns of the input side, k elements of a row.
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradherd.rows.column_table import ColumnTable, Slot
from gradherd.rows.layer_rules import BatchDim
from gradherd.rows.projected_weight import Place, ProjectedWeight, SketchPlan
from gradherd.rows.projections import (
    ConvShape,
    conv_columns,
    conv_inputs,
    embedding_columns,
    linear_columns,
    matrix_tensor_sketch,
    side,
)
from gradherd.rows.terms import OuterTerm, at_least_float32


class LayerCall(NamedTuple):
    """One use of a layer whose output gradient has arrived."""

    inputs: Tensor
    grads: Tensor
    batch: BatchDim
    saved: tuple[Tensor, ...]
    """Statistics of a norm's forward; see `norm_statistics`."""


class LayerSketch(Protocol):
    """Computes the columns of one module."""

    widths: dict[str, tuple[int, bool]]
    """Width of each slot by its local name, and whether it is for a projected weight."""

    def write(
        self,
        call: LayerCall,
        table: ColumnTable,
        slots: Mapping[str, Slot],
        index: Mapping[str, int],
    ) -> None:
        """Write the columns of all trainable parameters.

        Args:
            call: The use of the layer.
            table: Where to write.
            slots: The layer's slots by local name.
            index: Indices of its trainable parameters by local name.
        """
        ...

    def project(self, local: str, grad: Tensor) -> Tensor:
        """Return the columns that a parameter's rows must add up to."""
        ...

    def where(self, local: str) -> Place:
        """Say where the columns of a parameter are."""
        ...


class LinearSketch(ProjectedWeight):
    """Columns of nn.Linear, and of transformers' Conv1D, whose weight is transposed."""

    def __init__(
        self,
        shape: tuple[int, ...],
        names: Mapping[str, str],
        plan: SketchPlan,
        *,
        shared: bool,
        transposed: bool = False,
        one_bias: bool = False,
    ) -> None:
        """Prepare.

        Args:
            shape: Of the weight.
            names: Names of the layer's trainable parameters in the model, by local names.
            plan: Sizes and seed.
            shared: Whether there are several uses of the weight, which must be projected alike.
            transposed: Whether the weight is (I, O).
            one_bias: Whether the bias is used together with the weight and nowhere else.
        """
        self._transposed = transposed
        outputs, self._inputs = shape[::-1] if transposed else shape
        super().__init__(names, plan, outputs, may_free=one_bias or not shared)
        self._one_position: bool | None = False if shared else None

    def write(
        self,
        call: LayerCall,
        table: ColumnTable,
        slots: Mapping[str, Slot],
        index: Mapping[str, int],
    ) -> None:
        """Write the columns from inputs (..., I) and output gradients (..., O)."""
        grads = call.batch.move_first(call.grads, 1)
        inputs = call.batch.move_first(call.inputs, 1) if self.weight else grads
        if self._one_position is None:
            # Fixed from here on: rows of different batches are compared with each other.
            self._one_position = inputs.shape[1] == 1
        table.start(len(grads))
        if self.weight and self._one_position:
            term = OuterTerm(grads, inputs.to(grads.dtype), self.outputs)
            rows = term.sketch(self.plan.size, self.plan.seed, self.name)
            table.add_final(index["weight"], rows)
        elif self.weight and self.can_launch(inputs, grads, table):
            thin = F.linear(inputs, *side(self.key(inputs), self._inputs))
            batch, position, column = thin.stride()
            grad_batch, grad_position, output = grads.stride()
            strides = (grad_batch, output, grad_position)
            self.launch(thin, (batch, column, position), grads, strides, table, slots)
        elif self.weight:
            inside = side(self.key(grads), self._inputs)
            self.put(linear_columns(inputs.to(grads.dtype), grads, *inside), table, slots)
        if self.bias and (self._one_position or not self.free):
            table.put(slots["bias"], grads[:, 0] if grads.shape[1] == 1 else _sum(grads, 1))

    def project(self, local: str, grad: Tensor) -> Tensor:
        """Return the columns of a whole gradient."""
        if local == "bias":
            return at_least_float32(grad) if self._one_position else self.project_bias(grad)
        grad = at_least_float32(grad.T if self._transposed else grad)
        if self._one_position:
            return matrix_tensor_sketch(grad, self.plan.size, self.plan.seed, self.name)
        return self.project_weight(grad, self._inputs)

    def where(self, local: str) -> Place:
        """Say where the columns of a parameter are."""
        if self._one_position:
            return Place("") if local == "weight" else Place("bias", 0, self.outputs)
        return self.projected_place(local)


class EmbeddingSketch(ProjectedWeight):
    """Columns of nn.Embedding: its gradient is a sum of one-hot rows times output gradients."""

    def __init__(self, module: nn.Embedding, names: Mapping[str, str], plan: SketchPlan) -> None:
        super().__init__(names, plan, module.num_embeddings, may_free=False)
        self._padding, self._features = module.padding_idx, module.embedding_dim

    def write(
        self,
        call: LayerCall,
        table: ColumnTable,
        slots: Mapping[str, Slot],
        index: Mapping[str, int],
    ) -> None:
        """Write the columns from token ids (...) and output gradients (..., C)."""
        tokens = call.batch.move_first(call.inputs, 0).long()
        grads = call.batch.move_first(call.grads, 1)
        if self._padding is not None:  # torch gives the padding token no gradient
            grads = grads * (tokens != self._padding).unsqueeze(-1)
        inside = side(self.key(grads), self._features)[0]
        columns = embedding_columns(tokens, grads, inside, self.plan.seed, self.name, self.outputs)
        table.start(len(tokens))
        table.put(slots["weight"], columns.flatten(1))

    def project(self, local: str, grad: Tensor) -> Tensor:
        """Return the columns of a whole gradient."""
        return self.project_weight(at_least_float32(grad), self._features)

    def where(self, local: str) -> Place:
        """Say where the columns of the table are."""
        return self.projected_place(local)


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
        super().__init__(names, plan, outputs, may_free=not shared and not self._transposed)
        if self.bias:
            self.widths["bias"] = (module.out_channels, False)
        self._bias_width = module.out_channels
        self._window = tuple(module.kernel_size)
        padding = module.padding
        self._pad: tuple[list[int], str] | None = None
        if isinstance(padding, str) or module.padding_mode != "zeros":
            mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
            self._pad = (list(module._reversed_padding_repeated_twice), mode)
            padding = (0,) * len(self._window)
        self._conv = ConvShape(
            tuple(module.stride), tuple(padding), tuple(module.dilation), module.groups
        )
        self._filter_size = module.weight[0].numel()
        self._is_pointwise = self._filter_size == module.weight.shape[1] and not (
            any(step > 1 for step in self._conv.stride) or any(self._conv.padding)
        )

    def write(
        self,
        call: LayerCall,
        table: ColumnTable,
        slots: Mapping[str, Slot],
        index: Mapping[str, int],
    ) -> None:
        """Write the columns from inputs (B, C, ...) and output gradients (B, O, ...)."""
        inputs, grads = call.batch.require_first(call.inputs), call.batch.require_first(call.grads)
        table.start(len(grads))
        small, large = (grads, inputs) if self._transposed else (inputs, grads)
        if self._pad is not None:
            small = F.pad(small, self._pad[0], mode=self._pad[1])
        if self.weight and self._conv.groups == 1 and self.can_launch(small, large, table):
            thin = self._project(small)
            if _one_stride(thin) and _one_stride(large):
                self.launch(thin, _strides(thin), large, _strides(large), table, slots)
            else:
                self.put(conv_columns(_grouped(thin.to(large.dtype)), large), table, slots)
        elif self.weight:
            small = small.to(large.dtype)
            thin = conv_inputs(small, self.key(small), self._conv, self._window)
            self.put(conv_columns(thin, large), table, slots)
        if self.bias and not self.free:
            table.put(slots["bias"], _sum(grads.flatten(2), 2))

    def _project(self, images: Tensor) -> Tensor:
        """Convolve images (B, C, ...) of one group with the random filters: (B, q, ...)."""
        matrix, offset = side(self.key(images), self._filter_size)
        if self._is_pointwise and offset is None:
            # Reads any memory layout as it is; a convolution might convert the input first.
            thin = torch.bmm(matrix.expand(len(images), -1, -1), images.flatten(2))
            return thin.view(len(images), len(matrix), *images.shape[2:])
        return self._conv.apply(images, matrix.view(len(matrix), -1, *self._window), offset)

    def project(self, local: str, grad: Tensor) -> Tensor:
        """Return the columns of a whole gradient."""
        if local == "bias":
            return self.project_bias(grad)
        return self.project_weight(at_least_float32(grad).flatten(1), self._filter_size)

    def where(self, local: str) -> Place:
        """Say where the columns of a parameter are."""
        if local == "bias" and not self.free:
            return Place("bias", 0, self._bias_width)
        return self.projected_place(local)


def _one_stride(images: Tensor) -> bool:
    """Say whether one stride leads over all positions of (B, O, ...) images."""
    sizes, strides = images.shape[2:], images.stride()[2:]
    return all(strides[at] == sizes[at + 1] * strides[at + 1] for at in range(len(sizes) - 1))


def _strides(images: Tensor) -> tuple[int, int, int]:
    return (images.stride(0), images.stride(1), images.stride(-1))


def _grouped(thin: Tensor) -> Tensor:
    """Return (B, q, ...) as (B, 1, q, T)."""
    return thin.flatten(2).unsqueeze(1)


def _sum(grads: Tensor, dim: int) -> Tensor:
    return torch.sum(grads, dim, dtype=torch.promote_types(grads.dtype, torch.float32))
