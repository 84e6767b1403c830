"""The interface of a sparsifier, and the values that it exchanges with the step.

Letters: D coordinates, R workers, K coordinates that are sent, H elements of a header.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradherd.comm.checks import check_in
from gradherd.comm.script import Script


@dataclass(frozen=True)
class StepContext:
    """Which worker of how many this is, and which step."""

    number: int
    """Of the step, from 0; skipped steps do not count."""
    rank: int
    """This worker, from 0."""
    size: int
    """R."""
    compact: bool = False
    """Whether values take few bits, and so do magnitudes beside them (`consensus.pack`)."""


@dataclass(frozen=True, kw_only=True)
class Step(StepContext):
    """A step, as a method sees it."""

    acc: Tensor
    """(D,) residual + gradient of this worker. A method must not change it: if the step is called
    off, nothing has happened."""
    k: int
    """Number of coordinates to send, at least one."""
    state: Any
    """The method's state."""

    @property
    def dim(self) -> int:
        """D."""
        return len(self.acc)

    def everything(self) -> Tensor:
        """Return (D,) all coordinates."""
        return torch.arange(self.dim, device=self.acc.device)


@dataclass(frozen=True)
class Proposal:
    """What a worker computes on its own, before it hears from the others."""

    header: Tensor
    """(H,) int32 that is all-gathered; H must be the same on all workers."""
    own: Any = None
    """Data that this worker needs again in `agree`; it is not sent."""

    @classmethod
    def without_header(cls, step: Step, own: Any = None) -> "Proposal":
        """Return a proposal of which the others need to know nothing."""
        return cls(torch.zeros(0, dtype=torch.int32, device=step.acc.device), own)


@dataclass(frozen=True)
class Selection:
    """The coordinates that all workers agreed to send."""

    indices: Tensor | None
    """(K,) int64 without repeats, the same on all workers; None is all coordinates."""
    counts: list[int]
    """How many coordinates each of the R workers selected."""
    state: Any
    """The method's state for the next step."""
    threshold: float | None = None
    """Smallest magnitude that should be sent, if the method has such a threshold."""
    sums: Tensor | None = None
    """(K,) sums over workers, if the method has already reduced the values itself."""
    kept: Tensor | None = None
    """(K,) what this worker keeps at `indices` of its own values; None without `sums`."""
    selected: int | None = None
    """How many numbers were agreed on, if they are not values at `indices`."""


class Selector(ABC):
    """Select which coordinates of residual + gradient are sent.

    A sparsifier is a frozen dataclass whose fields are its settings. It never changes itself:
    `agree` returns the state for the next step (a frozen dataclass, or None), so a step can be
    called off by dropping that state. Everything that determines what is communicated must be the
    same on all workers, otherwise they would wait for each other forever. To add a method, write
    it in a file of its own and add one line to `gradherd.sparsify.registry.SPARSIFIERS`.
    """

    density: float
    """Share of the coordinates to send."""
    sums_values: ClassVar[bool] = False
    """Whether the method reduces the values itself, so that `Sparsify.values` does not apply."""
    sends_all: ClassVar[bool] = False
    """Whether it selects all coordinates at every step."""

    @property
    def agrees_alone(self) -> bool:
        """Whether `agree` sends nothing and reads headers alone: simulated workers call it once."""
        return False

    def begin(self, dim: int, workers: int, layers: Sequence[int]) -> Any:
        """Return the state before the first step; None is no state.

        Args:
            dim: D.
            workers: R.
            layers: Number of elements of each parameter tensor in the vector; they add up to D.
        """
        return None

    def propose(self, step: Step) -> Proposal:
        """Compute what needs no communication; nothing, unless a method says otherwise."""
        return Proposal.without_header(step)

    @abstractmethod
    def agree(self, step: Step, own: Any, headers: Tensor) -> Script[Selection]:
        """Agree with the other workers on what is sent.

        A script (`gradherd.comm.script`): yields collectives, returns the selection.

        Args:
            step: As in `propose`.
            own: `Proposal.own` of this worker.
            headers: (R, H) int32 headers of all workers, on the CPU.
        """


def target_count(density: float, dim: int) -> int:
    """Return k, the number of coordinates that a density of `dim` stands for: at least one.

    >>> target_count(0.001, 10), target_count(0.29, 100), target_count(1.0, 7)
    (1, 29, 7)
    """
    # 0.29 * 100 is 28.999999999999996 in floating point, but means 29.
    return max(1, min(dim, int(density * dim * (1 + 1e-12))))


def check_density(density: float) -> None:
    """Raise ValueError unless `density` is a number in (0, 1]."""
    check_in("(0, 1]", density=density)
