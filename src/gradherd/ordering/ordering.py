"""The orders of all workers and how they move from epoch to epoch.

State is global and free of ranks: every rank holds the same table and moves it in the same way,
so any rank can save it and any number of ranks can load it.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradherd.ordering.implicit_rows import ImplicitRows
from gradherd.ordering.registry import Policy
from gradherd.ordering.reshard import is_dealt, sequence, striped
from gradherd.ordering.seeded_random import SeededRandom
from gradherd.ordering.signed import Reduce
from gradherd.ordering.state import COLUMNS, BalanceState, Start

_FORMAT = 1


class Ordering:
    """Every worker's order of its own units, learned from what is observed.

    Reading changes nothing; `observe`, `skip_to` and `end_epoch` move the state.
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
            policy: How orders follow from gradients.
            sizes: Units of each worker; they may differ.
            seed: Of all random choices.
            start: First orders, unless the policy prescribes them.
            length: Time steps of an epoch; by default the units of the longest worker. With
                fewer, the units at the end of a longer order are left out of that epoch.
        """
        if not sizes or min(sizes) < 0:
            raise ValueError(f"sizes must name at least one worker, none below 0, got {sizes}")
        self._copies = True
        self.policy = policy
        self.chance = SeededRandom(seed)
        self.sizes = tuple(int(size) for size in sizes)
        self.length = max(sizes) if length is None else length
        if not 0 <= self.length <= max(sizes):
            raise ValueError(f"length must be in [0, {max(sizes)}], got {length}")
        if (policy.start or start) == "random":
            self._orders = self.chance.permutations(sizes, epoch=0)
        else:
            self._orders = [torch.arange(size) for size in sizes]
        self._memory = self._fresh_memory(epoch=0, before=None)
        self._version: str | None = None
        self.rest: Tensor | None = None
        """(n,) units of the data set that other workers have left of this epoch, if they have."""
        self.came_from: tuple[str, int, int] | None = None
        """Version, steps and number of workers of a table that was loaded and made over."""

    @property
    def orders(self) -> tuple[Tensor, ...]:
        """(n_i,) unit ids of worker i in visiting order. Never written in place."""
        return tuple(self._orders)

    @property
    def epoch(self) -> int:
        """Which epoch the orders are for, from 0."""
        return self._memory.epoch

    @property
    def steps(self) -> int:
        """Time steps of this epoch that have been observed or skipped."""
        return self._memory.steps

    @property
    def version(self) -> str:
        """Short hash of epoch and orders: equal on two ranks iff their tables are."""
        if self._version is None:  # Asked for at every batch, changed once an epoch.
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
        reduce: Reduce | None = None,
    ) -> None:
        """Learn from the next b time steps.

        Args:
            rows: (b, M, D) gradient of the unit each worker visited. With one worker also b
                rows that are not formed. None only where the policy needs none; then `seen`
                tells b.
            seen: (b, M) which rows are real; all by default. Units beyond a worker's own
                are never counted.
            reduce: Completes inner products where D is one shard of the columns.
        """
        seen = self._checked(rows, seen)
        if self.rest is not None:
            raise RuntimeError(
                "observe() of units that other workers have left: they are visited without "
                "learning; call pass_rest()"
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
            rows = self._memory.meet(rows)
        seen = seen & self._memory.valid(self.steps, len(seen))
        self.policy.observe(self._memory, rows, seen, self.chance, reduce)

    def _checked(self, rows: Tensor | ImplicitRows | None, seen: Tensor | None) -> Tensor:
        workers, kept = len(self.sizes), (self._memory.running, self._memory.mean)
        if rows is None:
            if self.policy.needs_rows or seen is None:
                raise ValueError(f"rows must be given to {self.policy}, got None")
            return seen.cpu()
        if not isinstance(rows, Tensor):
            if workers > 1 or seen is not None:
                raise ValueError(f"rows that are not formed are for one worker, got {workers}")
            return torch.ones((len(rows), 1), dtype=torch.bool)
        if rows.ndim != 3 or rows.shape[1] != workers:
            raise ValueError(
                f"rows must be (steps, {workers} workers, dim), got {tuple(rows.shape)}"
            )
        for known in kept:
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
        """Pass over the time steps before `step`: units visited there keep their place."""
        if not self.steps <= step <= self.length:
            raise RuntimeError(
                f"skip_to({step}) must be between {self.steps}, the steps passed, and "
                f"{self.length}, the steps of an epoch"
            )
        if step > self.steps:
            self._memory.pending = self._memory.pending_seen = None
            self._memory.steps = step

    def pass_rest(self, step: int) -> None:
        """Note that `step` rounds of the rest are done: nothing is learned from them."""
        self._memory.steps = step

    def restart_epoch(self) -> None:
        """Forget what was observed in this epoch; its orders stay."""
        mean, fresh = self._memory.mean, self._fresh_memory(self.epoch, before=None)
        fresh.mean = mean
        self._memory = fresh

    def end_epoch(self, next_epoch: int | None = None) -> None:
        """Adopt the orders that follow from this epoch; units not seen keep their place."""
        following = self.epoch + 1 if next_epoch is None else next_epoch
        self._orders = self.policy.reorder(self._orders, self._memory, following, self.chance)
        if self.policy.needs_rows:
            # A unit left out at the end has no feedback and would keep that place for ever:
            # let it come first instead.
            self._orders = [order.roll(max(0, len(order) - self.length)) for order in self._orders]
        self._memory = self._fresh_memory(following, before=self._memory)
        self._version = self.rest = self.came_from = None

    def _fresh_memory(self, epoch: int, before: BalanceState | None) -> BalanceState:
        memory = BalanceState.empty(self.sizes, epoch)
        memory.copies = self._copies
        self.policy.begin(memory, before)
        return memory

    def borrow_rows(self, borrow: bool) -> None:
        """Keep rows that are observed without copying them; their owner asks `holds` first."""
        self._copies = self._memory.copies = not borrow

    def holds(self, rows: Tensor) -> bool:
        """Return whether borrowed `rows` are still needed."""
        pending = self._memory.pending
        return pending is not None and pending.data_ptr() == rows.data_ptr()

    def map_columns(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply `change` to every (D,) row in memory: the columns of later rows are others."""
        for name in COLUMNS:
            kept = getattr(self._memory, name)
            if kept is not None:
                setattr(self._memory, name, torch.stack([change(row) for row in kept]))

    def state_dict(self) -> dict[str, Any]:
        """Return everything that decides the future, as tensors, numbers and strings."""
        state: dict[str, Any] = {
            "format": _FORMAT,
            "policy": repr(self.policy),
            "seed": self.chance.seed,
            "length": self.length,
            "orders": torch.cat(self._orders),
            "memory": self._memory.state_dict(),
        }
        return state if self.rest is None else state | {"rest": self.rest.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken; refuse a state of another run's shape.

        The number of workers may be another one. Then what they had learned of this epoch goes
        into the new orders, and `rest` is what they had not visited.
        """
        if state.get("format") != _FORMAT:
            raise ValueError(f"state has format {state.get('format')!r}, expected {_FORMAT}")
        missing = {"policy", "seed", "orders", "memory"} - state.keys()
        if missing:
            raise ValueError(f"state is damaged: it has no {', '.join(sorted(missing))}")
        memory = BalanceState.from_state_dict(state["memory"])
        for name, theirs, ours in (
            ("policy", state["policy"], repr(self.policy)),
            ("seed", state["seed"], self.chance.seed),
            ("units", sum(memory.sizes), sum(self.sizes)),
            ("units of each worker", *_apart(memory.sizes, self.sizes)),
        ):
            if theirs != ours:
                raise ValueError(f"state was saved with {name} {theirs}, this run has {ours}")
        if len(state["orders"]) != sum(self.sizes):
            raise ValueError(
                f"state is damaged: it orders {len(state['orders'])} units, not {sum(self.sizes)}"
            )
        orders = [order.long().clone() for order in state["orders"].split(memory.sizes)]
        for worker, order in enumerate(orders):
            if not torch.equal(order.sort().values, torch.arange(len(order))):
                raise ValueError(f"state is damaged: worker {worker}'s order is no permutation")
        memory.copies = self._copies
        rest = None if "rest" not in state else state["rest"].long().clone()
        if rest is not None and not _are_units(rest, sum(self.sizes)):
            raise ValueError("state is damaged: the rest of its epoch are no units of this run")
        if memory.sizes == self.sizes:
            self._orders, self._memory, self.rest = orders, memory, rest
            self._version = self.came_from = None
        else:
            self._make_over(orders, memory, rest, state.get("length", max(memory.sizes)))

    def _make_over(
        self, orders: list[Tensor], memory: BalanceState, rest: Tensor | None, length: int
    ) -> None:
        """Take over the table of another number of workers."""
        theirs = Ordering(self.policy, memory.sizes, seed=self.chance.seed, length=length)
        theirs._orders, theirs._memory, theirs.rest = orders, memory, rest
        steps, workers, version = theirs.steps, len(theirs.sizes), theirs.version
        left = sequence(orders, steps, length) if rest is None else rest[steps * workers :]
        if self.policy.needs_rows:
            theirs.end_epoch(theirs.epoch)
        mine = len(self.sizes)
        self._orders = striped(sequence(theirs.orders), mine)
        self._memory = self._fresh_memory(memory.epoch, before=None)
        if theirs._memory.mean is not None:  # Units change hands: one mean serves all workers.
            self._memory.mean = theirs._memory.mean.mean(0, keepdim=True).repeat(mine, 1)
        self.rest = left if steps or rest is not None else None
        self._version, self.came_from = None, (version, steps, workers)


def _are_units(rest: Tensor, units: int) -> bool:
    """Return whether these are units, each once at most."""
    within = bool(((rest >= 0) & (rest < units)).all())
    return rest.ndim == 1 and within and len(rest.unique()) == len(rest)


def _apart(theirs: tuple[int, ...], ours: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return both tables' sizes, or nothing twice if one can be made over to the other.

    That takes units that were dealt out in turn, and another number of workers.
    """
    dealt = (is_dealt(theirs) and is_dealt(ours)) and len(theirs) != len(ours)
    return ((), ()) if dealt else (theirs, ours)
