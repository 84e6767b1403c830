"""The orders of all workers, and how they change from epoch to epoch.

The state is global: every rank holds the same orders and updates them in the same way, so any rank
can save them and any number of ranks can load them. There is no collective that distributes orders;
what keeps ranks equal is that they see the same bits (`version` is compared with every batch).

Shapes: b time steps of a call, M workers, n_i units of worker i, D columns of a row.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gradherd.comm.checks import check_state
from gradherd.comm.script import Script, check_script, run
from gradherd.comm.world import World
from gradherd.ordering.bounds import HerdingWatch
from gradherd.ordering.implicit import ImplicitRows
from gradherd.ordering.policy import EpochState, Policy, Rows, ShardedRows, Start, all_seen
from gradherd.ordering.random import SeededRandom
from gradherd.ordering.sharding import (
    can_reshard,
    check_orders,
    check_reordered,
    own_units,
    sequence,
)

# Layout of a saved state; states of another one are refused.
_FORMAT = 2
_ALONE = World.single()


class Ordering:
    """Every worker's order of its own units, learned from the gradients it observes.

    Reading changes nothing; `observe`, `learn`, `skip_to` and `end_epoch` advance the state.

    >>> from gradherd.ordering.pair_grab import PairGraB
    >>> ordering = Ordering(PairGraB(), sizes=[4], start="identity")
    >>> ordering.observe(torch.tensor([1.0, 2.0, 5.0, 3.0]).view(4, 1, 1))
    >>> ordering.end_epoch()
    >>> ordering.orders
    (tensor([0, 2, 3, 1]),)
    """

    def __init__(
        self,
        policy: Policy,
        sizes: Sequence[int],
        *,
        seed: int = 0,
        start: Start = "random",
        length: int | None = None,
    ) -> None:
        """Start at epoch 0.

        Args:
            policy: Computes orders from gradients.
            sizes: Number of units of each worker; they may differ.
            seed: Seed of all random choices.
            start: First orders, unless the policy prescribes one.
            length: Time steps of an epoch; by default the units of the longest worker. With
                fewer, the units at the end of a longer order are not visited in that epoch.

        Raises:
            ValueError: There is no worker, a size is negative, or `length` exceeds the sizes.
        """
        if not sizes or min(sizes) < 0:
            raise ValueError(f"sizes must hold at least one worker, none below 0, got {sizes}")
        self.policy = policy
        self.watch: HerdingWatch | None = None
        """Measures the orders, if somebody wants to know."""
        self.random = SeededRandom(seed)
        self.sizes = tuple(int(size) for size in sizes)
        self.length = max(sizes) if length is None else length
        if not 0 <= self.length <= max(sizes):
            raise ValueError(f"length must be in [0, {max(sizes)}], got {length}")
        # Published code starts from random orders, except for HMDA (the order of the file).
        self._orders = [torch.arange(size) for size in sizes]
        if (policy.start or start) == "random":
            self._orders = self.random.permutations(sizes, epoch=0)
        self._state = self._new_state(epoch=0, previous=None)
        if policy.start == "computed":
            self._orders = self._reordered(0)
        self._version: str | None = None
        # Visits of each unit. Only differences matter, and only after epochs that ended early.
        self._visits = [torch.zeros(size, dtype=torch.int32) for size in self.sizes]
        self.rest: Tensor | None = None
        """(n,) global ids of the units of this epoch that another number of workers left over."""
        self.resharded_from: tuple[str, int, int] | None = None
        """Version, steps and number of workers of loaded orders, if that number was another."""

    @property
    def orders(self) -> tuple[Tensor, ...]:
        """(n_i,) unit ids of worker i in visiting order. Never written in place."""
        return tuple(self._orders)

    @property
    def epoch(self) -> int:
        """Epoch of the orders, from 0."""
        return self._state.epoch

    @property
    def steps(self) -> int:
        """Time steps of this epoch that were observed or skipped."""
        return self._state.steps

    @property
    def broken(self) -> int:
        """Time steps in a row whose rows were not finite: nothing is learned from them."""
        return self._state.broken

    def note_finite(self, finite: Tensor) -> None:
        """Note (steps,) which of the time steps just learned had finite rows, where it is known."""
        if finite.all() and self.policy.leaves_out_broken_rows:
            return  # Its signs have said more: products of finite rows may overflow.
        good = finite.nonzero()
        before = self.broken if not len(good) else -1 - int(good[-1])
        self._state.broken = before + len(finite)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the state's tensors that have one column for each column of a row."""
        return self._state.columns

    @property
    def version(self) -> str:
        """Short hash of epoch and orders, equal on two ranks if and only if their orders are."""
        if self._version is None:  # read for every batch, changes once an epoch
            # Eight bytes fit into one int64, so ranks can compare them in one small all-gather.
            digest = hashlib.blake2b(f"{self.epoch} {self.sizes}".encode(), digest_size=8)
            rest = [] if self.rest is None else [self.rest]
            for order in (*self._orders, *rest):
                digest.update(order.numpy().tobytes())
            self._version = digest.hexdigest()
        return self._version

    def observe(
        self, rows: Rows | ImplicitRows | None, seen: Tensor | None = None, *,
        first: int | None = None,
    ) -> None:  # fmt: skip
        """Learn from the next b time steps.

        Args:
            rows: (b, M, D) gradient of the unit each worker visited. None if the policy needs
                none; then `seen` gives b.
            seen: (b, M) which rows are real; all by default. Rows beyond a worker's own units
                never count.
            first: Time step of the first row, if it is not the next one. Steps in between were
                missed; an earlier one means that the epoch was started over.
        """
        # The state outlives the block that this may be called in.
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            run(self._learn(rows, seen, first), _ALONE)

    def learn(
        self, rows: Rows, seen: Tensor | None = None, *, first: int | None = None
    ) -> Script[None]:
        """Learn from rows that may be sharded: ranks then exchange something.

        Arguments as in `observe`; with `ShardedRows`, `seen` is the same on all ranks.
        """
        if isinstance(rows, ShardedRows):
            yield from self._learn(rows, seen, first)
        else:
            self.observe(rows, seen, first=first)

    def _learn(
        self, rows: Rows | ImplicitRows | None, seen: Tensor | None, first: int | None
    ) -> Script[None]:
        seen = self._checked(rows, seen)
        if first is not None and first != self.steps:
            # An epoch that starts over visits the same order again, so what was learned from its
            # first part would count twice.
            if first < self.steps:
                self.restart_epoch()
            self.skip_to(first)
        if self.rest is not None:
            raise RuntimeError(
                "observe() of units that another number of workers left over: they are visited "
                "without learning; call skip_rest()"
            )
        if self.steps + len(seen) > self.length:
            raise RuntimeError(
                f"observe() of {len(seen)} time steps after {self.steps}: the epoch has only "
                f"{self.length}; call end_epoch() first"
            )
        if rows is None:
            rows = torch.empty((*seen.shape, 0))
        elif isinstance(rows, Tensor):
            rows = self._aligned(rows)
        elif not isinstance(rows, ShardedRows):
            rows = self._state.align(rows)
        else:
            rows = replace(rows, blocks=tuple(map(self._aligned, rows.blocks)))
        # A worker that has run out of units repeats one: its row is real, but counts only once.
        if self.steps + len(seen) > min(self.sizes):
            times = torch.arange(self.steps, self.steps + len(seen)).unsqueeze(1)
            seen = seen & (times < torch.tensor(self.sizes))
        self._state.orders = self._orders
        if self.watch is not None:
            self.watch.add(self.steps, rows, seen)
        state, first = self._state, self.steps
        if not (isinstance(rows, Tensor | ShardedRows) or seen.all()):
            self.skip_to(first + len(seen))  # a batch that is not finite
            return
        given: Any = rows
        script = self.policy.observe(state, given, seen, self.random)
        check_script(script, self.policy, "observe")
        yield from script
        if state.steps != first + len(seen):
            raise ValueError(
                f"{self.policy}.observe must add len(seen) = {len(seen)} to state.steps, which is "
                f"{state.steps} after {first}"
            )

    def _aligned(self, rows: Tensor) -> Tensor:
        # Half precision would lose the small differences that signs depend on. Detached, since a
        # running sum with a graph would keep every backward alive.
        exact = rows.dtype in (torch.float32, torch.float64)
        aligned: Tensor = self._state.align(rows.detach() if exact else rows.detach().float())
        return aligned

    def _checked(self, rows: Rows | ImplicitRows | None, seen: Tensor | None) -> Tensor:
        """Return (b, M) which rows are real, or raise if rows and `seen` do not fit."""
        workers, state = len(self.sizes), self._state
        if rows is None:
            if self.policy.needs_rows or seen is None:
                raise ValueError(f"{self.policy} needs rows, got None")
            return seen.cpu()
        shape = rows.shape
        if len(shape) != 3 or shape[1] != workers:
            raise ValueError(f"rows must be (steps, {workers} workers, dim), got {tuple(shape)}")
        # Also those that are left from the epoch before.
        for known in (getattr(state, name) for name in state.columns):
            if known is not None and known.shape[-1] != shape[-1]:
                raise ValueError(f"rows must keep their dim {known.shape[-1]}, got {shape[-1]}")
        if seen is None:
            return all_seen(shape[0], workers)
        if seen.shape != shape[:2]:
            raise ValueError(
                f"seen must be {tuple(shape[:2])} as rows are, got {tuple(seen.shape)}"
            )
        return seen.cpu()

    def skip_to(self, step: int) -> None:
        """Skip the time steps before `step`: units visited there keep their place.

        Raises:
            RuntimeError: The step is behind, or beyond the end of the epoch.
        """
        if not self.steps <= step <= self.length:
            raise RuntimeError(
                f"skip_to({step}) must be between {self.steps}, the steps so far, and "
                f"{self.length}, the steps of an epoch"
            )
        if step > self.steps:
            self._state.skip_to(step)

    def skip_rest(self, step: int) -> None:
        """Count `step` rounds of the rest as visited: nothing is learned from them."""
        self._state.steps = step

    def restart_epoch(self) -> None:
        """Forget what was observed in this epoch; its orders stay."""
        # What was learned in the epoch before is not in doubt.
        before, self._state = self._state, self._new_state(self.epoch, previous=None)
        self._state.adopt(before)

    @torch.inference_mode(False)
    def end_epoch(self, next_epoch: int | None = None, *, rest_follows: bool = False) -> None:
        """Adopt the next orders.

        Units whose gradient was not seen keep their place, but those that were not visited at all
        (the epoch ended early, or does not reach them) come first: otherwise an epoch that always
        ends early would never get to them. After such a one, units with fewer visits come first.

        Args:
            next_epoch: Number of the next epoch; one more than this one by default.
            rest_follows: Units that were not visited will be, in this epoch.
        """
        following = self.epoch + 1 if next_epoch is None else next_epoch
        visited = self.length if rest_follows else self.steps if self.rest is None else 0
        before = self._orders
        self._orders = self._reordered(following)
        if self.policy.needs_rows and visited:
            for worker, order in enumerate(self._orders):
                self._visits[worker][before[worker][:visited]] += 1
                order = order.roll(max(0, len(order) - visited))
                if visited < self.length:
                    order = order[self._visits[worker][order].argsort(stable=True)]
                self._orders[worker] = order
        broken = self.broken
        self._state = self._new_state(following, previous=self._state)
        self._state.broken = broken
        self._version = self.rest = self.resharded_from = None

    def _reordered(self, epoch: int) -> list[Tensor]:
        orders = self.policy.reorder(self._orders, self._state, epoch, self.random)
        # A wrong order would train on some units twice and on others never, without an error.
        return check_reordered(orders, self.sizes, self.policy)

    def _new_state(self, epoch: int, previous: EpochState | None) -> EpochState:
        if self.watch is not None:
            self.watch.end(complete=previous is not None)
        state: EpochState = self.policy.new_state(self.sizes, epoch, previous)
        return state

    def map_columns(self, change: Callable[[Tensor], Tensor]) -> None:
        """Convert each (D,) row of the state to the columns that later rows will have."""
        for name in self._state.columns:
            rows = getattr(self._state, name)
            if rows is not None:
                setattr(self._state, name, torch.stack([change(row) for row in rows]))

    def state_dict(self, whole: Callable[[Tensor], Tensor] | None = None) -> dict[str, Any]:
        """Return everything that determines later orders, as tensors, integers and strings.

        Args:
            whole: Where rows are sharded: takes this rank's (C,) columns of a row and returns the
                whole (D,) row.
        """
        balance = self._state.state_dict()
        if whole is not None:
            for name in self._state.columns:
                if name in balance:
                    balance[name] = torch.stack([whole(row) for row in balance[name]])
        state: dict[str, Any] = {
            "format": _FORMAT,
            "policy": repr(self.policy),
            "seed": self.random.seed,
            "length": self.length,
            "orders": torch.cat(self._orders),
            "visits": torch.cat(self._visits),
            "balance": balance,
        }
        return state if self.rest is None else state | {"rest": self.rest.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken.

        The number of workers may differ. Then the new orders contain what the old workers had
        learned of this epoch, and `rest` is what they had not visited.

        Raises:
            ValueError: The state is damaged, or of a run with other settings.
        """
        if state.get("format") != _FORMAT:
            raise ValueError(
                f"state has format {state.get('format')!r}, expected {_FORMAT}: it was saved by "
                "another version of gradherd; start the order anew"
            )
        check_state(state, "policy", "seed", "orders", "visits", "balance")
        saved = state["balance"]
        check_state(saved, "sizes", "epoch")
        sizes = tuple(saved["sizes"])
        movable = can_reshard(sizes, self.sizes)
        for name, theirs, ours in (
            ("policy", state["policy"], repr(self.policy)),
            ("seed", state["seed"], self.random.seed),
            ("units", sum(sizes), sum(self.sizes)),
            ("units per worker", sizes, sizes if movable else self.sizes),
        ):
            if theirs != ours:
                raise ValueError(f"state was saved with {name} {theirs}, this run has {ours}")
        balance: EpochState = self.policy.new_state(sizes, saved["epoch"], None)
        balance.load(saved)
        for key in ("orders", "visits"):
            if (units := len(state[key])) != sum(self.sizes):
                raise ValueError(f"state is damaged: {key} of {units} units, not {sum(self.sizes)}")
        orders = [order.long().clone() for order in state["orders"].split(sizes)]
        rest = None if "rest" not in state else state["rest"].long().clone()
        check_orders(orders, rest)
        if sizes == self.sizes:  # All checks came first: a refused state changes nothing.
            self._orders, self._state, self.rest = orders, balance, rest
            self._visits = [v.int().clone() for v in state["visits"].split(sizes)]
            self._version = self.resharded_from = None
        else:
            self._adopt(orders, balance, rest, state.get("length", max(sizes)))

    def _adopt(
        self, orders: list[Tensor], balance: EpochState, rest: Tensor | None, length: int
    ) -> None:
        """Take over the orders of another number of workers."""
        theirs = Ordering(self.policy, balance.sizes, seed=self.random.seed, length=length)
        theirs._orders, theirs._state, theirs.rest = orders, balance, rest
        steps, workers, version = theirs.steps, len(theirs.sizes), theirs.version
        # Computed before reordering: what is left of the epoch follows the order it began with.
        left = sequence(orders, steps, length) if rest is None else rest[steps * workers :]
        # The old workers' units move as far as they have been learned; the epoch stays the same.
        if self.policy.needs_rows:
            theirs.end_epoch(theirs.epoch, rest_follows=True)
        mine = len(self.sizes)
        self._orders = own_units(sequence(theirs.orders), mine)
        # Running sums and half pairs belong to the old workers' streams: pairs restart.
        self._state = self._new_state(balance.epoch, previous=None)
        self._state.adopt(theirs._state)
        self.rest = left if steps or rest is not None else None
        self._version, self.resharded_from = None, (version, steps, workers)
