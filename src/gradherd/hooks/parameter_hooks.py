"""Hooks on parameters and optimizers: when a backward begins, what it gives, and when they step."""

import logging
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from gradherd.flat import plain_name
from gradherd.hooks.fsdp import sharded_groups
from gradherd.rows.module_hooks import UncopiedHook, remove_hook
from gradherd.rows.row_check import Registrar
from gradherd.torch_names import current_backward, not_compiled


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

    def __init__(self, model: nn.Module, arrived: Callable[[str, Tensor], None]) -> None:
        """Hook into each trainable parameter; `arrived` is called with its name and gradient."""
        self.before_first: Callable[[], None] = lambda: None
        """Called before the first gradient of each backward."""
        self.once: Callable[[], None] | None = None
        """Called once for each backward, instead of `arrived`."""
        # No backward has this number.
        self._arrived, self._graph_task = arrived, -1
        register = gradient_registrar(model)
        self._handles = [
            (parameter, register(parameter, partial(self._on_gradient, name)))
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ]

    def _on_gradient(self, name: str, grad: Tensor) -> None:
        # DDP and FSDP tell backwards apart by this number, too.
        task = current_backward()
        if task != self._graph_task:
            self._graph_task = task
            self.before_first()
            if self.once is not None:
                self.once()
        if self.once is None:
            self._arrived(name, grad.detach())

    def remove(self) -> None:
        """Remove the hooks."""
        for parameter, handle in self._handles:
            remove_hook(parameter, handle)
        self._handles = []


log = logging.getLogger("gradherd")


class ParameterUsage:
    """Records which parameters had a gradient in the backwards of one exchange.

    DDP tracks this itself, but does not pass it on to its hook: in the bucket, a parameter that was
    not used is zero like one whose gradient is zero.
    """

    def __init__(self, ddp: DDP) -> None:
        # The model itself is not kept: DDP holds its hook, and so this, out of the garbage
        # collector's sight, and would never be freed.
        self._accumulating, self._used = False, set[str]()
        self._hooks = ParameterHooks(ddp.module, self._arrived)
        self._handle = ddp.register_forward_pre_hook(UncopiedHook(self._forward))

    def _arrived(self, name: str, grad: Tensor) -> None:
        self._used.add(plain_name(name))

    def _forward(self, module: nn.Module, args: Any) -> None:
        """Start again, unless earlier backwards wait to be exchanged (no_sync)."""
        if not torch.is_grad_enabled():
            return
        if not self._accumulating:
            self._used.clear()
        # Under no_sync nothing is exchanged yet: what this backward uses counts for the one that
        # syncs.
        if not module.require_backward_grad_sync:
            self._accumulating = True

    def take(self) -> set[str]:
        """Return the names of the parameters, and begin anew."""
        used, self._used, self._accumulating = self._used, set(), False
        return used

    def remove(self) -> None:
        """Remove the hooks."""
        self._hooks.remove()
        self._handle.remove()


def stepping_optimizer(optimizer: Any, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return the torch optimizer inside wrappers such as Accelerate's, if it fits the model.

    Raises:
        ValueError: It is no optimizer, or steps parameters that would not be exchanged.
    """
    # Wrappers are Optimizers themselves, but torch's step hooks run in the inner one.
    while isinstance(inside := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inside
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"local steps need optimizer=, a torch.optim.Optimizer, got {optimizer!r}")
    if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
        raise ValueError(
            "ZeroRedundancyOptimizer lets one rank step each parameter for all, so the steps of "
            "the others would be lost: give local steps the optimizer that it wraps"
        )
    check_stepped(optimizer, parameters)
    return optimizer


def check_stepped(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Raise ValueError if an optimizer steps tensors that local steps would not exchange."""
    known = {id(p) for p in parameters}
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    unknown = sum(id(p) not in known for p in stepped if p.requires_grad)
    if unknown:
        raise ValueError(
            f"optimizer steps {unknown} tensors that are not trainable parameters of the model, so "
            "ranks would not share them: give local steps the module that holds them all"
        )


def check_optimizer(model: nn.Module, owner: Any, momentum: float, *, warns: bool) -> None:
    """Look at the model's optimizer when it steps, as long as the `owner` of the check is there.

    Momentum beside the sparsifier's own is refused. Alone it is allowed, as in the papers, but
    repeats for many steps what has arrived late, which costs accuracy; so that is said once, by the
    rank that `warns`. So is what was measured with Adam and its relatives, which divide by the size
    of what arrives.
    """
    warned, known = not warns, {id(p) for p in model.parameters()}

    def before_step(hook: Any, optimizer: Optimizer) -> None:
        nonlocal warned
        if not hook.active or (warned and not momentum):
            return
        for group in optimizer.param_groups:
            if not any(id(p) in known for p in group["params"]):
                continue
            own, betas = group.get("momentum") or 0.0, group.get("betas")
            # Adam and its relatives have a first beta instead, which has the same effect.
            if momentum and (own := own or (betas or (0.0,))[0]):
                raise ValueError(
                    f"{type(optimizer).__name__} has momentum {own:g} and the sparsifier "
                    f"{momentum:g}: each would multiply what the other repeats; use SGD with "
                    "momentum 0, or Sparsify(momentum=0)"
                )
            if (own or betas) and not momentum and not warned:
                warned = True
                log.warning("%s %s (docs/few_bytes.md)", type(optimizer).__name__, _cost(own))

    watch_steps(model, owner, before_step)


def _cost(momentum: float) -> str:
    """Say what a sparse exchange costs with momentum, or with an optimizer like Adam if 0."""
    if momentum:
        return (
            f"has momentum {momentum:g}, which repeats what a sparse exchange sends late: momentum "
            "0 with lr / (1 - momentum) often trains more accurately"
        )
    return (
        "steps with the sparse mean, which cost language models much of their quality: local steps "
        "that send as few bytes can train better"
    )


_hooks: list[tuple["weakref.ref[Any]", RemovableHandle]] = []
"""Hooks of all optimizers, and what they work for."""


def watch_steps(
    model: nn.Module, owner: Any, act: Callable[[Any, Optimizer], None], *, after: bool = False
) -> list[RemovableHandle]:
    """Call `act(owner, optimizer)` before a step that changes parameters of a model.

    The hooks are those of all optimizers, because `attach` does not know the loop's. They keep
    neither the model nor the owner alive (nor may `act`), and are removed some time after the owner
    is gone. Not at once: the garbage collector may come in the middle of an optimizer's step, which
    fails if its hooks change meanwhile. So they wait for the next call; until then they do nothing.

    If `after`, act after the step as well.
    """
    for gone, handle in _hooks:
        if gone() is None:
            handle.remove()
    alive, parameters = weakref.ref(owner), {id(p) for p in model.parameters()}

    @not_compiled
    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        target, groups = alive(), optimizer.param_groups
        if target is not None and any(id(p) in parameters for g in groups for p in g["params"]):
            act(target, optimizer)

    handles = [register_optimizer_step_pre_hook(hook)]
    if after:
        handles.append(register_optimizer_step_post_hook(hook))
    kept = [each for each in _hooks if each[0]() is not None]
    _hooks[:] = kept + [(alive, handle) for handle in handles]
    return handles
