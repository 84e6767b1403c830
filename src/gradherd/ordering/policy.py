"""The Policy protocol: what an order must provide, and the state it is given for an epoch.

A policy is stateless; everything it learns in an epoch is in one `BalanceState`. One class serves
all policies, so there is one `state_dict`, one place that moves tensors between devices and one
list of the tensors that are sharded where rows are.

Shapes: T time steps of an epoch (the units of the longest worker), b time steps of a call,
M workers, N units of all, W streams, D columns of a row, C values of a sign rule's carry.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradherd.comm.script import Script
from gradherd.ordering.balance import ImplicitRows
from gradherd.ordering.device_signs import DeviceSigner
from gradherd.ordering.seeded_random import SeededRandom

Start = Literal["identity", "random", "computed"]
"""First order of a worker's units: that of the data set, a random permutation, or what `reorder`
returns for epoch 0."""


@lru_cache(maxsize=8)  # batches have few sizes
def all_seen(steps: int, workers: int) -> Tensor:
    """Return a mask of rows that are all real. It is shared: do not write to it."""
    return torch.ones((steps, workers), dtype=torch.bool)


@dataclass
class BalanceState:
    """Signs so far and the sums behind them. Lives for one epoch but for `mean` and `recent`."""

    sizes: tuple[int, ...]
    """Number of units of each worker."""
    epoch: int
    """Epoch, from 0."""
    sides: Tensor
    """(T, M) int8: where the unit visited at a step goes: +1 front, -1 back, 0 stays."""
    steps: int = 0
    """Time steps so far."""
    carry: NDArray[np.float64] = field(default_factory=lambda: np.empty((0, 0)))
    """(C, W) what the sign rule carries from vector to vector."""
    running: Tensor | None = None
    """(W, D) signed running sums; None until the first row gives D."""
    # The first half of a pair must be a copy. Published CD-GraB code stores a reference to the
    # gather buffer, which the next step overwrites: every difference is then zero, every sign is
    # plus, and the order no longer depends on gradients (the `always-plus` order).
    pending: Tensor | None = None
    """(M, D) rows of the first half of a pair whose second half is yet to come."""
    pending_seen: Tensor | None = None
    """(M,) workers that have such a row."""
    pending_buffer: Tensor | None = None
    """Memory of `pending`, reused from pair to pair; not part of the saved state."""
    total: Tensor | None = None
    """(M, D) sum of the rows seen (mean balance)."""
    count: Tensor | None = None
    """(M,) number of rows in `total`."""
    mean: Tensor | None = None
    """(M, D) mean row of the previous epoch (mean balance); outlives the epoch."""
    fresh: Tensor | None = None
    """(N, D) this epoch's row of every unit, worker after worker; infinite where there is none
    (cd-grab-live)."""
    recent: Tensor | None = None
    """(N, D) the same of earlier epochs; outlives the epoch."""
    orders: Sequence[Tensor] = ()
    """(n_i,) units of worker i in visiting order, for `observe`; not part of the saved state."""
    scores: Tensor | None = None
    """(T, M) score of the unit visited at a step, NaN where unknown (score orders)."""
    late_sides: Tensor | None = None
    """(T, M) int8 on a GPU: sides that it has decided on, for which nobody waits; see `settle`."""
    late_spans: list[tuple[int, int]] = field(default_factory=list)
    """First and last time step, exclusive, of what counts in `late_sides`."""
    signer: DeviceSigner | None = None
    """Signs on a GPU, in memory that outlives the epoch; not part of the saved state."""

    @classmethod
    def empty(cls, sizes: Sequence[int], epoch: int) -> "BalanceState":
        """Return the state of an epoch in which nothing has been observed yet.

        Args:
            sizes: Number of units of each worker.
            epoch: Epoch, from 0.

        >>> BalanceState.empty([3, 2], epoch=0).sides.shape
        torch.Size([3, 2])
        """
        # Sides start at 0: a unit whose row never arrives keeps its position.
        sides = torch.zeros((max(sizes, default=0), len(sizes)), dtype=torch.int8)
        return cls(sizes=tuple(sizes), epoch=epoch, sides=sides)

    def valid(self, first: int, steps: int) -> Tensor:
        """Return (steps, M) booleans: does the worker have a unit at that time step?

        Args:
            first: The first time step.
            steps: Number of time steps.

        >>> BalanceState.empty([3, 2], epoch=0).valid(first=1, steps=2).tolist()
        [[True, True], [True, False]]
        """
        if first + steps <= min(self.sizes):  # the common case: one small tensor, not three
            return all_seen(steps, len(self.sizes))
        times = torch.arange(first, first + steps).unsqueeze(1)
        return times < torch.tensor(self.sizes)

    def late(self, first: int, steps: int, device: torch.device) -> Tensor:
        """Return (steps, M) memory on a GPU for sides from time step `first` on."""
        if self.late_sides is None:
            self.late_sides = torch.zeros_like(self.sides, device=device)
        end, begin = first + steps, first
        if self.late_spans and self.late_spans[-1][1] == first:
            begin, _ = self.late_spans.pop()
        self.late_spans.append((begin, end))
        return self.late_sides[first:end]

    def settle(self) -> None:
        """Copy sides from the GPU, which takes until it has computed all of them."""
        spans, self.late_spans = self.late_spans, []
        if spans:
            assert self.late_sides is not None
            late = self.late_sides.cpu()
            for first, end in spans:
                self.sides[first:end] = late[first:end]
                if self.count is not None:
                    self.count = self.count.cpu() + (late[first:end] != 0).sum(0)

    def align(self, rows: Tensor) -> Tensor:
        """Move the state to the device of `rows`; return `rows` in the dtype of the state.

        A loaded state may be on another device, and an epoch keeps the precision it began with.
        """
        for name in COLUMNS:
            value = getattr(self, name)
            if value is not None and (value.dtype, value.device) != (rows.dtype, rows.device):
                setattr(self, name, value.to(rows.device))
                rows = rows.to(value.dtype)
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all fields, as tensors and integers."""
        self.settle()
        # Copies: pair balance goes on writing into `pending`, `sides` and `running`.
        state: dict[str, Any] = {
            "sizes": list(self.sizes),
            "epoch": self.epoch,
            "steps": self.steps,
            "sides": self.sides.clone(),
            "carry": torch.from_numpy(self.carry.copy()),
        }
        for name in _OPTIONAL:
            value = getattr(self, name)
            if value is not None:
                state[name] = value.clone()
        return state

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "BalanceState":
        """Return the state that `state_dict` described.

        Raises:
            ValueError: A required field is missing.
        """
        missing = {"sizes", "epoch", "steps", "sides", "carry"} - state.keys()
        if missing:
            raise ValueError(f"state is damaged: its balance has no {', '.join(sorted(missing))}")
        return cls(
            sizes=tuple(state["sizes"]),
            epoch=state["epoch"],
            steps=state["steps"],
            # Sign rules run on the host, wherever the rows are.
            sides=state["sides"].cpu().clone(),
            carry=state["carry"].cpu().numpy().copy(),
            **{name: state[name].clone() for name in _OPTIONAL if name in state},
        )


