"""Which batch a forward is for, and which units a gradient belongs to.

A sampler hands out examples through iterators, a loader turns them into batches, and gradients come
back later, without a name on them. `Batches` answers both questions:

* Which batches has the loop received? Without worker processes those that were handed out. A loader
  that fetches ahead is named by its loop (`FollowedLoader`, which `Herd.batches` returns), and the
  loop's iterator counts. A loader that fetches ahead and is not named is refused.
* The forward that begins now is for the newest of them, even if the loop skipped batches or broke
  off in between; its gradient belongs to the units of that batch, once.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from gradherd.ordering.sampler import OrderedSampler

_REMEMBERED_PASSES = 4
_NESTED = 4
"""Wrappers between a loader and its sampler, at most: batch samplers, and what frameworks add."""


@dataclass(eq=False)
class LoopCount:
    """How many batches a named loop has received, however many its loader has fetched ahead."""

    delivered: int = 0
    """Batches that the loop has received; also those it has skipped, where a loader skips."""
    ended: bool = False
    """Whether the loop is over."""
    iterator: "weakref.ref[FollowedIterator] | None" = None
    """The loop's iterator, if there is one: a loop that is broken off releases it."""
    newest: "EpochPass | None" = None
    """The last pass over the sampler that has begun within the loop; more if the loader repeats."""

    @property
    def alive(self) -> bool:
        """Whether the loop may continue."""
        return not self.ended and (self.iterator is None or self.iterator() is not None)


