"""SIDCo: a threshold from a distribution that is fitted to the magnitudes, in stages.

Abdelmoniem et al., "An Efficient Statistical-based Gradient Compression Technique for Distributed
Training Systems", MLSys 2021. Each worker fits a distribution to its magnitudes and takes the
quantile that the target asks for. A tail that far out is fitted badly, so the first stage keeps
a quarter, and each later one fits what the last has kept. Stages are added where too few are
picked, and taken away where too many are.

How many that is, is counted in the worker's own picks: workers may have different numbers of
stages, and the union that travels is denser than the picks of one.

Letters: D coordinates, S stages.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from gradherd.comm.script import Script
from gradherd.sparsify.kernels import above, largest
from gradherd.sparsify.selector import Chosen, Place, Proposal, check_density
from gradherd.sparsify.threshold import count_of, unite

Distribution = Literal["exponential", "gamma", "pareto"]


@dataclass(frozen=True)
class State:
    """What one worker remembers: the others have numbers of their own."""

    stages: int
    """S of the next step."""
    steps: int = 0
    """Steps since S was last thought over."""
    total: float = 0.0
    """Sum over them of this worker's actual density / the target."""


@dataclass(frozen=True)
class SIDCo:
    """What reaches each worker's fitted threshold, united."""

    density: float = 1e-3
    """Share of the coordinates that each worker should pick."""
    distribution: Distribution = "exponential"
    """What magnitudes are fitted with: "exponential" in all stages, "pareto" (generalised) in all
    stages, or "gamma" in the first and pareto in the others."""
    first_ratio: float = 0.25
    """Share that the first of several stages keeps."""
    stages: int = 1
    """S of the first step."""
    every: int = 5
    """Steps after which S is thought over."""
    tolerance: float = 0.2
    """S stays while the mean of actual density / target is within this of 1."""
    stage_ratio: float = 0.5
    """S stays so low that stages of this ratio, all together, do not go below the target."""

    exclusive = False

    def __post_init__(self) -> None:
        check_density(self.density)
        if self.distribution not in FITS:
            known = ", ".join(FITS)
            raise ValueError(f"distribution must be one of {known}, got {self.distribution!r}")
        for name in ("first_ratio", "tolerance", "stage_ratio"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} must be in (0, 1), got {getattr(self, name)}")
        for name in ("stages", "every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    def begin(self, dim: int, workers: int, layers: Sequence[int]) -> State:
        """Start with the stages of the settings."""
        return State(self.stages)

    def propose(self, acc: Tensor, k: int, state: State, place: Place) -> Proposal:
        """Fit, pick, and show how many."""
        nothing = torch.zeros(0, dtype=torch.int64, device=acc.device)
        if k >= len(acc):  # All travels: nothing is fitted.
            return Proposal(count_of(nothing), (nothing, state, None))
        sizes = acc.abs()
        lowest, top = (float(end) for end in sizes.aminmax())
        if top == 0:  # Says nothing about the fit either.
            return Proposal(count_of(nothing), (nothing, state, None))
        if lowest == top:
            picks, threshold = largest(acc, k), top
        else:
            # By the largest first: the squares of what is left can neither overflow nor vanish.
            unit = top * float(torch.linalg.vector_norm(sizes.div_(top)))
            sizes.mul_(top / unit)
            ratios = stage_ratios(k / len(acc), state.stages, self.first_ratio)
            picks, threshold = refine(sizes, ratios, self.distribution)
            threshold *= unit
            if not len(picks):
                picks, threshold = largest(acc, 1), top
        after = self.adapt(state, len(picks) / len(acc), k / len(acc))
        return Proposal(count_of(picks), (picks, after, threshold))

    def settle(
        self, acc: Tensor, k: int, state: State, place: Place, proposal: Proposal, headers: Tensor
    ) -> Script[Chosen]:
        """Unite everybody's picks."""
        picks, after, threshold = proposal.found
        return (yield from unite(picks, len(acc), k, place, headers, after, threshold))

    def rescale(self, state: State, factor: float) -> State:
        """Nothing has a unit."""
        return state

    def adapt(self, state: State, actual: float, target: float) -> State:
        """Return the state after a step in which this worker picked `actual` of its coordinates.

        >>> SIDCo(every=1).adapt(State(stages=3), actual=0.0005, target=0.001)
        State(stages=4, steps=0, total=0.0)
        """
        steps, total = state.steps + 1, state.total + actual / target
        if steps < self.every:
            return replace(state, steps=steps, total=total)
        mean = total / steps
        more = (mean < 1 - self.tolerance) - (mean > 1 + self.tolerance)
        # A power of the ratio must not count as one more by rounding.
        most = math.ceil(math.log(target, self.stage_ratio) - 1e-9)
        return State(max(1, min(state.stages + more, most)))


def stage_ratios(target: float, stages: int, first: float) -> list[float]:
    """Return what share each stage keeps of what it sees: their product is the target.

    >>> stage_ratios(1 / 64, 3, 0.25)
    [0.25, 0.25, 0.25]
    """
    if stages == 1 or target >= first:
        return [target]
    return [first, *[(target / first) ** (1 / (stages - 1))] * (stages - 1)]


def refine(
    sizes: Tensor, ratios: Sequence[float], distribution: Distribution
) -> tuple[Tensor, float]:
    """Return where (D,) `sizes` reach the threshold of the last stage, and the threshold."""
    # Zeros have no place above any threshold, also where one is too small for the type.
    floor = max(FITS[distribution](sizes, ratios[0]), torch.finfo(sizes.dtype).tiny)
    picks = above(sizes, floor)
    later = exponential if distribution == "exponential" else pareto
    for ratio in ratios[1:]:
        values = sizes[picks]
        if len(values) < 2 or bool((values == values[0]).all()):
            break  # Nothing is left to tell apart.
        lowest = values.min()
        floor = float(lowest) + later(values - lowest, ratio)
        picks = picks[above(values, floor)]
    return picks, floor


def exponential(values: Tensor, ratio: float) -> float:
    """Return what a share `ratio` of an exponential distribution with this mean exceeds."""
    return -float(values.mean()) * math.log(ratio)


def pareto(values: Tensor, ratio: float) -> float:
    """Return what a share `ratio` of a generalised Pareto distribution with these moments exceeds.

    The paper's kappa: above zero the tail ends, below zero it is heavy, zero is exponential.
    """
    variance, mean = (float(moment) for moment in torch.var_mean(values))
    if not variance > 0:
        return mean
    square = mean**2 / variance
    kappa, alpha = (square - 1) / 2, mean * (square + 1) / 2
    if kappa == 0:
        return -alpha * math.log(ratio)
    return -alpha * math.expm1(kappa * math.log(ratio)) / kappa


def gamma(values: Tensor, ratio: float) -> float:
    """Return what a share `ratio` of a gamma distribution exceeds, by a closed form of its fit."""
    mean = float(values.mean())
    # The published code adds this too: the logarithm of a zero would be the whole mean.
    gap = math.log(mean) - float((values + sys.float_info.epsilon).log().mean())
    if not gap > 0:
        return mean
    shape = (3 - gap + math.sqrt((gap - 3) ** 2 + 24 * gap)) / (12 * gap)
    return mean / shape * gamma_quantile(shape, ratio)


def gamma_quantile(shape: float, ratio: float) -> float:
    """Return the x that a share `ratio` of a gamma distribution of unit scale exceeds.

    >>> round(gamma_quantile(1.0, 0.25), 12) == round(math.log(4), 12)
    True
    """
    # Laurent and Massart's bound of the tail, from above; by halving, as it cannot go astray.
    depth = -math.log(ratio)
    low, high = -700.0, math.log(shape + math.sqrt(2 * shape * depth) + depth)
    at = torch.tensor(shape, dtype=torch.float64)
    for _ in range(64):
        middle = (low + high) / 2
        tail = torch.special.gammaincc(at, torch.tensor(math.exp(middle), dtype=torch.float64))
        low, high = (middle, high) if float(tail) > ratio else (low, middle)
    return math.exp(high)


FITS: dict[str, Callable[[Tensor, float], float]] = {
    "exponential": exponential,
    "gamma": gamma,
    "pareto": pareto,
}
"""Distributions by name."""
