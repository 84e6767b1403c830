"""How FSDP2 cuts parameters into shards: which columns of the sharded state a rank holds.

Shapes: R ranks, C columns of each rank over all parameters.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gradherd.comm.collectives import all_gather
from gradherd.comm.world import World


class ShardSpan(NamedTuple):
    """A parameter that is cut into equal shards along one dimension."""

    name: str
    shape: tuple[int, ...]
    dim: int

    def width(self, ranks: int) -> int:
        """Return the columns of each rank; shards at the end are padded."""
        rows = -(-self.shape[self.dim] // ranks)
        return rows * math.prod(self.shape) // max(1, self.shape[self.dim])

    def cut(self, whole: Tensor, ranks: int) -> Tensor:
        """Return the shards of all ranks, (R, width), padded with zeros, as FSDP sends them.

        >>> ShardSpan("w", (3, 2), 0).cut(torch.arange(6), 2).tolist()
        [[0, 1, 2, 3], [4, 5, 0, 0]]
        """
        front = whole.reshape(self.shape).movedim(self.dim, 0)
        rows = -(-len(front) // ranks)
        padded = F.pad(front, [0, 0] * (front.dim() - 1) + [0, rows * ranks - len(front)])
        shards = padded.view(ranks, rows, *front.shape[1:]).movedim(1, self.dim + 1)
        return shards.reshape(ranks, -1)

    def join(self, shards: Tensor) -> Tensor:
        """Return the flat parameter of its (R, width) shards."""
        ranks, size = len(shards), self.shape[self.dim]
        rows = -(-size // ranks)
        inside = (*self.shape[: self.dim], rows, *self.shape[self.dim + 1 :])
        front = shards.reshape(ranks, *inside).movedim(self.dim + 1, 1).flatten(0, 1)[:size]
        return front.movedim(0, self.dim).reshape(-1)


class ShardLayout(NamedTuple):
    """Which columns a rank holds: its shard of one parameter after the other."""

    spans: tuple[ShardSpan, ...]

    def starts(self, ranks: int) -> dict[str, slice]:
        """Return where the columns of each parameter are."""
        found, at = {}, 0
        for span in self.spans:
            found[span.name] = slice(at, at + span.width(ranks))
            at += span.width(ranks)
        return found

    def columns(self, ranks: int) -> int:
        """Return C."""
        return sum(span.width(ranks) for span in self.spans)

    def cut(self, by_name: Mapping[str, Tensor], ranks: int) -> Tensor:
        """Return the columns of all ranks, (R, C); zero where a parameter is missing."""
        like = next(iter(by_name.values()), torch.zeros(()))
        missing = {s.name: like.new_zeros(s.shape) for s in self.spans if s.name not in by_name}
        whole = {**missing, **by_name}
        return torch.cat([span.cut(whole[span.name], ranks) for span in self.spans], dim=1)

    def gather(self, columns: Tensor, world: World) -> dict[str, Tensor]:
        """Gather a row of which every rank holds its (C,) columns. All ranks must call it."""
        shards = torch.split(
            all_gather(columns, world).value, [s.width(world.size) for s in self.spans], dim=1
        )
        return {span.name: span.join(own) for span, own in zip(self.spans, shards, strict=True)}
