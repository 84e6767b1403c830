"""One use of a layer: what is held until its gradient arrives, and what stays from use to use.

Steps are alike: the tensors of a layer have the shapes and strides of the step before. Then
everything about its kernels is known, and only addresses are handed over, many layers at a time.
On a GPU this decides whether the host keeps ahead of the device.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradherd.rows.call_recorder import save_input, top_saving_hooks
from gradherd.rows.column_table import ColumnTable, KnownUse
from gradherd.rows.forward_replay import UncopiedHook
from gradherd.rows.norm_sketches import norm_statistics

if TYPE_CHECKING:
    from gradherd.rows.layer_watcher import LayerWatcher
    from gradherd.rows.sketched_layers import SketchedLayer


_SAVED_INPUTS = {
    "AddmmBackward0": "_saved_mat1",
    "MmBackward0": "_saved_self",
    "ConvolutionBackward0": "_saved_input",
}
"""Where autograd saves the input of a product, by the name of its node."""
_current_task: Callable[[], int] = torch._C._current_graph_task_id
WaitingUse = tuple[KnownUse, Tensor, Tensor, tuple[Tensor, ...], "LayerUse"]
"""The use before that a use seems to be like, then input, gradient, what a norm has saved, and the
use."""
UseDetails = tuple[Any, tuple[int, ...] | None, tuple[int, int]]
"""The node of autograd that saves the input instead, inside activation checkpointing; the shape of
the layer's input, if what is held may have another one; outputs that are missing before and after,
for a part of a projection."""
PLAIN: UseDetails = (None, None, (0, 0))


class AfterForward(UncopiedHook):
    """Forward hook of one layer: a single call, since there are many of them in a step."""

    def __init__(self, layer: "SketchedLayer", watcher: "LayerWatcher") -> None:
        super().__init__(watcher.after_forward)
        self._layer, self._watcher = layer, watcher
        self._check, self._places = watcher.check, watcher.places

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Watch the layer."""
        layer, watcher = self._layer, self._watcher
        if (
            # The usual case, in which there is nothing to find out about the layer. As
            # `looks_closer`, without the call.
            not self._check.due
            and watcher.probed is None
            and not layer.is_table
            and args
            and args[0].dim() == layer.probed_dims
            and layer.name not in self._places
            and torch.is_grad_enabled()
            and (node := output.grad_fn) is not None
        ):
            hold_input(watcher, layer, args[0], output, node)
        else:
            watcher.after_forward(layer, module, args, kwargs, output)


class LayerUse:
    """What is held of a layer's forward; called by autograd when the gradient arrives."""

    __slots__ = ("details", "index", "inputs", "layer", "saved", "version", "watcher")

    def __init__(
        self,
        watcher: "LayerWatcher",
        layer: "SketchedLayer",
        inputs: Tensor,
        index: int,
        saved: tuple[Tensor, ...],
        details: UseDetails,
    ) -> None:
        """Hold.

        Args:
            watcher: Is given what is not like the use before.
            layer: The layer.
            inputs: Its input.
            index: Of the output among those of the node that computed it.
            saved: Statistics of a norm.
            details: What is not as usual.
        """
        self.watcher, self.layer, self.saved, self.details = watcher, layer, saved, details
        self.inputs: Tensor | None = inputs if details[0] is None else None
        self.version, self.index = inputs._version, index

    def __call__(self, grads: tuple[Tensor | None, ...]) -> None:
        """Receive the gradients of all outputs of the node."""
        grad = grads[self.index]
        if grad is None:
            return
        watcher, known, inputs = self.watcher, self.layer.known, self.inputs
        task, waiting = _current_task(), watcher.waiting
        if (
            # A use that seems like one before, in a backward in which nothing but kernels has to
            # run. Whether it is like that one is seen when enough of them wait: between two nodes
            # of autograd the processor has forgotten our code, so each line takes much longer.
            task == waiting.task
            and known is not None
            and inputs is not None
            and inputs.shape == known.shape
        ):
            uses = waiting.uses
            uses.append((known, inputs, grad, self.saved, self))
            # The hook lives as long as the graph, which the loss may keep; activations must not.
            self.inputs, self.saved = None, ()
            waiting.room -= known.size
            if waiting.room > 0 and len(uses) < waiting.most:
                return
            started = time.perf_counter()
            waiting.settle()
        else:
            started = time.perf_counter()
            watcher.on_new_grad(self, grad, task)
        watcher.seconds += time.perf_counter() - started


