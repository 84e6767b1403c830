"""Weights whose gradients are projected on the input side: what their layers have in common.

Shapes: B examples, T positions, O outputs, q columns of the input side, k elements of a row.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradherd.rows.column_table import ColumnTable, LayerColumns
from gradherd.rows.launch_plan import ProductLayer
from gradherd.rows.projections import (
    MAX_OUTPUTS,
    THIN_COLUMNS,
    SideKey,
    project_matrix,
    shorten,
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


class Place(NamedTuple):
    """Where the columns of a parameter are."""

    slot: str
    """Local name of the slot, or "" for sketches that are not made from columns."""
    lo: int = 0
    hi: int = 0


class ProjectedWeight:
    """What layers with a projected weight have in common."""

    def __init__(
        self, names: Mapping[str, str], plan: SketchPlan, outputs: int, *, may_free: bool
    ) -> None:
        """Prepare.

        Args:
            names: Names of the layer's trainable parameters in the model, by local names.
            plan: Sizes and seed.
            outputs: O.
            may_free: Whether a column may be left free for the bias.
        """
        self.plan, self.outputs = plan, outputs
        # Names seed the signs, and the model's names are the same on all ranks.
        self.name = names.get("weight", names.get("bias", ""))
        self.weight, self.bias = "weight" in names, "bias" in names
        self.free = self.weight and self.bias and may_free
        self.width = min(outputs, MAX_OUTPUTS)
        self.widths = {}
        if self.weight:
            self.widths["weight"] = (plan.inside * self.width, True)
        if self.bias:
            self.widths["bias"] = (outputs, False)

    def key(self, like: Tensor) -> SideKey:
        """Return the key of the input side's matrix."""
        plan = self.plan
        return SideKey(plan.seed, self.name, plan.inside, like.dtype, like.device, self.free)

    def put(self, columns: Tensor, out: LayerColumns) -> None:
        """Write columns (B, q, O)."""
        columns = shorten(columns, self.plan.seed, self.name)
        out.put("weight", columns.flatten(1))

    def can_launch(self, inputs: Tensor, grads: Tensor, table: ColumnTable) -> bool:
        """Say whether kernels can compute the columns, those of the bias among them."""
        return (
            table.group is not None
            and self.weight
            and (self.free or not self.bias)
            and self.plan.inside <= THIN_COLUMNS
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
        table, slot = out.table, out.slots["weight"]
        if self.outputs > MAX_OUTPUTS:  # hashed to fewer outputs at once
            assert table.group is not None
            wide = self.plan.inside * self.outputs
            # Kernels write all outputs, as those of a vocabulary; they are hashed to fewer
            # afterwards.
            long = torch.empty(table.examples, wide, device=tensors[1].device)
            key = ("long", slot.begin, key)
            if table.group.add(key, lambda: make(wide, False), tensors, long.data_ptr()) is None:
                return False
            table.group.flush()
            self.put(long.view(len(long), self.plan.inside, -1), out)
            return True
        return table.launch(slot, key, lambda add: make(table.width, add), tensors)

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
            side_matrix: (C, 16) matrix of the input side; None if the input is projected already.
            row: Elements between two examples' columns.
            add: Whether to add to the columns of an earlier use.
        """
        examples, positions, strides = inputs
        grad_positions, outputs, grad_strides = grads
        projected = side_matrix is None
        # Loads are wide only along a stride of 1.
        if (not projected and 1 not in strides[1:]) or 1 not in grad_strides[1:]:
            return None
        columns = self.plan.inside
        return ProductLayer(
            examples=examples,
            outputs=outputs,
            columns=columns,
            row=row,
            add=add,
            positions=grad_positions,
            grad_strides=(grad_strides[0], grad_strides[1], grad_strides[2]),
            grad_dtype=g.dtype,
            free=columns - 1 if self.free else -1,
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
        rows = (self.plan.inside - self.free) * self.width
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
        columns = project_matrix(grad, inside, self.plan.seed, self.name)
        return columns[: self.plan.inside - self.free].flatten()

    def project_bias(self, grad: Tensor) -> Tensor:
        """Return the columns of a whole gradient of the bias."""
        grad = at_least_float32(grad)
        return shorten(grad, self.plan.seed, self.name) if self.free else grad
