"""SIDCo: each worker's threshold is a quantile of a distribution that it fits to its gradients.

Abdelmoniem et al., "An Efficient Statistical-based Gradient Compression Technique for Distributed
Training Systems", MLSys 2021, arXiv:2101.10761. Each worker fits a distribution to its magnitudes
and uses the quantile of the target density as its threshold. Such a fit is poor far out in the
tail, so the first stage keeps a quarter of the coordinates, and each further stage is fitted to
what the last one kept. Stages are added if too few coordinates are selected, and removed if too
many are. Their number follows a worker's own count, so workers may have different numbers, and the
union that is sent is denser than the selection of one worker.

Letters: D coordinates, S stages.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from gradherd.sparsify.basics import ByThreshold
from gradherd.sparsify.kernels import indices_above, topk_indices
from gradherd.sparsify.message_sizes import DEFAULT_DENSITY
from gradherd.sparsify.selector import Proposal, StepContext, check_density

Distribution = Literal["exponential", "gamma", "pareto"]


@dataclass(frozen=True)
class SIDCoState:
    """State of `SIDCo`; every worker has its own."""

    stages: int
    """S of the next step."""
    steps: int = 0
    """Steps since S was last reconsidered."""
    total: float = 0.0
    """Sum over those steps of this worker's actual density / target density."""


@dataclass(frozen=True)
class SIDCo(ByThreshold):
    """Send the union of what reaches each worker's fitted threshold.

    Abdelmoniem et al., MLSys 2021, arXiv:2101.10761. Raises ValueError if a setting is out of
    range.
    """

    density: float = DEFAULT_DENSITY
    """Share of the coordinates that each worker should select."""
    distribution: Distribution = "exponential"
    """Distribution of the magnitudes: "exponential" or "pareto" (generalised) in all stages, or
    "gamma" in the first stage and "pareto" in the others."""
    # From here on, the defaults are those of the published code.
    first_ratio: float = 0.25
    """Share of the coordinates that the first of several stages keeps."""
    stages: int = 1
    """S of the first step."""
    every: int = 5
    """Reconsider S after this many steps."""
    tolerance: float = 0.2
    """S stays while the mean of actual / target density is within this of 1."""
    stage_ratio: float = 0.5
    """Upper limit of S: as many stages of this ratio as it takes to get down to the target."""

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

    def begin(self, dim: int, workers: int, layers: Sequence[int]) -> SIDCoState:
        """Start with the number of stages of the settings."""
        return SIDCoState(self.stages)

    def propose(self, acc: Tensor, k: int, state: SIDCoState, context: StepContext) -> Proposal:
        """Fit a threshold and select; the header is the count."""
        nothing = torch.zeros(0, dtype=torch.int64, device=acc.device)
        if k >= len(acc):  # Everything is sent: no threshold to fit.
            return self.proposal(nothing, state, None)
        magnitudes = acc.abs()
        lowest, top = (float(end) for end in magnitudes.aminmax())
        if top == 0:  # A zero vector says nothing about the number of stages, either.
            return self.proposal(nothing, state, None)
        if lowest == top:
            # No threshold separates equal magnitudes, and their variance is zero.
            selected, threshold = topk_indices(acc, k), top
        else:
            # Fit to a vector of norm 1. Dividing by the largest magnitude first keeps the squares
            # in the norm from overflowing or vanishing.
            unit = top * float(torch.linalg.vector_norm(magnitudes.div_(top)))
            magnitudes.mul_(top / unit)
            ratios = stage_ratios(k / len(acc), state.stages, self.first_ratio)
            selected, threshold = select_in_stages(magnitudes, ratios, self.distribution)
            threshold *= unit
            if not len(selected):
                selected, threshold = topk_indices(acc, 1), top
        new_state = self.adapt(state, len(selected) / len(acc), k / len(acc))
        return self.proposal(selected, new_state, threshold)

    def adapt(self, state: SIDCoState, actual: float, target: float) -> SIDCoState:
        """Return the state after a step in which this worker's density was `actual`.

        >>> SIDCo(every=1).adapt(SIDCoState(stages=3), actual=0.0005, target=0.001)
        SIDCoState(stages=4, steps=0, total=0.0)
        """
        steps, total = state.steps + 1, state.total + actual / target
        if steps < self.every:
            return replace(state, steps=steps, total=total)
        mean = total / steps
        change = (mean < 1 - self.tolerance) - (mean > 1 + self.tolerance)
        # Without the small term, rounding could turn an exact power of the ratio into one more.
        most = math.ceil(math.log(target, self.stage_ratio) - 1e-9)
        return SIDCoState(max(1, min(state.stages + change, most)))


