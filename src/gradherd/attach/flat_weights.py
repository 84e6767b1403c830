"""The parameters and buffers of a module as flat vectors, for local steps.

Of a sharded module (FSDP2) the vectors hold this rank's shards.

Shapes: D elements of all trainable parameters, B of all floating-point buffers.
"""

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from gradherd.attach.fsdp_torch import fsdp_modules
from gradherd.comm.collectives import broadcast
from gradherd.comm.world import World
from gradherd.flat import FlatSpec, local_shard


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
        self.parameters = local_parameters(model)
        self.layout = FlatSpec.small_last(self.parameters, dense_below)
        self._shardings = [module for _, module in fsdp_modules(model)]
        slices = self.layout.slices
        self._parts = [(p, slices[name]) for name, p in self.parameters.items()]
        self.device = device
        dtypes = {p.dtype for p in self.parameters.values()}
        # At least float32, also for half-precision weights: outer steps are small against them.
        self.dtype = torch.float64 if torch.float64 in dtypes else torch.float32
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
        known = {id(p) for p, _ in self._parts}
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and id(parameter) not in known:
                raise RuntimeError(
                    f"{name} was frozen or missing when local steps were attached and is trained "
                    "now: detach and attach again"
                )

    def read(self) -> Tensor:
        """Return (D,) the parameters."""
        flat = torch.empty(self.layout.size, dtype=self.dtype, device=self.device)
        for parameter, part in self._parts:
            flat[part].view(local_shard(parameter).shape).copy_(local_shard(parameter))
        return flat

    @torch.no_grad()
    def write(self, flat: Tensor) -> None:
        """Set the parameters to those of a (D,) vector."""
        for module in self._shardings:
            module.reshard()  # Whole parameters that an evaluation has left would be stale.
        for parameter, part in self._parts:
            local_shard(parameter).copy_(flat[part].view(local_shard(parameter).shape))

    def rounded(self, flat: Tensor) -> Tensor:
        """Return a copy of a (D,) vector as the parameters' dtypes can hold it."""
        flat = flat.clone()
        for parameter, part in self._parts:
            if parameter.dtype != self.dtype:
                flat[part] = flat[part].to(parameter.dtype).to(self.dtype)
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

    def by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """Return copies of a (D,) vector's parts, in the shapes of the parameters."""
        slices = self.layout.slices
        return {
            name: flat[slices[name]].view(local_shard(p).shape).clone()
            for name, p in self.parameters.items()
        }

    def restore(self, flat: Tensor, saved: Mapping[str, Tensor]) -> Tensor:
        """Copy what `by_name` returned into a (D,) vector, and return it."""
        for name, part in self.layout.slices.items():
            flat[part].view(saved[name].shape).copy_(saved[name])
        return flat

    def check_shapes(self, key: str, saved: Mapping[str, Tensor]) -> None:
        """Raise ValueError unless saved tensors have the names and shapes of the parameters."""
        shapes = {(name, tuple(local_shard(p).shape)) for name, p in self.parameters.items()}
        if odd := {(name, tuple(tensor.shape)) for name, tensor in saved.items()} ^ shapes:
            name, shape = min(odd)
            raise ValueError(
                f"local state is of another model: {key} of {name!r} with shape {shape} is on one "
                "side only"
            )


def local_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by name.

    Raises:
        ValueError: A parameter is not real.
    """
    parameters = {
        # The same name with torch.compile and without, so that checkpoints fit both.
        name.replace("_orig_mod.", ""): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    for name, parameter in parameters.items():
        if not parameter.is_floating_point():
            raise ValueError(f"{name} holds {parameter.dtype}; only real numbers can be exchanged")
    return parameters


def float_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the floating-point buffers by name."""
    return {
        name.replace("_orig_mod.", ""): buffer
        for name, buffer in model.named_buffers()
        if buffer.is_floating_point() and buffer.numel()
    }
