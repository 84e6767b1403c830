"""Which batch a forward is for: the passes over an epoch, and the batches that loops received.

A sampler hands out examples through iterators, a loader turns them into batches, perhaps long
before the training loop receives them, and gradients come back later, without a name on them. The
`BatchLedger` keeps track: it knows which batches the loop has received, so the forward that follows
is for the newest one, however many were skipped, broken off or only looked at in between.
"""

import gc
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch.utils.data import BatchSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter, _SingleProcessDataLoaderIter

_REMEMBERED_PASSES = 4
_REMEMBERED_BATCHES = 64


class EpochSource(Protocol):
    """What hands out examples: a sampler."""

    def indices(self) -> list[int]:
        """Return the examples of the current epoch, in order."""
        ...

    def cursor(self, position: int) -> dict[str, Any]:
        """Return the cursor of a position in the current order."""
        ...

    def position_of(self, state: Mapping[str, Any]) -> int:
        """Return the position of a cursor in the current order; raise if it is of another one."""
        ...


@dataclass(eq=False)
class EpochPass:
    """One pass over the order of an epoch, and how far it has come."""

    begin: int
    """Position at which it started."""
    length: int
    """Examples of the epoch."""
    version: str
    """Version of the order that it hands out."""
    handed_out: int = 0
    """Position up to which it has handed out examples."""
    stamp: int = 0
    """When it last handed out an example, counted over all passes."""
    ended: bool = False
    """Whether more examples were asked for than there are."""
    logged: int = 0
    """Batches that the ledger has logged as received."""
    claimed: set[int] = field(default_factory=set)
    """Batches that a gradient was credited to."""
    iterator: "weakref.ref[EpochIterator] | None" = None
    """The iterator itself, as long as a loader holds it."""
    loader: "LoaderPass | None" = None
    """The pass of a loader that prefetches, if it does and could be found."""
    looked_up: bool = False
    """Whether `loader` was looked up."""

    def __post_init__(self) -> None:
        self.handed_out = self.begin

    @property
    def alive(self) -> bool:
        """Whether its loop may continue: a loop that ended releases its iterator."""
        if self.loader is not None:
            # Prefetching workers exhaust the iterator, and the loader lets go of it, while the
            # last batches are still to be trained on.
            return self.loader.alive
        return self.iterator is not None and self.iterator() is not None

    def num_batches(self, batch_size: int) -> int:
        """Return the number of batches from its start to the end of the epoch."""
        return -(-(self.length - self.begin) // batch_size)

    def received(self, batch_size: int) -> int:
        """Return the number of batches that its loop has received."""
        handed_out = -(-(self.handed_out - self.begin) // batch_size)
        if self.loader is None:
            return handed_out
        return min(handed_out, self.loader.received(self.begin // batch_size))


class EpochIterator(Iterator[int]):
    """Iterates over an epoch. The order is that of the sampler when the pass began."""

    def __init__(self, sampler: EpochSource, epoch_pass: EpochPass, clock: Iterator[int]) -> None:
        self._sampler = sampler
        self._indices = sampler.indices()
        self._cursor = sampler.cursor(0)
        self._pass = epoch_pass
        self._clock = clock

    def __next__(self) -> int:
        position = self._pass.handed_out
        if position >= len(self._indices):
            self._pass.ended = True
            raise StopIteration
        self._pass.handed_out = position + 1
        self._pass.stamp = next(self._clock)
        return self._indices[position]

    def state_dict(self) -> dict[str, Any]:
        """Return a cursor of constant size; see `OrderedSampler.state_dict`."""
        return {**self._cursor, "position": self._pass.handed_out}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of `state`."""
        position = self._sampler.position_of(state)
        self._indices = self._sampler.indices()
        self._cursor = self._sampler.cursor(0)
        self._pass.begin = self._pass.handed_out = position
        self._pass.version = self._cursor["version"]


class LoaderPass:
    """One pass of a torch DataLoader, which outlives the iterator it draws its indices from."""

    def __init__(self, iterator: _BaseDataLoaderIter, batch_size: int | None) -> None:
        self._iterator = weakref.ref(iterator)
        # Persistent workers keep the loader's iterator; a new pass replaces its index iterator.
        self._indices = weakref.ref(iterator._sampler_iter)
        self._last = iterator._num_yielded
        self.in_order = bool(getattr(iterator, "_in_order", True))
        self.prefetches = not isinstance(iterator, _SingleProcessDataLoaderIter)
        self.batch_size = batch_size
        """Examples of a batch, if the loader makes batches."""
        # torchdata's loader counts on from where it was resumed.
        self._counts_on = type(iterator).__module__.startswith("torchdata.")

    @property
    def alive(self) -> bool:
        """Whether its loop may continue."""
        iterator = self._iterator()
        return iterator is not None and iterator._sampler_iter is self._indices()

    def is_same_pass(self, other: "LoaderPass") -> bool:
        """Return whether both are the same pass of the same loader."""
        return self._indices() is other._indices()

    def received(self, resumed_at: int) -> int:
        """Return the batches that its loop has received, where it was resumed after some."""
        iterator = self._iterator()
        if iterator is not None and iterator._sampler_iter is self._indices():
            self._last = iterator._num_yielded
        return self._last - (resumed_at if self._counts_on else 0)


def find_loader_pass(sampler: object, iterator: EpochIterator | None) -> LoaderPass | None:
    """Return the pass of a torch DataLoader that draws its indices from an iterator.

    A sampler is not told its loader, so iterators of loaders are looked up among the objects of the
    process. That takes some 20 ms: call it once per pass, and only where it matters.

    Args:
        sampler: The sampler of the loader.
        iterator: The sampler's iterator; None if it is exhausted and the loader has released it.

    Returns:
        None if there is no such loader, or more than one.

    Raises:
        ValueError: Something between loader and sampler shards the batches once more.
    """
    passes = []
    for candidate in gc.get_objects():
        if not issubclass(type(candidate), _BaseDataLoaderIter):  # isinstance wakes up proxies
            continue
        source, between = candidate._index_sampler, []
        for _ in range(4):
            if source is sampler or source is None:
                break
            between.append(source)
            source = getattr(source, "sampler", None) or getattr(source, "batch_sampler", None)
        if source is not sampler:
            continue
        for wrapper in between:
            if "shard" in type(wrapper).__name__.lower():
                raise ValueError(
                    f"{type(wrapper).__name__} shards the batches of an OrderedSampler, which are "
                    "this rank's own already, so part of the data would never be visited: keep "
                    "the framework from preparing this loader (with Accelerate, leave it out of "
                    "accelerator.prepare)"
                )
        indices = candidate._sampler_iter
        # The generator of a batch sampler has no frame any more once it is exhausted.
        exhausted = indices is not iterator and getattr(indices, "gi_frame", None) is None
        if exhausted != (iterator is None):
            continue
        batches = between[0] if between and isinstance(between[0], BatchSampler) else None
        passes.append(LoaderPass(candidate, getattr(batches, "batch_size", None)))
    return passes[0] if len(passes) == 1 else None


UNKNOWN = -1
"""Number of a batch that cannot be told."""


class BatchTicket(NamedTuple):
    """One batch of one pass."""

    epoch_pass: EpochPass
    number: int
    """Number of the batch in its pass, from 0; or `UNKNOWN`."""


class BatchLedger:
    """Knows which batches loops have received, and so which one a forward is for."""

    def __init__(
        self,
        batch_size: int,
        ahead: int | None = None,
        find_loader: Callable[[EpochIterator | None], LoaderPass | None] = lambda iterator: None,
    ) -> None:
        """Start empty.

        Args:
            batch_size: Examples in a batch.
            ahead: Batches that the loop fetches before it trains on the one at hand; None if that
                is not known. Then it must become clear from the first forward.
            find_loader: Looks up the loader's pass that an iterator belongs to.
        """
        self._batch_size = batch_size
        self._ahead = ahead
        self._find_loader = find_loader
        self._passes: list[EpochPass] = []
        self._log: deque[BatchTicket] = deque(maxlen=_REMEMBERED_BATCHES)

    def begin(self, epoch_pass: EpochPass) -> None:
        """Track a new pass."""
        self._passes = [*self._passes[1 - _REMEMBERED_PASSES :], epoch_pass]

    @property
    def newest(self) -> EpochPass | None:
        """The pass that began last."""
        return self._passes[-1] if self._passes else None

    def current(self) -> BatchTicket | None:
        """Return the batch that a forward which begins now is for; None before the first one.

        The newest batch that a loop has received, less those that it fetches ahead. Without a new
        one since the last forward it is the same batch again.

        Raises:
            RuntimeError: Batches were fetched before the first forward, and it is not known whether
                they were skipped or are yet to come.
            ValueError: The loader's batches are not those of the sampler.
        """
        self._log_received()
        if not self._log:
            return None
        newest = self._log[-1]
        if self._ahead is None:
            if newest.number > 0:
                raise RuntimeError(
                    f"the loop has received {newest.number + 1} batches before the first forward, "
                    "and gradherd cannot tell whether it skips batches or fetches them ahead: say "
                    "which with OrderedSampler(..., ahead=0) if it skips, or ahead=1 if it is one "
                    "batch ahead"
                )
            self._ahead = 0
        if not self._ahead:
            return newest
        last = newest.epoch_pass
        lag = self._ahead
        if newest.number + 1 == last.num_batches(self._batch_size):
            # Nothing is left to fetch: the loop works off what it has. How far it is shows only
            # in a single process with a full last batch, and only for one batch.
            partial = (last.length - last.begin) % self._batch_size
            if partial or self._ahead > 1 or (last.loader is not None and last.loader.prefetches):
                return BatchTicket(last, UNKNOWN)
            lag -= last.ended
        return self._log[max(0, len(self._log) - 1 - lag)]

    def _log_received(self) -> None:
        """Log the batches that were received since the last call."""
        fresh: list[BatchTicket] = []
        running: EpochPass | None = None  # a loop that goes on
        for one in self._passes:
            self._look_up(one)
            first, one.logged = one.logged, one.received(self._batch_size)
            if not one.alive and running is not None:
                continue  # It began after a loop that goes on, and is over: a look at the data.
            tickets = [BatchTicket(one, number) for number in range(first, one.logged)]
            if one.alive and tickets and running is not None and fresh:
                raise RuntimeError(
                    "two iterators over this sampler have received batches since the last forward, "
                    "and gradherd cannot tell which of them it is for: end one before the other "
                    "goes on, or give the examples of each batch to herd.observe(indices)"
                )
            running = one if one.alive else running
            fresh += tickets
        self._log.extend(fresh)

    def _look_up(self, one: EpochPass) -> None:
        """Find the loader of a pass that has handed out more than one batch since the last look.

        Either its loader prefetches, or its loop has received several batches.
        """
        handed_out = one.handed_out - one.begin
        if one.looked_up or handed_out <= (one.logged + 1) * self._batch_size:
            return
        iterator = one.iterator() if one.iterator is not None else None
        if iterator is None and one.handed_out < one.length:
            return  # a loop that was broken off
        loader, one.looked_up = self._find_loader(iterator), True
        known = (other.loader for other in self._passes if other.loader is not None)
        if loader is None or any(loader.is_same_pass(other) for other in known):
            return  # It belongs to another pass: that of this one is gone.
        one.loader = loader
        if one.loader.batch_size not in (None, self._batch_size):
            raise ValueError(
                f"the loader makes batches of {one.loader.batch_size}, but the sampler was created "
                f"with batch_size={self._batch_size}: give both the same"
            )


class PositionIndex:
    """Finds the position of a batch in the order of an epoch by its examples."""

    def __init__(self, order: list[int]) -> None:
        self._order = order
        self._positions: dict[int, list[int]] = {}
        for position, index in enumerate(order):
            self._positions.setdefault(index, []).append(position)

    def find(self, indices: Sequence[int], unit: int) -> int:
        """Return the position of a batch of whole, consecutive units.

        Raises:
            ValueError: The order does not hold them like this.
        """
        wanted = [int(index) for index in indices]
        for position in self._positions.get(wanted[0], []) if wanted else []:
            aligned = position % unit == 0 and len(wanted) % unit == 0
            if aligned and self._order[position : position + len(wanted)] == wanted:
                return position
        raise ValueError(
            f"examples {wanted[:8]}{' ...' if len(wanted) > 8 else ''} are not consecutive in this "
            "rank's order of the epoch: give the indices of one batch, as the loader delivered it"
        )
