"""Hooks on the gradients of parameters, which say that a backward has begun and what it gives."""

from collections.abc import Callable, Container, Sequence
from typing import Any

from torch import Tensor, nn

from gradherd.hooks.fsdp_torch import sharded_groups
from gradherd.rows.parameter_owners import remove_hook
from gradherd.rows.row_check import Registrar
from gradherd.rows.torch_names import current_backward

_BACKWARDS_BEFORE_ONE_HOOK = 8


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
        self.first = ""
        """Name of the parameter whose gradient came first in the last backward."""
        # No backward has this number.
        self._graph_task = -1

        def hook(name: str) -> Callable[[Tensor], None]:
            def on_grad(grad: Tensor) -> None:
                # DDP and FSDP tell backwards apart by this number, too.
                task = current_backward()
                if task != self._graph_task:
                    self._graph_task, self.first = task, name
                    self.before_first()
                    if self.once is not None:
                        self.once()
                if self.once is None:
                    arrived(name, grad.detach())

            return on_grad

        self._register = gradient_registrar(model)
        self._hooks = {
            name: (parameter, hook(name))
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        self._handles: dict[str, Any] = {}
        self.keep(self._hooks)

    def keep(self, names: Container[str]) -> None:
        """Have hooks on these parameters only."""
        for name, (parameter, hook) in self._hooks.items():
            if name in names and name not in self._handles:
                self._handles[name] = self._register(parameter, hook)
            elif name not in names and name in self._handles:
                remove_hook(parameter, self._handles.pop(name))

    def keep_all(self) -> None:
        """Have a hook on every parameter again."""
        self.keep(self._hooks)

    def remove(self) -> None:
        """Remove the hooks."""
        self.keep(())


class HookSaver:
    """Keeps the hook of one parameter alone, as long as that one notices every backward.

    A hook takes a few microseconds, and models have a hundred parameters. In most loops the same
    one has its gradient first in every backward. Whether that stays so is seen from the gradients
    of the others: none may have changed more often than the one that is watched. Clipping,
    unscaling and zeroing change all of them alike. At the first sign of another backward, and for
    good, every parameter has its hook again.
    """

    def __init__(self, hooks: ParameterHooks, names: Sequence[str]) -> None:
        """Begin with all hooks.

        Args:
            hooks: The hooks.
            names: Names of the parameters, in the order of the gradients.
        """
        self._hooks = hooks
        self._places = {name: place for place, name in enumerate(names)}
        self._first, self._times = "", 0
        self._watched: int | None = None
        self._given_up = False
        # Addresses of gradients and how often each was changed in place, as it was last.
        self._addresses: list[int] = []
        self._versions: list[int] = []

    def end(self, grads: Sequence[Tensor | None]) -> None:
        """Note the gradients at the end of a backward that a hook has noticed."""
        if self._given_up:
            return
        if self._watched is None:
            first = self._hooks.first
            self._times = self._times + 1 if first == self._first else 1
            self._first = first
            if self._times < _BACKWARDS_BEFORE_ONE_HOOK:
                return
        place = self._places[self._first]
        try:
            self._addresses, self._versions = _states(grads)
        except RuntimeError:  # sparse gradients have no address
            self.give_up()
            return
        # Views, such as those of one flat buffer, count the changes of all of them.
        looked_at = grads if self._watched is None else grads[place : place + 1]
        if any(grad is not None and grad._is_view() for grad in looked_at):
            self.give_up()
        elif self._watched is None:
            self._watched = place
            self._hooks.keep([self._first])

    def all_noticed(self, grads: Sequence[Tensor | None]) -> bool:
        """Say whether every backward up to now was noticed."""
        if self._watched is None:
            return True
        if self._same(grads):
            return True
        self.give_up()
        return False

    def _same(self, grads: Sequence[Tensor | None]) -> bool:
        assert self._watched is not None
        if grads[self._watched] is None:  # zeroed: any gradient was made by another backward
            return not any(grad is not None for grad in grads)
        try:
            addresses, versions = _states(grads)
        except RuntimeError:
            return False
        changes = {new - old for new, old in zip(versions, self._versions, strict=True) if new >= 0}
        if addresses != self._addresses or len(changes) > 1:
            return False
        self._versions = versions
        return True

    def give_up(self) -> None:
        """Have a hook for every parameter from now on."""
        self._given_up = True
        if self._watched is not None:
            self._watched = None
            self._hooks.keep_all()


def _states(grads: Sequence[Tensor | None]) -> tuple[list[int], list[int]]:
    """Return the address of every gradient, and how often it was changed in place."""
    addresses = [0 if grad is None else grad.data_ptr() for grad in grads]
    return addresses, [-1 if grad is None else grad._version for grad in grads]
