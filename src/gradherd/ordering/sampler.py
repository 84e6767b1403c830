"""The sampler for a DataLoader: torch's DistributedSampler with a learned order.

Iterating changes nothing. The order of an epoch is fixed when `iter()` is called, so loader workers
may prefetch as they like. The next order is adopted when the last gradient of the epoch has been
observed, or when `set_epoch` names another epoch.
"""

import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler
from torch.utils.hooks import RemovableHandle

from gradherd.comm.checks import check_state, check_whole
from gradherd.comm.script import Script
from gradherd.comm.world import World
from gradherd.ordering.balance import ImplicitRows
from gradherd.ordering.batch_claims import BatchClaim
from gradherd.ordering.iterators import CountedPass, EpochIterator, EpochPass, LoaderRegistry
from gradherd.ordering.ledger import (
    BEFORE_ANY_EXAMPLE,
    BatchLedger,
    BatchTicket,
    EpochClaims,
    cursor_position,
)
from gradherd.ordering.ordering import Ordering
from gradherd.ordering.policy import Policy
from gradherd.ordering.registry import find_policy
from gradherd.ordering.sharding import UnitSharding, check_sampling, stripe


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
        ahead: int | None = None,
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
            ahead: Batches that the loop itself fetches before it trains on the one at hand: 0 in a
                plain loop, 1 if it copies the next batch to the GPU. Needed only if several
                batches arrive before the first forward.
        """
        check_sampling(dataset, batch_size, unit, seed, ahead)
        world = World.detect() if world is None else world
        if not isinstance(world, World):
            raise ValueError(f"world must be World(rank=0, size=4) or None, got {world!r}")
        self.sharding = UnitSharding(len(dataset), unit, world.size, drop_last)  # type: ignore[arg-type]
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
        self._read_hooks: OrderedDict[int, Callable[[str], None]] = OrderedDict()
        self._ahead = ahead
        self.counted_pass: CountedPass | None = None  # set by wrappers that count for the loop
        self._begin_ledger()
        self._resumed = (0, 0)  # epoch, and the position at which its iterators start
        self._loader_skips = False  # whether the loader skips to that position by itself
        self._named_epoch: int | None = None  # the last argument of set_epoch
        self._begin_epoch()

    def _begin_ledger(self) -> None:
        self._ledger = BatchLedger(
            self.batch_size,
            self._ahead,
            lambda it, one: self.counted_pass or self._loaders.find_pass(self, it, one.drawn_by),
        )
        self._loaders = LoaderRegistry()

    def _begin_epoch(self) -> None:
        self.epoch = self.ordering.epoch
        self.num_samples = len(self)
        self.total_size = self.num_samples * self.world.size
        self._claims = EpochClaims(
            epoch=self.epoch,
            version=self.ordering.version,
            start=self.start,
            length=len(self),
            batch_size=self.batch_size,
            unit=self.unit,
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return what is copied and pickled: all but the herd and the open iterators."""
        position = self.state_dict()["position"]
        state = self.__dict__ | {"_read_hooks": OrderedDict()}
        state["_resumed"] = self.ordering.epoch, position
        for name in ("_ledger", "_loaders", "_claims"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin_ledger()
        self._begin_epoch()

    def register_read_hook(self, hook: Callable[[str], None]) -> RemovableHandle:
        """Call `hook(what)` before the order is read or advanced.

        Whoever feeds gradients back hands in what is under way. `what` is "iterate" before an
        iterator starts, "end" before the epoch may end (on all ranks at the same point), and "read"
        before the order or its position is read, perhaps on this rank only.
        """
        handle = RemovableHandle(self._read_hooks)
        self._read_hooks[handle.id] = hook
        return handle

    @property
    def attached(self) -> bool:
        """Whether somebody feeds gradients back."""
        return bool(self._read_hooks)

    def _call_read_hooks(self, what: str) -> None:
        for hook in list(self._read_hooks.values()):
            hook(what)

    def __iter__(self) -> EpochIterator:
        """Return an iterator over this rank's examples in the current order."""
        self._call_read_hooks("iterate")
        if self._ended_short():
            self.end_epoch()
        begin, skipped = (0, self.start) if self._loader_skips else (self.start, 0)
        epoch_pass = EpochPass(begin, len(self), self.ordering.version, skipped // self.batch_size)
        iterator = EpochIterator(self, epoch_pass, self.batch_size, self._loaders)
        epoch_pass.iterator = weakref.ref(iterator)
        self._ledger.begin(epoch_pass)
        return iterator

    def _ended_short(self) -> bool:
        """Return whether a loop has ended with less than a batch missing: the loader drops it."""
        last = self._claims.last_pass or self._ledger.newest
        if last is None or last.version != self.ordering.version or last.alive:
            return False
        # What all ranks have learned, which is the same on all of them, not what this one fed.
        return 0 < len(self) - self.ordering.steps * self.unit < self.batch_size

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
        self._call_read_hooks("read")
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
        self._call_read_hooks("end")
        named, self._named_epoch = self._named_epoch, epoch
        if not self.ordering.policy.needs_rows:
            if epoch != self.ordering.epoch:
                self.end_epoch(epoch)
        elif named is not None and epoch > named and self._loop_moved_on(epoch):
            self.end_epoch(max(epoch, self.ordering.epoch + 1))
        elif epoch > self.ordering.epoch:
            self.end_epoch(epoch)

    def _loop_moved_on(self, epoch: int) -> bool:
        """Say whether a loop that names `epoch` has been through the current order."""
        if self._claims.last_pass is not None:
            return True
        # A pass without gradients through an order that is new may be an evaluation.
        begun = epoch != self.ordering.epoch or self.ordering.steps > 0
        return begun and self._ledger.loop_ran(self.ordering.version)

    def end_epoch(self, next_epoch: int | None = None) -> None:
        """Adopt the next order."""
        ordering = self.ordering
        if self.attached and not ordering.steps and self._ledger.loop_ran(ordering.version):
            warnings.warn(
                f"epoch {self.epoch} was handed out, but no gradient came back, so nothing was "
                "learned from it: is the attached model the one that is trained?",
                stacklevel=3,
            )
        self.ordering.end_epoch(next_epoch)
        self._loader_skips = False
        self._begin_epoch()

    def current_batch(self) -> BatchTicket | None:
        """Return the batch that a forward which begins now is for; see `BatchLedger.current`."""
        if not self.ordering.policy.needs_rows:  # Which units count does not matter.
            return None
        return self._ledger.current()

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
            return self._claims.by_indices(indices, self.indices)
        if not self.ordering.policy.needs_rows:
            return self._claims.next_units(self._ledger.newest)
        ticket = ticket or self._ledger.current()
        if ticket is None:
            raise RuntimeError(BEFORE_ANY_EXAMPLE.format(epoch=self.epoch))
        return self._claims.by_ticket(ticket)

    def observe(
        self,
        rows: Tensor | ImplicitRows | None,
        seen: Tensor | None = None,
        *,
        first: int | None = None,
    ) -> None:
        """Learn from the next units; arguments as in `Ordering.observe`.

        After the last unit the next order is adopted: forgetting `set_epoch` does not freeze it.
        """
        self.ordering.observe(rows, seen, first=first)
        self.end_if_complete()

    def observe_sharded(
        self, rows: Tensor, seen: Tensor | None = None, *, first: int | None = None
    ) -> Script[None]:
        """Learn from this rank's columns of the next units; see `Ordering.observe_sharded`."""
        yield from self.ordering.observe_sharded(rows, seen, first=first)
        self.end_if_complete()

    def end_if_complete(self) -> None:
        """Adopt the next order after the last unit."""
        if self.ordering.steps == self.ordering.length:
            self.end_epoch()

    def skip_rest(self) -> None:
        """Count the claimed batch of what other ranks left over; after the last the epoch ends."""
        self.ordering.skip_rest(self._claims.position // self.unit)
        if self.ordering.steps * self.unit == len(self):
            self.end_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Return a cursor of constant size: epoch, position and version of the order.

        What was learned is in `ordering.state_dict()`: load that before the cursor.
        """
        self._call_read_hooks("read")
        return self.cursor(max(self._claims.position, self.ordering.steps * self.unit))

    def cursor(self, position: int) -> dict[str, Any]:
        """Return the cursor of a position in the current order."""
        ordering = self.ordering
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
        if skipped_by not in ("sampler", "loader"):
            raise ValueError(f"skipped_by must be 'sampler' or 'loader', got {skipped_by!r}")
        check_state(state, "epoch")
        self._loader_skips = skipped_by == "loader"
        self._named_epoch = None
        self._resumed = (state["epoch"], self.position_of(state))
        self._begin_epoch()
        if self.finishing_rest and not len(self):  # less than a round, which is dropped
            self.end_epoch()

    def position_of(self, state: Mapping[str, Any]) -> int:
        """Return the position of a cursor in the current order; raise if it is of another one."""
        if not self.ordering.policy.needs_rows:
            self.set_epoch(state["epoch"])
        return cursor_position(state, self.ordering, unit=self.unit, length=len(self))
