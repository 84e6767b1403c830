"""Which columns of every worker's gradient a rank holds while CD-GraB signs: of buckets, of shards.

The state of an ordering outlives a layout: DDP rebuilds its buckets after the first step, and
another number of ranks may load a checkpoint. So columns can be gathered to vectors by parameter,
and cut from them again.

Shapes: R ranks, C columns of this rank over all parameters.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gradherd.comm.collectives import all_gather
from gradherd.comm.world import World


class BucketLayout(NamedTuple):
    """Which parameters are in which bucket, in order; a rank has its slice of each bucket."""

    buckets: tuple[tuple[tuple[str, int], ...], ...]
    """(name, elements) of each parameter of each bucket."""

    @classmethod
    def one_bucket(cls, parameters: Iterable[tuple[str, int]], world: World) -> "BucketLayout":
        """Return the layout of a single bucket, padded so that it divides by the ranks.

        Args:
            parameters: (name, elements) of each parameter.
            world: The ranks that share the bucket.

        >>> BucketLayout.one_bucket([("weight", 5), ("bias", 2)], World(rank=0, size=4)).lengths()
        [8]
        """
        named = tuple(parameters)
        padding = -sum(count for _, count in named) % world.size
        return cls(((*named, ("", padding)),))

    def lengths(self) -> list[int]:
        """Return the elements of each bucket."""
        return [sum(count for _, count in bucket) for bucket in self.buckets]

    def gather(self, columns: Tensor, world: World) -> dict[str, Tensor]:
        """Gather a row of which every rank holds its columns. All ranks must call it.

        Args:
            columns: (C,) this rank's columns.
            world: The ranks that hold the others.

        Returns:
            The flat elements of each parameter, by name.
        """
        lengths = self.lengths()
        shares = [length // world.size for length in lengths]
        body = sum(shares)
        tail = sum(length % world.size for length in lengths)
        # The last rank has the tails as well. All ranks must send equally much, so all send space
        # for them; there are fewer than R elements of each bucket.
        padded = columns.new_zeros(body + tail)
        padded[: len(columns)] = columns
        gathered = all_gather(padded, world).value
        start, end = 0, body
        by_name: dict[str, Tensor] = {}
        for bucket, length, share in zip(self.buckets, lengths, shares, strict=True):
            rest = length - share * world.size
            flat = torch.cat(
                [gathered[:, start : start + share].flatten(), gathered[-1, end : end + rest]]
            )
            start, end = start + share, end + rest
            names = [name for name, _ in bucket]
            pieces = torch.split(flat, [count for _, count in bucket])
            by_name.update(zip(names, pieces, strict=True))
        return by_name

    def columns(self, by_name: Mapping[str, Tensor], world: World) -> Tensor:
        """Return this rank's (C,) columns of a vector.

        Args:
            by_name: The flat elements of each parameter, by name; zero where one is missing.
            world: The ranks that share the columns.

        >>> layout = BucketLayout(((("weight", 3), ("bias", 2)),))
        >>> by_name = {"weight": torch.tensor([1, 2, 3]), "bias": torch.tensor([4, 5])}
        >>> [layout.columns(by_name, World(rank, 2)).tolist() for rank in (0, 1)]
        [[1, 2], [3, 4, 5]]
        """
        body, tails = [], []
        # Any of them: all parameters of a row have one dtype and device.
        like = next(iter(by_name.values()))
        for bucket, length in zip(self.buckets, self.lengths(), strict=True):
            flat = torch.cat([by_name.get(name, like.new_zeros(count)) for name, count in bucket])
            share = length // world.size
            body.append(flat[world.rank * share : (world.rank + 1) * share])
            tails.append(flat[share * world.size :])
        return torch.cat([*body, *(tails if world.rank == world.size - 1 else [])])


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
        # Zeros at the end of the dimension, as torch pads the last shards.
        padded = F.pad(front, [0, 0] * (front.dim() - 1) + [0, rows * ranks - len(front)])
        shards = padded.view(ranks, rows, *front.shape[1:]).movedim(1, self.dim + 1)
        return shards.reshape(ranks, -1)

    def join(self, shards: Tensor) -> Tensor:
        """Return the flat parameter of its (R, width) shards."""
        ranks, size = len(shards), self.shape[self.dim]
        rows = -(-size // ranks)
        inside = (*self.shape[: self.dim], rows, *self.shape[self.dim + 1 :])
        # The dimension that was cut comes first, so that shards can be joined and padding cut off.
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

    def width(self, ranks: int) -> int:
        """Return C."""
        return sum(span.width(ranks) for span in self.spans)

    def columns(self, by_name: Mapping[str, Tensor], world: World) -> Tensor:
        """Return this rank's (C,) columns of a vector; zero where a parameter is missing."""
        return self.cut(by_name, world.size)[world.rank]

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


def gather_rows(
    columns: Tensor,
    layout: BucketLayout | ShardLayout,
    names: Sequence[str],
    world: World,
    device: torch.device,
) -> Tensor:
    """Return (m, D) whole rows of an ordering's state. All ranks must call it.

    Args:
        columns: (m, C) this rank's columns.
        layout: Which columns these are.
        names: The order of parameters in whole rows.
        world: The ranks that hold the other columns.
        device: Where their group works.
    """

    def whole(row: Tensor) -> Tensor:
        by_name = layout.gather(row.to(device), world)
        return torch.cat([by_name[name] for name in names]).to(row.device)

    return torch.stack([whole(row) for row in columns])
