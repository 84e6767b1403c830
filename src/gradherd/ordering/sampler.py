"""The sampler for a DataLoader: torch's DistributedSampler with a learned order.

The order of an epoch is fixed when `iter()` is called, so loader workers may prefetch as they like.
The next order is adopted when the last gradient of the epoch has been observed, when `set_epoch`
names another epoch, or when a loop that has gone through the epoch begins again.
"""

import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import active_children
from typing import Any, Literal, TypeGuard

from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler, IterableDataset

from gradherd.comm.checks import BrokenBatches, check_choice, check_state, check_whole
from gradherd.comm.script import Script
from gradherd.comm.world import World
from gradherd.ordering.batches import (
    BatchClaim,
    Batches,
    BatchTicket,
    EpochPass,
    LoopCount,
)
from gradherd.ordering.implicit import ImplicitRows
from gradherd.ordering.ordering import Ordering
from gradherd.ordering.policy import Policy, Rows
from gradherd.ordering.registry import find_policy
from gradherd.ordering.sharding import UnitSharding, stripe


class Feeder:
    """Feeds gradients back to a sampler, and hands in what is under way when that is needed."""

    def before_iterating(self) -> None:
        """An iterator starts."""

    def finish(self) -> None:
        """The epoch may end, on all ranks at the same point."""

    def before_reading(self) -> None:
        """The order or its position is read, perhaps on this rank only."""


_NOBODY = Feeder()


class EpochIterator(Iterator[int]):
    """Iterates over an epoch. The order is that of the sampler when the pass began."""

    def __init__(self, sampler: "OrderedSampler", epoch_pass: EpochPass) -> None:
        """Start a pass over what `sampler` hands out."""
        self._sampler = sampler
        self._indices = sampler.indices()
        self._cursor = sampler.cursor(0)
        self._pass = epoch_pass

    def __next__(self) -> int:
        one = self._pass
        position = one.handed_out
        # Asked for more than a batch before any forward: the loop skips, or the loader prefetches.
        second = position - one.begin == self._sampler.batch_size
        if second and not one.logged and one.count is None:
            # There may be worker processes of a loader.
            one.fetched_ahead = any(other.daemon for other in active_children())
        if position >= len(self._indices):
            one.ended = True
            raise StopIteration
        one.handed_out = position + 1
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


