"""Parameters as slices of one flat vector, in the order of `model.parameters()`.

Shapes: D elements of all trainable parameters together.
"""

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass
from itertools import accumulate

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
    """Shape of each parameter."""

    def __post_init__(self) -> None:
        if len(self.names) != len(self.shapes):
            raise ValueError(f"got {len(self.names)} names for {len(self.shapes)} shapes")

    @classmethod
    def of(cls, model: nn.Module, only: Container[nn.Parameter] | None = None) -> "FlatSpec":
        """Return the layout of the parameters of `model` that require a gradient.

        Args:
            model: The model.
            only: The parameters to take; None takes all.
        """
        named = [
            (name, p)
            for name, p in model.named_parameters()
            if p.requires_grad and (only is None or p in only)
        ]
        return cls(tuple(name for name, _ in named), tuple(tuple(p.shape) for _, p in named))

    @property
    def numels(self) -> tuple[int, ...]:
        """Number of elements of each parameter."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Position of each parameter's first element."""
        return tuple(accumulate((0, *self.numels)))[: len(self.names)]

    @property
    def size(self) -> int:
        """D, the length of the flat vector."""
        return sum(self.numels)

    def flatten(self, tensors: Mapping[str, Tensor | None]) -> Tensor:
        """Concatenate named tensors into one flat vector (D,).

        A missing or None tensor (a parameter without gradient) becomes zeros. Names that are not
        trainable parameters are ignored.
        """
        given = [tensors.get(name) for name in self.names]
        # Zeros take dtype and device from the tensors that are given.
        like = next((tensor for tensor in given if tensor is not None), torch.zeros(()))
        parts = []
        for name, shape, tensor in zip(self.names, self.shapes, given, strict=True):
            if tensor is None:
                parts.append(like.new_zeros(math.prod(shape)))
            elif tuple(tensor.shape) != shape:
                raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
            else:
                parts.append(tensor.reshape(-1))
        return torch.cat(parts) if parts else like.new_zeros(0)

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """Return each parameter's part of `vector` (..., D), as a view (..., *shape)."""
        if vector.shape[-1] != self.size:
            raise ValueError(
                f"vector must have {self.size} elements in its last dimension, got shape "
                f"{tuple(vector.shape)}"
            )
        parts = self.split(vector)
        return {
            name: part.view((*vector.shape[:-1], *shape))
            for name, part, shape in zip(self.names, parts, self.shapes, strict=True)
        }

    def split(self, vector: Tensor) -> tuple[Tensor, ...]:
        """Return each parameter's part of `vector` (..., D), flat, as a view (..., numel)."""
        return torch.split(vector, list(self.numels), dim=-1)
