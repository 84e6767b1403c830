"""The parameters and buffers of a module as flat vectors, for local steps.

Of a sharded module (FSDP2) the vectors hold this rank's shards.

Shapes: D elements of all trainable parameters, B of all floating-point buffers.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from gradherd.comm.collectives import broadcast
from gradherd.comm.world import World
from gradherd.flat import FlatSpec, exchangeable, local_shard, plain_name, wide_dtype
from gradherd.hooks.fsdp_torch import fsdp_modules
from gradherd.hooks.torch_names import copy_all


class FlatWeights:
    """Reads and writes the weights of a module as vectors on the device of an exchange.

    Args:
        model: The module.
        dense_below: Parameters with fewer elements than this come last in the vector.
        device: Where vectors live.
        with_buffers: Whether buffers are read and written, too.
    """

    def __init__(
        self, model: nn.Module, dense_below: int, device: torch.device, *, with_buffers: bool
    ) -> None:
        self._model = model
        self.parameters = exchangeable(model.named_parameters())
        self.layout = FlatSpec.small_last(self.parameters, dense_below)
        self._shardings = [module for _, module in fsdp_modules(model)]
        self.device, self.dtype = device, wide_dtype(self.parameters.values())
        self._with_buffers = with_buffers

    @torch.no_grad()
    def broadcast(self, world: World) -> None:
        """Give all ranks the parameters and buffers of rank 0, as DDP does when it is made."""
        for tensor in map(local_shard, [*self._model.parameters(), *self._model.buffers()]):
            if world.size == 1 or not tensor.numel():
                continue
            # As bytes: every dtype can be sent, and nothing is rounded.
            flat = tensor.detach().to(self.device, copy=True).reshape(-1).contiguous()
            received = broadcast(flat.view(torch.uint8), world).value.view(flat.dtype)
            tensor.copy_(received.view(tensor.shape))

    def check_trainable(self) -> None:
        """Refuse parameters that were frozen when the layout was made: nobody would send them.

        Raises:
            RuntimeError: There is one.
        """
        for module in self._shardings:
            module.reshard()
        known = {id(p) for p in self.parameters.values()}
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and id(parameter) not in known:
                raise RuntimeError(
                    f"{name} was frozen or missing when local steps were attached and is trained "
                    "now: detach and attach again"
                )

    def read(self) -> Tensor:
        """Return (D,) the parameters."""
        flat = torch.empty(self.layout.size, dtype=self.dtype, device=self.device)
        copy_all(*self._pairs(flat))
        return flat

    def _pairs(self, flat: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the parts of a (D,) vector, and what this rank holds of each parameter."""
        views = self.layout.views(flat)
        return list(views.values()), [local_shard(self.parameters[name]) for name in views]

    @torch.no_grad()
    def write(self, flat: Tensor) -> None:
        """Set the parameters to those of a (D,) vector."""
        for module in self._shardings:
            module.reshard()  # Whole parameters that an evaluation has left would be stale.
        parts, shards = self._pairs(flat)
        copy_all(shards, parts)

    def rounded(self, flat: Tensor) -> Tensor:
        """Return a (D,) vector as the parameters' dtypes can hold it: itself, or a copy."""
        if all(p.dtype == self.dtype for p in self.parameters.values()):
            return flat
        flat = flat.clone()
        for part, shard in zip(*self._pairs(flat), strict=True):
            if shard.dtype != self.dtype:
                part.copy_(part.to(shard.dtype))
        return flat

    @contextlib.contextmanager
    def replaced_by(self, flat: Tensor) -> Iterator[None]:
        """Let the parameters be those of a (D,) vector inside; restore them and all buffers."""
        before_write = self.read()
        # All of them, also integer ones such as num_batches_tracked.
        buffers = [(buffer, buffer.detach().clone()) for buffer in self._model.buffers()]
        try:
            self.write(flat)
            yield
        finally:
            self.write(before_write)
            # What runs inside may have changed them: statistics, or a broadcast for evaluation.
            for buffer, before in buffers:
                buffer.detach().copy_(before)

    def buffers(self) -> dict[str, Tensor]:
        """Return the floating-point buffers by name, if they are exchanged."""
        # Asked again each time: modules may replace their buffers.
        return float_buffers(self._model) if self._with_buffers else {}

    def read_buffers(self) -> Tensor | None:
        """Return (B,) the buffers; None without any."""
        # Running statistics are averaged like weights, in at least float32.
        flat = [b.detach().to(self.device, self.dtype).reshape(-1) for b in self.buffers().values()]
        return torch.cat(flat) if flat else None

    @torch.no_grad()
    def write_buffers(self, flat: Tensor) -> None:
        """Set the buffers to those of a (B,) vector."""
        buffers = list(self.buffers().values())
        for buffer, piece in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
            buffer.copy_(piece.view(buffer.shape))


def float_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the floating-point buffers by name."""
    return {
        plain_name(name): buffer
        for name, buffer in model.named_buffers()
        if buffer.is_floating_point() and buffer.numel()
    }
