"""The weights of a module as one vector: read, written, swapped."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from gradherd.comm.collectives import broadcast
from gradherd.comm.world import World
from gradherd.flat import FlatSpec, exchangeable, local_shard, plain_name, wide_dtype
from gradherd.hooks.fsdp import fsdp_modules
from gradherd.torch_names import add_all, copy_all


class FlatWeights:
    """Reads and writes the weights of a module as vectors on the device of an exchange.

    Parameters with fewer than `dense_below` elements come last in a vector, behind `gap` elements
    of padding.
    """

    def __init__(self, model: nn.Module, dense_below: int, device: torch.device) -> None:
        self._model = model
        self.parameters = exchangeable(model.named_parameters())
        self.layout = FlatSpec.small_last(self.parameters, dense_below)
        self._shardings = [module for _, module in fsdp_modules(model)]
        self.device, self.dtype = device, wide_dtype(self.parameters.values())
        self.is_wide = all(p.dtype == self.dtype for p in self.parameters.values())
        """Whether parameters hold all bits of a vector."""
        self.gap = 0
        self._large = self.layout.sparse_numels
        self._small = list(self.layout.numels[len(self._large) :])
        self.buffer_elements = sum(buffer.numel() for buffer in self.buffers().values())

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
        """Refuse parameters that were frozen when the layout was made: nobody would send them."""
        for module in self._shardings:
            module.reshard()
        known = {id(p) for p in self.parameters.values()}
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and id(parameter) not in known:
                raise RuntimeError(
                    f"{name} was frozen or missing when local steps were attached and is trained "
                    "now: detach and attach again"
                )

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the parts of a vector as views in the shapes of the parameters."""
        parts = flat.split([*self._large, self.gap, *self._small])
        parts = parts[: len(self._large)] + parts[len(self._large) + 1 :]
        named = zip(self.layout.names, parts, self.layout.shapes, strict=True)
        return {name: part.view(shape) for name, part, shape in named}

    def read(self, out: Tensor | None = None) -> Tensor:
        """Return the parameters as a vector."""
        if out is None:
            length = self.layout.size + self.gap
            out = torch.zeros(length, dtype=self.dtype, device=self.device)
        views = self.views(out)
        copy_all(list(views.values()), [local_shard(self.parameters[name]) for name in views])
        return out

    @torch.no_grad()
    def write(self, flat: Tensor) -> None:
        """Set the parameters to those of a vector."""
        for module in self._shardings:
            module.reshard()  # Whole parameters that an evaluation has left would be stale.
        views = self.views(flat)
        copy_all([local_shard(self.parameters[name]) for name in views], list(views.values()))

    @torch.no_grad()
    def add(self, flat: Tensor) -> None:
        """Add a vector to the parameters, which hold all its bits (`is_wide`)."""
        views = self.views(flat)
        shards = [local_shard(self.parameters[name]) for name in views]
        add_all(shards, [part.to(shards[0].device) for part in views.values()])

    @contextlib.contextmanager
    def replaced_by(self, flat: Tensor) -> Iterator[None]:
        """Let the parameters be those of a vector inside; restore them and all buffers."""
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
        """Return the floating-point buffers by name."""
        # Asked again each time: modules may replace their buffers.
        return float_buffers(self._model)

    def read_buffers(self) -> Tensor | None:
        """Return the buffers as a vector; None without any."""
        # Running statistics are averaged like weights, in at least float32.
        flat = [
            b.detach().to(self.device, self.dtype).reshape(-1)
            for b in float_buffers(self._model).values()
        ]
        if sum(map(len, flat)) != self.buffer_elements:
            raise RuntimeError(
                f"the model has {sum(map(len, flat))} elements of buffers, and had "
                f"{self.buffer_elements} at attach(): detach and attach again"
            )
        return torch.cat(flat) if flat else None

    @torch.no_grad()
    def write_buffers(self, flat: Tensor) -> None:
        """Set the buffers to those of a vector."""
        buffers = list(float_buffers(self._model).values())
        for buffer, piece in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
            buffer.copy_(piece.view(buffer.shape))


def float_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the floating-point buffers by name."""
    return {
        plain_name(name): buffer
        for name, buffer in model.named_buffers()
        if buffer.is_floating_point() and buffer.numel()
    }
