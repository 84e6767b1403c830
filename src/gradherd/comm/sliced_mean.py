"""Average vectors over ranks such that every rank also sees a slice of every rank's vector.

An all-reduce is a reduce-scatter followed by an all-gather. Here the first half is an all-to-all:
rank r receives slice r of every rank's vector, as many elements as one vector has. Their mean is
what a reduce-scatter would have given, and all-gathering it is the other half. The slices also
contain, for this rank's columns, everything that coordinated balancing needs. This sends the same
bytes as an all-reduce, and no rank ever holds the whole vectors of all ranks.

Vectors come in buckets, as they become ready. What is left of a bucket when its length does not
divide by R (fewer than R elements) is gathered whole, and every rank owns one element of it; ranks
for which there is none have zeros.

Rows of single examples have no mean to share: only their slices are sent, padded
(`script.ScatterColumns`).

Shapes: R ranks, N elements of a bucket, C columns of this rank over all buckets, or over all
parameters of a sharded model, w of them of one span; n rows of D columns.
"""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from gradherd.comm.collectives import (
    PendingCollective,
    all_gather,
    all_gather_start,
    all_to_all_start,
)
from gradherd.comm.world import World

Slices: TypeAlias = tuple[Tensor, ...]
"""(R, c) this rank's slice of each bucket of every rank, side by side, and what was left."""
ONE_BUCKET_ELEMENTS = 2_000_000
"""Up to this many elements, sending one copy of all buckets is cheaper than one message each."""


def mean_of_rows(block: Tensor, out: Tensor, *, share: float | None = None) -> Tensor:
    """Write the mean over the rows of (R, n) into `out` (n,), accumulated in at least float32.

    Rows are added in the order of ranks, so virtual workers get the same bits. Row by row is also
    faster than `block.mean(0)`.

    Args:
        block: (R, n), a row from each rank.
        out: (n,), may be a view of where the mean belongs; it is returned.
        share: Factor of each row; None is 1 / R, the mean.
    """
    share = 1 / len(block) if share is None else share
    wide = torch.promote_types(block.dtype, torch.float32)
    total = out if out.dtype == wide else torch.empty_like(out, dtype=wide)
    torch.mul(block[0].to(wide), share, out=total)  # half times a float would round to half
    for row in block[1:]:
        total.add_(row, alpha=share)
    return total if total is out else out.copy_(total)


