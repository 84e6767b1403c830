"""What a loop does with parameters: which ones a backward uses, and how the optimizer steps."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from gradherd.rows.forward_replay import UncopiedHook


def tracks_usage(ddp: DDP) -> bool:
    """Return whether a backward may leave parameters unused; DDP itself tracks that only then."""
    return bool(ddp.find_unused_parameters or ddp.static_graph)


class ParameterUsage:
    """Records which parameters had a gradient in the backwards of one exchange.

    DDP tracks this itself, but does not say so to its hook: in the bucket, a parameter that was
    not used is zero like one whose gradient is zero.
    """

    def __init__(self, ddp: DDP, parameters: Mapping[str, nn.Parameter]) -> None:
        self._ddp = ddp
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
        if not self._ddp.require_backward_grad_sync:
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