COLUMNS = ("running", "pending", "total", "mean", "fresh", "recent")
"""Fields with one column for each column of a row: these are sharded where rows are."""
_OPTIONAL = (*COLUMNS, "pending_seen", "count", "scores")


class Policy(Protocol):
    """Turns one epoch's gradients into the next epoch's orders.

    A policy is a frozen dataclass whose fields are its settings. It has no state of its own: what
    it carries through an epoch is in the `BalanceState` it is given, and what it draws comes from
    the `SeededRandom` it is given. There is no server that sends out orders: every rank computes
    those of all workers from the same inputs and must arrive at the same ones.
    """

    @property
    def needs_rows(self) -> bool:
        """Whether the policy uses gradients."""
        ...

    @property
    def start(self) -> Start | None:
        """The first order, if the method prescribes one."""
        ...

    def begin(self, state: BalanceState, previous: BalanceState | None) -> None:
        """Prepare the empty state of an epoch.

        Args:
            state: State of the new epoch; modified.
            previous: State of the epoch before; None in the first epoch or after a restart.
        """
        ...

    def observe(
        self,
        state: BalanceState,
        rows: Tensor | ImplicitRows,
        seen: Tensor,
        random: SeededRandom,
        *,
        sharded: bool = False,
    ) -> Script[None]:
        """Learn from the next b time steps.

        A generator: it yields a collective of `comm.script` where ranks must exchange something,
        which is the case only with `sharded`.

        Args:
            state: Advanced by b steps.
            rows: (b, M, D) gradient of the unit each worker visited; arbitrary where not seen.
                With one worker also rows that are not formed, all of them seen.
            seen: (b, M) which of them are real.
            random: For signs that are drawn.
            sharded: D is this rank's shard of the columns, so inner products are partial sums.
        """
        ...

    def reorder(
        self, orders: list[Tensor], state: BalanceState, epoch: int, random: SeededRandom
    ) -> list[Tensor]:
        """Return the orders of `epoch`.

        Args:
            orders: (n_i,) unit ids of worker i in the order in which they were visited.
            state: What was learned in that epoch.
            epoch: The epoch that the returned orders are for.
            random: For orders that are drawn.

        Returns:
            (n_i,) unit ids of each worker. The tensors of `orders` are not modified.
        """
        ...