def padded_length(elements: int, ranks: int) -> int:
    """Return the next length that divides by the number of ranks.

    >>> padded_length(650, 4)
    652
    """
    return -(-elements // ranks) * ranks


def mean_bytes(elements: int, ranks: int, element_size: int = 4) -> int:
    """Return the bytes that a rank sends to average that many elements.

    >>> mean_bytes(650, 4)
    3912
    """
    # A single copy of all buckets is padded, so that it divides by R. Larger vectors are sent
    # bucket by bucket; what their ends add is too little to count.
    one_bucket = elements <= ONE_BUCKET_ELEMENTS
    length = padded_length(elements, ranks) if one_bucket else elements
    return 2 * length * element_size * (ranks - 1) // ranks


def column_slices(rows: Tensor, ranks: int) -> Tensor:
    """Return (..., D) rows as slices of equally many columns, (R, ..., C), padded with zeros.

    >>> column_slices(torch.arange(1, 6).view(1, 5), 3).tolist()
    [[[1, 2]], [[3, 4]], [[5, 0]]]
    """
    columns = padded_length(rows.shape[-1], ranks) // ranks
    slices = rows.new_empty(ranks, *rows.shape[:-1], columns)
    for rank, one in enumerate(slices):
        own = rows[..., rank * columns : (rank + 1) * columns]
        one[..., : own.shape[-1]] = own
        one[..., own.shape[-1] :] = 0  # adds nothing to an inner product
    return slices


class _Loan:
    """Slices that are read by another thread, and on a GPU maybe on another stream."""

    def __init__(self, buffers: dict[int, Tensor]) -> None:
        self._buffers = buffers
        self._device = buffers[0].device
        self._ended = threading.Event()
        self._read: torch.cuda.Event | None = None

    def end(self, instead: Tensor | None) -> None:
        """Give the slices back, or other memory for them; further calls do nothing."""
        if self._ended.is_set():
            return
        if self._device.type == "cuda":
            self._read = torch.cuda.Event()
            # Not of the current device: another thread has cuda:0, wherever the slices are.
            self._read.record(torch.cuda.current_stream(self._device))
        # Slices in half precision were converted: whoever keeps those does not keep the buffer.
        if instead is not None and instead.dtype == self._buffers[0].dtype:
            self._buffers[0] = instead
        self._ended.set()

    def wait(self) -> None:
        """Return when what reads the slices was enqueued; this stream waits for it to run."""
        self._ended.wait()
        if self._read is not None:
            torch.cuda.current_stream(self._device).wait_event(self._read)


class SlicedMean:
    """Averages the buckets of one backward after the other, in memory that it reuses.

    The slices that `finish` returns are not copied. They stay valid until the next bucket arrives,
    or, after `lend`, until they are released: who reads them beside the training loop has the next
    exchange wait. Fresh memory would cost as much as the exchange, and a second set of buffers
    another gradient.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        # (N,) elements of this rank, the mean in the end; (R, N // R) its slice of all ranks'.
        self._started: list[tuple[Tensor, PendingCollective]] = []
        # By number of the bucket. DDP rebuilds its buckets once, so shapes may change.
        self._buffers: dict[int, Tensor] = {}
        self._loan: _Loan | None = None
        self.bytes = 0
        """Bytes that this rank has sent so far."""

    def lend(self) -> Callable[[Tensor | None], None]:
        """Keep the slices of the last `finish` as they are until the returned function is called.

        Any thread may call it; further calls do nothing. Who wants to keep the slices of a single
        bucket gives it other memory of their shape instead.
        """
        # A new one each time: a late call for slices of an earlier backward releases no others.
        self._loan = _Loan(self._buffers)
        return self._loan.end

    def start(self, flat: Tensor) -> None:
        """Begin to exchange the slices of a bucket (N,), which stays as it is until `finish`.

        All ranks must start the same buckets in the same order.
        """
        share = len(flat) // self._world.size
        body = flat[: share * self._world.size].view(self._world.size, share)
        out = self._buffer(len(self._started), flat, share)
        self._started.append((flat, all_to_all_start(body, self._world, out=out)))

    def _buffer(self, number: int, like: Tensor, columns: int) -> Tensor:
        """Return an (R, columns) tensor with arbitrary content, once nobody reads it any more."""
        if self._loan is not None:
            self._loan.wait()
        old, shape = self._buffers.get(number), (self._world.size, columns)
        if old is None or (old.shape, old.dtype, old.device) != (shape, like.dtype, like.device):
            self._buffers[number] = like.new_empty(shape)
        return self._buffers[number]

    def abandon(self) -> None:
        """Forget the buckets of a backward that broke off."""
        self._started = []

    def finish(self) -> Slices:
        """Wait for the slices and overwrite every bucket with its mean.

        Every element is averaged by one rank only, so all ranks get the same bits.

        Returns:
            This rank's slices of every rank's vector, in at least float32.
        """
        started, self._started = self._started, []
        ends = [flat[slices.value.numel() :] for flat, slices in started]
        tails: Sequence[Tensor] = ends
        # One message for the ends of all buckets, sent while the slices are still being exchanged.
        if any(map(len, ends)):
            gathered, sent = all_gather(torch.cat(ends), self._world)
            self.bytes += sent
            tails = gathered.split([*map(len, ends)], dim=1)
        found, pending, rank = [], [], self._world.rank
        for (flat, slices), end, tail in zip(started, ends, tails, strict=True):
            block = slices.wait()
            slots = flat[: block.numel()].view(block.shape)
            own = mean_of_rows(block, out=slots[rank])  # in place: its final slot
            pending.append(all_gather_start(own, self._world, out=slots))
            wide = torch.promote_types(block.dtype, torch.float32)
            found.append(block.to(wide))
            if len(end):
                mean_of_rows(tail, out=end)
                column = tail[:, rank : rank + 1].to(wide)
                found.append(column if rank < len(end) else column.new_zeros(len(tail), 1))
            self.bytes += slices.bytes + pending[-1].bytes
        for gather in pending:
            gather.wait()
        return tuple(one for one in found if one.shape[1])


# --- Which columns a rank has ------------------------------------------------------------------

# The state of an ordering outlives a layout: DDP rebuilds its buckets after the first step, and
# another number of ranks may load a checkpoint. So columns can be gathered to vectors by parameter,
# and cut from them again.


class BucketSpan(NamedTuple):
    """Parameters one after the other in a bucket, of which each rank has a slice.

    What is left when the length does not divide by R is dealt out one by one.
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
        ends = torch.cat(parts).tensor_split([self.numel // ranks * ranks])
        return torch.cat([column_slices(end, ranks) for end in ends], dim=1)

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
        # Zeros at the end of the dimension, as torch pads the last shards.
        shards = column_slices(whole.reshape(self.shape).movedim(self.dim, -1), ranks)
        return shards.movedim(-1, self.dim + 1).reshape(ranks, -1)

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

    def split(self, slices: Tensor) -> tuple[Tensor, ...]:
        """Return the (R, w) columns of each span, of (R, C) slices."""
        return torch.split(slices, [span.width(len(slices)) for span in self.spans], dim=1)

    def columns(self, by_name: Mapping[str, Tensor], world: World) -> Tensor:
        """Return this rank's (C,) columns of a vector, given by parameter."""
        return self.cut(by_name, world.size)[world.rank]

    def gather(self, columns: Tensor, world: World) -> dict[str, Tensor]:
        """Gather a row of which every rank holds its (C,) columns. All ranks must call it.

        Returns:
            The flat elements of each parameter, by name.
        """
        found: dict[str, Tensor] = {}
        slices = self.split(all_gather(columns, world).value)
        for span, own in zip(self.spans, slices, strict=True):
            found.update(span.join(own))
        return found
