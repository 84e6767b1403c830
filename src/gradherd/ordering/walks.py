"""Which examples a gradient is for: the iterators of an epoch, and how far each was fed back.

A sampler hands out examples through iterators and gets gradients back later, without a name on
them. Several iterators may be open (a loop that was broken off, a look at the data, prefetching
workers), so somebody has to keep the books.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


class Claim(NamedTuple):
    """Which units a gradient is for."""

    epoch: int
    """Their epoch."""
    step: int
    """The first one's place in the epoch's order."""
    units: int
    """How many."""
    examples: int
    """How many examples they hold."""


@dataclass
class Walk:
    """How far one iterator has come."""

    begin: int
    """Position at which it started."""
    handed: int
    """Position up to which it handed out examples."""
    in_order: bool = True
    """Whether batches arrive in the order they were handed out."""
    iterator: Callable[[], object | None] = lambda: None
    """The iterator itself, as long as a loop holds it."""

    @property
    def held(self) -> bool:
        """Whether its loop may go on."""
        return self.iterator() is not None


class Walks:
    """The books of one epoch."""

    def __init__(self, epoch: int, length: int, start: int) -> None:
        """Open them.

        Args:
            epoch: Which one.
            length: Examples this rank visits in it.
            start: Position at which iterators start.
        """
        self._epoch = epoch
        self._length = length
        self._walks: list[Walk] = []  # in the order they began; the last few
        self._fed: Walk | None = None  # the one that gradients are fed back for
        self.position = start
        """Up to where gradients were fed back."""

    def begin(self, walk: Walk) -> None:
        """Note a new iterator."""
        self._walks = [*self._walks[-3:], walk]

    def leave(self, loader: object | None) -> None:
        """Note that `loader` begins anew: with persistent workers it is the one of before."""
        for walk in self._walks:
            if loader is not None and walk.iterator() is loader:
                walk.iterator = lambda: None

    def ended_short(self, batch_size: int) -> bool:
        """Return whether a loop is over of which less than a batch is missing.

        Then the loader drops incomplete batches, and the epoch is over, too.
        """
        last = self._fed or (self._walks[-1] if self._walks else None)
        missing = self._length - self.position
        return last is not None and not last.held and 0 < missing < batch_size

    def next_batch(self, batch_size: int) -> tuple[Walk, int, int]:
        """Return the walk, first position and number of examples of the next gradient.

        Raises:
            RuntimeError: They have not been handed out.
        """
        walk = self._to_feed()
        if walk is not self._fed:
            # A new walk through the same order: its gradients replace those of the one before.
            self._fed, self.position = walk, walk.begin
        first, count = self.position, min(batch_size, self._length - self.position)
        if count == 0 or first + count > walk.handed:
            raise RuntimeError(
                f"a gradient of {batch_size} examples came back after those of {first}, but the "
                f"sampler has handed out only {walk.handed} of {self._length} in epoch "
                f"{self._epoch}: is there one backward for each batch of {batch_size} from a "
                "loader with this sampler? (herd.pause() is for other backwards)"
            )
        return walk, first, count

    def _to_feed(self) -> Walk:
        """Tell a loop that started over from a look at the data in the middle of a loop.

        The newest iterator counts, unless its loop is over and that of the one before is not.
        Where that does not tell (both are held, or none), it counts unless it has run to its
        end without a gradient while the one before it still has some to come.
        """
        if not self._walks:
            raise RuntimeError(
                f"a gradient came back in epoch {self._epoch} before the sampler handed out any "
                "example: iterate over a loader with this sampler after set_epoch()"
            )
        newest, fed = self._walks[-1], self._fed
        if fed is not None and newest is not fed:
            if fed.held != newest.held:
                return fed if fed.held else newest
            owes = fed.handed > self.position
            if owes and newest.handed in (newest.begin, self._length):
                return fed
        return newest


class Walked(Protocol):
    """Who hands out examples: a sampler."""

    def indices(self) -> list[int]:
        """Return the examples of the current epoch, in order."""
        ...

    def cursor(self, position: int) -> dict[str, Any]:
        """Return the cursor of a position in the current order."""
        ...

    def position_of(self, state: Mapping[str, Any]) -> int:
        """Return where a cursor stands in the order at hand; raise if it belongs to another."""
        ...


class Pass(Iterator[int]):
    """One walk through an epoch. The order is the sampler's when the walk began."""

    def __init__(self, sampler: Walked, walk: Walk) -> None:
        self._sampler = sampler
        self._indices = sampler.indices()
        self._order = sampler.cursor(0)
        self._walk = walk

    def __next__(self) -> int:
        position = self._walk.handed
        if position >= len(self._indices):
            raise StopIteration
        self._walk.handed = position + 1
        return self._indices[position]

    def state_dict(self) -> dict[str, Any]:
        """Return a cursor of constant size; see `OrderedSampler.state_dict`."""
        return {**self._order, "position": self._walk.handed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at the position of `state`."""
        position = self._sampler.position_of(state)
        self._indices = self._sampler.indices()
        self._order = self._sampler.cursor(0)
        self._walk.begin = self._walk.handed = position


class Places:
    """Where an epoch's order holds which examples."""

    def __init__(self, order: list[int]) -> None:
        self._order = order
        self._places: dict[int, list[int]] = {}
        for place, index in enumerate(order):
            self._places.setdefault(index, []).append(place)

    def of(self, indices: Sequence[int], unit: int) -> int:
        """Return the position of a batch: whole units, one after the other.

        Raises:
            ValueError: The order does not hold them so.
        """
        wanted = [int(index) for index in indices]
        for place in self._places.get(wanted[0], []) if wanted else []:
            aligned = place % unit == 0 and len(wanted) % unit == 0
            if aligned and self._order[place : place + len(wanted)] == wanted:
                return place
        raise ValueError(
            f"examples {wanted[:8]}{' ...' if len(wanted) > 8 else ''} do not stand one after the "
            "other in this rank's order of the epoch: give the indices of one batch, as the "
            "loader delivered it"
        )


def calling_loader() -> object | None:
    """Return the loader's iterator that is asking for examples, if it is one.

    A sampler is not told its loader, so it is looked for among the callers.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        caller: object = frame.f_locals.get("self")
        if hasattr(caller, "_in_order") or hasattr(caller, "_sampler_iter"):
            return caller
    return None
