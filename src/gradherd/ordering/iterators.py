"""The passes over an epoch: a sampler's iterators, and the loaders that draw from them."""

import gc
import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import GeneratorType
from typing import Any, ClassVar, Protocol

from torch.utils.data import BatchSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter, _SingleProcessDataLoaderIter

_YOUNG, _OLD = (0, 1), (2,)
"""Generations of Python's garbage collector: new objects, and those that survived collections."""
_NESTED = 4
"""Wrappers between a loader and its sampler, at most: batch samplers, and what frameworks add."""
_LARGE = 1000
"""Containers with more items hold data, not iterators."""


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
    skipped: int = 0
    """Batches at its start that the loader skips, since they were trained on before a restart."""
    handed_out: int = 0
    """Position up to which it has handed out examples."""
    ended: bool = False
    """Whether more examples were asked for than there are."""
    logged: int = 0
    """Batches that the ledger has logged as received."""
    claimed: set[int] = field(default_factory=set)
    """Batches that a gradient was credited to."""
    iterator: "weakref.ref[EpochIterator] | None" = None
    """The iterator itself, as long as a loader holds it."""
    loader: "LoaderPass | CountedPass | None" = None
    """The pass of a loader that prefetches, if it does and could be found."""
    looked_up: bool = False
    """Whether `loader` was looked up."""
    drawn_by: "weakref.ref[_BaseDataLoaderIter] | None" = None
    """The loader's iterator that draws from the pass, where it was found while it prefetched."""

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

    def __init__(
        self,
        sampler: EpochSource,
        epoch_pass: EpochPass,
        batch_size: int,
        loaders: "LoaderRegistry",
    ) -> None:
        """Start a pass.

        Args:
            sampler: What hands out the examples.
            epoch_pass: How far the pass has come.
            batch_size: Examples in a batch.
            loaders: Finds the loader that draws from this iterator.
        """
        self._sampler = sampler
        self._indices = sampler.indices()
        self._cursor = sampler.cursor(0)
        self._pass = epoch_pass
        self._batch_size = batch_size
        self._loaders = loaders

    def __next__(self) -> int:
        position = self._pass.handed_out
        # Asked for more than a batch before any forward: the loader prefetches. It may exhaust and
        # release this iterator before the first forward, so look for it while it still draws.
        if position - self._pass.begin == self._batch_size and not self._pass.logged:
            self._pass.drawn_by = self._loaders.drawing_from(self)
        if position >= len(self._indices):
            self._pass.ended = True
            raise StopIteration
        self._pass.handed_out = position + 1
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

    def is_same_pass(self, other: object) -> bool:
        """Return whether both are the same pass of the same loader."""
        return isinstance(other, LoaderPass) and self._indices() is other._indices()

    def received(self, resumed_at: int) -> int:
        """Return the batches that its loop has received, where it was resumed after some."""
        iterator = self._iterator()
        if iterator is not None and iterator._sampler_iter is self._indices():
            self._last = iterator._num_yielded
        return self._last - (resumed_at if self._counts_on else 0)


@dataclass(eq=False)
class CountedPass:
    """A pass whose loop itself counts the batches it receives, however many are fetched ahead.

    Wrappers of frameworks set it as `sampler.counted_pass` before a pass begins.
    """

    delivered: int = 0
    """Batches that the loop has received; also those it has skipped, where a loader skips."""
    alive: bool = True
    """Whether the loop may continue."""
    in_order: ClassVar[bool] = True
    prefetches: ClassVar[bool] = False
    batch_size: ClassVar[int | None] = None

    def is_same_pass(self, other: object) -> bool:
        """Return whether both are the same pass."""
        return self is other

    def received(self, resumed_at: int) -> int:
        """Return the batches that the loop has received."""
        return self.delivered


