"""The orders of all workers, and how they change from epoch to epoch.

The state is global: every rank holds the same orders and updates them in the same way, so any rank
can save them and any number of ranks can load them.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradherd.comm.script import Script, run
from gradherd.comm.world import World
from gradherd.ordering.implicit_rows import ImplicitRows
from gradherd.ordering.policy import COLUMNS, BalanceState, Policy, Start
from gradherd.ordering.seeded_random import SeededRandom
from gradherd.ordering.sharding import is_striped, own_units, sequence

_FORMAT = 2


class Ordering:
    """Every worker's order of its own units, learned from the gradients it observes.

    Reading changes nothing; `observe`, `skip_to` and `end_epoch` advance the state.
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
        """
        if not sizes or min(sizes) < 0:
            raise ValueError(f"sizes must hold at least one worker, none below 0, got {sizes}")
        self.policy = policy
        self.random = SeededRandom(seed)
        self.sizes = tuple(int(size) for size in sizes)
        self.length = max(sizes) if length is None else length
        if not 0 <= self.length <= max(sizes):
            raise ValueError(f"length must be in [0, {max(sizes)}], got {length}")
        if (policy.start or start) == "random":
            self._orders = self.random.permutations(sizes, epoch=0)
        else:
            self._orders = [torch.arange(size) for size in sizes]
        self._state = self._new_state(epoch=0, previous=None)
        self._version: str | None = None
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
    def version(self) -> str:
        """Short hash of epoch and orders, equal on two ranks if and only if their orders are."""
        if self._version is None:  # read for every batch, changes once an epoch
            digest = hashlib.blake2b(f"{self.epoch} {self.sizes}".encode(), digest_size=8)
            rest = [] if self.rest is None else [self.rest]
            for order in (*self._orders, *rest):
                digest.update(order.numpy().tobytes())
            self._version = digest.hexdigest()
        return self._version

    def observe(
        self,
        rows: Tensor | ImplicitRows | None,
        seen: Tensor | None = None,
        *,
        first: int | None = None,
    ) -> None:
        """Learn from the next b time steps.

        Args:
            rows: (b, M, D) gradient of the unit each worker visited. With one worker also b rows
                that are not formed. None if the policy needs none; then `seen` gives b.
            seen: (b, M) which rows are real; all by default. Rows beyond a worker's own units
                never count.
            first: Time step of the first row, if it is not the next one. Steps in between were
                missed; an earlier one means that the epoch was started over.
        """
        run(self._observe(rows, seen, first, sharded=False), World.single())

    def observe_sharded(self, rows: Tensor, *, first: int | None = None) -> Script[None]:
        """Learn from rows of which every rank holds a shard of the columns.

        Args:
            rows: (b, M, D) gradient of the unit each worker visited, D this rank's columns.
            first: As in `observe`.
        """
        return self._observe(rows, None, first, sharded=True)

    def _observe(
        self,
        rows: Tensor | ImplicitRows | None,
        seen: Tensor | None,
        first: int | None,
        *,
        sharded: bool,
    ) -> Script[None]:
        seen = self._checked(rows, seen)
        if first is not None:
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
            # Half precision would lose the small differences that signs are made of.
            exact = rows.dtype in (torch.float32, torch.float64)
            rows = rows.detach() if exact else rows.detach().float()
            rows = self._state.align(rows)
        seen = seen & self._state.valid(self.steps, len(seen))
        yield from self.policy.observe(self._state, rows, seen, self.random, sharded=sharded)

    def _checked(self, rows: Tensor | ImplicitRows | None, seen: Tensor | None) -> Tensor:
        workers, state = len(self.sizes), self._state
        if rows is None:
            if self.policy.needs_rows or seen is None:
                raise ValueError(f"{self.policy} needs rows, got None")
            return seen.cpu()
        if not isinstance(rows, Tensor):
            if workers > 1 or seen is not None:
                raise ValueError(f"rows that are not formed need a single worker, got {workers}")
            return torch.ones((len(rows), 1), dtype=torch.bool)
        if rows.ndim != 3 or rows.shape[1] != workers:
            raise ValueError(
                f"rows must be (steps, {workers} workers, dim), got {tuple(rows.shape)}"
            )
        for known in (state.running, state.mean):
            if known is not None and known.shape[-1] != rows.shape[-1]:
                raise ValueError(
                    f"rows must keep their dim {known.shape[-1]}, got {rows.shape[-1]}"
                )
        if seen is None:
            return torch.ones(rows.shape[:2], dtype=torch.bool)
        if seen.shape != rows.shape[:2]:
            raise ValueError(
                f"seen must be {tuple(rows.shape[:2])} as rows are, got {tuple(seen.shape)}"
            )
        return seen.cpu()

    def skip_to(self, step: int) -> None:
        """Skip the time steps before `step`: units visited there keep their place."""
        if not self.steps <= step <= self.length:
            raise RuntimeError(
                f"skip_to({step}) must be between {self.steps}, the steps so far, and "
                f"{self.length}, the steps of an epoch"
            )
        if step > self.steps:
            self._state.pending = self._state.pending_seen = None
            self._state.steps = step

    def skip_rest(self, step: int) -> None:
        """Count `step` rounds of the rest as visited: nothing is learned from them."""
        self._state.steps = step

    def restart_epoch(self) -> None:
        """Forget what was observed in this epoch; its orders stay."""
        mean, self._state = self._state.mean, self._new_state(self.epoch, previous=None)
        self._state.mean = mean

    def end_epoch(self, next_epoch: int | None = None) -> None:
        """Adopt the next orders; units that were not seen keep their place."""
        following = self.epoch + 1 if next_epoch is None else next_epoch
        self._orders = self.policy.reorder(self._orders, self._state, following, self.random)
        if self.policy.needs_rows:
            # A unit beyond `length` was not visited, so its place would never change: let it come
            # first in the next epoch.
            self._orders = [order.roll(max(0, len(order) - self.length)) for order in self._orders]
        self._state = self._new_state(following, previous=self._state)
        self._version = self.rest = self.resharded_from = None

    def _new_state(self, epoch: int, previous: BalanceState | None) -> BalanceState:
        state = BalanceState.empty(self.sizes, epoch)
        self.policy.begin(state, previous)
        return state

    def map_columns(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply `change` to every (D,) row of the state: later rows have other columns."""
        for name in COLUMNS:
            value = getattr(self._state, name)
            if value is not None:
                setattr(self._state, name, torch.stack([change(row) for row in value]))

    def state_dict(self) -> dict[str, Any]:
        """Return everything that determines later orders, as tensors, integers and strings."""
        state: dict[str, Any] = {
            "format": _FORMAT,
            "policy": repr(self.policy),
            "seed": self.random.seed,
            "length": self.length,
            "orders": torch.cat(self._orders),
            "balance": self._state.state_dict(),
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
        missing = {"policy", "seed", "orders", "balance"} - state.keys()
        if missing:
            raise ValueError(f"state is damaged: it has no {', '.join(sorted(missing))}")
        balance = BalanceState.from_state_dict(state["balance"])
        for name, theirs, ours in (
            ("policy", state["policy"], repr(self.policy)),
            ("seed", state["seed"], self.random.seed),
            ("units", sum(balance.sizes), sum(self.sizes)),
            ("units per worker", *_incompatible_sizes(balance.sizes, self.sizes)),
        ):
            if theirs != ours:
                raise ValueError(f"state was saved with {name} {theirs}, this run has {ours}")
        if len(state["orders"]) != sum(self.sizes):
            raise ValueError(
                f"state is damaged: it orders {len(state['orders'])} units, not {sum(self.sizes)}"
            )
        orders = [order.long().clone() for order in state["orders"].split(balance.sizes)]
        for worker, order in enumerate(orders):
            if not torch.equal(order.sort().values, torch.arange(len(order))):
                raise ValueError(f"state is damaged: worker {worker}'s order is not a permutation")
        rest = None if "rest" not in state else state["rest"].long().clone()
        if rest is not None and not _are_units(rest, sum(self.sizes)):
            raise ValueError(
                "state is damaged: the rest of its epoch names units that this run does not have"
            )
        if balance.sizes == self.sizes:
            self._orders, self._state, self.rest = orders, balance, rest
            self._version = self.resharded_from = None
        else:
            self._adopt(orders, balance, rest, state.get("length", max(balance.sizes)))

    def _adopt(
        self, orders: list[Tensor], balance: BalanceState, rest: Tensor | None, length: int
    ) -> None:
        """Take over the orders of another number of workers."""
        theirs = Ordering(self.policy, balance.sizes, seed=self.random.seed, length=length)
        theirs._orders, theirs._state, theirs.rest = orders, balance, rest
        steps, workers, version = theirs.steps, len(theirs.sizes), theirs.version
        left = sequence(orders, steps, length) if rest is None else rest[steps * workers :]
        if self.policy.needs_rows:
            theirs.end_epoch(theirs.epoch)
        mine = len(self.sizes)
        self._orders = own_units(sequence(theirs.orders), mine)
        self._state = self._new_state(balance.epoch, previous=None)
        if theirs._state.mean is not None:  # Units change owner: one mean serves all workers.
            self._state.mean = theirs._state.mean.mean(0, keepdim=True).repeat(mine, 1)
        self.rest = left if steps or rest is not None else None
        self._version, self.resharded_from = None, (version, steps, workers)


def _are_units(rest: Tensor, units: int) -> bool:
    """Return whether these are ids of units, each at most once."""
    within = bool(((rest >= 0) & (rest < units)).all())
    return rest.ndim == 1 and within and len(rest.unique()) == len(rest)


def _incompatible_sizes(
    theirs: tuple[int, ...], ours: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return both sizes, or two empty tuples if the orders can be moved from one to the other.

    That takes units that are striped over workers, and another number of workers.
    """
    movable = (is_striped(theirs) and is_striped(ours)) and len(theirs) != len(ours)
    return ((), ()) if movable else (theirs, ours)