@dataclass(eq=False)
class EpochPass:
    """One pass over the order of an epoch, and how far it has come."""

    begin: int
    """Position at which it started."""
    length: int
    """Examples of the epoch."""
    version: str
    """Version of the order that it hands out."""
    skipped: int = 0
    """Batches at its start that the loader skips, since they were trained on before a restart."""
    handed_out: int = 0
    """Position up to which it has handed out examples."""
    ended: bool = False
    """Whether more examples were asked for than there are."""
    logged: int = 0
    """Batches that were noted as received."""
    claimed: set[int] = field(default_factory=set)
    """Batches that a gradient was credited to."""
    iterator: "weakref.ref[Any] | None" = None
    """The sampler's iterator, as long as a loader holds it."""
    count: LoopCount | None = None
    """The count of the named loop that draws from the pass."""
    counted_before: int = 0
    """Batches of the loop's passes before."""
    fetched_ahead: bool = False
    """Whether the examples of several batches were asked for while there were other processes."""
    keeps_up: bool = False
    """Whether the first forward of its loop has come after one batch."""
    thread: int = field(default_factory=threading.get_ident)
    """Thread that began it."""

    def __post_init__(self) -> None:
        self.handed_out = self.begin

    @property
    def alive(self) -> bool:
        """Whether its loop may continue: a loop that ended releases its iterator."""
        if self.count is not None:
            return self.count.alive and self.count.newest is self
        return self.iterator is not None and self.iterator() is not None

    def num_batches(self, batch_size: int) -> int:
        """Return the number of batches from its start to the end of the epoch."""
        return -(-(self.length - self.begin) // batch_size)

    def received(self, batch_size: int) -> int:
        """Return the number of batches that its loop has received."""
        handed_out = -(-(self.handed_out - self.begin) // batch_size)
        if self.count is None:
            return handed_out
        return min(handed_out, self.count.delivered - self.counted_before)

    def check(self, batch_size: int) -> None:
        """Raise if what was received cannot be told from what was handed out."""
        handed_out = -(-(self.handed_out - self.begin) // batch_size)
        if self.count is not None:
            if self.alive and self.count.delivered - self.counted_before > handed_out:
                raise ValueError(
                    "the loader's batch sampler goes over this sampler again before the last "
                    "gradients of an epoch are in, which the next order needs: let it end with the "
                    "epoch, and iterate over the loader once per epoch"
                )
            return
        whole = (self.handed_out - self.begin) % batch_size == 0
        if not whole and self.handed_out < self.length:
            raise ValueError(
                f"the loader has asked for {self.handed_out - self.begin} examples, which is no "
                f"number of whole batches: the sampler was created with batch_size={batch_size}; "
                "give the loader the same"
            )
        # Autograd's own threads are not those of a loop.
        here = threading.current_thread()
        elsewhere = self.thread != here.ident and not here.name.startswith("Dummy-")
        if self.fetched_ahead or elsewhere:
            raise RuntimeError(
                f"the loader has asked for {handed_out} batches before the forward of the first: "
                "it fetches ahead (worker processes or a thread), so name it where you iterate: "
                "for batch in herd.batches(loader)"
            )


class BatchTicket(NamedTuple):
    """One batch of one pass."""

    epoch_pass: EpochPass
    number: int
    """Number of the batch in its pass, from 0."""


class BatchClaim(NamedTuple):
    """The units that a gradient belongs to."""

    epoch: int
    """Epoch in which they are visited."""
    step: int
    """Position of the first one in the order of that epoch."""
    units: int
    """Number of units."""
    examples: int
    """Number of examples in them."""
    version: str = ""
    """Version of that order, which must be the same on all ranks."""


class Batches:
    """Knows which batches loops have received, and which of them have had their gradient."""

    def __init__(self, batch_size: int, unit: int = 1, *, skips: bool = False) -> None:
        """Start without an epoch, for batches and units of so many examples.

        If the loop `skips`, several batches may come before the first forward of a pass: none of
        them was fetched ahead.
        """
        self._batch_size = batch_size
        self._unit = unit
        self._skips = skips
        self._keeps_up = False  # whether it is clear that a named loop fetches nothing ahead
        self._count: LoopCount | None = None
        self._passes: list[EpochPass] = []
        self._newest_batch: BatchTicket | None = None
        self.begin_epoch(epoch=0, version="", start=0, length=0)

    def begin_epoch(self, *, epoch: int, version: str, start: int, length: int) -> None:
        """Credit gradients to another epoch, from position `start` on of `length` examples."""
        self._epoch, self._version, self._start, self._length = epoch, version, start, length
        self._examples: list[int] = []
        self._positions: dict[int, list[int]] = {}
        self.position = start
        """Position up to which gradients were credited."""
        self.last_pass: EpochPass | None = None
        """The pass that gradients were credited to."""

    def start_over(self) -> None:
        """Credit gradients from the beginning of the epoch on, also after a resume."""
        self._start = 0

    def follow(self, count: LoopCount) -> None:
        """Let a loop count what it receives. The next pass is the loop's."""
        if self._count is not None and self._count.iterator is None:
            self._count.ended = True  # nobody else says so
        self._count = count

    def begin_pass(self, one: EpochPass) -> None:
        """Track a new pass."""
        recent = self._passes[1 - _REMEMBERED_PASSES :]
        # A loop that goes on is never forgotten, however often somebody looks at the data.
        running = [other for other in self._passes if other.alive and other not in recent]
        self._passes = [*running, *recent, one]
        count = self._count
        if count is None or not count.alive:
            return
        if (last := count.newest) is not None:
            dropped = last.iterator is not None and last.iterator() is None and not last.ended
            if last.received(self._batch_size) == last.num_batches(self._batch_size):
                one.counted_before = count.delivered
            elif dropped or last.handed_out == last.begin:  # as some do when they load a state
                one.counted_before = last.counted_before
            else:  # another loop's, or the loader fetches the next epoch before this one is over
                return
        one.count, count.newest = count, one

    @property
    def newest(self) -> EpochPass | None:
        """The pass that began last."""
        return self._passes[-1] if self._passes else None

    def loop_ran(self, version: str) -> bool:
        """Return whether the loop that began last went through an order, or at least began to.

        One batch may be a look at the data, unless there are no more.
        """
        newest = self.newest
        if newest is None or newest.version != version:
            return False
        received = newest.received(self._batch_size)
        left = newest.num_batches(self._batch_size) - newest.skipped
        return received - newest.skipped >= min(2, max(1, left))

    def current(self) -> BatchTicket | None:
        """Return the batch that a forward which begins now is for; None before the first one.

        The newest batch that a loop has received. Without a new one since the last forward it is
        the same batch again.

        Raises:
            RuntimeError: Several batches came before the first forward of a pass, and it is not
                known whether they were skipped, are yet to come or are one.
            ValueError: The loader's batches are not those of the sampler.
        """
        self._note_received()
        newest = self._newest_batch
        if newest is None:
            return None
        last = newest.epoch_pass
        last.check(self._batch_size)
        # A loader of larger batches may have taken the place of a loop that kept up; one that is
        # named has shown the size of its batches.
        if not (last.keeps_up or (self._keeps_up and last.count is not None)):
            unexplained = newest.number - last.skipped
            if unexplained > 0 and not self._skips:
                raise RuntimeError(
                    f"the loop has received {unexplained + 1} batches before the first forward "
                    f"(of {self._batch_size} examples each, the sampler's batch_size): if they are "
                    "one batch of the loader, give both the same batch_size; if the loop skips "
                    "batches, say so with OrderedSampler(..., skips=True); if it fetches ahead, do "
                    "that in a generator and iterate over herd.batches(generator); a list of "
                    "batches, as from list(loader), cannot be followed: iterate over the loader, "
                    "or give each batch's examples to herd.observe()"
                )
            self._keeps_up = last.keeps_up = True
        return newest

    def _note_received(self) -> None:
        """Note the batches that were received since the last call."""
        fresh: BatchTicket | None = None  # the newest batch
        running: EpochPass | None = None  # a loop that goes on
        named = any(one.count is not None and one.alive for one in self._passes)
        for one in self._passes:
            first, one.logged = one.logged, one.received(self._batch_size)
            if (named and one.count is None) or (not one.alive and running is not None):
                continue  # It began after a loop that goes on: a look at the data.
            if one.alive and one.logged > first and running is not None and fresh is not None:
                raise RuntimeError(
                    "two iterators over this sampler have received batches since the last forward, "
                    "and gradherd cannot tell which of them it is for: end one before the other "
                    "goes on, or give the examples of each batch to herd.observe(indices)"
                )
            running = one if one.alive else running
            fresh = BatchTicket(one, one.logged - 1) if one.logged > first else fresh
        self._newest_batch = fresh or self._newest_batch

    def span(self, ticket: BatchTicket) -> tuple[int, int]:
        """Return the position of a batch in its epoch, and the number of its examples."""
        first = ticket.epoch_pass.begin + ticket.number * self._batch_size
        return first, min(self._batch_size, ticket.epoch_pass.length - first)

    def claim(self, ticket: BatchTicket | None) -> BatchClaim | None:
        """Return the units of a batch; None if it was claimed before, or is not of this order.

        Raises:
            RuntimeError: The sampler has not handed out a batch.
        """
        ticket = ticket or self.current()
        if ticket is None:
            raise RuntimeError(self._before_any_example())
        (current, number), (first, examples) = ticket, self.span(ticket)
        if current.version != self._version or number in current.claimed:
            return None
        if first < self._start:
            return None  # A loader that was to skip what was trained on before has not done so.
        current.claimed.add(number)
        self.last_pass = current
        return self._claim(first, examples)

    def claim_examples(self, indices: Sequence[int], order: Callable[[], list[int]]) -> BatchClaim:
        """Return the units of a batch that is given by its examples, whole and consecutive.

        `order` returns all examples of the epoch.

        Raises:
            ValueError: The order does not hold the batch like this.
        """
        wanted = [int(index) for index in indices]
        if not self._examples:  # once an epoch: it may have a million
            self._examples, self._positions = order(), {}
            for position, index in enumerate(self._examples):
                self._positions.setdefault(index, []).append(position)
        for first in self._positions.get(wanted[0], []) if wanted else []:
            aligned = first % self._unit == 0 and len(wanted) % self._unit == 0
            if aligned and self._examples[first : first + len(wanted)] == wanted:
                before = self.position
                claim = self._claim(first, len(wanted))
                self.position = before + len(wanted)  # Batches come in any order: only count them.
                return claim
        raise ValueError(
            f"examples {wanted[:8]}{' ...' if len(wanted) > 8 else ''} are not consecutive in this "
            "rank's order of the epoch: give the indices of one batch, as the loader delivered it"
        )

    def claim_next(self) -> BatchClaim | None:
        """Return the units that come next, whichever they are; None if there are no more.

        No more batches of a pass than its loop has received: a batch may have several forwards.
        """
        newest = self.newest
        if newest is None:
            raise RuntimeError(self._before_any_example())
        restarts = self.last_pass is None or not self.last_pass.alive
        if newest is not self.last_pass and newest.version == self._version and restarts:
            self.last_pass, self.position = newest, newest.begin
        current = self.last_pass or newest
        if len(current.claimed) >= current.received(self._batch_size):
            return None
        current.claimed.add(len(current.claimed))
        count = min(self._batch_size, self._length - self.position)
        return self._claim(self.position, count) if count > 0 else None

    def _claim(self, first: int, count: int) -> BatchClaim:
        self.position = first + count
        step, units = first // self._unit, count // self._unit
        return BatchClaim(self._epoch, step, units, count, self._version)

    def _before_any_example(self) -> str:
        return (
            f"a gradient came back in epoch {self._epoch} before the sampler handed out any "
            "example: iterate over a loader with this sampler after set_epoch()"
        )


class FollowedLoader:
    """A loader that fetches ahead, and tells the sampler which batch the loop has received."""

    def __init__(self, loader: Any, sampler: "OrderedSampler") -> None:
        """Wrap a loader, or what a framework has made of one; it draws from `sampler`.

        Raises:
            ValueError: The loader's batches are not those of the sampler.
        """
        check_followed(loader, sampler)
        self._loader, self._sampler = loader, sampler

    def __iter__(self) -> "FollowedIterator":
        return FollowedIterator(self._loader.__iter__, self._sampler)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__.get("_loader"), name)


class FollowedIterator(Iterator[Any]):
    """Iterates over batches, and counts for the sampler how many the loop has received."""

    def __init__(self, begin: Callable[[], Iterator[Any]], sampler: "OrderedSampler") -> None:
        """Begin a loop: `begin` iterates over a loader that draws from `sampler`."""
        self._count = LoopCount(iterator=weakref.ref(self))
        sampler.follow(self._count)  # before the loader draws
        self._batches = begin()

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._count.ended, self._count.delivered = True, self._count.delivered - 1
            raise
        finally:
            # Also a batch that could not be made, after which a loop may go on with the next.
            self._count.delivered += 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__.get("_batches"), name)


def check_followed(loader: Any, sampler: "OrderedSampler") -> None:
    """Raise ValueError if a loader's batches are not those of the sampler, as far as it tells."""
    if not getattr(loader, "in_order", True):
        raise ValueError(
            "DataLoader(in_order=False) delivers batches in another order than the sampler's, so "
            "gradients would be credited to the wrong examples; use in_order=True, or give the "
            "herd the examples of each batch: herd.observe(indices)"
        )
    source = getattr(loader, "batch_sampler", None)
    for _ in range(_NESTED):
        if source is None or source is sampler:
            break
        if "shard" in type(source).__name__.lower():
            raise ValueError(
                f"{type(source).__name__} shards the batches of an OrderedSampler, which are this "
                "rank's own already, so part of the data would never be visited: keep the "
                "framework from preparing this loader (with Accelerate, leave it out of "
                "accelerator.prepare)"
            )
        source = getattr(source, "sampler", None) or getattr(source, "batch_sampler", None)
    size, dataset = getattr(loader, "batch_size", None), getattr(loader, "dataset", None)
    if isinstance(size, int) and size != sampler.batch_size:
        raise ValueError(
            f"the loader makes batches of {size}, but the sampler was created with "
            f"batch_size={sampler.batch_size}: give both the same"
        )
    if isinstance(dataset, Sized) and len(dataset) != sampler.sharding.examples:
        raise ValueError(
            f"the loader's data set has {len(dataset)} examples, but the sampler's has "
            f"{sampler.sharding.examples}: give both the same"
        )
