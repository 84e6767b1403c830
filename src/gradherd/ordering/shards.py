"""Exchange gradients so that averaging and balancing share one trip.

An all-reduce is a reduce-scatter and an all-gather. Here the first half is an all-to-all: rank r
receives slice r of every worker's vector, (R, N/R), as many numbers as one vector has. Their mean
is what a reduce-scatter would have given; all-gathering it is the other half. And the slices
themselves hold, for this rank's columns, everything that coordinated balancing needs. Same bytes
as an all-reduce, and no rank ever holds all workers' gradients.

Vectors come in buckets, as they become ready. What does not divide by R (fewer than R numbers a
bucket) is gathered whole; the last rank takes those columns.

Letters: R ranks, N numbers of a bucket, C columns of this rank over all buckets.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradherd.comm.collectives import (
    PendingCollective,
    all_gather,
    all_gather_start,
    all_to_all_start,
)
from gradherd.comm.world import World
from gradherd.ordering.ordering import Ordering


class Bucket(NamedTuple):
    """A vector on its way."""

    flat: Tensor
    """(N,) this rank's numbers; overwritten by the mean in `give_back`."""
    slices: PendingCollective
    """(R, N // R) this rank's slice of every rank's numbers."""


def send(flat: Tensor, world: World, *, out: Tensor | None = None) -> Bucket:
    """Begin to exchange slices of `flat`, which must stay as it is until they have arrived.

    They arrive in `out`, (R, N // R), where it is given.
    """
    share = len(flat) // world.size
    body = flat[: share * world.size].view(world.size, share)
    return Bucket(flat, all_to_all_start(body, world, out=out))


class Pool:
    """BalanceState for slices that is used again: fresh memory costs as much as the exchange."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, like: Tensor, rows: int, columns: int) -> Tensor:
        """Return a (rows, columns) tensor of the kind of `like`, with anything in it."""
        for index, tensor in enumerate(self._free):
            alike = (tensor.dtype, tensor.device) == (like.dtype, like.device)
            if alike and tensor.shape == (rows, columns):
                return self._free.pop(index)
        return like.new_empty(rows, columns)

    def give(self, tensor: Tensor) -> None:
        """Take back what is not needed any more."""
        self._free.append(tensor)


class Arrived(NamedTuple):
    """The slices of all buckets."""

    blocks: list[Tensor]
    """(R, N // R) for each bucket."""
    tails: Tensor
    """(R, t) what did not divide, of all buckets."""
    bytes: int
    """Sent so far for them."""


def arrive(buckets: Sequence[Bucket], world: World) -> Arrived:
    """Wait for the slices of all buckets."""
    ends = [bucket.flat[bucket.slices.value.numel() :] for bucket in buckets]
    tails, sent = all_gather(torch.cat(ends), world) if any(map(len, ends)) else (None, 0)
    blocks = [bucket.slices.wait() for bucket in buckets]
    if tails is None:
        tails = blocks[0].new_empty(world.size, 0)
    return Arrived(blocks, tails, sent + sum(bucket.slices.bytes for bucket in buckets))


def give_back(buckets: Sequence[Bucket], arrived: Arrived, world: World) -> list[PendingCollective]:
    """Begin to overwrite every bucket with the mean over ranks.

    Each number is averaged by one rank only, so all ranks get the same bits.
    """
    flights, taken = [], 0
    tail = mean_of_rows(arrived.tails, torch.empty_like(arrived.tails[0]))
    for bucket, block in zip(buckets, arrived.blocks, strict=True):
        body, end = bucket.flat[: block.numel()], bucket.flat[block.numel() :]
        end.copy_(tail[taken : taken + len(end)])
        taken += len(end)
        slots = body.view(block.shape)
        mean_of_rows(block, out=slots[world.rank])  # in its place: this rank's slot of the result
        flights.append(all_gather_start(slots[world.rank], world, out=slots))
    return flights


def mean_of_rows(block: Tensor, out: Tensor) -> Tensor:
    """Write the mean over ranks, summed in float32 at least; row by row beats mean(0)."""
    share = 1 / len(block)
    wide = torch.promote_types(block.dtype, torch.float32)
    total = out if out.dtype == wide else torch.empty_like(out, dtype=wide)
    torch.mul(block[0].to(wide), share, out=total)  # half by a number would be rounded to half
    for row in block[1:]:
        total.add_(row, alpha=share)
    return total if total is out else out.copy_(total)


def rows_of(arrived: Arrived, world: World, pool: Pool) -> Tensor:
    """Return this rank's columns of every worker's gradient: (R, C), float32 at least.

    Gives blocks that are not part of the result back to the pool.
    """
    parts = [*arrived.blocks, *([arrived.tails] if world.rank == world.size - 1 else [])]
    parts = [part for part in parts if part.shape[1]]
    wide = torch.promote_types(arrived.tails.dtype, torch.float32)
    if len(parts) == 1 and parts[0].dtype == wide:
        return parts[0]
    columns = sum(part.shape[1] for part in parts)
    like = torch.empty(0, dtype=wide, device=arrived.tails.device)
    rows, start = pool.take(like, world.size, columns), 0
    for part in parts:
        rows[:, start : start + part.shape[1]] = part
        start += part.shape[1]
    for block in arrived.blocks:
        pool.give(block)
    return rows


def take_back(lent: list[Tensor], ordering: Ordering, pool: Pool) -> list[Tensor]:
    """Give rows that `ordering` has no more use for back to the pool; return the others."""
    held = [rows for rows in lent if ordering.holds(rows)]
    for rows in lent:
        if not ordering.holds(rows):
            pool.give(rows)
    return held


class Layout(NamedTuple):
    """Which parameters stand in which bucket, in order."""

    buckets: tuple[tuple[tuple[str, int], ...], ...]
    """(name, numbers) of each parameter of each bucket."""

    def lengths(self) -> list[int]:
        """Return N of each bucket."""
        return [sum(count for _, count in bucket) for bucket in self.buckets]

    def whole(self, columns: Tensor, world: World) -> dict[str, Tensor]:
        """Gather one (C,) row, of which every rank holds its columns, by parameter."""
        lengths = self.lengths()
        shares = [length // world.size for length in lengths]
        body = sum(shares)
        tail = sum(length % world.size for length in lengths)
        padded = columns.new_zeros(body + tail)
        padded[: len(columns)] = columns
        gathered = all_gather(padded, world).value
        start, end = 0, body
        found: dict[str, Tensor] = {}
        for bucket, length, share in zip(self.buckets, lengths, shares, strict=True):
            rest = length - share * world.size
            flat = torch.cat(
                [gathered[:, start : start + share].flatten(), gathered[-1, end : end + rest]]
            )
            start, end = start + share, end + rest
            names = [name for name, _ in bucket]
            pieces = torch.split(flat, [count for _, count in bucket])
            found.update(zip(names, pieces, strict=True))
        return found

    def columns(self, whole: dict[str, Tensor], world: World) -> Tensor:
        """Return this rank's (C,) columns of a vector given by parameter; a missing one is 0."""
        body, tails = [], []
        like = next(iter(whole.values()))
        for bucket, length in zip(self.buckets, self.lengths(), strict=True):
            flat = torch.cat([whole.get(name, like.new_zeros(count)) for name, count in bucket])
            share = length // world.size
            body.append(flat[world.rank * share : (world.rank + 1) * share])
            tails.append(flat[share * world.size :])
        return torch.cat([*body, *(tails if world.rank == world.size - 1 else [])])
