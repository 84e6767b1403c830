"""Hooks of modules and parameters that leave copies, compilers and the user's hooks alone."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class UncopiedHook:
    """A module hook that copies of the module do not take along.

    A hook holds on to what it works for: a sampler with its data set, say. A module that is copied
    (`copy.deepcopy`, `AveragedModel`) or pickled (`torch.save`) gets a hook that does nothing.
    """

    def __init__(
        self, hook: Callable[..., Any], compiled: Callable[..., Any] | None = None
    ) -> None:
        """Call `hook` where the module runs, and `compiled`, which is traced, where it is compiled.

        None leaves the hook out of graphs: a compiler would trace it with the numbers of this
        batch, and compile anew for the next until it gives up.
        """
        self._hook, self._compiled = hook, compiled or _out_of_graphs(hook)

    def __call__(self, *args: Any) -> Any:
        """Call one of the two."""
        if torch.compiler.is_compiling():
            return self._compiled(*args)
        return self._hook(*args)

    def __reduce__(self) -> tuple[type["UncopiedHook"], tuple[Any, Any]]:
        return UncopiedHook, (do_nothing, do_nothing)


def do_nothing(*args: Any) -> None:
    """Do nothing, as a hook of a copy."""


def _out_of_graphs(hook: Callable[..., Any]) -> Callable[..., Any]:
    why = (
        "gradherd reads rows or notes the batch here: compile without fullgraph=True, or order "
        "whole batches and attach to the compiled model"
    )
    takes_reason = "reason" in inspect.signature(torch.compiler.disable).parameters  # not in 2.7
    left_out: Callable[..., Any] = torch.compiler.disable(
        hook, **({"reason": why} if takes_reason else {})
    )
    return left_out


def register_first(parameter: nn.Parameter, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Register a hook that runs before the user's, which may change the gradient."""
    before = dict(parameter._backward_hooks or {})
    handle: RemovableHandle = parameter.register_hook(hook)
    hooks = parameter._backward_hooks
    assert hooks is not None
    # Python's dicts keep the order of insertion, and autograd calls hooks in it.
    for key in before:
        del hooks[key]
    hooks.update(before)
    return handle


def remove_hook(parameter: nn.Parameter, handle: Any) -> None:
    """Remove a hook, and what would make autograd call Python although no hook is left."""
    handle.remove()
    if parameter._backward_hooks is not None and not parameter._backward_hooks:
        parameter._backward_hooks = None
