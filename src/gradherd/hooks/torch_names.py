"""Every private name of torch that what is attached uses, with the reason; FSDP's in `fsdp`.

Those that rows use, too, are in `rows.torch_names`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP

PRIVATE_NAMES = {
    "torch._foreach_copy_": "copies the gradients or weights of all parameters in one call",
    "torch._C._nn.flatten_dense_tensors": "joins the gradients of all parameters in one call",
    "torch.Tensor._post_accumulate_grad_hooks": "tells whether optimizers step in the backward",
    "torch.amp.GradScaler._get_scale_async": "the loss scale without waiting for the GPU",
    "torch.nn.parallel.DistributedDataParallel._comm_hooks": "tells whether DDP has a hook: it "
    "takes one for its lifetime",
    "torch._dynamo.OptimizedModule._orig_mod": "the module inside torch.compile's wrapper",
}
"""By their full names."""


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the module inside torch.compile's wrapper, or the model itself."""
    inside: nn.Module = getattr(model, "_orig_mod", model)
    return inside


def comm_hook_states(ddp: DDP) -> list[Any]:
    """Return what was registered with each communication hook of a DDP model."""
    return [state for _, state in ddp._comm_hooks]


def scale_on_device(scaler: GradScaler | None) -> Tensor | None:
    """Return the loss scale as a tensor, without waiting for a GPU; None is 1."""
    if scaler is None or not scaler.is_enabled():
        return None
    return scaler._get_scale_async()


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, in one call."""
    torch._foreach_copy_(list(targets), list(sources))