class OrderedSampler(DistributedSampler[Any]):
    """Sample each worker's examples in the order that its policy has learned.

    >>> sampler = OrderedSampler(range(6), "d-rr", batch_size=2, world=World.single())
    >>> sorted(sampler)
    [0, 1, 2, 3, 4, 5]
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        policy: str | Policy,
        *,
        batch_size: int,
        unit: int = 1,
        seed: int = 0,
        world: World | None = None,
        drop_last: bool = False,
        skips: bool = False,
    ) -> None:
        """Shard the data set over the workers of `world`.

        Args:
            dataset: Map-style data set, the same on every rank.
            policy: A name from `POLICIES`, or a policy object.
            batch_size: Examples in a rank's batch, as given to the DataLoader.
            unit: Number of consecutive examples that are ordered as one: 1 orders every example,
                `batch_size` whole batches (which needs no gradients of single examples).
            seed: Seed of all random choices; must be equal on all ranks.
            world: Rank and number of ranks; detected by default.
            drop_last: Make the ranks' epochs equally long by dropping units (different ones in
                each epoch) instead of repeating some.
            skips: Whether the loop may skip batches before the first forward of an epoch. Without
                it, several batches that arrive before are refused: they may have been fetched
                ahead, or be one of a larger size.
        """
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise ValueError(
                f"dataset must be map-style, with a length, got {type(dataset).__name__}: a stream "
                "cannot be reordered"
            )
        check_whole("batch_size", batch_size, 1)
        check_whole("seed", seed, 0)
        if type(unit) is not int or not 1 <= unit <= batch_size or batch_size % unit:
            raise ValueError(f"unit must divide batch_size {batch_size}, got {unit!r}")
        check_choice("skips", skips, True, False)
        world = World.detect() if world is None else world
        if not isinstance(world, World):
            raise ValueError(f"world must be World(rank=0, size=4) or None, got {world!r}")
        self.sharding = UnitSharding(len(dataset), unit, world.size, drop_last)
        super().__init__(
            dataset,
            num_replicas=world.size,
            rank=world.rank,
            shuffle=True,
            seed=seed,
            drop_last=drop_last,
        )
        self.world = world
        self.batch_size = batch_size
        self.unit = unit
        self.ordering = Ordering(
            find_policy(policy),
            self.sharding.sizes,
            seed=seed,
            length=self.sharding.length,
        )
        self._feeder: weakref.ref[Feeder] | None = None
        self._skips = skips
        self._batches = Batches(batch_size, unit, skips=skips)
        self._resumed = (0, 0)  # epoch, and the position at which its iterators start
        self._loader_skips = False  # whether the loader skips to that position by itself
        self._named_epoch: int | None = None  # the last argument of set_epoch
        self._broken = BrokenBatches("no order is learned from such batches", world.rank)
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self.epoch = self.ordering.epoch
        self.num_samples = len(self)
        self.total_size = self.num_samples * self.world.size
        self._batches.begin_epoch(
            epoch=self.epoch,
            version=self.ordering.version,
            start=self.start,
            length=len(self),
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return what is copied and pickled: all but the herd and the open iterators."""
        position = self.state_dict()["position"]
        state = self.__dict__ | {"_feeder": None}
        state["_resumed"] = self.ordering.epoch, position
        del state["_batches"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._batches = Batches(self.batch_size, self.unit, skips=self._skips)
        self._begin_epoch()

    def fed_by(self, feeder: Feeder | None) -> None:
        """Let somebody feed gradients back, who is told before the order is read or advanced."""
        # Weak: it holds the model, which may be dropped before the sampler.
        self._feeder = None if feeder is None else weakref.ref(feeder)

    @property
    def _told(self) -> Feeder:
        """Who is told before the order is read or advanced."""
        return (self._feeder and self._feeder()) or _NOBODY

    @property
    def attached(self) -> bool:
        """Whether somebody feeds gradients back."""
        return self._told is not _NOBODY

    def __iter__(self) -> EpochIterator:
        """Return an iterator over this rank's examples in the current order."""
        self._told.before_iterating()
        if self._ended_short():
            self.end_epoch()
        elif self._rest_is_done():
            self._resumed, self._loader_skips = (self.ordering.epoch, 0), False
            self._batches.start_over()
        begin, skipped = (0, self.start) if self._loader_skips else (self.start, 0)
        epoch_pass = EpochPass(begin, len(self), self.ordering.version, skipped // self.batch_size)
        iterator = EpochIterator(self, epoch_pass)
        epoch_pass.iterator = weakref.ref(iterator)
        self._batches.begin_pass(epoch_pass)
        return iterator

    def follow(self, count: LoopCount) -> None:
        """Let a loop count the batches it receives; see `Herd.batches`."""
        self._batches.follow(count)

    def _rest_is_done(self) -> bool:
        """Return whether a loop has trained on what a resumed epoch had left, and skipped batches.

        The epoch goes on then, as in a loop that was not stopped: over all of its examples. A pass
        that trained on nothing does not count: it may have been an evaluation.
        """
        last = self._batches.last_pass
        return self._is_over(last) and self.start > 0 and last.handed_out == last.length

    def _ended_short(self) -> bool:
        """Return whether a loop has ended with less than a batch missing: the loader drops it."""
        # What all ranks have learned, which is the same on all of them, not what this one fed.
        missing = len(self) - self.ordering.steps * self.unit
        last = self._batches.last_pass or self._batches.newest
        return self._is_over(last) and 0 < missing < self.batch_size

    def _is_over(self, last: EpochPass | None) -> TypeGuard[EpochPass]:
        """Return whether a pass went over the current order, and its loop has ended."""
        return last is not None and last.version == self.ordering.version and not last.alive

    def __len__(self) -> int:
        return (self.sharding.length if self._rest is None else len(self._rest)) * self.unit

    @property
    def _rest(self) -> Tensor | None:
        """This rank's share of the units that another number of ranks left over, if any."""
        rest = self.ordering.rest
        if rest is None:
            return None
        return stripe(rest, self.world.rank, self.world.size, self.sharding.drop_last)

    @property
    def finishing_rest(self) -> bool:
        """Whether this epoch is what another number of ranks left over: nothing is learned."""
        return self.ordering.rest is not None

    @property
    def start(self) -> int:
        """Position at which iterators start: 0, or where a resumed epoch continues."""
        epoch, position = self._resumed
        return position if epoch == self.ordering.epoch else 0

    def indices(self) -> list[int]:
        """Return the examples this rank visits in the current epoch, in order."""
        self._told.before_reading()
        rank, units = self.world.rank, self._rest
        if units is not None:
            return list(self.sharding.examples_of(units).tolist())
        return list(self.sharding.indices(rank, self.ordering.orders[rank]).tolist())

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that comes next. Setting the current one again changes nothing.

        An epoch that was left early ends with what was observed of it, and units that were not
        visited come first in the next one. A learned order cannot go back: naming an epoch that is
        over (frameworks count from 0 after a restart) only tells that the loop has moved on.
        """
        check_whole("epoch", epoch, 0)
        self._told.finish()
        named, self._named_epoch = self._named_epoch, epoch
        if named is None and self._resumed == (epoch + 1, 0) == (self.ordering.epoch, 0):
            warnings.warn(
                f"the loaded state was saved behind the last batch of epoch {epoch}, so the loop, "
                "which names it again, trains one epoch more: begin at sampler.epoch",
                stacklevel=2,
            )
        if not self.ordering.policy.needs_rows:
            if epoch != self.ordering.epoch:
                self.end_epoch(epoch)
        elif named is not None and epoch > named and self._loop_moved_on(epoch):
            self.end_epoch(max(epoch, self.ordering.epoch + 1))
        elif epoch > self.ordering.epoch:
            self.end_epoch(epoch)

    def _loop_moved_on(self, epoch: int) -> bool:
        """Say whether a loop that names `epoch` has been through the current order."""
        if self._batches.last_pass is not None:
            return True
        # A pass without gradients through an order that is new may be an evaluation.
        begun = epoch != self.ordering.epoch or self.ordering.steps > 0
        return begun and self._batches.loop_ran(self.ordering.version)

    def end_epoch(self, next_epoch: int | None = None) -> None:
        """Adopt the next order."""
        ordering = self.ordering
        if self.attached and not ordering.steps and self._batches.loop_ran(ordering.version):
            warnings.warn(
                f"epoch {self.epoch} was handed out, but no gradient came back, so nothing was "
                "learned from it: is the attached model the one that is trained?",
                stacklevel=3,
            )
        self.ordering.end_epoch(next_epoch)
        self._loader_skips = False
        self._begin_epoch()

    def current_batch(self) -> BatchTicket | None:
        """Return the batch that a forward which begins now is for; see `Batches.current`."""
        if not self.ordering.policy.needs_rows:  # Which units count does not matter.
            return None
        return self._batches.current()

    def is_current(self, ticket: BatchTicket) -> bool:
        """Return whether a batch is of the current order."""
        return ticket.epoch_pass.version == self.ordering.version

    def examples_of(self, ticket: BatchTicket) -> int:
        """Return the number of examples of a batch."""
        return self._batches.span(ticket)[1]

    def claim(
        self, ticket: BatchTicket | None = None, indices: Sequence[int] | None = None
    ) -> BatchClaim | None:
        """Return the units that a gradient belongs to, and count them as fed back.

        Args:
            ticket: The batch of its forward, as `current_batch` returned it; by default the one
                that a forward would be for now.
            indices: The examples of the batch, for loaders that deliver out of order.

        Returns:
            None for a second gradient of the same batch, and for one of an earlier order.

        Raises:
            RuntimeError: The sampler has not handed out a batch.
            ValueError: The examples are not a batch of this epoch, or are needed and not given.
        """
        if indices is not None:
            self._told.before_reading()
            return self._batches.claim_examples(indices, self.indices)
        if not self.ordering.policy.needs_rows:
            return self._batches.claim_next()
        return self._batches.claim(ticket)

    def observe(
        self, rows: Rows | ImplicitRows | None, seen: Tensor | None = None, *,
        first: int | None = None,
    ) -> None:  # fmt: skip
        """Learn from the next units; arguments as in `Ordering.observe`.

        After the last unit the next order is adopted: forgetting `set_epoch` does not freeze it.
        """
        self.ordering.observe(rows, seen, first=first)
        self._stop_if_broken()
        self.end_if_complete()

    def learn(
        self, rows: Rows, seen: Tensor | None = None, *, first: int | None = None
    ) -> Script[None]:
        """Learn from the next units, on all ranks together; see `Ordering.learn`."""
        yield from self.ordering.learn(rows, seen, first=first)
        self._stop_if_broken()
        self.end_if_complete()

    def note_finite(self, finite: Tensor) -> None:
        """Note which of the last time steps had finite rows; see `Ordering.note_finite`."""
        self.ordering.note_finite(finite)
        if not finite.all():
            self._broken.note(1)  # also those that are not the last
        self._stop_if_broken()

    def _stop_if_broken(self) -> None:
        """Say once that gradients are not finite; raise after many in a row, on all ranks alike."""
        if batches := self.ordering.broken * self.unit // self.batch_size:
            self._broken.note(batches)

    def end_if_complete(self) -> None:
        """Adopt the next order after the last unit."""
        if self.ordering.steps == self.ordering.length:
            self.end_epoch()

    def skip_rest(self) -> None:
        """Count the claimed batch of what other ranks left over; after the last the epoch ends."""
        self.ordering.skip_rest(self._batches.position // self.unit)
        if self.ordering.steps * self.unit == len(self):
            self.end_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Return a cursor of constant size: epoch, position and version of the order.

        What was learned is in `ordering.state_dict()`: load that before the cursor.
        """
        self._told.before_reading()
        return self.cursor()

    def cursor(self, position: int | None = None) -> dict[str, Any]:
        """Return the cursor of a position in the current order; None: of what is known now."""
        ordering = self.ordering
        if position is None:
            position = max(self._batches.position, ordering.steps * self.unit)
        return {"epoch": ordering.epoch, "position": position, "version": ordering.version}

    def load_state_dict(
        self, state: Mapping[str, Any], *, skipped_by: Literal["sampler", "loader"] = "sampler"
    ) -> None:
        """Continue where `state_dict` was taken, with other workers at what is left of the epoch.

        Args:
            state: A cursor.
            skipped_by: Who skips the batches of the epoch that were trained on already: iterators
                of this sampler, or "loader", a framework that skips them by itself. Never both.
        """
        check_choice("skipped_by", skipped_by, "sampler", "loader")
        check_state(state, "epoch")
        self._loader_skips = skipped_by == "loader"
        self._named_epoch = None
        self._resumed = (state["epoch"], self.position_of(state))
        self._begin_epoch()
        if self.finishing_rest and not len(self):  # less than a round, which is dropped
            self.end_epoch()

    def position_of(self, state: Mapping[str, Any]) -> int:
        """Return the position of a cursor in the current order.

        Raises:
            RuntimeError: The cursor belongs to another order.
            ValueError: It is out of range, or not where another number of workers saved its order.
        """
        if not self.ordering.policy.needs_rows:
            self.set_epoch(state["epoch"])
        ordering = self.ordering
        if ordering.resharded_from is not None and state["version"] == ordering.resharded_from[0]:
            steps = ordering.resharded_from[1]
            if state["position"] != steps * self.unit:
                raise ValueError(
                    f"position {state['position']} is not where its ordering was saved, "
                    f"{steps * self.unit}: to continue with another number of workers in "
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
        if not 0 <= state["position"] <= len(self):
            raise ValueError(f"position must be in [0, {len(self)}], got {state['position']}")
        position: int = state["position"]
        return position
