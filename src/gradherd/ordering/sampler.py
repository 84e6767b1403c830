"""The sampler a DataLoader takes: torch's DistributedSampler with a learned order.

Iterating changes nothing. The order of an epoch is fixed when `iter()` is called, so loader
workers may prefetch as they like; it moves on when the epoch's last gradient is observed, or
when `set_epoch` names another epoch, whichever comes first.
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler, IterableDataset

from gradherd.comm.world import World
from gradherd.ordering.implicit_rows import ImplicitRows
from gradherd.ordering.ordering import Ordering
from gradherd.ordering.registry import Policy, make_policy
from gradherd.ordering.reshard import turns
from gradherd.ordering.sharding import UnitSharding
from gradherd.ordering.signed import Reduce
from gradherd.ordering.walks import Claim, Pass, Places, Walk, Walks, calling_loader


class Feedback(Protocol):
    """Feeds gradients back to a sampler, some of it beside the training loop."""

    def wait(self) -> None:
        """Return when what was handed over has been learned. Other ranks need not call it."""
        ...

    def catch_up(self) -> None:
        """Hand over the last backward, then wait."""
        ...

    def finish(self) -> None:
        """Let everything be learned that was fed back so far, on all ranks at the same point."""
        ...


class OrderedSampler(DistributedSampler[Any]):
    """Hand out each worker's examples in the order its policy found.

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
                f"dataset must be map-style, with a length, got {type(dataset).__name__}: an order "
                "cannot be given to a stream"
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
        self.feedback: Feedback | None = None
        """Who feeds gradients back, and must be heard before the order is read."""
        self._resumed = (0, 0)  # epoch, and the position at which its iterators start
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self.epoch = self.ordering.epoch
        self.num_samples = len(self)
        self.total_size = self.num_samples * self.world.size
        self._walks = Walks(self.epoch, len(self), self.start)
        self._places: Places | None = None  # made when a batch is told by its examples

    def __iter__(self) -> Iterator[int]:
        """Return an iterator over this rank's examples in the current order."""
        loader = calling_loader()
        in_order = bool(getattr(loader, "_in_order", True))
        if self.ordering.policy.needs_rows and not in_order and self.feedback is None:
            raise ValueError(_OUT_OF_ORDER)
        if self.feedback is not None:
            self.feedback.catch_up()
        self._walks.leave(loader)
        if self._walks.ended_short(self.batch_size):
            self.end_epoch()
        walk = Walk(self.start, self.start, in_order)
        found = Pass(self, walk)
        walk.iterator = weakref.ref(loader or found)
        self._walks.begin(walk)
        return found

    def __len__(self) -> int:
        return (self.sharding.length if self._turns is None else len(self._turns)) * self.unit

    @property
    def _turns(self) -> Tensor | None:
        """This rank's units of what another number of ranks has left of the epoch, if they have."""
        rest = self.ordering.rest
        if rest is None:
            return None
        return turns(rest, self.world.rank, self.world.size, self.sharding.drop_last)

    @property
    def resting(self) -> bool:
        """Whether this epoch is what another number of ranks has left: nothing is learned then."""
        return self.ordering.rest is not None

    @property
    def start(self) -> int:
        """Position at which iterators start: 0, or where a resumed epoch goes on."""
        epoch, position = self._resumed
        return position if epoch == self.ordering.epoch else 0

    def indices(self) -> list[int]:
        """Return the examples this rank visits in the current epoch, in order."""
        self._wait()
        if (units := self._turns) is not None:
            found = self.sharding.examples_of(units)
        else:
            found = self.sharding.indices(self.world.rank, self.ordering.orders[self.world.rank])
        indices: list[int] = found.tolist()
        return indices

    def set_epoch(self, epoch: int) -> None:
        """Name the epoch that comes next. Naming the current one again changes nothing.

        An epoch that was left early is closed with what was observed of it; units not seen keep
        their place.
        """
        if self.feedback is not None:
            self.feedback.finish()
        if epoch != self.ordering.epoch:
            self.end_epoch(epoch)

    def end_epoch(self, next_epoch: int | None = None) -> None:
        """Adopt the order that follows from what was observed."""
        self.ordering.end_epoch(next_epoch)
        self._begin_epoch()

    def claim(self, indices: Sequence[int] | None = None) -> Claim:
        """Return which units the next batch's gradient is for, and count them as fed back.

        Args:
            indices: The batch's examples, where they do not arrive in order.

        Raises:
            RuntimeError: The sampler has not handed out that batch.
            ValueError: The examples are not a batch of this epoch, or are needed and not given.
        """
        walk, first, count = self._walks.next_batch(self.batch_size)
        if indices is not None:
            self._places = self._places or Places(self.indices())
            first, count = self._places.of(indices, self.unit), len(indices)
        elif not walk.in_order and self.ordering.policy.needs_rows:
            raise ValueError(_OUT_OF_ORDER)
        self._walks.position += count
        return Claim(self.ordering.epoch, first // self.unit, count // self.unit, count)

    def observe(
        self,
        rows: Tensor | ImplicitRows | None,
        seen: Tensor | None = None,
        *,
        first: int | None = None,
        reduce: Reduce | None = None,
    ) -> None:
        """Learn from the next units; arguments as in `Ordering.observe`.

        After the last unit of an epoch the next order is adopted, so forgetting `set_epoch` does
        not freeze it.

        Args:
            rows: Gradient of the unit each worker visited, step by step.
            seen: Which of them are real.
            first: Time step of the first one, where it is not the next: steps in between were
                missed, and an earlier one means that the epoch was started over.
            reduce: Completes inner products of shards.
        """
        if first is not None and first < self.ordering.steps:
            self.ordering.restart_epoch()
        if first is not None:
            self.ordering.skip_to(first)
        self.ordering.observe(rows, seen, reduce=reduce)
        if self.ordering.steps == self.ordering.length:
            self.end_epoch()

    def pass_over(self) -> None:
        """Count the claimed batch of what other ranks have left; after the last the epoch ends."""
        self.ordering.pass_rest(self._walks.position // self.unit)
        if self.ordering.steps * self.unit == len(self):
            self.end_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Return a cursor of constant size: which epoch, how far, which order.

        Loaders ask for this at every batch and do not copy it. What was learned is in
        `ordering.state_dict()`: save that with the model, and load it before the cursor.
        """
        self._wait()
        return self.cursor(max(self._walks.position, self.ordering.steps * self.unit))

    def _wait(self) -> None:
        if self.feedback is not None:
            self.feedback.wait()

    def cursor(self, position: int) -> dict[str, Any]:
        """Return the cursor of a position in the current order."""
        ordering = self.ordering
        return {"epoch": ordering.epoch, "position": position, "version": ordering.version}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; iterators start there until the epoch ends.

        With another number of workers they start with what is left of the epoch.
        """
        self._resumed = (state["epoch"], self.position_of(state))
        self._begin_epoch()
        if self.resting and not len(self):  # Less than a round was left, and is dropped.
            self.end_epoch()

    def position_of(self, state: Mapping[str, Any]) -> int:
        """Return where a cursor stands in the order at hand; raise if it belongs to another."""
        if not self.ordering.policy.needs_rows:
            self.set_epoch(state["epoch"])
        ordering = self.ordering
        if ordering.came_from is not None and state["version"] == ordering.came_from[0]:
            steps = ordering.came_from[1]
            if state["position"] != steps * self.unit:
                raise ValueError(
                    f"this position, {state['position']}, is not where its ordering was saved, "
                    f"{steps * self.unit}: another number of workers can go on in mid-epoch where "
                    "a herd is attached and its state is saved, else from an epoch's start"
                )
            return 0  # What comes before it is not in the order any more.
        if (state["epoch"], state["version"]) != (ordering.epoch, ordering.version):
            raise RuntimeError(
                f"this position belongs to order {state['version']} of epoch {state['epoch']}, the "
                f"sampler holds order {ordering.version} of epoch {ordering.epoch}; load the "
                "state of its ordering first: sampler.ordering.load_state_dict(...)"
            )
        if not 0 <= state["position"] <= len(self):
            raise ValueError(f"position must be in [0, {len(self)}], got {state['position']}")
        position: int = state["position"]
        return position


_OUT_OF_ORDER = (
    "DataLoader(in_order=False) delivers batches in another order than the sampler's, so gradients "
    "would be taken for those of other examples; use in_order=True, or tell attach's herd the "
    "examples of each batch: herd.observe(indices)"
)