def hold_input(
    watcher: "LayerWatcher",
    layer: "SketchedLayer",
    inputs: Tensor,
    output: Tensor,
    hooked: Any,
    pad: tuple[int, int] = (0, 0),
    shape: tuple[int, ...] | None = None,
) -> None:
    """Hold a layer's input until the gradient of its output arrives.

    Args:
        watcher: Receives the gradient.
        layer: The layer.
        inputs: Its input.
        output: Its output.
        hooked: The node of autograd that computed the output.
        pad: Outputs that are missing before and after, for a part of a projection.
        shape: What the input is viewed as; None is as it is.
    """
    elsewhere = top_saving_hooks(False) is not None
    # Inside activation checkpointing a reference would keep the input alive.
    node = save_input((inputs.detach(),)) if elsewhere else None
    found: Tensor | None = None
    saved: tuple[Tensor, ...] = ()
    if layer.is_norm:
        saved = norm_statistics(hooked, layer.module, elsewhere=elsewhere)
    elif node is None and output.dtype != inputs.dtype == torch.float32:  # as under autocast
        found, shape = layer.saved_input.find(inputs, hooked), shape or inputs.shape
    # Detached: an input changed in place later, as in x += layer(x), would hold its own holder.
    held = inputs.detach() if found is None else found
    details = PLAIN if node is None is shape and pad == (0, 0) else (node, shape, pad)
    use = LayerUse(watcher, layer, held, output.output_nr, saved, details)
    if hooked is None:
        output.register_hook(lambda grads: use((grads,)))
    else:  # After all hooks on the tensor, by which users change its gradient.
        hooked.register_prehook(use)


class WaitingUses:
    """Uses of layers that seem like those of the step before, until enough of them wait."""

    __slots__ = ("_on_new_grad", "_table", "most", "room", "task", "uses")

    def __init__(self, on_new_grad: Callable[[LayerUse, Tensor, int], None]) -> None:
        """Begin without uses.

        Args:
            on_new_grad: Is called with a use that is not like one before.
        """
        self._on_new_grad = on_new_grad
        self.clear()

    def clear(self) -> None:
        """Forget the uses, and let none wait."""
        self.uses: list[WaitingUse] = []
        self._table: ColumnTable | None = None
        self.task = -1
        """The backward whose uses may wait, in which nothing but kernels has to run."""
        self.most = self.room = 0
        """Uses, and bytes of theirs, that may still wait."""

    def follow(self, task: int, table: ColumnTable) -> None:
        """Let the uses in a backward wait, as many as a launch of its table serves."""
        assert table.group is not None
        self.task, self._table = task, table
        self.most, self.room = table.group.room()

    def settle(self) -> None:
        """Hand over the uses that wait to the kernels."""
        if not self.uses:
            return
        assert self._table is not None
        task, table = self.task, self._table
        uses, self.uses = self.uses, []
        for known, inputs, grads, saved, use in uses:
            # Unchanged since the forward: kernels read it now.
            same = inputs._version == use.version
            if not same or not table.launch_again(known, inputs, grads, saved):
                use.inputs, use.saved = inputs, saved
                with torch.no_grad():  # as in that backward
                    self._on_new_grad(use, grads, task)
        if task == self.task:
            self.follow(task, table)


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

    def find(self, inputs: Tensor, last: Any) -> Tensor | None:
        """Return it, with as many elements in the same order; None if there is none.

        Args:
            inputs: The input.
            last: The node of autograd that computed the output.
        """
        node = last
        for _ in range(self._steps):
            node = node.next_functions[0][0] if node is not None else None
        if type(node) is not self._kind:
            node = self._look(last)
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
