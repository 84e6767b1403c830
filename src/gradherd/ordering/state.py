"""What a policy carries through an epoch: one small class for all, so there is one state_dict.

Shapes: T time steps of an epoch (the units of the longest worker), M workers, W streams, D columns
of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Start = Literal["identity", "random"]
"""First order of a worker's units: that of the data set, or a random permutation."""


@dataclass
class BalanceState:
    """Signs so far and the sums behind them. Lives for one epoch, except for `mean`."""

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
    pending: Tensor | None = None
    """(M, D) rows of the first half of a pair whose second half is yet to come."""
    pending_seen: Tensor | None = None
    """(M,) workers that have such a row."""
    pending_buffer: Tensor | None = None
    """Memory of `pending`, used again; not part of the saved state."""
    total: Tensor | None = None
    """(M, D) sum of the rows seen (mean balance)."""
    count: Tensor | None = None
    """(M,) number of rows in `total`."""
    mean: Tensor | None = None
    """(M, D) mean row of the previous epoch (mean balance); outlives the epoch."""

    @classmethod
    def empty(cls, sizes: Sequence[int], epoch: int) -> "BalanceState":
        """Return the state of an epoch in which nothing was observed yet."""
        sides = torch.zeros((max(sizes, default=0), len(sizes)), dtype=torch.int8)
        return cls(sizes=tuple(sizes), epoch=epoch, sides=sides)

    def valid(self, first: int, steps: int) -> Tensor:
        """Return (steps, M) booleans: does the worker have a unit at that time step?"""
        times = torch.arange(first, first + steps).unsqueeze(1)
        return times < torch.tensor(self.sizes)

    def align(self, rows: Tensor) -> Tensor:
        """Move the state to the device of `rows`; return `rows` in the dtype of the state.

        A loaded state may be on another device, and an epoch keeps the precision it began with.
        """
        for name in COLUMNS:
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, value.to(rows.device))
                rows = rows.to(value.dtype)
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all fields, as tensors and integers."""
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
        """Return the state that `state_dict` described."""
        missing = {"sizes", "epoch", "steps", "sides", "carry"} - state.keys()
        if missing:
            raise ValueError(f"state is damaged: its balance has no {', '.join(sorted(missing))}")
        return cls(
            sizes=tuple(state["sizes"]),
            epoch=state["epoch"],
            steps=state["steps"],
            sides=state["sides"].cpu().clone(),
            carry=state["carry"].cpu().numpy().copy(),
            **{name: state[name].clone() for name in _OPTIONAL if name in state},
        )


COLUMNS = ("running", "pending", "total", "mean")
"""Fields with one column for each column of a row: these are sharded where rows are."""
_OPTIONAL = (*COLUMNS, "pending_seen", "count")
