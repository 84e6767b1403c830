"""Parameters as slices of one flat vector.

Of a sharded model (FSDP2) the vector holds this rank's shards.

Shapes: D elements of all trainable parameters together.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class FlatSpec:
    """Where each trainable parameter lies in a flat vector of D elements.

    >>> spec = FlatSpec.of(nn.Linear(3, 2))
    >>> spec.names, spec.offsets, spec.size
    (('weight', 'bias'), (0, 6), 8)
    """

    names: tuple[str, ...]
    """Names from `named_parameters()`: a tied parameter appears once, under its first name."""
    shapes: tuple[tuple[int, ...], ...]
    """Shape of each parameter, or of this rank's shard of it."""
    whole: int = 0
    """How many elements at the end are always sent whole, where the others are sparsified."""

    @classmethod
    def of(cls, model: nn.Module) -> "FlatSpec":
        """Return the layout of the parameters of `model` that require a gradient."""
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        return cls(tuple(name for name, _ in named), tuple(tuple(p.shape) for _, p in named))

    @classmethod
    def small_last(cls, parameters: Mapping[str, Tensor], dense_below: int) -> "FlatSpec":
        """Return a layout in which small parameters come last, to be sent whole.

        Within both, parameters are in the order given, that of the model. Unlike DDP's buckets,
        which are rebuilt during training, the layout depends on the model alone, and so do
        checkpoints.

        Args:
            parameters: The parameters by name; of a DTensor, this rank's shard is laid out.
            dense_below: Those with fewer elements are small. A shard is small if the whole
                parameter is, so that all ranks lay them out alike.

        >>> parameters = {"bias": torch.zeros(2), "weight": torch.zeros(2, 3)}
        >>> spec = FlatSpec.small_last(parameters, dense_below=4)
        >>> spec.names, spec.offsets, spec.sparse, spec.size
        (('weight', 'bias'), (0, 6), 6, 8)
        """
        small = {name for name, p in parameters.items() if p.numel() < dense_below}
        names = sorted(parameters, key=lambda name: name in small)  # keeps the order within both
        shards = {name: local_shard(p) for name, p in parameters.items()}
        whole = sum(shards[name].numel() for name in small)
        return cls(tuple(names), tuple(tuple(shards[name].shape) for name in names), whole)

    @cached_property
    def numels(self) -> tuple[int, ...]:
        """Number of elements of each parameter."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Position of each parameter's first element."""
        return tuple(accumulate((0, *self.numels)))[: len(self.names)]

    @cached_property
    def size(self) -> int:
        """D, the length of the flat vector."""
        return sum(self.numels)

    @property
    def sparse(self) -> int:
        """How many elements at the start are sparsified."""
        return self.size - self.whole

    @property
    def sparse_numels(self) -> list[int]:
        """Number of elements of each parameter that is sparsified."""
        spans = zip(self.offsets, self.numels, strict=True)
        return [count for begin, count in spans if begin < self.sparse]

    @cached_property
    def slices(self) -> dict[str, slice]:
        """Where each parameter lies, by name."""
        spans = zip(self.names, self.offsets, self.numels, strict=True)
        return {name: slice(begin, begin + count) for name, begin, count in spans}

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """Return each parameter's part of `vector` (..., D), as a view (..., *shape)."""
        parts = self.split(vector)
        return {
            name: part.view((*vector.shape[:-1], *shape))
            for name, part, shape in zip(self.names, parts, self.shapes, strict=True)
        }

    def split(self, vector: Tensor) -> tuple[Tensor, ...]:
        """Return each parameter's part of `vector` (..., D), flat, as a view (..., numel)."""
        return torch.split(vector, list(self.numels), dim=-1)


def exchangeable(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, nn.Parameter]:
    """Return the trainable ones among named parameters.

    Raises:
        ValueError: A parameter is not real.
    """
    parameters = {plain_name(name): p for name, p in named if p.requires_grad}
    for name, parameter in parameters.items():
        if not parameter.is_floating_point():
            raise ValueError(f"{name} holds {parameter.dtype}; only real numbers can be exchanged")
    return parameters


def plain_name(name: str) -> str:
    """Return a parameter's name without torch.compile's wrappers, so that checkpoints fit both."""
    return name.replace("_orig_mod.", "")


def local_shard(parameter: Tensor) -> Tensor:
    """Return what this rank holds of a tensor: its shard, or the whole of it."""
    whole: Any = parameter.detach()
    local: Tensor = whole.to_local() if hasattr(whole, "to_local") else whole
    return local


def in_memory_order(flat: Tensor, like: Tensor) -> Tensor:
    """Return (n,) elements as a view in the shape of a tensor.

    A bucket of DDP holds elements in the memory order of the parameter, which for channels_last is
    not that of its dimensions.
    """
    dense = torch.empty_like(like, device="meta")  # keeps strides where they are dense
    return flat.as_strided(like.shape, dense.stride(), flat.storage_offset())


def wide_dtype(parameters: Iterable[Tensor]) -> torch.dtype:
    """Return the dtype of what sums up over many steps: float32, or float64 for doubles.

    Also for half precision: each gradient or outer step is small against the sum.
    """
    is_double = any(parameter.dtype == torch.float64 for parameter in parameters)
    return torch.float64 if is_double else torch.float32
