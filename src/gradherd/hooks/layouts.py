"""Which columns of every worker's gradient a rank holds while CD-GraB signs: of buckets, of shards.

The state of an ordering outlives a layout: DDP rebuilds its buckets after the first step, and
another number of ranks may load a checkpoint. So columns can be gathered to vectors by parameter,
and cut from them again.

Shapes: R ranks, C columns of this rank over all parameters, w of them of one span.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gradherd.comm.collectives import all_gather
from gradherd.comm.world import World


class BucketSpan(NamedTuple):
    """Parameters one after the other in a bucket, of which each rank has a slice.

    What is left when the length does not divide by R is dealt out one by one (`comm.sliced_mean`).
    """

    parameters: tuple[tuple[str, int], ...]
    """(name, elements) of each."""

    @property
    def numel(self) -> int:
        """Elements of the bucket."""
        return sum(count for _, count in self.parameters)

    def width(self, ranks: int) -> int:
        """Return the columns of each rank; the last one may be padding."""
        return -(-self.numel // ranks)

    def cut(self, by_name: Mapping[str, Tensor], ranks: int) -> Tensor:
        """Return the (R, w) slices of all ranks; zero where a parameter is missing.

        >>> by_name = {"weight": torch.tensor([1, 2, 3]), "bias": torch.tensor([4, 5])}
        >>> BucketSpan((("weight", 3), ("bias", 2))).cut(by_name, 2).tolist()
        [[1, 2, 5], [3, 4, 0]]
        """
        # Any of them: all parameters of a row have one dtype and device.
        like = next(iter(by_name.values()))
        parts = [
            by_name[name].reshape(-1) if name in by_name else like.new_zeros(count)
            for name, count in self.parameters
        ]
        flat, body = torch.cat(parts), self.numel // ranks * ranks
        rest = F.pad(flat[body:], (0, (body - self.numel) % ranks))
        return torch.cat([flat[:body].view(ranks, -1), rest.view(-1, ranks).T], dim=1)

    def join(self, slices: Tensor) -> dict[str, Tensor]:
        """Return the flat elements of each parameter, by name, of (R, w) slices."""
        ranks = len(slices)
        share, rest = divmod(self.numel, ranks)
        flat = torch.cat([slices[:, :share].flatten(), slices[:rest, share:].flatten()])
        pieces = torch.split(flat, [count for _, count in self.parameters])
        return dict(zip((name for name, _ in self.parameters), pieces, strict=True))


class ShardSpan(NamedTuple):
    """A parameter that is cut into equal shards along one dimension."""

    name: str
    shape: tuple[int, ...]
    dim: int

    def width(self, ranks: int) -> int:
        """Return the columns of each rank; shards at the end are padded."""
        rows = -(-self.shape[self.dim] // ranks)
        return rows * math.prod(self.shape) // max(1, self.shape[self.dim])

    def cut(self, by_name: Mapping[str, Tensor], ranks: int) -> Tensor:
        """Return the (R, w) shards of all ranks, padded with zeros, as FSDP sends them.

        >>> ShardSpan("w", (3, 2), 0).cut({"w": torch.arange(6)}, 2).tolist()
        [[0, 1, 2, 3], [4, 5, 0, 0]]
        """
        like = next(iter(by_name.values()), torch.zeros(()))
        whole = by_name[self.name] if self.name in by_name else like.new_zeros(self.shape)
        front = whole.reshape(self.shape).movedim(self.dim, 0)
        rows = -(-len(front) // ranks)
        # Zeros at the end of the dimension, as torch pads the last shards.
        padded = F.pad(front, [0, 0] * (front.dim() - 1) + [0, rows * ranks - len(front)])
        shards = padded.view(ranks, rows, *front.shape[1:]).movedim(1, self.dim + 1)
        return shards.reshape(ranks, -1)

    def join(self, shards: Tensor) -> dict[str, Tensor]:
        """Return the flat parameter, by its name, of its (R, w) shards."""
        ranks, size = len(shards), self.shape[self.dim]
        rows = -(-size // ranks)
        inside = (*self.shape[: self.dim], rows, *self.shape[self.dim + 1 :])
        # The dimension that was cut comes first, so that shards can be joined and padding cut off.
        front = shards.reshape(ranks, *inside).movedim(self.dim + 1, 1).flatten(0, 1)[:size]
        return {self.name: front.movedim(0, self.dim).reshape(-1)}


class ColumnLayout(NamedTuple):
    """Which columns a rank holds: its slice of one span after the other."""

    spans: tuple[BucketSpan | ShardSpan, ...]

    def width(self, ranks: int) -> int:
        """Return C."""
        return sum(span.width(ranks) for span in self.spans)

    def cut(self, by_name: Mapping[str, Tensor], ranks: int) -> Tensor:
        """Return the (R, C) columns of all ranks; zero where a parameter is missing."""
        return torch.cat([span.cut(by_name, ranks) for span in self.spans], dim=1)

    def columns(self, by_name: Mapping[str, Tensor], world: World) -> Tensor:
        """Return this rank's (C,) columns of a vector, given by parameter."""
        return self.cut(by_name, world.size)[world.rank]

    def gather(self, columns: Tensor, world: World) -> dict[str, Tensor]:
        """Gather a row of which every rank holds its (C,) columns. All ranks must call it.

        Returns:
            The flat elements of each parameter, by name.
        """
        widths = [span.width(world.size) for span in self.spans]
        slices = torch.split(all_gather(columns, world).value, widths, dim=1)
        found: dict[str, Tensor] = {}
        for span, own in zip(self.spans, slices, strict=True):
            found.update(span.join(own))
        return found
