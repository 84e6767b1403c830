"""Weights whose gradients are projected on the input side: what their layers have in common.

Shapes: B examples, T positions, I inputs, O outputs, q columns of the input side, W of the output
side, k elements of a row.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradherd.rows.column_table import ColumnTable, LayerColumns
from gradherd.rows.launch_plan import ProductLayer
from gradherd.rows.projections import (
    SideKey,
    fold,
    output_signs,
    project_matrix,
    side,
)
from gradherd.rows.terms import at_least_float32

KERNEL_DTYPES = {torch.float16, torch.bfloat16, torch.float32}


class SketchPlan(NamedTuple):
    """Sizes and seed of two-sided sketches."""

    inside: int
    """q."""
    size: int
    """k."""
    seed: int


_FEWEST_OUTPUTS, _MOST_FOLDED = 1024, 16


def output_columns(outputs: int) -> int:
    """Return W: up to 1024 outputs are not folded, more of them at most 16 into one.

    >>> [output_columns(outputs) for outputs in (768, 3072, 50257)]
    [768, 1024, 4096]
    """
    width = _FEWEST_OUTPUTS
    while width * _MOST_FOLDED < outputs:
        width *= 2
    return min(outputs, width)


class Place(NamedTuple):
    """Where the columns of a parameter are."""

    slot: str
    """Local name of the slot, or "" for sketches that are not made from columns."""
    lo: int = 0
    hi: int = 0


class ProjectedWeight:
    """What layers with a projected weight have in common."""

    def __init__(
        self,
        names: Mapping[str, str],
        plan: SketchPlan,
        outputs: int,
        *,
        may_free: bool,
        inputs: int = 0,
    ) -> None:
        """Prepare.

        Args:
            names: Names of the layer's trainable parameters in the model, by local names.
            plan: Sizes and seed.
            outputs: O.
            may_free: Whether a column may be left free for the bias.
            inputs: I, if the gradient is not to be projected where there are so few.
        """
        self.plan, self.outputs, self.inputs = plan, outputs, inputs
        # Names seed the signs, and the model's names are the same on all ranks.
        self.name = names.get("weight", names.get("bias", ""))
        self.weight, self.bias = "weight" in names, "bias" in names
        self.free = self.weight and self.bias and may_free
        # As many columns as inputs, and one for the bias, make an exact gradient.
        self.columns = min(plan.inside, inputs + self.free) if inputs else plan.inside
        self.width = output_columns(outputs)
        self.widths = {}
        if self.weight:
            self.widths["weight"] = (self.columns * self.width, True)
        if self.bias:
            self.widths["bias"] = (outputs, False)

    def key(self, like: Tensor) -> SideKey:
        """Return the key of the input side's matrix."""
        whole = self.columns - self.free == self.inputs
        return SideKey(
            self.plan.seed, self.name, self.columns, like.dtype, like.device, self.free, whole
        )

    def put(self, columns: Tensor, out: LayerColumns) -> None:
        """Write columns (B, q, O)."""
        columns = fold(columns, self.width, self.plan.seed, self.name)
        out.put("weight", columns.flatten(1))

    def signs(self, device: torch.device) -> Tensor | None:
        """Return the signs of outputs that are folded, (O,) float32; None if none are."""
        if self.outputs == self.width:
            return None
        return output_signs(self.plan.seed, self.name, self.outputs, device)

    def can_launch(self, inputs: Tensor, grads: Tensor, table: ColumnTable) -> bool:
        """Say whether kernels can compute the columns, those of the bias among them."""
        return (
            table.group is not None
            and self.weight
            and (self.free or not self.bias)
            and inputs.dtype in KERNEL_DTYPES
            and grads.dtype in KERNEL_DTYPES
        )

    def launch(
        self,
        key: Hashable,
        make: Callable[[int, bool], ProductLayer | None],
        tensors: tuple[Tensor, Tensor],
        out: LayerColumns,
    ) -> bool:
        """Let kernels compute the columns together with those of other layers.

        Args:
            key: Stands for everything that `make` depends on.
            make: Returns the layer, given the elements between two examples' columns, and whether
                to add to the columns of an earlier use.
            tensors: Input and output gradient.
            out: Where to write.

        Returns:
            False if kernels cannot do it.
        """
        table = out.table
        return table.launch(out.slots["weight"], key, lambda add: make(table.width, add), tensors)

    def product_layer(
        self,
        inputs: tuple[int, int, Sequence[int]],
        grads: tuple[int, int, Sequence[int]],
        x: Tensor,
        g: Tensor,
        side_matrix: Tensor | None,
        row: int,
        add: bool,
    ) -> ProductLayer | None:
        """Describe the product of a layer to the kernels; None if they cannot read its tensors.

        Args:
            inputs: Examples, positions and strides of the input.
            grads: Positions, outputs and strides of the output gradient.
            x: The input.
            g: The output gradient.
            side_matrix: `kernel_side`; None if the input is projected already.
            row: Elements between two examples' columns.
            add: Whether to add to the columns of an earlier use.
        """
        examples, positions, strides = inputs
        grad_positions, outputs, grad_strides = grads
        projected = side_matrix is None
        # Loads are wide only along a stride of 1.
        if (not projected and 1 not in strides[1:]) or 1 not in grad_strides[1:]:
            return None
        return ProductLayer(
            examples=examples,
            outputs=outputs,
            width=self.width,
            output_signs=self.signs(g.device),
            columns=self.columns,
            row=row,
            add=add,
            positions=grad_positions,
            grad_strides=(grad_strides[0], grad_strides[1], grad_strides[2]),
            grad_dtype=g.dtype,
            free=self.columns - 1 if self.free else -1,
            thin_strides=(strides[0], strides[1], strides[2]) if projected else None,
            input_dtype=x.dtype,
            side=side_matrix,
            input_positions=positions,
            input_strides=(strides[0], strides[1], strides[2]),
            is_aligned=x.data_ptr() % 16 == 0 and g.data_ptr() % 16 == 0,
        )

    def projected_place(self, local: str) -> Place:
        """Say where the columns of weight and bias are if the weight is projected."""
        # The free row of the projection is the last one, behind those of the weight.
        rows = (self.columns - self.free) * self.width
        if local == "weight":
            return Place("weight", 0, rows)
        return (
            Place("weight", rows, rows + self.width)
            if self.free
            else Place("bias", 0, self.outputs)
        )

    def project_weight(self, grad: Tensor, inside: Tensor | None = None) -> Tensor:
        """Return the columns of a whole (O, rows) gradient.

        Args:
            grad: The gradient.
            inside: (q, rows) matrix of the input side; None takes that of a linear layer.
        """
        if inside is None:
            inside = side(self.key(grad), grad.shape[1])[0]
        columns = project_matrix(grad, inside, self.width, self.plan.seed, self.name)
        return columns[: self.columns - self.free].flatten()

    def project_bias(self, grad: Tensor) -> Tensor:
        """Return the columns of a whole gradient of the bias."""
        grad = at_least_float32(grad)
        return fold(grad, self.width, self.plan.seed, self.name) if self.free else grad
