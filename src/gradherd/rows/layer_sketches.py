"""One class per layer type: its parameters' per-example gradients as a few columns.

`write` takes a layer's input and output gradient to columns and writes them to the table. `project`
applies the same linear map to the gradient of the whole batch, so that rows can be checked against
it, and `where` says which columns those are.

Gradients of biases and norms are exact. Weights with one position per example (the layers of an
MLP) have gradients of rank one, which a thin projection of the input distorts: those of a small
classifier are formed and sketched, larger ones use the tensor sketch (`OuterTerm.sketch`).

Shapes: B examples, T positions, O outputs, q columns of the input side, k elements of a row.
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from gradherd.rows.column_table import LayerColumns
from gradherd.rows.launch_plan import ProductLayer
from gradherd.rows.layer_rules import BatchDim
from gradherd.rows.projected_weight import Place, ProjectedWeight, SketchPlan
from gradherd.rows.projections import (
    embedding_columns,
    kernel_side,
    linear_columns,
    matrix_tensor_sketch,
    side,
)
from gradherd.rows.sketch import count_sketch, sketch_columns
from gradherd.rows.terms import OuterTerm, at_least_float32

_SMALL_WEIGHT = 65_536
"""Elements of a weight whose gradients of single examples are formed: two launches, not twenty."""


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

    def write(self, call: LayerCall, out: LayerColumns) -> None:
        """Write the columns of all trainable parameters.

        Args:
            call: The use of the layer.
            out: Where to write.
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
        outputs, inputs = shape[::-1] if transposed else shape
        may_free = one_bias or not shared
        super().__init__(names, plan, outputs, may_free=may_free, inputs=inputs)
        self._one_position: bool | None = False if shared else None
        self._is_small = outputs * inputs <= _SMALL_WEIGHT

    def write(self, call: LayerCall, out: LayerColumns) -> None:
        """Write the columns from inputs (..., I) and output gradients (..., O)."""
        if self._one_position is False and self._launch(call, out):
            return
        grads = call.batch.move_first(call.grads, 1)
        inputs = call.batch.move_first(call.inputs, 1) if self.weight else grads
        if self._one_position is None:
            # Fixed from here on: rows of different batches are compared with each other.
            self._one_position = inputs.shape[1] == 1
        out.table.start(len(grads))
        if self.weight and self._one_position:
            out.table.add_final(out.indices["weight"], self._sketch_outer(inputs, grads))
        elif self.weight:
            inside = side(self.key(grads), self.inputs)
            self.put(linear_columns(inputs.to(grads.dtype), grads, *inside), out)
        if self.bias and (self._one_position or not self.free):
            out.put("bias", grads[:, 0] if grads.shape[1] == 1 else sum_positions(grads, 1))

    def _sketch_outer(self, inputs: Tensor, grads: Tensor) -> Tensor:
        """Sketch gradients with one position, from inputs (B, 1, I) and gradients (B, 1, O)."""
        size, seed = self.plan.size, self.plan.seed
        if self._is_small:
            left, right = at_least_float32(grads[:, 0]), at_least_float32(inputs[:, 0])
            outer = left.unsqueeze(2) * right.to(left.dtype).unsqueeze(1)
            return sketch_columns(outer.flatten(1), size, seed, self.name)
        term = OuterTerm(grads, inputs.to(grads.dtype), self.outputs)
        return term.sketch(size, seed, self.name)

    def _launch(self, call: LayerCall, out: LayerColumns) -> bool:
        """Let kernels write the columns; say whether they can."""
        inputs, grads = call.inputs, call.grads
        if not self.can_launch(inputs, grads, out.table):
            return False
        out.table.start(call.batch.examples)
        key = (
            inputs.shape, inputs.stride(), grads.stride(), inputs.dtype, grads.dtype,
            call.batch.dim, inputs.data_ptr() % 16, grads.data_ptr() % 16,
        )  # fmt: skip

        def make(row: int, add: bool) -> ProductLayer | None:
            # Views, if strides allow; kernels read the tensors where they are.
            x, g = (call.batch.move_first(one, 1) for one in (inputs, grads))
            if x.data_ptr() != inputs.data_ptr() or g.data_ptr() != grads.data_ptr():
                return None  # copied: no stride leads over all positions
            return self.product_layer(
                (x.shape[0], x.shape[1], x.stride()),
                (g.shape[1], self.outputs, g.stride()),
                inputs,
                grads,
                kernel_side(self.key(grads), self.inputs),
                row,
                add,
            )

        return self.launch(key, make, (inputs, grads), out)

    def project(self, local: str, grad: Tensor) -> Tensor:
        """Return the columns of a whole gradient."""
        if local == "bias":
            return at_least_float32(grad) if self._one_position else self.project_bias(grad)
        grad = at_least_float32(grad.T if self._transposed else grad)
        if self._one_position and self._is_small:
            return count_sketch(grad.flatten(), self.plan.size, self.plan.seed, name=self.name)
        if self._one_position:
            return matrix_tensor_sketch(grad, self.plan.size, self.plan.seed, self.name)
        return self.project_weight(grad)

    def where(self, local: str) -> Place:
        """Say where the columns of a parameter are."""
        if self._one_position:
            return Place("") if local == "weight" else Place("bias", 0, self.outputs)
        return self.projected_place(local)


class EmbeddingSketch(ProjectedWeight):
    """Columns of nn.Embedding: its gradient is a sum of one-hot rows times output gradients."""

    def __init__(self, module: nn.Embedding, names: Mapping[str, str], plan: SketchPlan) -> None:
        tokens, features = module.num_embeddings, module.embedding_dim
        super().__init__(names, plan, tokens, may_free=False, inputs=features)
        self._padding = module.padding_idx

    def write(self, call: LayerCall, out: LayerColumns) -> None:
        """Write the columns from token ids (...) and output gradients (..., C)."""
        tokens = call.batch.move_first(call.inputs, 0).long()
        grads = call.batch.move_first(call.grads, 1)
        if self._padding is not None:  # torch gives the padding token no gradient
            # Not in place: autograd and the user's hooks see the same tensor.
            grads = grads * (tokens != self._padding).unsqueeze(-1)
        inside = side(self.key(grads), self.inputs)[0]
        signs = self.signs(tokens.device)
        columns = embedding_columns(tokens, grads, inside, signs, self.width)
        out.table.start(len(tokens))
        out.put("weight", columns.flatten(1))

    def project(self, local: str, grad: Tensor) -> Tensor:
        """Return the columns of a whole gradient."""
        return self.project_weight(at_least_float32(grad))

    def where(self, local: str) -> Place:
        """Say where the columns of the table are."""
        return self.projected_place(local)


def sum_positions(grads: Tensor, dim: int) -> Tensor:
    """Sum over positions, in float32 at least."""
    return torch.sum(grads, dim, dtype=torch.promote_types(grads.dtype, torch.float32))
