"""Which modules own the trainable parameters of a model, and how their rows are found."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradherd.rows.layers import Rule, rule_for, wants


@dataclass(frozen=True)
class Owner:
    """A module that owns trainable parameters, and how its rows are found."""

    name: str
    module: nn.Module
    rule: Rule | None
    """None: the forward is replayed."""
    parameters: dict[str, nn.Parameter]
    """By local name."""


def owners(model: nn.Module) -> Iterator[Owner]:
    """Walk the modules whose calls decide the gradients of trainable parameters.

    Recurrent and attention layers use the parameters of everything below them, as do modules
    with parametrizations; lists of parameters are used by the module that holds them.
    """
    seen: set[nn.Module] = set()
    stack = [("", model)]
    while stack:
        name, module = stack.pop()
        if module in seen:
            continue
        seen.add(module)
        closed = isinstance(module, nn.RNNBase | nn.MultiheadAttention)
        closed = closed or hasattr(module, "parametrizations")
        if closed:
            named = dict(module.named_parameters())
            children: list[tuple[str, nn.Module]] = []
        else:
            named, children = _own(module)
        found = {local: p for local, p in named.items() if wants(p)}
        if found:
            yield Owner(name, module, None if closed else rule_for(module), found)
        prefix = f"{name}." if name else ""
        stack.extend((prefix + local, child) for local, child in reversed(children))


def _own(module: nn.Module) -> tuple[dict[str, nn.Parameter], list[tuple[str, nn.Module]]]:
    """Return the parameters a module uses itself, and the children that are called."""
    named = dict(module.named_parameters(recurse=False))
    children = []
    for local, child in module.named_children():
        if isinstance(child, nn.ParameterList | nn.ParameterDict):
            named.update(child.named_parameters(prefix=local))
        else:
            children.append((local, child))
    return named, children


def bare(model: nn.Module) -> nn.Module:
    """Return the module inside DDP, or raise ValueError if hooks on it would not be called."""
    if isinstance(model, DistributedDataParallel):
        model = model.module
    for name, module in model.named_modules():
        compiled = "_orig_mod" in module._modules
        if compiled or getattr(module, "_compiled_call_impl", None) is not None:
            raise ValueError(
                f"module '{name}' is compiled, and hooks set after torch.compile are ignored: "
                "attach to the model before compiling it, or order whole batches"
            )
    return model


def describe(model: nn.Module) -> str:
    """Say in one line which modules have rules and which are replayed.

    >>> describe(nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2)))
    'rows: 1 module by rule (Linear); 1 replayed, slower: 1 (LSTM)'
    """
    found = list(owners(bare(model)))
    ruled = [owner for owner in found if owner.rule is not None]
    slow = [owner for owner in found if owner.rule is None]
    kinds = ", ".join(sorted({type(owner.module).__name__ for owner in ruled}))
    line = f"rows: {len(ruled)} module{'s' * (len(ruled) != 1)} by rule"
    line += f" ({kinds})" if kinds else ""
    if slow:
        names = ", ".join(
            f"{owner.name or 'the model itself'} ({type(owner.module).__name__})" for owner in slow
        )
        line += f"; {len(slow)} replayed, slower: {names}"
    return line
