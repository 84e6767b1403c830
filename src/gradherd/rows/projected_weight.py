"""Weights whose gradients are projected on the input side: what their layers have in common.

Shapes: B examples, T positions, O outputs, q columns of the input side, k elements of a row.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from gradherd.rows.column_table import ColumnTable, Slot
from gradherd.rows.projections import MAX_OUTPUTS, SideKey, project_matrix, shorten, side
from gradherd.rows.terms import at_least_float32

_KERNEL_COLUMNS = 16
"""Columns of the input side that the kernels of a GPU have room for."""
_KERNEL_DTYPES = {torch.float16, torch.bfloat16, torch.float32}


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

    def put(self, columns: Tensor, table: ColumnTable, slots: Mapping[str, Slot]) -> None:
        """Write columns (B, q, O)."""
        columns = shorten(columns, self.plan.seed, self.name)
        table.put(slots["weight"], columns.flatten(1))

    def launch(
        self,
        thin: Tensor,
        strides: tuple[int, int, int],
        grads: Tensor,
        grad_strides: tuple[int, int, int],
        table: ColumnTable,
        slots: Mapping[str, Slot],
    ) -> None:
        """Write columns by one kernel; strides are over examples, columns and positions."""
        from gradherd.rows.triton_rows import combine

        positions = thin.numel() // (len(grads) * self.plan.inside)
        shape = (len(grads), self.plan.inside, self.outputs, positions)
        if self.outputs <= MAX_OUTPUTS:
            view, add = table.view(slots["weight"])
            combine(thin, strides, grads, grad_strides, shape, view, add=add)
            return
        long = torch.empty(shape[0], shape[1] * shape[2], device=grads.device)
        combine(thin, strides, grads, grad_strides, shape, long, add=False)
        self.put(long.view(shape[:3]), table, slots)

    def can_launch(self, inputs: Tensor, grads: Tensor, table: ColumnTable) -> bool:
        """Say whether the kernels can do it."""
        return (
            inputs.is_cuda
            and self.plan.inside <= _KERNEL_COLUMNS
            and table.dtype == torch.float32
            and inputs.dtype in _KERNEL_DTYPES
            and grads.dtype in _KERNEL_DTYPES
        )

    def projected_place(self, local: str) -> Place:
        """Say where the columns of weight and bias are if the weight is projected."""
        rows = (self.plan.inside - self.free) * self.width
        if local == "weight":
            return Place("weight", 0, rows)
        return (
            Place("weight", rows, rows + self.width)
            if self.free
            else Place("bias", 0, self.outputs)
        )

    def project_weight(self, grad: Tensor, rows: int) -> Tensor:
        """Return the columns of a whole (O, rows) gradient."""
        inside = side(self.key(grad), rows)[0]
        columns = project_matrix(grad, inside, self.plan.seed, self.name)
        return columns[: self.plan.inside - self.free].flatten()

    def project_bias(self, grad: Tensor) -> Tensor:
        """Return the columns of a whole gradient of the bias."""
        grad = at_least_float32(grad)
        return shorten(grad, self.plan.seed, self.name) if self.free else grad
