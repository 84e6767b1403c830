"""SAGE: a threshold of each worker's own, which follows the size of its values.

Yoon, Jeong and Oh, "SAGE: toward on-the-fly gradient compression ratio scaling", The Journal of
Supercomputing, 2023. Each step multiplies a worker's threshold by three numbers: alpha, how much
the mean magnitude has grown (from a sample of at most some 400 coordinates); beta, a little more or
less than one as too many or too few are above the threshold times alpha; gamma, five per cent
where they are too many or too few by ten times. Where hardly any coordinate should travel beta
is nearly one: within a factor of ten of the target, the density stays about where it was.

The published code reads a random sample element by element; ours is spread evenly over the vector
and read at once.

Letters: D coordinates.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf
from typing import Literal

import torch
from torch import Tensor

from gradherd.comm.script import Script
from gradherd.sparsify.kernels import above, largest
from gradherd.sparsify.selector import Chosen, Place, Proposal, check_density
from gradherd.sparsify.threshold import count_of, suggested, unite, within


@dataclass(frozen=True)
class State:
    """What one worker remembers: the others have numbers of their own."""

    threshold: float | None
    """Of the last step; None before the first."""
    mean: float | None
    """Sampled mean magnitude of the last step in which it was not zero; None before."""


@dataclass(frozen=True)
class Sage:
    """What reaches each worker's own threshold, united."""

    density: float = 1e-3
    """Share of the coordinates that each worker should pick."""
    first: float | Literal["formula", "topk"] = "formula"
    """Threshold of the first step: "formula" is 1 / (2 sqrt k), as published, whatever the
    gradients are; "topk" is the k-th largest magnitude; or a number in the unit of that step."""
    error: float = 0.05
    """Margin of error of Slovin's formula: D / (1 + error^2 D) coordinates are sampled."""
    low: float = 0.1
    """Picks below this part of the target are far too few."""
    high: float = 10.0
    """Picks above this multiple of the target are far too many."""
    shrink: float = 0.95
    """Factor (gamma) where they are far too few."""
    grow: float = 1.05
    """Factor (gamma) where they are far too many."""

    exclusive = False

    def __post_init__(self) -> None:
        check_density(self.density)
        if self.first not in ("formula", "topk") and not (
            isinstance(self.first, int | float) and 0 < self.first < inf
        ):
            raise ValueError(f"first must be formula, topk or a positive number, got {self.first}")
        if not 0 <= self.error <= 1:
            raise ValueError(f"error must be in [0, 1], got {self.error}")
        if not 0 <= self.low <= 1:
            raise ValueError(f"low must be in [0, 1], got {self.low}")
        if not self.high >= 1:
            raise ValueError(f"high must be at least 1, got {self.high}")
        if not 0 < self.shrink <= 1:
            raise ValueError(f"shrink must be in (0, 1], got {self.shrink}")
        if not 1 <= self.grow < inf:
            raise ValueError(f"grow must be at least 1 and finite, got {self.grow}")

    def begin(self, dim: int, workers: int, layers: Sequence[int]) -> State:
        """Start without a threshold."""
        return State(None, None)

    def propose(self, acc: Tensor, k: int, state: State, place: Place) -> Proposal:
        """Move this worker's threshold and pick; show how many."""
        if k >= len(acc):  # All travels: there is nothing to learn for the threshold.
            nothing = torch.zeros(0, dtype=torch.int64, device=acc.device)
            return Proposal(count_of(nothing), (nothing, state, None))
        mean = sample_mean(acc, self.error)
        if state.threshold is None:
            threshold = within(self._first(acc, k), acc.dtype)
            picks = above(acc, threshold)
        else:
            alpha = mean / state.mean if mean > 0 and state.mean else 1.0
            guess = within(state.threshold * alpha, acc.dtype)
            picks, threshold = self._examine(acc, guess, k / len(acc))
        # A threshold of almost zero could not grow back by factors: begin anew.
        lost = threshold <= torch.finfo(acc.dtype).tiny
        after = State(None if lost else threshold, mean if mean > 0 else state.mean)
        return Proposal(count_of(picks), (picks, after, threshold))

    def settle(
        self, acc: Tensor, k: int, state: State, place: Place, proposal: Proposal, headers: Tensor
    ) -> Script[Chosen]:
        """Unite everybody's picks."""
        picks, after, threshold = proposal.found
        return (yield from unite(picks, len(acc), k, place, headers, after, threshold))

    def rescale(self, state: State, factor: float) -> State:
        """Follow a change of the unit that values are in."""
        return State(
            None if state.threshold is None else state.threshold * factor,
            None if state.mean is None else state.mean * factor,
        )

    def _first(self, acc: Tensor, k: int) -> float:
        if self.first == "topk":
            return float(acc[largest(acc, k)].abs().min())
        return suggested(k) if self.first == "formula" else float(self.first)

    def _examine(self, acc: Tensor, guess: float, wanted: float) -> tuple[Tensor, float]:
        """Return what reaches the threshold, and the threshold: `guess` times beta gamma."""
        # The factor grows with the density that is examined, so no threshold is below that of
        # zero: one pass over the vector does for both the examination and the picks.
        near = above(acc, guess * self.factor(0.0, wanted))
        sizes = acc[near].abs()
        examined = int((sizes >= guess).sum()) / len(acc)
        threshold = within(guess * self.factor(examined, wanted), acc.dtype)
        return near[above(sizes, threshold)], threshold

    def factor(self, examined: float, wanted: float) -> float:
        """Return beta gamma for the density at the last threshold times alpha.

        >>> Sage().factor(0.001, 0.001)
        1.0
        """
        beta = 2 / (1 + exp(wanted - examined))
        if examined < self.low * wanted:
            return beta * self.shrink
        return beta * self.grow if examined > self.high * wanted else beta


def sample_mean(acc: Tensor, error: float) -> float:
    """Return the mean magnitude of a sample that is spread evenly over (D,) `acc`."""
    dim = len(acc)
    count = max(1, int(dim / (1 + error**2 * dim)))
    places = torch.arange(count, device=acc.device) * dim // count
    return float(acc[places].double().abs().mean())
