"""SAGE: each worker's threshold follows the scale of its gradients.

Yoon, Jeong and Oh, "SAGE: toward on-the-fly gradient compression ratio scaling", The Journal of
Supercomputing, 2023. At each step a worker multiplies its threshold by three factors: alpha, the
growth of the mean magnitude (estimated on a sample of about 400 coordinates at most); beta, a
little above or below one as too many or too few coordinates reach the threshold times alpha; and
gamma, 5 % up or down if they are off by a factor of ten. For small densities beta is nearly one,
so within a factor of ten of the target the density hardly moves. The published code reads a random
sample element by element; this one reads an evenly spaced sample at once.

Letters: D coordinates.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradherd.sparsify.basics import ByThreshold, clamp_to_dtype, suggested_threshold
from gradherd.sparsify.kernels import indices_above, topk_indices
from gradherd.sparsify.message_sizes import DEFAULT_DENSITY
from gradherd.sparsify.selector import Proposal, StepContext, check_density


@dataclass(frozen=True)
class SageState:
    """State of `Sage`; every worker has its own."""

    threshold: float | None
    """Threshold of the last step; None before the first."""
    mean: float | None
    """Last sampled mean magnitude that was not zero; None before."""


@dataclass(frozen=True)
class Sage(ByThreshold):
    """Send the union of what reaches each worker's own, adaptive threshold.

    Yoon, Jeong and Oh, The Journal of Supercomputing, 2023. The defaults of `low`, `high`, `shrink`
    and `grow` are those of the code that the ExDyna authors compare with. Raises ValueError if a
    setting is out of range.
    """

    density: float = DEFAULT_DENSITY
    """Share of the coordinates that each worker should select."""
    first: float | Literal["formula", "topk"] = "formula"
    """Threshold of the first step: "formula" is 1 / (2 sqrt k) as published, regardless of the
    gradients; "topk" is the k-th largest magnitude; or a number in the unit of that step."""
    error: float = 0.05
    """Margin of error in Slovin's formula: D / (1 + error^2 D) coordinates are sampled."""
    low: float = 0.1
    """Below this share of the target, far too few coordinates are selected."""
    high: float = 10.0
    """Above this multiple of the target, far too many coordinates are selected."""
    shrink: float = 0.95
    """Factor (gamma) if far too few are selected."""
    grow: float = 1.05
    """Factor (gamma) if far too many are selected."""

    def __post_init__(self) -> None:
        check_density(self.density)
        if self.first not in ("formula", "topk") and not (
            isinstance(self.first, int | float) and 0 < self.first < math.inf
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
        if not 1 <= self.grow < math.inf:
            raise ValueError(f"grow must be at least 1 and finite, got {self.grow}")

    def begin(self, dim: int, workers: int, layers: Sequence[int]) -> SageState:
        """Start without a threshold."""
        return SageState(None, None)

    def propose(self, acc: Tensor, k: int, state: SageState, context: StepContext) -> Proposal:
        """Update this worker's threshold and select; the header is the count."""
        if k >= len(acc):  # Everything is sent, so the threshold learns nothing.
            nothing = torch.zeros(0, dtype=torch.int64, device=acc.device)
            return self.proposal(nothing, state, None)
        mean = float(sample_mean(acc, self.error))
        guess = self._guess(acc, k, state, mean)
        if state.threshold is None:
            threshold = guess
            selected = indices_above(acc, threshold)
        else:
            selected, threshold = self._select(acc, guess, k / len(acc))
        new_state = self._next_state(state, threshold, mean, acc.dtype)
        return self.proposal(selected, new_state, threshold)

    def rescale(self, state: SageState, factor: float) -> SageState:
        """Multiply threshold and mean by `factor`."""
        return SageState(
            None if state.threshold is None else state.threshold * factor,
            None if state.mean is None else state.mean * factor,
        )

    def _guess(self, acc: Tensor, k: int, state: SageState, mean: float) -> float:
        """Return the first threshold, or the last one times alpha."""
        if state.threshold is None:
            return clamp_to_dtype(self._first_threshold(acc, k), acc.dtype)
        # A sample of zeros says nothing about the scale.
        alpha = mean / state.mean if mean > 0 and state.mean else 1.0
        return clamp_to_dtype(state.threshold * alpha, acc.dtype)

    def _next_state(
        self, state: SageState, threshold: float, mean: float, dtype: torch.dtype
    ) -> SageState:
        # A threshold near zero could never grow back by factors of 5 %: start again.
        lost = threshold <= torch.finfo(dtype).tiny
        return SageState(None if lost else threshold, mean if mean > 0 else state.mean)

    def _first_threshold(self, acc: Tensor, k: int) -> float:
        if self.first == "topk":
            return float(acc[topk_indices(acc, k)].abs().min())
        return suggested_threshold(k) if self.first == "formula" else float(self.first)

    def _select(self, acc: Tensor, guess: float, target: float) -> tuple[Tensor, float]:
        """Return what reaches the new threshold, and the threshold: `guess` * beta * gamma."""
        # beta * gamma grows with the examined density, so no new threshold is below the one for
        # density zero: a single pass over the vector finds all candidates for both questions.
        candidates = indices_above(acc, guess * self.factor(0.0, target))
        magnitudes = acc[candidates].abs()
        examined = int((magnitudes >= guess).sum()) / len(acc)
        threshold = clamp_to_dtype(guess * self.factor(examined, target), acc.dtype)
        return candidates[indices_above(magnitudes, threshold)], threshold

    def factor(self, examined: float, target: float) -> float:
        """Return beta * gamma, given the density at the last threshold times alpha.

        >>> Sage().factor(0.001, 0.001)
        1.0
        """
        beta = 2 / (1 + math.exp(target - examined))
        if examined < self.low * target:
            return beta * self.shrink
        return beta * self.grow if examined > self.high * target else beta


def sample_mean(acc: Tensor, error: float) -> Tensor:
    """Return the mean magnitude of an evenly spaced sample: (..., D) -> (...)."""
    dim = acc.shape[-1]
    # Slovin's formula. With an error of 0.05 it approaches 400 for long vectors.
    count = max(1, int(dim / (1 + error**2 * dim)))
    positions = torch.arange(count, device=acc.device) * dim // count
    # float64: a sum of float32 magnitudes may overflow, and alpha would be infinite.
    return acc[..., positions].double().abs().mean(-1)
