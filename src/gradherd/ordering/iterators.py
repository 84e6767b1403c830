"""Which examples a gradient belongs to: the iterators of an epoch, and how far each was fed back.

A sampler hands out examples through iterators and gets gradients back later, without a name on
them. Several iterators may be open (a loop that was left early, a look at the data, prefetching
workers), so their progress is tracked here.
"""

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch.utils.data.dataloader import _BaseDataLoaderIter


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


class EpochIterator(Iterator[int]):
    """One pass over an epoch. The order is that of the sampler when the pass began."""

    def __init__(self, sampler: EpochSource, progress: "IteratorProgress") -> None:
        self._sampler = sampler
        self._indices = sampler.indices()
        self._cursor = sampler.cursor(0)
        self._progress = progress

    def __next__(self) -> int:
        position = self._progress.handed_out
        if position >= len(self._indices):
            raise StopIteration
        self._progress.handed_out = position + 1
        return self._indices[position]

    def state_dict(self) -> dict[str, Any]:
        """Return a cursor of constant size; see `OrderedSampler.state_dict`."""
        return {**self._cursor, "position": self._progress.handed_out}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of `state`."""
        position = self._sampler.position_of(state)
        self._indices = self._sampler.indices()
        self._cursor = self._sampler.cursor(0)
        self._progress.begin = self._progress.handed_out = position


@dataclass
class IteratorProgress:
    """How far one iterator has come."""

    begin: int
    """Position at which it started."""
    handed_out: int
    """Position up to which it has handed out examples."""
    iterator: "weakref.ref[EpochIterator] | None" = None
    """The iterator itself, as long as a loader holds it."""
    loader: "LoaderPass | None" = None
    """The pass of a prefetching loader that it belongs to, if there is one."""
    looked_up: bool = False
    """Whether `loader` was looked up."""

    @property
    def alive(self) -> bool:
        """Whether its loop may continue: a loop that ended releases its iterator."""
        if self.loader is not None:
            # Prefetching workers exhaust the iterator, and the loader lets go of it, while the
            # last batches are still to be trained on.
            return self.loader.alive
        return self.iterator is not None and self.iterator() is not None


class LoaderPass:
    """One pass of a torch DataLoader, which outlives the iterator it draws its indices from."""

    def __init__(self, iterator: _BaseDataLoaderIter) -> None:
        self._iterator = weakref.ref(iterator)
        # Persistent workers keep the loader's iterator; a new pass replaces its index iterator.
        self._indices = weakref.ref(iterator._sampler_iter)
        self.in_order = bool(getattr(iterator, "_in_order", True))

    @property
    def alive(self) -> bool:
        """Whether its loop may continue."""
        iterator = self._iterator()
        return iterator is not None and iterator._sampler_iter is self._indices()


def find_loader_pass(sampler: object) -> LoaderPass | None:
    """Return the pass of the torch DataLoader that iterates over `sampler`, if there is just one.

    A sampler is not told its loader, so iterators of loaders are looked up among the objects of the
    process. That takes some 20 ms: call it once per pass, and only where it matters.
    """
    passes = []
    for candidate in gc.get_objects():
        if issubclass(type(candidate), _BaseDataLoaderIter):  # isinstance would wake up proxies
            source = candidate._index_sampler
            if source is sampler or getattr(source, "sampler", None) is sampler:
                passes.append(LoaderPass(candidate))
    return passes[0] if len(passes) == 1 else None


class EpochProgress:
    """Progress of all iterators of one epoch."""

    def __init__(
        self,
        epoch: int,
        length: int,
        start: int,
        find_loader: Callable[[], LoaderPass | None] = lambda: None,
    ) -> None:
        """Start an epoch.

        Args:
            epoch: Its number.
            length: Examples that this rank visits in it.
            start: Position at which iterators start.
            find_loader: Looks up the loader's pass that the newest iterator belongs to.
        """
        self._find_loader = find_loader
        self._epoch = epoch
        self._length = length
        self._iterators: list[IteratorProgress] = []  # the last few, oldest first
        self._fed: IteratorProgress | None = None  # the one that gradients are fed back for
        self.position = start
        """Position up to which gradients were fed back."""

    def add(self, progress: IteratorProgress) -> None:
        """Track a new iterator."""
        self._iterators = [*self._iterators[-3:], progress]

    def ended_short(self, batch_size: int) -> bool:
        """Return whether a loop has ended with less than a batch missing.

        Then the loader drops incomplete batches, and the epoch is over.
        """
        last = self._fed or (self._iterators[-1] if self._iterators else None)
        missing = self._length - self.position
        return last is not None and not last.alive and 0 < missing < batch_size

    def next_batch(self, batch_size: int) -> tuple[IteratorProgress, int, int]:
        """Return the iterator, first position and number of examples of the next gradient.

        Raises:
            RuntimeError: These examples have not been handed out.
        """
        if self._iterators:
            newest = self._iterators[-1]
            if not newest.looked_up and newest.handed_out - newest.begin > batch_size:
                newest.loader, newest.looked_up = self._find_loader(), True  # it prefetches
        progress = self._iterator_to_feed()
        if progress is not self._fed:
            # A new pass over the same order: its gradients replace those of the one before.
            self._fed, self.position = progress, progress.begin
        first, count = self.position, min(batch_size, self._length - self.position)
        if count == 0 or first + count > progress.handed_out:
            raise RuntimeError(
                f"a gradient of {batch_size} examples came back after those of {first}, but the "
                f"sampler has handed out only {progress.handed_out} of {self._length} in epoch "
                f"{self._epoch}: is there one backward for each batch of {batch_size} from a "
                "loader with this sampler? (use herd.pause() around other backwards)"
            )
        return progress, first, count

    def _iterator_to_feed(self) -> IteratorProgress:
        """Tell a loop that started over from a look at the data in the middle of a loop.

        The newest iterator counts, unless its loop has ended and that of the one before has not.
        If that does not decide it (both are alive, or none), the newest counts unless it has run
        to its end without a gradient while the one before it still expects some.
        """
        if not self._iterators:
            raise RuntimeError(
                f"a gradient came back in epoch {self._epoch} before the sampler handed out any "
                "example: iterate over a loader with this sampler after set_epoch()"
            )
        newest, fed = self._iterators[-1], self._fed
        if fed is not None and newest is not fed:
            if fed.alive != newest.alive:
                return fed if fed.alive else newest
            expects_more = fed.handed_out > self.position
            if expects_more and newest.handed_out in (newest.begin, self._length):
                return fed
        return newest


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
