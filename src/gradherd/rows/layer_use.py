"""One use of a layer: what is held until its gradient arrives, and what stays from use to use.

Steps are alike: the tensors of a layer have the shapes and strides of the step before. Then
everything about its kernels is known, and only addresses are handed over. On a GPU this decides
whether the host keeps ahead of the device.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradherd.rows.column_table import ColumnTable, KnownUse
from gradherd.rows.forward_replay import UncopiedHook

if TYPE_CHECKING:
    from gradherd.rows.layer_watcher import LayerWatcher
    from gradherd.rows.sketched_layers import SketchedLayer


_SAVED_INPUTS = {
    "AddmmBackward0": "_saved_mat1",
    "MmBackward0": "_saved_self",
    "ConvolutionBackward0": "_saved_input",
}
"""Where autograd saves the input of a product, by the name of its node."""


class AfterForward(UncopiedHook):
    """Forward hook of one layer: a single call, since there are many of them in a step."""

    def __init__(self, layer: "SketchedLayer", watcher: "LayerWatcher") -> None:
        super().__init__(watcher.after_forward)
        self._layer, self._watcher = layer, watcher

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Watch the layer."""
        layer, watcher = self._layer, self._watcher
        if (
            # The usual case, in which there is nothing to find out about the layer.
            not layer.is_table
            and args
            and args[0].dim() == layer.probed_dims
            and not watcher.looks_closer(layer.name)
            and torch.is_grad_enabled()
            and output.requires_grad
        ):
            watcher.watch(layer, args[0], output)
        else:
            watcher.after_forward(layer, module, args, kwargs, output)


class LayerUse:
    """What is held of a layer's forward; called by autograd when the gradient arrives."""

    __slots__ = (
        "index", "inputs", "layer", "node", "pad", "saved", "shape", "version", "watcher",
    )  # fmt: skip

    def __init__(
        self,
        watcher: "LayerWatcher",
        layer: "SketchedLayer",
        inputs: Tensor,
        index: int,
        node: Any,
        saved: tuple[Tensor, ...],
        shape: torch.Size | None,
        pad: tuple[int, int],
    ) -> None:
        """Hold.

        Args:
            watcher: Is given what is not like the use before.
            layer: The layer.
            inputs: Its input.
            index: Of the output among those of the node that computed it.
            node: Node of autograd that saves the input instead, inside activation checkpointing.
            saved: Statistics of a norm.
            shape: Of the layer's input, if what is held is what autograd has saved of it.
            pad: Outputs that are missing before and after, for a part of a projection.
        """
        self.watcher, self.layer, self.node, self.saved = watcher, layer, node, saved
        self.inputs: Tensor | None = inputs if node is None else None
        self.version = inputs._version
        self.index, self.shape, self.pad = index, shape, pad

    def __call__(self, grads: tuple[Tensor | None, ...]) -> None:
        """Receive the gradients of all outputs of the node."""
        grad = grads[self.index]
        if grad is None:
            return
        started = time.perf_counter()
        watcher, known, inputs = self.watcher, self.layer.known, self.inputs
        task = torch._C._current_graph_task_id()
        if (
            # A use like one before, in a backward in which nothing but kernels has to run.
            known is not None
            and task == watcher.usual_task
            and inputs is not None
            and inputs._version == self.version
            and watcher.tables[task].launch_again(known, inputs, grad, self.saved)
        ):
            self.inputs, self.saved = None, ()
        else:
            watcher.on_new_grad(self, grad, task)
        watcher.seconds += time.perf_counter() - started


def note_launch(
    layer: "SketchedLayer",
    inputs: Tensor,
    grads: Tensor,
    held: Tensor,
    arrived: Tensor,
    table: ColumnTable,
) -> bool:
    """Remember how kernels served a use, so that the next one like it takes no time.

    Args:
        layer: The layer.
        inputs: Its input.
        grads: Its output gradient.
        held: The input as a use holds it; other than `inputs` under autocast.
        arrived: The gradient as autograd has it; other than `grads` inside attention.
        table: Where its columns were written.

    Returns:
        Whether kernels served it.
    """
    launched, table.launched = table.launched, None
    if launched is None:
        return False
    # Not for an input that was padded or projected first, or a transposed convolution.
    own = launched.tensors[0] is inputs and launched.tensors[1] is grads
    # Inside attention, a gradient that was not padded or copied has its elements where it had them.
    if own and arrived.data_ptr() == grads.data_ptr() and arrived.nbytes == grads.nbytes:
        layer.known = KnownUse(launched, held, arrived)
    return True


class SavedInput:
    """Finds the copy of a layer's input in lower precision that autograd saves under autocast.

    The input itself would be freed after the forward, but for us.
    """

    __slots__ = ("_kind", "_name", "_steps")

    def __init__(self) -> None:
        # Where it was in the graph behind the output: how far, in which kind of node.
        self._steps, self._name = 0, ""
        self._kind: type | None = None

    def find(self, inputs: Tensor, output: Tensor) -> Tensor | None:
        """Return it, with as many elements in the same order; None if there is none."""
        node: Any = output.grad_fn
        for _ in range(self._steps):
            node = node.next_functions[0][0] if node is not None else None
        if type(node) is not self._kind:
            node = self._look(output.grad_fn)
        if node is None or not self._name:
            return None
        saved = getattr(node, self._name)
        # Of the same precision it would be no copy, but the input itself.
        if saved is None or saved.dtype == inputs.dtype or saved.numel() != inputs.numel():
            return None
        # In whatever layout, if it has the same shape.
        alike = saved.is_contiguous() or saved.shape == inputs.shape
        return saved if alike else None

    def _look(self, node: Any) -> Any:
        """Return the node that has saved it, and remember where it is."""
        self._name, self._kind = "", None
        for self._steps in range(3):  # products of more than two dimensions are followed by a view
            if node is None:
                break
            if (name := node.name()) in _SAVED_INPUTS:
                self._name, self._kind = _SAVED_INPUTS[name], type(node)
                return node
            node = node.next_functions[0][0] if node.next_functions else None
        self._steps = 0
        return None


@contextmanager
def no_autocast(device_type: str) -> Iterator[None]:
    """Compute without autocast, and without graph."""
    with torch.no_grad(), torch.autocast(device_type, enabled=False):
        yield
