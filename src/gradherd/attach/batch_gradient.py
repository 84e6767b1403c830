"""The gradient of a whole batch, read off the hooks of parameters.

Shapes: D parameters, k columns of a row.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradherd.attach.fsdp_torch import fsdp_modules, sharded_groups
from gradherd.rows.flat import FlatSpec
from gradherd.rows.launch_group import has_kernels
from gradherd.rows.row_check import Registrar
from gradherd.rows.settings import SketchRows
from gradherd.rows.sketch import count_sketch, sketch_vector

if TYPE_CHECKING:
    from gradherd.rows.triton_gradient import GradientSketcher


def gradient_registrar(model: nn.Module) -> Registrar:
    """Return a function that hooks a parameter's gradient, whether the model is sharded or not.

    Hooks on a sharded parameter itself never run: autograd sees the whole one.
    """
    owners = {
        id(parameter.sharded): (group, parameter)
        for group in sharded_groups(model)
        for parameter in group.parameters
    }

    def register(parameter: nn.Parameter, hook: Callable[[Tensor], None]) -> Any:
        if id(parameter) in owners:
            group, sharded = owners[id(parameter)]
            # FSDP reduces gradients before they reach the sharded parameter, so the group is asked.
            return group.on_gradient(sharded, hook)
        return parameter.register_hook(hook)

    return register


# Elsewhere a copy for each parameter costs little, and adds without rounding.
AT_END_DEVICES = {"cuda"}


class ParameterHooks:
    """Calls back with each parameter's gradient in every backward, before it is accumulated."""

    def __init__(
        self,
        model: nn.Module,
        arrived: Callable[[str, Tensor], None],
        begin: Callable[[], None] | None = None,
    ) -> None:
        """Register a hook for each trainable parameter.

        Args:
            model: The model.
            arrived: Called with name and gradient of each parameter.
            begin: Called instead, once for each backward.
        """
        self.began: Callable[[], None] = lambda: None
        """Called before the first gradient of each backward."""
        # No backward has this number.
        self._graph_task = -1

        def hook(name: str) -> Callable[[Tensor], None]:
            def on_grad(grad: Tensor) -> None:
                # DDP and FSDP tell backwards apart by this number, too.
                task = torch._C._current_graph_task_id()
                if task != self._graph_task:
                    self._graph_task = task
                    self.began()
                    if begin is not None:
                        begin()
                if begin is None:
                    arrived(name, grad.detach())

            return on_grad

        register = gradient_registrar(model)
        self._handles = [
            register(parameter, hook(name))
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def _sketcher_for(
    parameters: list[nn.Parameter], sketch: SketchRows | None
) -> "GradientSketcher | None":
    """Return what sketches p.grad in place; None where there is no kernel for it, or no sketch."""
    if sketch is None or not has_kernels(parameters[0].device):
        return None
    # Imported here: Triton is optional, and absent where there is no GPU.
    from gradherd.rows import triton_gradient

    if not triton_gradient.can_sketch(parameters):
        return None
    return triton_gradient.GradientSketcher(parameters, sketch.size, sketch.seed)


class BatchGradientSource:
    """The gradient of a whole batch, or a count sketch of it."""

    def __init__(self, model: nn.Module, sketch: SketchRows | None) -> None:
        self._spec = FlatSpec.of(model)
        self._offsets = dict(zip(self._spec.names, self._spec.offsets, strict=True))
        self._lengths = dict(zip(self._spec.names, self._spec.numels, strict=True))
        self._sketch = sketch
        self._row: Tensor | None = None
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        # On a GPU the launches for each parameter would cost more than the rest of the step.
        # Optimizers that step inside the backward leave nothing to read at its end.
        self._at_end = (
            self._parameters[0].device.type in AT_END_DEVICES
            and not fsdp_modules(model)
            and not any(p._post_accumulate_grad_hooks for p in self._parameters)
        )
        self._before: Tensor | None = None
        self._sketcher = _sketcher_for(self._parameters, sketch) if self._at_end else None
        self._hooks = ParameterHooks(
            model, self._arrived, None if not self._at_end else self._begin
        )

    @property
    def waiting(self) -> bool:
        """Whether a gradient has arrived."""
        return self._row is not None

    def _begin(self) -> None:
        """Prepare to read all gradients at once when this backward is over."""
        if self._row is None:
            # What earlier backwards have left in p.grad is subtracted at the end of this one.
            accumulated = any(p.grad is not None for p in self._parameters)
            self._before = self._all_grads() if accumulated else None
        # Queued callbacks run when the engine has accumulated every gradient, which no hook of a
        # single parameter can tell.
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        row = self._all_grads()
        self._row = row if self._before is None else row - self._before

    def _all_grads(self) -> Tensor:
        """Return the accumulated gradients of all parameters as one row: (D,), or sketched (k,)."""
        with torch.no_grad():
            grads = [p.grad for p in self._parameters]
            if self._sketcher is not None:
                return self._sketcher.sketch(grads)
            parts = [
                # The parameter itself stands in for a missing gradient, as it has the right length;
                # its part is set to zero below.
                p.detach() if grad is None else grad.to_dense() if grad.is_sparse else grad
                for p, grad in zip(self._parameters, grads, strict=True)
            ]
            # One call: reshaping each of them from Python takes longer than copying. It copies in
            # the logical order of elements, whatever the layout of a gradient is.
            row = torch._C._nn.flatten_dense_tensors(parts).float()
            for name, grad in zip(self._spec.names, grads, strict=True):
                if grad is None:  # not used in this backward
                    begin = self._offsets[name]
                    row[begin : begin + self._lengths[name]] = 0
            if self._sketch is not None:
                row = sketch_vector(row, self._sketch.size, self._sketch.seed)
            return row

    def _arrived(self, name: str, grad: Tensor) -> None:
        dense = grad.to_dense() if grad.is_sparse else grad  # Embedding(sparse=True)
        flat, offset = dense.flatten().float(), self._offsets[name]
        if self._row is None:
            self._row = flat.new_zeros(self._sketch.size if self._sketch else self._spec.size)
        if self._sketch is None:
            self._row[offset : offset + len(flat)] += flat
        else:
            # A count sketch is linear, so the sketch of the whole gradient is the sum over
            # parameters.
            self._row += count_sketch(flat, self._sketch.size, self._sketch.seed, offset=offset)

    def take(self, examples: int, loss_scale: float) -> Tensor:
        """Return the one row of the batch."""
        assert self._row is not None
        row, self._row = self._row, None
        if loss_scale != 1:
            row /= loss_scale
        return row.unsqueeze(0)

    def take_implicit(self, examples: int, loss_scale: float) -> None:
        """Return None: the gradient of a batch is already formed."""
        return None

    def on_backward(self, began: Callable[[], None]) -> None:
        """Call `began` before the first gradient of each backward."""
        self._hooks.began = began

    def check(self, examples: int) -> None:
        """Return None: the gradient of a batch is what it is."""
        return None

    def failed_check(self) -> Tensor:
        """Return an empty mask: there are no checks."""
        return torch.zeros(0, dtype=torch.uint8)

    def leave_out(self, mask: Tensor) -> None:
        """Do nothing: there are no checks."""

    def left_out(self) -> list[str]:
        """Return nothing: all parameters count."""
        return []

    @property
    def seconds_in_backward(self) -> float:
        """Return 0: copying a gradient is not counted."""
        return 0.0

    def restart_checks(self) -> None:
        """Do nothing: there are no checks."""

    def forget(self) -> None:
        """Drop the last gradient."""
        self._row = None

    def close(self) -> None:
        """Remove the hooks."""
        self._hooks.remove()