class LoaderRegistry:
    """Finds the torch DataLoader that draws from an iterator of a sampler.

    A DataLoader does not tell its sampler who it is, but how many batches its loop has received is
    known to it alone. Its iterator is found among the objects that Python's garbage collector
    tracks: youngest first, because it was created just before it asked for its first batch.
    """

    def __init__(self) -> None:
        # Persistent workers keep one iterator for all epochs: it is no young object then.
        self._known: weakref.WeakSet[_BaseDataLoaderIter] = weakref.WeakSet()

    def drawing_from(self, iterator: EpochIterator) -> "weakref.ref[_BaseDataLoaderIter] | None":
        """Return the loader's iterator that draws from a sampler's, if it is known or new."""
        candidates = {*self._known, *_loader_iterators(_YOUNG)}
        drawing = [
            one for one in candidates if _reaches(getattr(one, "_sampler_iter", None), iterator)
        ]
        if len(drawing) != 1:
            return None
        self._known.update(drawing)
        return weakref.ref(drawing[0])

    def find_pass(
        self,
        sampler: object,
        iterator: EpochIterator | None,
        drawn_by: "weakref.ref[_BaseDataLoaderIter] | None" = None,
    ) -> LoaderPass | None:
        """Return the pass of a torch DataLoader that draws its indices from an iterator.

        Where the loader is not known, that takes up to 100 ms: call it once per pass, and only
        where it matters.

        Args:
            sampler: The sampler of the loader.
            iterator: The sampler's iterator; None if it is exhausted and the loader has released
                it.
            drawn_by: The loader's iterator, if `drawing_from` has found it.

        Returns:
            None if there is no such loader, or more than one.

        Raises:
            ValueError: Something between loader and sampler shards the batches once more.
        """
        if drawn_by is None and iterator is not None:
            drawn_by = self.drawing_from(iterator)
        if drawn_by is not None:
            drawer = drawn_by()
            if drawer is None:
                return None  # its loop was broken off
            if passes := _loader_passes([drawer], sampler, iterator):
                return passes[0]
        passes = _loader_passes(_loader_iterators(_YOUNG + _OLD), sampler, iterator)
        return passes[0] if len(passes) == 1 else None


def _loader_iterators(generations: Iterable[int]) -> list[_BaseDataLoaderIter]:
    """Return the iterators of DataLoaders in some generations of the garbage collector."""
    # A list, not a generator: suspended, that would be part of what it searches, a cycle that
    # keeps every object alive. And the type alone: isinstance asks objects for their class.
    return [
        candidate
        for generation in generations
        for candidate in gc.get_objects(generation)
        if issubclass(type(candidate), _BaseDataLoaderIter)
    ]


def _loader_passes(
    candidates: Iterable[_BaseDataLoaderIter], sampler: object, iterator: EpochIterator | None
) -> list[LoaderPass]:
    """Return the passes of loaders that draw their indices from an iterator."""
    passes = []
    for candidate in candidates:
        source: Any = candidate._index_sampler
        between: list[object] = []
        for _ in range(_NESTED):
            if source is sampler or source is None:
                break
            between.append(source)
            source = getattr(source, "sampler", None) or getattr(source, "batch_sampler", None)
        if source is not sampler and not _reaches(candidate._sampler_iter, iterator):
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
        if isinstance(indices, GeneratorType):
            # The generator of a batch sampler has no frame any more once it is exhausted.
            if (indices.gi_frame is None) != (iterator is None):
                continue
        elif iterator not in (None, indices) and not _reaches(indices, iterator):
            continue  # torchdata's batch sampler: an iterator that is no generator
        batches = between[0] if between and isinstance(between[0], BatchSampler) else None
        passes.append(LoaderPass(candidate, getattr(batches, "batch_size", None)))
    return passes


def _reaches(indices: object, iterator: EpochIterator | None) -> bool:
    """Return whether an iterator over batches draws from the sampler's, through any wrapper.

    Batch samplers of a user's own need not tell what they draw from, but their generators hold it.
    A generator that is being executed hides what it holds; it draws from the iterator that asks.
    """
    if iterator is None or indices is iterator or _runs(indices):
        return iterator is not None
    near: list[object] = [indices]
    for _ in range(_NESTED):
        # Not through large containers: data sets are lists of examples, too.
        small = (
            one
            for one in near
            if not isinstance(one, list | tuple | dict | set) or len(one) <= _LARGE
        )
        held = (one for each in small for one in gc.get_referents(each))
        near = list(itertools.islice(held, _LARGE))
        if any(one is iterator or _runs(one) for one in near):
            return True
    return False


def _runs(one: object) -> bool:
    return isinstance(one, GeneratorType) and one.gi_running
