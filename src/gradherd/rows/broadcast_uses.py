"""Tensors that all examples share: class tokens, tables of positions, scales of layers.

Such a tensor has no batch dimension of its own. Where it meets the examples, in a sum, a product or
an expansion, autograd adds up the gradients of all examples; one step earlier they are still apart.
So the node where they meet is looked for in the graph behind the input of the next layer, and a
hook there reads its output gradient.

Which layers have such nodes behind them is learned while rows are checked, so that other steps look
nowhere else.

Shapes: B examples.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradherd.rows.column_table import LayerColumns
from gradherd.rows.layer_rules import UnbatchedError
from gradherd.rows.layer_sketches import LayerCall
from gradherd.rows.projected_weight import Place, SketchPlan
from gradherd.rows.sketch import sketch_columns
from gradherd.rows.terms import at_least_float32

_MOST_NODES = 64
"""Nodes between the inputs of two layers that are looked at."""
# Each of these has a gradient with the same elements in the same order.
_SAME_ELEMENTS = {
    "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "UnsqueezeBackward0",
    "SqueezeBackward0", "SqueezeBackward1", "ToCopyBackward0", "CloneBackward0",
}  # fmt: skip
_SUMS = {"AddBackward0": 1.0, "SubBackward0": -1.0}


class Meeting(NamedTuple):
    """A node where a shared tensor meets the examples."""

    name: str
    """Of the node."""
    node: Any
    position: int
    """Of the shared tensor among the node's inputs."""
    shape: tuple[int, ...]
    """Of the shared tensor there."""

    def gradients(self, grads: Tensor) -> Tensor:
        """Return each example's gradient of the shared tensor: (B, *rest).

        Args:
            grads: (B, ...) gradient of the node's output.

        Raises:
            UnbatchedError: The shared tensor differs from example to example.
        """
        grads = at_least_float32(grads.detach())
        if self.name in _SUMS and self.position == 1:
            # torch.add(a, b, alpha=2) and a - b scale the second summand only.
            grads = grads * (_SUMS[self.name] * self.node._saved_alpha)
        elif self.name == "MulBackward0":
            node = self.node
            # The derivative of a product with respect to one factor is the other one.
            other = node._saved_self if self.position else node._saved_other
            grads = grads * other.detach()
        missing = grads.dim() - len(self.shape)
        sizes = (1,) * missing + self.shape
        if missing < 0 or sizes[0] != 1:
            raise UnbatchedError("it has a dimension for examples of its own")
        # Other dimensions that were broadcast are summed, as autograd would; examples are kept
        # apart.
        summed = [at for at in range(1, grads.dim()) if sizes[at] == 1 and grads.shape[at] > 1]
        return (grads.sum(summed) if summed else grads).flatten(1)


Found = Callable[[Any, tuple[str, int], Meeting, Tensor], None]
"""Is called with what was expected, the layer (and the dimensions of its input) behind which it was
found, the node, and the gradient of the node's output."""


class BroadcastUses:
    """Finds where shared tensors meet the examples, step by step."""

    def __init__(self, parameters: Mapping[Any, nn.Parameter], found: Found) -> None:
        """Prepare.

        Args:
            parameters: Parameters that modules use directly, by what stands for them.
            found: Called in the backward.
        """
        # As long as it is held, the node that accumulates a parameter's gradient stays the same.
        self._parameters = {
            parameter.view_as(parameter).grad_fn.next_functions[0][0]: (key, parameter.shape)  # type: ignore[union-attr]
            for key, parameter in parameters.items()
        }
        self._tables: dict[Any, tuple[Any, torch.Size]] = {}
        self._found = found
        self.places: set[str] = set()
        """Layers behind whose inputs something was found."""
        self._seen: set[Any] = set()

    @property
    def is_needed(self) -> bool:
        """Whether anything is looked for."""
        return bool(self._parameters or self._tables)

    def expect(self, output: Tensor, key: Any) -> None:
        """Look for uses of an output that all examples share, in this forward."""
        self._tables[output.grad_fn] = (key, output.shape)

    def search(self, tensor: Tensor, place: str, *, everywhere: bool) -> None:
        """Look behind a tensor, and hook the nodes where shared tensors meet the examples.

        Args:
            tensor: The input of a layer.
            place: Name of the layer.
            everywhere: Whether to look behind layers at which nothing was found before.
        """
        if tensor.grad_fn is None or not (everywhere or place in self.places):
            return
        waiting = [tensor.grad_fn]
        origin = (place, tensor.dim())
        targets = self._parameters | self._tables
        count = 0
        # Breadth first, and bounded: what is shared meets the examples near the layer that reads
        # it.
        while waiting and count < _MOST_NODES:
            node = waiting.pop(0)
            if node in self._seen:
                continue
            self._seen.add(node)
            count += 1
            for position, (before, _) in enumerate(node.next_functions):
                shape: tuple[int, ...] | None = None
                inner = before
                # Views between the tensor and its use change its shape, not what the gradient is.
                while inner is not None and inner.name() in _SAME_ELEMENTS:
                    shape = shape or tuple(inner._input_metadata[0].shape)
                    inner = inner.next_functions[0][0]
                if inner in targets and node.name() not in _SAME_ELEMENTS:
                    self.places.add(place)
                    key, own = targets[inner]
                    self._hook(
                        key, origin, Meeting(node.name(), node, position, shape or tuple(own))
                    )
                elif before is not None:
                    waiting.append(before)

    def _hook(self, key: Any, origin: tuple[str, int], meeting: Meeting) -> None:
        if meeting.name not in {*_SUMS, "MulBackward0", "ExpandBackward0"}:
            return  # then its rows do not add up, and it is left out
        # Activation checkpointing runs layers again, on an input whose graph is the same.
        marks = meeting.node.metadata.setdefault("gradherd", set())
        if (id(self), meeting.position) in marks:
            return
        marks.add((id(self), meeting.position))

        def hook(grads: tuple[Tensor | None, ...]) -> None:
            if grads[0] is not None:
                self._found(key, origin, meeting, grads[0])

        meeting.node.register_prehook(hook)

    def next_forward(self) -> None:
        """Forget the graph of this forward."""
        self._tables, self._seen = {}, set()


class DirectSketch:
    """Columns of a parameter that its module uses directly: a sketch of its whole gradient."""

    def __init__(self, local: str, name: str, plan: SketchPlan) -> None:
        self.widths: dict[str, tuple[int, bool]] = {}
        self._local, self._name, self._plan = local, name, plan

    def write(self, call: LayerCall, out: LayerColumns) -> None:
        """Write the sketch of each example's gradient, given as `call.grads` (B, N)."""
        out.table.start(len(call.grads))
        out.table.add_final(out.indices[self._local], self._sketch(call.grads))

    def project(self, local: str, grad: Tensor) -> Tensor:
        """Return the sketch of a whole gradient."""
        return self._sketch(at_least_float32(grad).reshape(1, -1))[0]

    def where(self, local: str) -> Place:
        """Say that there are no columns."""
        return Place("")

    def _sketch(self, rows: Tensor) -> Tensor:
        return sketch_columns(rows.contiguous(), self._plan.size, self._plan.seed, self._name)
