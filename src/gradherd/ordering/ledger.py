"""Which batch a forward is for, and which units a gradient belongs to.

A sampler hands out examples through iterators, a loader turns them into batches, perhaps long
before the training loop receives them, and gradients come back later, without a name on them. The
`BatchLedger` knows which batches the loop has received, so the forward that follows is for the
newest one, however many were skipped, broken off or only looked at in between. `EpochClaims` turns
batches into units of the order of an epoch.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from gradherd.ordering.batch_claims import BatchClaim
from gradherd.ordering.iterators import CountedPass, EpochIterator, EpochPass, LoaderPass
from gradherd.ordering.ordering import Ordering

_REMEMBERED_PASSES = 4
_REMEMBERED_BATCHES = 64

UNKNOWN = -1
"""Number of a batch that is not known."""


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
        find_loader: Callable[
            [EpochIterator | None, EpochPass], LoaderPass | CountedPass | None
        ] = lambda iterator, epoch_pass: None,
    ) -> None:
        """Start empty.

        Args:
            batch_size: Examples in a batch.
            ahead: Batches that the loop fetches before it trains on the one at hand; None if that
                is not known. Then it must become clear from the first forward.
            find_loader: Looks up the loader's pass that an iterator and its pass belong to.
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
        if isinstance(newest.epoch_pass.loader, CountedPass):
            return newest  # The loop itself says which batch it has received.
        if self._ahead is None:
            unexplained = newest.number - newest.epoch_pass.skipped
            if unexplained > 0:
                raise RuntimeError(
                    f"the loop has received {unexplained + 1} batches before the first forward, "
                    "and gradherd cannot tell whether it skips batches or fetches them ahead: say "
                    "which with OrderedSampler(..., ahead=0) if it skips, or ahead=1 if it is one "
                    "batch ahead; a list of batches, as from list(loader), cannot be followed: "
                    "iterate over the loader, or give each batch's examples to herd.observe()"
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

        Either its loader prefetches, or its loop has received several batches. Likewise while
        another loader prefetches, which may have begun this pass, too.
        """
        handed_out = one.handed_out - one.begin
        loaders = [other.loader for other in self._passes if other is not one and other.loader]
        expected = one.logged + (not any(each.prefetches and each.alive for each in loaders))
        if one.looked_up or handed_out <= expected * self._batch_size:
            return
        iterator = one.iterator() if one.iterator is not None else None
        if iterator is None and one.handed_out < one.length:
            return  # a loop that was broken off
        loader, one.looked_up = self._find_loader(iterator, one), True
        known = (other.loader for other in self._passes if other.loader is not None)
        if loader is None:
            return
        if any(loader.is_same_pass(other) for other in known):
            if iterator is not None and loader.prefetches:
                raise ValueError(
                    "the loader's batch sampler goes over this sampler again before the last "
                    "gradients of an epoch are in, which the next order needs: let it end with the "
                    "epoch, and iterate over the loader once per epoch"
                )
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


class EpochClaims:
    """Turns the batches of one epoch into claims on units of its order, each at most once."""

    def __init__(
        self, *, epoch: int, version: str, start: int, length: int, batch_size: int, unit: int
    ) -> None:
        """Start an epoch.

        Args:
            epoch: Its number.
            version: Version of its order.
            start: Position at which it is resumed; 0 at its beginning.
            length: Examples that this rank visits in it.
            batch_size: Examples in a batch.
            unit: Examples in a unit.
        """
        self._epoch = epoch
        self._version = version
        self._start = start
        self._length = length
        self._batch_size = batch_size
        self._unit = unit
        self._positions: PositionIndex | None = None
        self.position = start
        """Position up to which gradients were credited."""
        self.last_pass: EpochPass | None = None
        """The pass that gradients were credited to."""

    def by_ticket(self, ticket: BatchTicket) -> BatchClaim | None:
        """Claim a batch; None if that was done before, or it is not of this order.

        Raises:
            ValueError: The loader delivers batches in another order than the sampler's.
        """
        current, number = ticket
        if current.loader is not None and not current.loader.in_order:
            raise ValueError(
                "DataLoader(in_order=False) delivers batches in another order than the sampler's, "
                "so gradients would be credited to the wrong examples; use in_order=True, or give "
                "the herd the examples of each batch: herd.observe(indices)"
            )
        if number == UNKNOWN or current.version != self._version or number in current.claimed:
            return None
        first = current.begin + number * self._batch_size
        if first < self._start:
            return None  # A loader that was to skip what was trained on before has not done so.
        current.claimed.add(number)
        self.last_pass = current
        self.position = first
        return self._claim(first, min(self._batch_size, current.length - first))

    def by_indices(self, indices: Sequence[int], order: Callable[[], list[int]]) -> BatchClaim:
        """Claim a batch given by its examples; `order` returns all examples of the epoch."""
        if self._positions is None:
            self._positions = PositionIndex(order())
        first, before = self._positions.find(indices, self._unit), self.position
        claim = self._claim(first, len(indices))
        self.position = before + len(indices)  # Batches come in any order: only count them.
        return claim

    def next_units(self, newest: EpochPass | None) -> BatchClaim | None:
        """Claim the units that come next, whichever they are; None after the last ones."""
        if newest is None:
            raise RuntimeError(BEFORE_ANY_EXAMPLE.format(epoch=self._epoch))
        restarts = self.last_pass is None or not self.last_pass.alive
        if newest is not self.last_pass and newest.version == self._version and restarts:
            self.last_pass, self.position = newest, newest.begin
        count = min(self._batch_size, self._length - self.position)
        return self._claim(self.position, count) if count > 0 else None

    def _claim(self, first: int, count: int) -> BatchClaim:
        self.position = first + count
        step, units = first // self._unit, count // self._unit
        return BatchClaim(self._epoch, step, units, count, self._version)


BEFORE_ANY_EXAMPLE = (
    "a gradient came back in epoch {epoch} before the sampler handed out any example: iterate over "
    "a loader with this sampler after set_epoch()"
)


def cursor_position(state: Mapping[str, Any], ordering: Ordering, *, unit: int, length: int) -> int:
    """Return the position of a saved cursor in the current order.

    Args:
        state: Epoch, position and version, as `OrderedSampler.state_dict` returns them.
        ordering: The current orders.
        unit: Examples in a unit.
        length: Examples that this rank visits in an epoch.

    Raises:
        RuntimeError: The cursor belongs to another order.
        ValueError: It is out of range, or not where another number of workers saved its order.
    """
    if ordering.resharded_from is not None and state["version"] == ordering.resharded_from[0]:
        steps = ordering.resharded_from[1]
        if state["position"] != steps * unit:
            raise ValueError(
                f"position {state['position']} is not where its ordering was saved, "
                f"{steps * unit}: to continue with another number of workers in "
                "mid-epoch, save the state of the attached herd; otherwise save at the start "
                "of an epoch"
            )
        return 0  # The order no longer contains what comes before it.
    if (state["epoch"], state["version"]) != (ordering.epoch, ordering.version):
        raise RuntimeError(
            f"this position belongs to order {state['version']} of epoch {state['epoch']}, but "
            f"the sampler holds order {ordering.version} of epoch {ordering.epoch}: load the "
            "state of its ordering first, sampler.ordering.load_state_dict(...)"
        )
    if not 0 <= state["position"] <= length:
        raise ValueError(f"position must be in [0, {length}], got {state['position']}")
    position: int = state["position"]
    return position
