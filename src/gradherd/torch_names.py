"""Every private name of torch that is used, with the reason; those of FSDP are in `hooks.fsdp`."""

import sys
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.modules.conv import _ConvNd
from torch.nn.parallel import DistributedDataParallel as DDP

PRIVATE_NAMES = {
    "torch._C._current_graph_task_id": "tells backwards apart, and whether one runs",
    "torch._C._autograd._get_current_graph_task_keep_graph": "tells whether a backward may run "
    "again (retain_graph)",
    "torch.autograd.Variable._execution_engine": "calls back when a backward is over",
    "torch.Tensor._base": "finds the node of a layer whose output is a view",
    "torch.Tensor._version": "tells whether a tensor that waits was changed in place",
    "torch.Tensor._backward_hooks": "puts a hook on a gradient in front of the user's",
    "torch.nn.modules.conv._ConvNd._reversed_padding_repeated_twice": "how a convolution pads its "
    "input itself",
    "torch.nn.Module._compiled_call_impl": "tells whether a module was compiled in place",
    "torch.nn.Module._modules": "finds wrappers of torch.compile inside a model",
    "torch.nn.Module._parameters": "reads a parameter behind a property of the same name",
    "torch.nn.Module._forward_pre_hooks": "tells whether a hook may compute a layer's weight",
    "torch._dynamo.OptimizedModule._orig_mod": "the module inside torch.compile's wrapper",
    "torch._dynamo.decorators.assume_constant_result": "what `mark_constant` does, without loading "
    "the compiler",
    "torch.utils._pytree": "finds the tensors in nested arguments",
    "torch._foreach_copy_": "copies the gradients or weights of all parameters in one call",
    "torch._foreach_add_": "adds to the weights of all parameters in one call",
    "torch._C._nn.flatten_dense_tensors": "joins the gradients of all parameters in one call",
    "torch.Tensor._post_accumulate_grad_hooks": "tells whether optimizers step in the backward",
    "torch.amp.GradScaler._get_scale_async": "the loss scale without waiting for the GPU",
    "torch.nn.parallel.DistributedDataParallel._comm_hooks": "tells whether DDP has a hook: it "
    "takes one for its lifetime",
    "torch.Tensor._indices": "the size of a sparse gradient that is not coalesced",
    "torch.Tensor._values": "the same",
    "torch.distributed.distributed_c10d._get_process_group_store": "the store of a group; "
    "torch 2.7 has no `ProcessGroup.get_group_store`",
    "torch.distributed.ProcessGroup._get_backend": "leads to the timeout of a group",
    "torch.distributed.ProcessGroup._device_types": "for which devices a group has backends",
    "torch.distributed.distributed_c10d._world": "tells whether a group was destroyed, and knows "
    "the ranks of one that only some ranks make",
    "torch.distributed.distributed_c10d._new_process_group_helper": "makes a group that only some "
    "ranks make",
    "torch.distributed.distributed_c10d._get_default_store": "the store through which they meet",
}
"""By their full names."""
OPTIONAL_NAMES = {
    "torch._C._autograd._top_saved_tensors_default_hooks": "tells whether what layers save is "
    "packed away (checkpoints, offloading); torch 2.7 has no such name, so there every layer has a "
    "tap, which is slower",
    "torch._C._cuda_getCurrentRawStream": "the number of the current stream, for every layer; the "
    "public way takes as long as a launch. Builds of torch for CPUs have no such name",
    "torch._C._distributed_c10d.Backend.Options._timeout": "how long a rank waits for its peers; "
    "without it, as long as torch's default says",
    "torch.nn.parallel.DistributedDataParallel._join_config": "whether a loop runs inside join()",
}
"""Those that a version may lack."""


def missing_names() -> list[str]:
    """Return those that this version of torch lacks.

    >>> missing_names()
    []
    """
    missing = []
    for name in PRIVATE_NAMES:
        owner: Any = torch
        *parents, last = name.split(".")[1:]
        if parents[:1] == ["_dynamo"]:  # loading it takes long, and nothing of it is called here
            continue
        for part in parents:
            owner = getattr(owner, part, None)
        if owner is nn.Module:  # attributes of instances
            owner = nn.Module()
        # Nor is what another constructor sets an attribute of the class.
        sets = owner in (DDP, _ConvNd) and last in owner.__init__.__code__.co_names
        if not (hasattr(owner, last) or sets):
            missing.append(name)
    return missing


def mark_constant(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have the compiler run a function while it traces, and take its result for a constant.

    As `torch.compiler.assume_constant_result`, which loads the compiler, a second or two, for
    models that are never compiled.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def not_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the compiler out of a function that something compiled may call.

    As `torch.compiler.disable`, which loads the compiler.
    """
    disabled: Callable[..., Any] | None = None

    @wraps(function)
    def call(*args: Any) -> Any:
        nonlocal disabled
        if disabled is None and (compiler := sys.modules.get("torch._dynamo")) is not None:
            disabled = compiler.disable(function)
        return (disabled or function)(*args)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call


current_backward: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the number of the backward that runs (autograd's graph task), -1 outside of one."""


keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
"""Says whether the graph of the backward that runs is kept for another one."""


saved_tensor_hooks: Callable[[bool], Any] = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignores_tracing: True
)
"""Returns not None if what layers save for their backward may be packed: checkpoints, offloading.
"""


_raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def stream_getter(device: torch.device) -> Callable[[], int]:
    """Return what tells the stream that kernels of a device are launched on, as a number."""
    if device.type != "cuda":
        return int
    index = torch.cuda.current_device() if device.index is None else device.index
    if _raw_stream is not None:
        return partial(_raw_stream, index)
    return lambda: torch.cuda.current_stream(index).cuda_stream


def call_after_backward(function: Callable[[], None]) -> None:
    """Call a function when the backward that runs is over."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the module inside torch.compile's wrapper, or the model itself."""
    inside: nn.Module = getattr(model, "_orig_mod", model)
    return inside


def comm_hook_states(ddp: DDP) -> list[Any]:
    """Return what was registered with each communication hook of a DDP model."""
    return [state for _, state in ddp._comm_hooks]


def is_joining(ddp: DDP) -> bool:
    """Return whether a DDP model is used inside `ddp.join()`."""
    return bool(getattr(getattr(ddp, "_join_config", None), "enable", False))


def scale_on_device(scaler: GradScaler | None) -> Tensor | None:
    """Return the loss scale as a tensor, without waiting for a GPU; None is 1."""
    if scaler is None or not scaler.is_enabled():
        return None
    return scaler._get_scale_async()


def current_scale(scaler: GradScaler | None) -> Tensor | float:
    """Return the loss scale: the tensor that updates change, so that nobody waits for a GPU."""
    if scaler is None:
        return 1.0
    # There is none before the first loss is scaled.
    tensor: Tensor | None = getattr(scaler, "_get_scale_async", lambda: None)()
    return scaler.get_scale() if tensor is None else tensor


def add_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Add each source to its target, in one call."""
    torch._foreach_add_(list(targets), list(sources))


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, in one call."""
    torch._foreach_copy_(list(targets), list(sources))
