"""The trainable parameters of a model: which modules own them, and hooks on their gradients."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle


@dataclass(frozen=True)
class ParameterOwner:
    """A module that owns trainable parameters."""

    name: str
    module: nn.Module
    parameters: dict[str, nn.Parameter]
    """Trainable parameters by their local name."""


def parameter_owners(model: nn.Module) -> Iterator[ParameterOwner]:
    """Yield the modules whose calls determine the gradients of trainable parameters.

    Recurrent and attention layers use the parameters of their children without calling them, and
    so do modules with parametrizations. Parameter lists are used by the module that holds them.
    """
    seen: set[nn.Module] = set()
    stack = [("", model)]
    while stack:
        name, module = stack.pop()
        if module in seen:  # a module in two places has one set of hooks
            continue
        seen.add(module)
        # Attention hands the weights of its out_proj to a function; hooks of out_proj never run.
        owns_all = isinstance(module, nn.RNNBase | nn.MultiheadAttention)
        owns_all = owns_all or hasattr(module, "parametrizations")
        if owns_all:
            named = dict(module.named_parameters())
            children: list[tuple[str, nn.Module]] = []
        else:
            named, children = _own_parameters(module)
        trainable = {local: p for local, p in named.items() if p.requires_grad}
        if trainable:
            yield ParameterOwner(name, module, trainable)
        prefix = f"{name}." if name else ""
        # Reversed, because a stack gives the last one first: owners come in the order of the model.
        stack.extend((prefix + local, child) for local, child in reversed(children))


def _own_parameters(
    module: nn.Module,
) -> tuple[dict[str, nn.Parameter], list[tuple[str, nn.Module]]]:
    """Return the parameters that a module uses itself, and the children that it calls."""
    named = dict(module.named_parameters(recurse=False))
    children = []
    for local, child in module.named_children():
        # These containers have no forward, so no hook of theirs would ever run.
        if isinstance(child, nn.ParameterList | nn.ParameterDict):
            named.update(child.named_parameters(prefix=local))
        else:
            children.append((local, child))
    # A weight that a child has as well is used there (the bias of BERT's decoder is registered
    # twice). A replay of this module would count that use once more.
    in_children = {p for _, child in children for p in child.parameters()}
    return {local: p for local, p in named.items() if p not in in_children}, children


def plain_type(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before it was tapped."""
    kind: type[nn.Module] = getattr(type(module), "plain_type", type(module))
    return kind


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the module inside DDP and torch.compile's wrapper."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def refuse_compiled(model: nn.Module) -> None:
    """Raise ValueError if a part of a model is compiled: it ignores hooks that are set later."""
    for name, module in model.named_modules():
        compiled = "_orig_mod" in module._modules
        if compiled or getattr(module, "_compiled_call_impl", None) is not None:
            raise ValueError(
                f"module '{name}' is compiled, and hooks set after torch.compile are ignored: "
                "attach to the model before compiling it, use rows='sketch', or order whole batches"
            )


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
