"""Which columns of the sharded state belong to which parameter of which bucket.

Shapes: R ranks, C columns of this rank over all buckets.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from gradherd.comm.collectives import all_gather
from gradherd.comm.world import World


class BucketLayout(NamedTuple):
    """Which parameters are in which bucket, in order.

    It says what a rank's columns are. The state of the ordering outlives a layout: DDP rebuilds
    its buckets, and a checkpoint may be loaded by another number of ranks. So columns can be
    gathered to vectors by parameter, and cut from them again.
    """

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
        like = next(iter(by_name.values()))
        for bucket, length in zip(self.buckets, self.lengths(), strict=True):
            flat = torch.cat([by_name.get(name, like.new_zeros(count)) for name, count in bucket])
            share = length // world.size
            body.append(flat[world.rank * share : (world.rank + 1) * share])
            tails.append(flat[share * world.size :])
        return torch.cat([*body, *(tails if world.rank == world.size - 1 else [])])
