"""What an order must provide, and the states that it is given for an epoch.

A policy is stateless; everything it learns in an epoch is in one `EpochState`, of the kind that its
`new_state` makes: `SignState` for orders that sign rows, and what each of them adds.

Shapes: T time steps of an epoch (the units of the longest worker), b time steps of a call,
M workers, N units of all, W streams, D columns of a row, C values of a sign rule's carry.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, Literal, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor

from gradherd.comm.checks import check_state
from gradherd.comm.script import Script
from gradherd.ordering.balance import (
    DeviceSigner,
    Unsigned,
    balance,
    reorder,
    sign_on_device,
)
from gradherd.ordering.implicit import Combined
from gradherd.ordering.random import SeededRandom
from gradherd.ordering.sign_rules import Floats, Greedy, SignRule

Start = Literal["identity", "random", "computed"]
"""First order of a worker's units: that of the data set, a random permutation, or what `reorder`
returns for epoch 0."""


@dataclass(frozen=True)
class ShardedRows:
    """Rows of which every rank holds some columns: inner products are sums over ranks."""

    blocks: tuple[Tensor, ...]
    """(b, M, c) this rank's columns, in blocks side by side that have C columns together."""
    release: Callable[[Tensor | None], None] | None = None
    """If given: may be called by a policy that does not read them any more, as the next exchange
    waits for their memory; or with other memory of the shape of one step, to keep a single
    block."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(b, M, C)."""
        steps, workers, _ = self.blocks[0].shape
        return steps, workers, sum(block.shape[-1] for block in self.blocks)

    @property
    def columns(self) -> Tensor:
        """(b, M, C) all columns, copied if there are several blocks."""
        return self.blocks[0] if len(self.blocks) == 1 else torch.cat(self.blocks, -1)


def masked(rows: Tensor, mask: Tensor) -> Tensor:
    """Return the (b, M, D) rows with zeros where the (b, M) mask is false."""
    if mask.all():  # the common case: no copy
        return rows
    return torch.where(mask.to(rows.device).unsqueeze(-1), rows, 0)


Rows: TypeAlias = Tensor | ShardedRows
"""(b, M, D) rows of all workers, or this rank's columns of them."""


@lru_cache(maxsize=8)  # batches have few sizes
def all_seen(steps: int, workers: int) -> Tensor:
    """Return a mask of rows that are all real. It is shared: do not write to it."""
    return torch.ones((steps, workers), dtype=torch.bool)


@dataclass
class EpochState:
    """How far an epoch has come. Subclasses add what their policies learn."""

    sizes: tuple[int, ...]
    """Number of units of each worker."""
    epoch: int
    """Epoch, from 0."""
    steps: int = 0
    """Time steps so far."""
    orders: Sequence[Tensor] = ()
    """(n_i,) units of worker i in visiting order, for `observe`; not part of the saved state."""
    broken: int = 0
    """Time steps in a row whose rows were not finite; not part of the saved state."""

    columns: ClassVar[tuple[str, ...]] = ()
    """Fields with one column for each column of a row: these are sharded where rows are."""
    others: ClassVar[tuple[str, ...]] = ()
    """Further tensors of the saved state, which are on the CPU."""

    @property
    def length(self) -> int:
        """T, the units of the longest worker."""
        return max(self.sizes, default=0)

    def skip_to(self, step: int) -> None:
        """Count the time steps before `step` as visited: nothing is learned from them."""
        self.steps = step

    def adopt(self, other: Self) -> None:
        """Take over what outlives the epoch, from a state that may be of other workers."""

    def align(self, rows: Any) -> Any:
        """Move the state to the device of `rows`; return `rows` in the dtype of the state.

        A loaded state may be on another device, and an epoch keeps the precision it began with.
        """
        for name in self.columns:
            value = getattr(self, name)
            if value is not None and (value.dtype, value.device) != (rows.dtype, rows.device):
                setattr(self, name, value.to(rows.device))
                rows = rows.to(value.dtype)
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all fields, as tensors and integers."""
        state: dict[str, Any] = {
            "sizes": list(self.sizes),
            "epoch": self.epoch,
            "steps": self.steps,
        }
        for name in (*self.columns, *self.others):
            value = getattr(self, name)
            if value is not None:
                # Copies: pair balance goes on writing into `pending`, `sides` and `running`.
                state[name] = value.clone()
        return state

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` of such a state returned; refuse what does not fit."""
        names = (*self.columns, *self.others)
        own = {name: value for name in names if (value := getattr(self, name)) is not None}
        check_state(state, "steps", *own)
        self.steps = state["steps"]
        if not 0 <= self.steps <= self.length:
            raise ValueError(f"state is damaged: {self.steps} steps of an epoch of {self.length}")
        for name, value in own.items():
            if value.shape != state[name].shape:
                found, wanted = tuple(state[name].shape), tuple(value.shape)
                raise ValueError(f"state is damaged: {name} is {found}, not {wanted}")
        for name in names:
            if name in state:
                value = state[name] if name in self.columns else state[name].cpu()
                setattr(self, name, value.clone())


