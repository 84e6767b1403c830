"""What a policy remembers: one small class for all of them, so that there is one state_dict.

Letters: T time steps of an epoch (the longest worker's units), M workers, W streams, D dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Start = Literal["identity", "random"]
"""First order of a worker's units: as in the data set, or drawn."""


@dataclass
class BalanceState:
    """Signs so far and the sums behind them. Lives for one epoch, but for `mean`."""

    sizes: tuple[int, ...]
    """Units of each worker."""
    epoch: int
    """Which epoch this is, from 0."""
    sides: Tensor
    """(T, M) int8: where the unit visited at a step goes; 0 = nothing known."""
    steps: int = 0
    """Time steps passed."""
    copies: bool = True
    """Whether rows to be kept are copied, or their owner leaves them alone for two calls."""
    carry: NDArray[np.float64] = field(default_factory=lambda: np.empty((0, 0)))
    """(C, W) what the sign rule remembers."""
    running: Tensor | None = None
    """(W, D) signed sums; None until the first row tells D."""
    pending: Tensor | None = None
    """(M, D) rows of the first half of a pair whose second half is yet to come."""
    pending_seen: Tensor | None = None
    """(M,) which workers gave one."""
    total: Tensor | None = None
    """(M, D) sum of the rows seen (mean balance)."""
    count: Tensor | None = None
    """(M,) how many they were."""
    mean: Tensor | None = None
    """(M, D) mean row of the epoch before (mean balance); survives the epoch."""

    @classmethod
    def empty(cls, sizes: Sequence[int], epoch: int) -> "BalanceState":
        """Return the memory of an epoch in which nothing was seen yet."""
        sides = torch.zeros((max(sizes, default=0), len(sizes)), dtype=torch.int8)
        return cls(sizes=tuple(sizes), epoch=epoch, sides=sides)

    def valid(self, first: int, steps: int) -> Tensor:
        """Return (steps, M) booleans: has the worker a unit at that time step?"""
        times = torch.arange(first, first + steps).unsqueeze(1)
        return times < torch.tensor(self.sizes)

    def meet(self, rows: Tensor) -> Tensor:
        """Move what is kept to the rows' device (a state may be loaded elsewhere); return rows.

        Numbers keep the precision that the epoch began with.
        """
        for name in COLUMNS:
            kept = getattr(self, name)
            if kept is not None:
                setattr(self, name, kept.to(rows.device))
                rows = rows.to(kept.dtype)
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Return copies of everything, as tensors and numbers."""
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
        """Return the memory that `state_dict` described."""
        missing = {"sizes", "epoch", "steps", "sides", "carry"} - state.keys()
        if missing:
            raise ValueError(f"state is damaged: its memory has no {', '.join(sorted(missing))}")
        return cls(
            sizes=tuple(state["sizes"]),
            epoch=state["epoch"],
            steps=state["steps"],
            sides=state["sides"].cpu().clone(),
            carry=state["carry"].cpu().numpy().copy(),
            **{name: state[name].clone() for name in _OPTIONAL if name in state},
        )


COLUMNS = ("running", "pending", "total", "mean")
"""What has one column for each number of a row."""
_OPTIONAL = (*COLUMNS, "pending_seen", "count")
