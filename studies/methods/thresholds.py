"""Methods whose workers select what reaches a threshold of their own: hard, SAGE and SIDCo.

Workers select different coordinates, any number of them, and the union is sent.

Hard threshold: Sahu et al., "Rethinking gradient sparsification as total error minimization",
NeurIPS 2021, arXiv:2108.00951. The threshold never changes, so the density follows the gradients:
everything is sent while they are large, nothing when they are small.

SAGE: Yoon, Jeong and Oh, "SAGE: toward on-the-fly gradient compression ratio scaling", The Journal
of Supercomputing, 2023. At each step a worker multiplies its threshold by three factors: alpha, the
growth of the mean magnitude (estimated on a sample of about 400 coordinates at most); beta, a
little above or below one as too many or too few coordinates reach the threshold times alpha; and
gamma, 5 % up or down if they are off by a factor of ten. For small densities beta is nearly one,
so within a factor of ten of the target the density hardly moves. The published code reads a random
sample element by element; this one reads an evenly spaced sample at once.

SIDCo: Abdelmoniem et al., "An Efficient Statistical-based Gradient Compression Technique for
Distributed Training Systems", MLSys 2021, arXiv:2101.10761. Each worker fits a distribution to its
magnitudes and uses the quantile of the target density as its threshold. Such a fit is poor far out
in the tail, so the first stage keeps a quarter of the coordinates, and each further stage is fitted
to what the last one kept. Stages are added if too few coordinates are selected, and removed if too
many are. Their number follows a worker's own count, so workers may have different numbers, and the
union that is sent is denser than the selection of one worker.

Letters: D coordinates, R workers, K coordinates that are sent, S stages.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from gradherd.comm.checks import check_numbers
from gradherd.comm.message_sizes import DEFAULT_DENSITY
from gradherd.comm.script import Script
from gradherd.sparsify.kernels import indices_above, topk_indices
from gradherd.sparsify.selecting import gather_union
from gradherd.sparsify.selector import (
    Proposal,
    Selection,
    Selector,
    Step,
    check_density,
    target_count,
)

Distribution = Literal["exponential", "gamma", "pareto"]


class ByThreshold(Selector):
    """A method whose workers each select what reaches a threshold, and send the union."""

    @staticmethod
    def proposal(selected: Tensor, state: Any, threshold: float | None) -> Proposal:
        """Return a proposal whose header is the number of selected coordinates.

        Args:
            selected: (K_r,) ascending indices that this worker selected.
            state: The method's state for the next step.
            threshold: This worker's threshold.
        """
        count = torch.tensor([len(selected)], dtype=torch.int32, device=selected.device)
        return Proposal(count, (selected, state, threshold))

    def agree(self, step: Step, own: Any, headers: Tensor) -> Script[Selection]:
        """Gather the union of all selections, or take everything if k is D."""
        selected, state, threshold = own
        if step.k >= step.dim:
            return Selection(step.everything(), [step.dim] * step.size, state, 0.0)
        counts = headers[:, 0].tolist()
        union = yield from gather_union(selected, counts, step.dim, step)
        return Selection(union, counts, state, threshold)


@dataclass(frozen=True)
class ThresholdState:
    """State of `Threshold`, the same on all workers."""

    threshold: float
    """Changes only when the unit of the values changes."""


@dataclass(frozen=True)
class Threshold(ByThreshold):
    """Send the union of what reaches a constant threshold on any worker.

    Sahu et al., NeurIPS 2021, arXiv:2108.00951. Raises ValueError if a setting is out of range.
    """

    density: float = DEFAULT_DENSITY
    """Density that the default threshold is meant for; the actual density may be anything."""
    value: float | None = None
    """The threshold, in the unit of the first step. None is the paper's 1 / (2 sqrt k), which
    follows a warm-up of the density; a given value does not."""

    def __post_init__(self) -> None:
        check_density(self.density)
        if self.value is not None:
            check_numbers(value=self.value)
        if self.value is not None and not 0 < self.value < math.inf:
            raise ValueError(f"value must be a positive number or None, got {self.value}")

    def begin(self, dim: int, workers: int, layers: Sequence[int]) -> ThresholdState:
        """Set the threshold."""
        if self.value is not None:
            return ThresholdState(self.value)
        return ThresholdState(suggested_threshold(target_count(self.density, dim)))

    def propose(self, step: Step) -> Proposal:
        """Select what reaches the threshold; the header is the count."""
        threshold = step.state.threshold
        if self.value is None:
            # During a warm-up of the density k is larger than usual, and the threshold lower.
            usual_k = target_count(self.density, step.dim)
            threshold *= suggested_threshold(step.k) / suggested_threshold(usual_k)
        threshold = clamp_to_dtype(threshold, step.acc.dtype)
        return self.proposal(indices_above(step.acc, threshold), step.state, threshold)


def suggested_threshold(k: int) -> float:
    """Return the paper's threshold for sending about k coordinates: 1 / (2 sqrt k).

    >>> suggested_threshold(25)
    0.1
    """
    return 1 / (2 * math.sqrt(k))


def clamp_to_dtype(threshold: float, dtype: torch.dtype) -> float:
    """Return the threshold, clamped to the positive normal range of `dtype`."""
    # Zero would select everything, exact zeros included; infinity nothing at all, for ever.
    limits = torch.finfo(dtype)
    return min(max(threshold, limits.tiny), limits.max)


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

    def propose(self, step: Step) -> Proposal:
        """Update this worker's threshold and select; the header is the count."""
        acc, k, state = step.acc, step.k, step.state
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

    def propose(self, step: Step) -> Proposal:
        """Fit a threshold and select; the header is the count."""
        acc, k, state = step.acc, step.k, step.state
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
