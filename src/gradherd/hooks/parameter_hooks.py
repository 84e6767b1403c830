"""Hooks on the gradients of parameters, which say that a backward has begun and what it gives."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from gradherd.hooks.fsdp_torch import sharded_groups
from gradherd.rows.module_hooks import remove_hook
from gradherd.rows.row_check import Registrar
from gradherd.rows.torch_names import current_backward


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


class ParameterHooks:
    """Calls back with each parameter's gradient in every backward, before it is accumulated."""

    def __init__(
        self,
        model: nn.Module,
        arrived: Callable[[str, Tensor], None],
        once: Callable[[], None] | None = None,
    ) -> None:
        """Register a hook for each trainable parameter.

        Args:
            model: The model.
            arrived: Called with name and gradient of each parameter.
            once: Called instead, once for each backward.
        """
        self.before_first: Callable[[], None] = lambda: None
        """Called before the first gradient of each backward."""
        self.once = once
        """Called once for each backward, instead of `arrived`."""
        # No backward has this number.
        self._graph_task = -1

        def hook(name: str) -> Callable[[Tensor], None]:
            def on_grad(grad: Tensor) -> None:
                # DDP and FSDP tell backwards apart by this number, too.
                task = current_backward()
                if task != self._graph_task:
                    self._graph_task = task
                    self.before_first()
                    if self.once is not None:
                        self.once()
                if self.once is None:
                    arrived(name, grad.detach())

            return on_grad

        register = gradient_registrar(model)
        self._handles = [
            (parameter, register(parameter, hook(name)))
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ]

    def remove(self) -> None:
        """Remove the hooks."""
        for parameter, handle in self._handles:
            remove_hook(parameter, handle)
        self._handles = []