@dataclass
class SignState(EpochState):
    """Signs so far, and the sums behind them."""

    sides: Tensor = field(init=False)
    """(T, M) int8: where the unit visited at a step goes: +1 front, -1 back, 0 stays."""
    carry: Tensor = field(init=False)
    """(C, W) float64: what the sign rule carries from vector to vector."""
    running: Tensor | None = None
    """(W, D) signed running sums; None until the first row gives D."""
    late: list[tuple[int, Tensor]] = field(default_factory=list)
    """(b, M) int8 sides that a GPU has decided on, with the first time step of each, for which
    nobody waits; see `sync_sides`."""
    signer: DeviceSigner | None = None
    """Signs on a GPU, in memory that outlives the epoch; not part of the saved state."""

    columns: ClassVar[tuple[str, ...]] = ("running",)
    others: ClassVar[tuple[str, ...]] = ("sides", "carry")

    def __post_init__(self) -> None:
        # Sides start at 0: a unit whose row never arrives keeps its position.
        self.sides = torch.zeros((self.length, len(self.sizes)), dtype=torch.int8)

    def place(self, first: int, sides: Tensor, seen: Tensor) -> Tensor:
        """Note sides (b, M) or (K, s, M) of the time steps from `first` on; return those seen.

        The others stay as they are: 0, where units keep their place, or that of an odd unit. Time
        steps that were seen but have no sign are counted: they are not finite.
        """
        steps = math.prod(sides.shape[:-1])
        own = self.sides[first : first + steps].view_as(sides)
        torch.where(seen, sides, own, out=own)
        if (counted := sides * seen).any():
            self.broken = 0
        elif seen.any():
            self.broken += steps
        return counted

    def sync_sides(self) -> None:
        """Copy sides from the GPU, which takes until it has computed all of them."""
        late, self.late = self.late, []
        if late:
            firsts, parts = zip(*late, strict=True)
            sides = torch.cat(parts).cpu().split([*map(len, parts)])
            for first, part in zip(firsts, sides, strict=True):
                self.place(first, part, all_seen(1, 1))

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all fields, as tensors and integers."""
        self.sync_sides()
        return super().state_dict()


class Policy(ABC):
    """Turns one epoch's gradients into the next epoch's orders.

    A policy is a frozen dataclass whose fields are its settings. It has no state of its own: what
    it carries through an epoch is in the state it is given, and what it draws comes from the
    `SeededRandom` it is given. There is no server that sends out orders: every rank computes those
    of all workers from the same inputs and must arrive at the same ones.
    """

    needs_rows: ClassVar[bool] = True
    """Whether the policy uses gradients."""
    takes_implicit: ClassVar[bool] = False
    """Whether `observe` also takes `ImplicitRows`, of a single worker."""
    leaves_out_broken_rows: ClassVar[bool] = False
    """Whether the policy itself leaves out rows that are not finite, also on a GPU."""

    @property
    def start(self) -> Start | None:
        """The first order, if the method prescribes one."""
        return None

    def new_state(self, sizes: tuple[int, ...], epoch: int, previous: Any) -> Any:
        """Return the state of an epoch in which nothing has been observed yet.

        Args:
            sizes: Number of units of each worker.
            epoch: Epoch, from 0.
            previous: State of the epoch before; None in the first epoch or after a restart.
        """
        return EpochState(sizes, epoch)

    @abstractmethod
    def observe(self, state: Any, rows: Rows, seen: Tensor, random: SeededRandom) -> Script[None]:
        """Learn from the next b time steps.

        A generator: it yields a collective of `comm.script` where ranks must exchange something,
        which is the case only with `ShardedRows`. It must add len(seen) to state.steps.

        Args:
            state: Made by `new_state`; advanced by b steps.
            rows: Gradient of the unit each worker visited; arbitrary where not seen.
            seen: (b, M) which of them are real.
            random: For signs that are drawn.
        """

    @abstractmethod
    def reorder(
        self, orders: list[Tensor], state: Any, epoch: int, random: SeededRandom
    ) -> list[Tensor]:
        """Return the orders of `epoch`.

        Args:
            orders: (n_i,) unit ids of worker i in the order in which they were visited.
            state: What was learned in that epoch.
            epoch: The epoch that the returned orders are for.
            random: For orders that are drawn.

        Returns:
            (n_i,) int64 unit ids of each worker, on the CPU, each unit once. The tensors of
            `orders` are not modified.
        """


@dataclass(frozen=True)
class SignPolicy(Policy):
    """What orders that sign rows have in common: a rule, and units that move to their side."""

    rule: SignRule = field(default_factory=Greedy)
    """How signs are decided."""

    leaves_out_broken_rows: ClassVar[bool] = True
    state: ClassVar[type[SignState]]
    """Kind of the state."""
    shared: ClassVar[bool] = False
    """Whether the vectors of all workers are signed in one stream."""
    steps_per_vector: ClassVar[int] = 1
    """Time steps behind each vector that is signed."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "observe" in vars(cls) and "takes_implicit" not in vars(cls):
            cls.takes_implicit = False  # what it inherits does not speak for its own

    def __post_init__(self) -> None:
        rule: Any = self.rule
        if not isinstance(rule, SignRule):
            got = rule.__name__ if isinstance(rule, type) else repr(rule)
            raise ValueError(f"rule must be a sign rule such as Greedy(), got {got}")

    def new_state(self, sizes: tuple[int, ...], epoch: int, previous: Any) -> Any:
        """Return a new state, with the rule's carry for all vectors of each stream."""
        state = self.state(sizes, epoch)
        counts = [size // self.steps_per_vector for size in state.sizes]
        streams, vectors = (1, sum(counts)) if self.shared else (len(counts), max(counts))
        carry = torch.tensor(self.rule.start(vectors, state.epoch), dtype=torch.float64)
        state.carry = carry.unsqueeze(1).repeat(1, streams)
        state.signer = None if previous is None else previous.signer
        return state

    def _sign(
        self,
        state: SignState,
        vectors: Tensor,
        seen: Tensor,
        first: int,
        random: SeededRandom,
        *,
        sharded: bool,
        mean: Tensor | None = None,
    ) -> Script[tuple[Tensor, bool]]:
        """Sign (K, M, D) vectors, and add them to the running sums.

        If `shared`, one sum serves all workers: step after step, and within a step worker after
        worker, as the paper's server does it. Else each worker is a stream.

        Vectors are in visiting order; (K, M) `seen` says which are real, and `first` is the number
        of each worker's first one in the epoch. The state's sums and the rule's carry are updated.
        If `sharded`, ranks hold columns and sign together. (M, D) `mean` is subtracted from the
        vectors.

        Returns:
            (K, M) signs, and whether they are late: on a GPU that nobody waits for, until the next
            call, and for a `MeanState` its total is updated, too.
        """
        count, workers, columns = vectors.shape
        if state.running is None:
            state.running = vectors.new_zeros((1 if self.shared else workers, columns))
        if self.shared:
            vectors = vectors.flatten(0, 1).unsqueeze(1)
        if not sharded and seen.all():
            if (late := sign_on_device(self.rule, vectors, state)) is not None:
                return late.reshape(count, workers), True
        in_streams = vectors.shape[:2]
        # Zero vectors leave the running sums alone; `seen` keeps their signs from being used.
        centred = vectors if mean is None else vectors - mean
        vectors = masked(centred, seen.reshape(in_streams)).transpose(0, 1)
        draws = self._draws(state, first, count, random).reshape(in_streams).T
        unsigned = Unsigned(vectors, state.running, self.rule, draws, state.carry.numpy())
        step = workers if self.shared else 1
        signs = yield from balance(unsigned, step=step if sharded else None)
        return signs.T.reshape(count, workers), False

    def _draws(self, state: SignState, first: int, count: int, random: SeededRandom) -> Floats:
        """Return numbers (count, M) for the vectors from `first` on; zeros if none are needed."""
        workers = len(state.sizes)
        if not self.rule.randomized:
            return np.broadcast_to(np.float64(0), (count, workers))
        # Always the whole epoch: which draw a vector gets must not depend on how many vectors come
        # in one call, nor on vectors that were missed.
        total = state.length // self.steps_per_vector
        return random.draws(total, workers, state.epoch)[first : first + count]

    def _sign_implicit(
        self, state: SignState, vectors: Combined, first: int, random: SeededRandom
    ) -> Tensor:
        """Do as `_sign` does with vectors of rows that are not formed; return (P, 1) signs."""
        if state.running is None:
            state.running = vectors.formed.new_zeros((1, vectors.rows.shape[-1]))
        draws = self._draws(state, first, len(vectors.weights), random).T
        return vectors.sign(state.running, self.rule, draws, state.carry.numpy()).unsqueeze(1)

    def reorder(
        self, orders: list[Tensor], state: SignState, epoch: int, random: SeededRandom
    ) -> list[Tensor]:
        """Move each unit to its side."""
        state.sync_sides()
        sides = state.sides
        return [reorder(own, sides[: len(own), worker]) for worker, own in enumerate(orders)]
