"""What a loop does with parameters: which ones a backward uses, and how the optimizer steps."""

import logging
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from gradherd.rows.module_hooks import UncopiedHook

log = logging.getLogger("gradherd")


def tracks_usage(ddp: DDP) -> bool:
    """Return whether a backward may leave parameters unused; DDP itself tracks that only then."""
    return bool(ddp.find_unused_parameters or ddp.static_graph)


class ParameterUsage:
    """Records which parameters had a gradient in the backwards of one exchange.

    DDP tracks this itself, but does not pass it on to its hook: in the bucket, a parameter that was
    not used is zero like one whose gradient is zero.
    """

    def __init__(self, ddp: DDP, parameters: Mapping[str, nn.Parameter]) -> None:
        # The model itself is not kept: DDP holds its hook, and so this, out of the garbage
        # collector's sight, and would never be freed.
        self._accumulating = False
        self._device = next(iter(parameters.values())).device
        self._flags = [False] * len(parameters)
        self._handles = [
            parameter.register_hook(self._mark(at))
            for at, parameter in enumerate(parameters.values())
        ]
        self._handles.append(ddp.register_forward_pre_hook(UncopiedHook(self._forward)))

    def _forward(self, module: nn.Module, args: Any) -> None:
        """Start again, unless earlier backwards wait to be exchanged (no_sync)."""
        if not torch.is_grad_enabled():
            return
        if not self._accumulating:
            self._flags = [False] * len(self._flags)
        # Under no_sync nothing is exchanged yet: what this backward uses counts for the one that
        # syncs.
        if not module.require_backward_grad_sync:
            self._accumulating = True

    def _mark(self, at: int) -> Any:
        """Return a hook for the parameter with that number."""

        def mark(grad: Tensor) -> None:
            self._flags[at] = True

        return mark

    def take(self) -> Tensor:
        """Return one uint8 flag for each parameter, and reset them."""
        flags = torch.tensor(self._flags, dtype=torch.uint8, device=self._device)
        self._flags = [False] * len(self._flags)
        self._accumulating = False
        return flags

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


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
    known = {id(p) for p in parameters}
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    strange = sum(id(p) not in known for p in stepped if p.requires_grad)
    if strange:
        raise ValueError(
            f"optimizer steps {strange} tensors that are not trainable parameters of the model, so "
            "ranks would not share them: give local steps the module that holds them all"
        )
    return optimizer


def check_optimizer(model: nn.Module, owner: Any, momentum: float, *, warns: bool) -> None:
    """Look at the model's optimizer when it first steps.

    Momentum beside the sparsifier's own is refused. Alone it is allowed, as in the papers, but
    repeats for many steps what has arrived late, which costs accuracy; so that is said once. So is
    what was measured with Adam and its relatives, which divide by the size of what arrives.

    Args:
        model: The model whose gradients the sparsifier exchanges.
        owner: The sparsifier's hook; the check ends with it.
        momentum: The momentum of its correction; 0 is none.
        warns: Whether this rank is the one that warns.
    """
    parameters, alive = {id(p) for p in model.parameters()}, weakref.ref(owner)
    warned = not warns

    def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        nonlocal warned
        hook = alive()
        if hook is None or not hook.active or (warned and not momentum):
            return
        for group in optimizer.param_groups:
            if not any(id(p) in parameters for p in group["params"]):
                continue
            own, betas = group.get("momentum") or 0.0, group.get("betas")
            if momentum:
                # Adam and its relatives have a first beta instead, which has the same effect.
                _refuse_second(optimizer, own or (betas or (0.0,))[0], momentum)
            elif (own or betas) and not warned:
                warned = True
                log.warning("%s %s (docs/few_bytes.md)", type(optimizer).__name__, _cost(own))

    # Global, because attach does not know the optimizer; so it must not keep the model alive.
    remove_after(owner, [register_optimizer_step_pre_hook(before_step)])


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


def _refuse_second(optimizer: Optimizer, own: float, momentum: float) -> None:
    if own:
        raise ValueError(
            f"{type(optimizer).__name__} has momentum {own:g} and the sparsifier "
            f"{momentum:g}: each would multiply what the other repeats; use SGD with "
            "momentum 0, or Sparsify(momentum=0)"
        )


_hooks: list[tuple["weakref.ref[Any]", RemovableHandle]] = []
"""Hooks of all optimizers, and what they work for."""


def remove_after(owner: Any, handles: Iterable[RemovableHandle]) -> None:
    """Remove hooks of all optimizers some time after their owner is gone.

    Not at once: the garbage collector may come in the middle of an optimizer's step, which fails if
    its hooks change meanwhile. Hooks of owners that are gone wait for the next call; until then
    they do nothing.
    """
    for alive, handle in _hooks:
        if alive() is None:
            handle.remove()
    _hooks[:] = [hook for hook in _hooks if hook[0]() is not None]
    _hooks.extend((weakref.ref(owner), handle) for handle in handles)
