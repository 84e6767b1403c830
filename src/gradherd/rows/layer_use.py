"""One use of a layer: what is held until its gradient arrives, and what stays from use to use.

Steps are alike: the tensors of a layer have the shapes and strides of the step before. Then
everything about its kernels is known, and only addresses are handed over. On a GPU this decides
whether the host keeps ahead of the device.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradherd.rows.column_table import ColumnTable, KnownLaunch
from gradherd.rows.forward_replay import UncopiedHook

if TYPE_CHECKING:
    from gradherd.rows.sketched_layers import SketchedLayer


_SAVED_INPUTS = {
    "AddmmBackward0": "_saved_mat1",
    "MmBackward0": "_saved_self",
    "ConvolutionBackward0": "_saved_input",
}
"""Where autograd saves the input of a product, by the name of its node."""


class AfterForward(UncopiedHook):
    """Forward hook of one layer: a single call, since there are many of them in a step."""

    def __init__(self, layer: "SketchedLayer", hook: Callable[..., None]) -> None:
        super().__init__(hook)
        self._layer, self._after_forward = layer, hook

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Call the hook."""
        self._after_forward(self._layer, module, args, kwargs, output)


class LayerUse:
    """What is held of a layer's forward; called by autograd when the gradient arrives."""

    __slots__ = ("index", "inputs", "layer", "node", "pad", "receive", "saved", "version")

    def __init__(
        self,
        layer: "SketchedLayer",
        inputs: Tensor,
        node: Any,
        saved: tuple[Tensor, ...],
        pad: tuple[int, int],
        index: int,
        receive: Callable[["LayerUse", Tensor], None],
    ) -> None:
        """Hold.

        Args:
            layer: The layer.
            inputs: Its detached input.
            node: Node of autograd that saves the input instead, inside activation checkpointing.
            saved: Statistics of a norm.
            pad: Outputs that are missing before and after, for a part of a projection.
            index: Of the output among those of the node that computed it.
            receive: Called with the gradient of the output.
        """
        self.layer, self.node, self.saved, self.pad = layer, node, saved, pad
        self.inputs: Tensor | None = inputs if node is None else None
        self.version = inputs._version
        self.index, self.receive = index, receive

    def __call__(self, grads: tuple[Tensor | None, ...]) -> None:
        """Receive the gradients of all outputs of the node."""
        grad = grads[self.index]
        if grad is not None:
            self.receive(self, grad)


class KnownUse:
    """Recognises uses of a layer whose kernels are known from an earlier one."""

    __slots__ = ("_count", "_grads", "_inputs", "launch")

    def __init__(self, inputs: Tensor, grads: Tensor, launch: KnownLaunch) -> None:
        """Remember a use.

        Args:
            inputs: Input of the layer.
            grads: Its output gradient.
            launch: How kernels were launched for it.
        """
        self._inputs = inputs.shape, inputs.stride(), inputs.dtype
        self._grads = grads.shape, grads.stride(), grads.dtype
        self._count = len(launch.tensors)
        self.launch = launch._replace(tensors=())  # which would be kept alive

    def fits(self, tensors: tuple[Tensor, ...]) -> bool:
        """Say whether input, output gradient and statistics of another use are like these."""
        inputs, grads = tensors[0], tensors[1]
        return (
            (inputs.shape, inputs.stride(), inputs.dtype) == self._inputs
            and (grads.shape, grads.stride(), grads.dtype) == self._grads
            and len(tensors) == self._count
            # Kernels may expect aligned addresses.
            and (inputs.data_ptr() | grads.data_ptr()) % 16 == 0
        )


def note_launch(
    layer: "SketchedLayer", inputs: Tensor, grads: Tensor, arrived: Tensor, table: ColumnTable
) -> bool:
    """Remember how kernels served a use, so that the next one like it takes no time.

    Args:
        layer: The layer.
        inputs: Its input.
        grads: Its output gradient.
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
        layer.known = KnownUse(inputs, arrived, launched)
    return True


def autocast_input(inputs: Tensor, output: Tensor) -> Tensor:
    """Return the copy of a layer's input in lower precision that autograd saves under autocast.

    The input itself would be freed after the forward, but for us.
    """
    node: Any = output.grad_fn
    for _ in range(3):  # Products of more than two dimensions are followed by a view.
        name = node.name() if node is not None else ""
        if name in _SAVED_INPUTS:
            saved = getattr(node, _SAVED_INPUTS[name])
            if not isinstance(saved, Tensor) or saved.numel() != inputs.numel():
                return inputs
            if saved.shape == inputs.shape:  # in whatever layout
                return saved.detach()
            return saved.detach().view(inputs.shape) if saved.is_contiguous() else inputs
        node = node.next_functions[0][0] if node is not None and node.next_functions else None
    return inputs


@contextmanager
def no_autocast(device_type: str) -> Iterator[None]:
    """Compute without autocast, and without graph."""
    with torch.no_grad(), torch.autocast(device_type, enabled=False):
        yield
