"""Where the elements of parameters are: in DDP's buckets, in FSDP's shards, in flat vectors.

`BucketLayout` and `ShardLayout` say which columns of every worker's gradient a rank holds while
CD-GraB signs whole batches. The state of an ordering outlives a layout: DDP rebuilds its buckets
after the first step, and another number of ranks may load a checkpoint. So columns can be gathered
to vectors by parameter, and cut from them again. `BucketMap` leads from coordinates of the flat
vector of a sparse exchange, which is in the order of the model, back to the buckets.

Shapes: R ranks, C columns of this rank over all parameters, D elements of all parameters in the
flat vector, K of them that are sent.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from gradherd.comm.collectives import all_gather
from gradherd.comm.sliced_mean import column_slices
from gradherd.comm.world import World
from gradherd.ordering.policy import COLUMNS
from gradherd.sparsify import kernels


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
        # Any of them: all parameters of a row have one dtype and device.
        like = next(iter(by_name.values()))
        for bucket, length in zip(self.buckets, self.lengths(), strict=True):
            flat = torch.cat([by_name.get(name, like.new_zeros(count)) for name, count in bucket])
            share = length // world.size
            body.append(flat[world.rank * share : (world.rank + 1) * share])
            tails.append(flat[share * world.size :])
        return torch.cat([*body, *(tails if world.rank == world.size - 1 else [])])


class DealtColumns(NamedTuple):
    """The columns of a rank where rows of single examples are dealt (`comm.sliced_mean`)."""

    size: int
    """Columns of a whole row."""
    world: World
    """The ranks that share them."""
    device: torch.device
    """Where their group works."""

    def cut(self, row: Tensor) -> Tensor:
        """Return this rank's (C,) columns of a row.

        >>> dealt = DealtColumns(5, World(rank=2, size=3), torch.device("cpu"))
        >>> dealt.cut(torch.tensor([1, 2, 3, 4, 5])).tolist()
        [5, 0]
        """
        return column_slices(row.unsqueeze(0), self.world.size)[self.world.rank, 0]

    def joined(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state of an ordering with the columns of all ranks. All ranks must call it."""
        balance = state["balance"]
        for key in COLUMNS:
            if key in balance:
                slices = all_gather(balance[key].to(self.device), self.world).value  # (R, m, C)
                rows = slices.transpose(0, 1).flatten(1)[:, : self.size]
                balance[key] = rows.to(balance[key].device)
        return state


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


def pieces(bucket: dist.GradBucket) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the parameters of a bucket, each with its flat gradient in the bucket."""
    flat, offset = bucket.buffer(), 0
    for parameter in bucket.parameters():
        yield parameter, flat[offset : offset + parameter.numel()]
        offset += parameter.numel()


class BucketMap:
    """Where the buckets of one backward and the flat vector of all parameters correspond."""

    def __init__(self, buckets: Sequence[dist.GradBucket], slices: Mapping[Tensor, slice]) -> None:
        """Map all buckets of a backward.

        Args:
            buckets: DDP's buckets, in the order in which they arrived.
            slices: Where each parameter is in the flat vector.
        """
        self._flats = [bucket.buffer() for bucket in buckets]
        self.parameters: set[Tensor] = set()
        """Parameters that the buckets hold."""
        table = []  # (begin in the flat vector, bucket, begin in the bucket) of each parameter
        for number, bucket in enumerate(buckets):
            offset = 0
            for parameter, piece in pieces(bucket):
                self.parameters.add(parameter)
                # An empty parameter begins where the next one does: `put` could not tell them
                # apart.
                if parameter in slices and len(piece):
                    table.append((slices[parameter].start, number, offset))
                offset += len(piece)
        # Sorted by where parameters begin, for the binary search in `put`; on the device, so that
        # indices need not be copied to the host.
        rows = torch.tensor(sorted(table), dtype=torch.int64).view(-1, 3).T
        device = self._flats[0].device
        self._begins, self._numbers, self._offsets = rows.contiguous().to(device)

    def fill(self, value: float) -> None:
        """Fill all buckets with one value."""
        for flat in self._flats:
            flat.fill_(value)

    def put(self, indices: Tensor, values: Tensor) -> Tensor:
        """Write values into buckets that are zero.

        Args:
            indices: (K,) positions in the flat vector.
            values: (K,).

        Returns:
            (K,) the values as the dtypes of the buckets hold them.
        """
        # Parameters are contiguous in the flat vector, so the last one that begins at or before an
        # index holds it.
        row = torch.searchsorted(self._begins, indices, right=True) - 1
        offsets = indices - self._begins[row] + self._offsets[row]
        buckets = self._numbers[row]
        written = torch.zeros_like(values)
        for number, flat in enumerate(self._flats):
            kernels.scatter_to_bucket(flat, buckets, number, offsets, values, written)
        return written
