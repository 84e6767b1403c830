"""The sampler for a DataLoader: torch's DistributedSampler with a learned order.

Iterating changes nothing. The order of an epoch is fixed when `iter()` is called, so loader workers
may prefetch as they like. The next order is adopted when the last gradient of the epoch has been
observed, or when `set_epoch` names another epoch, whichever comes first.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler, IterableDataset
from torch.utils.hooks import RemovableHandle

from gradherd.comm.script import Script
from gradherd.comm.world import World
from gradherd.ordering.coordination import BatchClaim
from gradherd.ordering.implicit_rows import ImplicitRows
from gradherd.ordering.iterators import (
    EpochIterator,
    EpochProgress,
    IteratorProgress,
    PositionIndex,
    find_loader_pass,
)
from gradherd.ordering.ordering import Ordering
from gradherd.ordering.policy import Policy
from gradherd.ordering.registry import make_policy
from gradherd.ordering.reshard import stripe
from gradherd.ordering.sharding import UnitSharding


class OrderedSampler(DistributedSampler[Any]):
    """Hand out each worker's examples in the order that its policy has learned.

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
    ) -> None:
        """UnitSharding the data set to the workers of `world`.

        Args:
            dataset: Map-style data set, the same on every rank.
            policy: A name from `POLICIES`, or a policy object.
            batch_size: Examples in a rank's batch, as given to the DataLoader.
            unit: Consecutive examples ordered as one: 1 = each for itself, `batch_size` = whole
                batches (no gradients of single examples needed).
            seed: Of all random choices; must be equal on all ranks.
            world: Rank and number of ranks; found out by default.
            drop_last: Visit equal numbers of units on all ranks by leaving some out (other ones
                in each epoch) instead of repeating some.
        """
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise ValueError(
                f"dataset must be map-style, with a length, got {type(dataset).__name__}: a stream "
                "cannot be reordered"
            )
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if not 1 <= unit <= batch_size or batch_size % unit:
            raise ValueError(f"unit must divide batch_size {batch_size}, got {unit}")
        world = World.detect() if world is None else world
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
            make_policy(policy) if isinstance(policy, str) else policy,
            self.sharding.sizes,
            seed=seed,
            length=self.sharding.length,
        )
        self._read_hooks: OrderedDict[int, Callable[[str], None]] = OrderedDict()
        self._resumed = (0, 0)  # epoch, and the position at which its iterators start
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self.epoch = self.ordering.epoch
        self.num_samples = len(self)
        self.total_size = self.num_samples * self.world.size
        self._progress = EpochProgress(
            self.epoch, len(self), self.start, lambda: find_loader_pass(self)
        )
        self._positions: PositionIndex | None = None  # built when a batch is given by its examples

    def register_read_hook(self, hook: Callable[[str], None]) -> RemovableHandle:
        """Have `hook(what)` called before the order is read or advanced.

        Whoever feeds gradients back uses it to hand in what is still under way. `what` says why:

        * "iterate": a new iterator is about to start;
        * "end": the epoch is about to end, on all ranks at the same point;
        * "read": the order or its position is about to be read, perhaps on this rank only.
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
        if self._progress.ended_short(self.batch_size):
            self.end_epoch()
        progress = IteratorProgress(self.start, self.start)
        iterator = EpochIterator(self, progress)
        progress.iterator = weakref.ref(iterator)
        self._progress.add(progress)
        return iterator

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
        if (units := self._rest) is not None:
            examples = self.sharding.examples_of(units)
        else:
            examples = self.sharding.indices(self.world.rank, self.ordering.orders[self.world.rank])
        indices: list[int] = examples.tolist()
        return indices

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that comes next. Setting the current one again changes nothing.

        An epoch that was left early ends with what was observed of it; units that were not seen
        keep their place.
        """
        self._call_read_hooks("end")
        if epoch != self.ordering.epoch:
            self.end_epoch(epoch)

    def end_epoch(self, next_epoch: int | None = None) -> None:
        """Adopt the next order."""
        self.ordering.end_epoch(next_epoch)
        self._begin_epoch()

    def claim(self, indices: Sequence[int] | None = None) -> BatchClaim:
        """Return the units that the next gradient belongs to, and count them as fed back.

        Args:
            indices: The examples of the batch, for loaders that deliver out of order.

        Raises:
            RuntimeError: The sampler has not handed out that batch.
            ValueError: The examples are not a batch of this epoch, or are needed and not given.
        """
        progress, first, count = self._progress.next_batch(self.batch_size)
        if indices is not None:
            self._positions = self._positions or PositionIndex(self.indices())
            first, count = self._positions.find(indices, self.unit), len(indices)
        elif self.ordering.policy.needs_rows:
            if progress.loader is not None and not progress.loader.in_order:
                raise ValueError(_OUT_OF_ORDER)
        self._progress.position += count
        return BatchClaim(self.ordering.epoch, first // self.unit, count // self.unit, count)

    def observe(
        self,
        rows: Tensor | ImplicitRows | None,
        seen: Tensor | None = None,
        *,
        first: int | None = None,
    ) -> None:
        """Learn from the next units; arguments as in `Ordering.observe`.

        After the last unit of an epoch the next order is adopted, so forgetting `set_epoch` does
        not freeze it.
        """
        self.ordering.observe(rows, seen, first=first)
        self._end_if_complete()

    def observe_sharded(self, rows: Tensor, *, first: int | None = None) -> Script[None]:
        """Learn from this rank's columns of the next units; see `Ordering.observe_sharded`."""
        yield from self.ordering.observe_sharded(rows, first=first)
        self._end_if_complete()

    def _end_if_complete(self) -> None:
        if self.ordering.steps == self.ordering.length:
            self.end_epoch()

    def skip_rest(self) -> None:
        """Count the claimed batch of what other ranks left over; after the last the epoch ends."""
        self.ordering.skip_rest(self._progress.position // self.unit)
        if self.ordering.steps * self.unit == len(self):
            self.end_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Return a cursor of constant size: epoch, position and version of the order.

        Loaders ask for it at every batch and do not copy it. What was learned is in
        `ordering.state_dict()`: save that with the model, and load it before the cursor.
        """
        self._call_read_hooks("read")
        return self.cursor(max(self._progress.position, self.ordering.steps * self.unit))

    def cursor(self, position: int) -> dict[str, Any]:
        """Return the cursor of a position in the current order."""
        ordering = self.ordering
        return {"epoch": ordering.epoch, "position": position, "version": ordering.version}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken; iterators start there until the epoch ends.

        With another number of workers they visit what is left of the epoch.
        """
        self._resumed = (state["epoch"], self.position_of(state))
        self._begin_epoch()
        if self.finishing_rest and not len(self):  # Less than a round was left, and is dropped.
            self.end_epoch()

    def position_of(self, state: Mapping[str, Any]) -> int:
        """Return the position of a cursor in the current order; raise if it is of another one."""
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


_OUT_OF_ORDER = (
    "DataLoader(in_order=False) delivers batches in another order than the sampler's, so gradients "
    "would be credited to the wrong examples; use in_order=True, or give the herd the examples of "
    "each batch: herd.observe(indices)"
)