def stage_ratios(target: float, stages: int, first: float) -> list[float]:
    """Return the share that each stage keeps of its input; their product is the target.

    >>> stage_ratios(1 / 64, 3, 0.25)
    [0.25, 0.25, 0.25]
    """
    if stages == 1 or target >= first:
        return [target]
    return [first, *[(target / first) ** (1 / (stages - 1))] * (stages - 1)]


def select_in_stages(
    magnitudes: Tensor, ratios: Sequence[float], distribution: Distribution
) -> tuple[Tensor, float]:
    """Return where magnitudes reach the last stage's threshold, and that threshold.

    Args:
        magnitudes: (D,), not all equal.
        ratios: Share that each stage keeps of its input, from `stage_ratios`.
        distribution: What is fitted.

    Returns:
        (K_r,) int64 ascending indices, and the threshold in the unit of `magnitudes`.
    """
    # At least the smallest normal number: zeros must not be selected if a fit underflows.
    threshold = max(FITS[distribution](magnitudes, ratios[0]), torch.finfo(magnitudes.dtype).tiny)
    selected = indices_above(magnitudes, threshold)
    # The excess over a high threshold approaches a generalised Pareto, whatever the values are;
    # gamma is for the first stage only, as published.
    later = exponential if distribution == "exponential" else pareto
    for ratio in ratios[1:]:
        values = magnitudes[selected]
        if len(values) < 2 or bool((values == values[0]).all()):
            break  # No higher threshold separates equal values.
        lowest = values.min()  # Fits assume magnitudes from zero on.
        threshold = float(lowest) + later(values - lowest, ratio)
        selected = selected[indices_above(values, threshold)]
    return selected, threshold


def exponential(values: Tensor, ratio: float) -> float:
    """Return the threshold that a share `ratio` of the fitted exponential distribution exceeds."""
    return -float(values.mean()) * math.log(ratio)


def pareto(values: Tensor, ratio: float) -> float:
    """Return the threshold that a share `ratio` of the fitted generalised Pareto exceeds.

    The fit is by moments. In the paper's kappa, the tail is bounded if kappa > 0, heavy if
    kappa < 0, and exponential if kappa = 0.
    """
    variance, mean = (float(moment) for moment in torch.var_mean(values))
    if not variance > 0:
        return mean
    square = mean**2 / variance
    kappa, alpha = (square - 1) / 2, mean * (square + 1) / 2
    if kappa == 0:  # The limit of the formula below, which would divide zero by zero.
        return -alpha * math.log(ratio)
    # expm1 instead of ratio**kappa - 1, which loses all digits for a small kappa.
    return -alpha * math.expm1(kappa * math.log(ratio)) / kappa


def gamma(values: Tensor, ratio: float) -> float:
    """Return the threshold that a share `ratio` of the fitted gamma distribution exceeds.

    The fit is the usual closed-form approximation of the maximum likelihood estimate.
    """
    mean = float(values.mean())
    # The published code adds epsilon, too: one zero would make the mean logarithm infinite.
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
    # Bisection on log x always converges. The upper end is Laurent and Massart's tail bound. torch
    # has no inverse of gammaincc, and this is one threshold per step.
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
"""Fits of the first stage, by distribution: (magnitudes, ratio) -> threshold."""
