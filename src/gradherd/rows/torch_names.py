"""Every private name of torch that rows use, with the reason, and what they do without it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

PRIVATE_NAMES = {
    "torch._C._current_graph_task_id": "tells backwards apart, and whether one runs",
    "torch._C._will_engine_execute_node": "tells whether a backward reaches a parameter",
    "torch._C._autograd._top_saved_tensors_default_hooks": "tells whether autograd recomputes or "
    "offloads what it saves; torch 2.7 lacks it",
    "torch.Tensor._version": "tells whether a tensor was changed in place",
    "torch.Tensor._backward_hooks": "puts a hook on a gradient in front of the user's",
    "torch.nn.Module._parameters": "reads a parameter behind a property of the same name",
    "torch.nn.Module._buffers": "lets a forward that is repeated work on copies of the buffers",
    "torch.nn.Module._forward_pre_hooks": "runs hooks that prepare a module that is run again",
    "torch._dynamo.decorators": "marks a function that runs while a model is traced, see "
    "`mark_constant`",
    "torch.utils._pytree": "finds the tensors in nested arguments",
}
"""By their full names."""


def missing_names() -> list[str]:
    """Return those that this version of torch lacks.

    >>> set(missing_names()) <= {"torch._C._autograd._top_saved_tensors_default_hooks"}
    True
    """
    missing = []
    for name in PRIVATE_NAMES:
        found: Any = torch
        for part in name.split(".")[1:]:
            if found is nn.Module:  # attributes of instances
                found = getattr(nn.Module(), part, None)
            else:
                found = getattr(found, part, None)
        if found is None and name != "torch.Tensor._backward_hooks":
            missing.append(name)
    return missing


def mark_constant(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have the compiler run a function while it traces, and take its result for a constant.

    As `torch.compiler.assume_constant_result`, which loads the compiler, a second or two, for
    models that are never compiled.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


current_backward: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the number of the backward that runs (autograd's graph task), -1 outside of one."""
