"""What methods compute in a step, apart from what travels: seconds, from measurements.

For a CPU: one rank on one core of a Neoverse-N1 (processor times of `benchmarks/slow_network.py`;
torch 2.13, gloo, whose sums of half-precision numbers are slow). For a GPU: passes over the
gradient's memory on an H200, with 1.5 ms for the host's part of a sparse exchange; several GPUs
were not at hand. Both are starting points: measure.
"""

from dataclasses import dataclass, replace

_PER_PARAMETER = {
    "cpu": {
        "fp16": 19e-9,
        "powersgd": 7e-9,
        "topk": 3.5e-9,
        "exdyna": 2e-9,
        "ride": 1.4e-9,
        "sketch": 2.4e-9,
    },
    "cuda": {
        "fp16": 6e-12,
        "powersgd": 20e-12,
        "topk": 35e-12,
        "exdyna": 16e-12,
        "ride": 16e-12,
        "sketch": 16e-12,
    },
}
"""Device -> method -> seconds for each parameter."""
_FIXED = {
    "cpu": {"powersgd": 1e-3, "topk": 1e-3, "exdyna": 1e-3, "ride": 0.2e-3, "sketch": 0.2e-3},
    "cuda": {"powersgd": 1e-3, "topk": 1.5e-3, "exdyna": 1.5e-3, "ride": 0.2e-3, "sketch": 0.2e-3},
}
"""Device -> method -> seconds of any step."""
DEVICES = tuple(_PER_PARAMETER)


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """Seconds of a step that each method computes."""

    dense: float = 0.0
    """Summing; like those of fp16 and ride, it counts where it takes longer than the bytes."""
    fp16: float = 0.0
    """Converting."""
    powersgd: float = 0.0
    topk: float = 0.0
    exdyna: float = 0.0
    """Adding the residual, picking, writing the mean."""
    ride: float = 0.0
    """CD-GraB on a dense exchange."""
    sketch: float = 0.0
    """CD-GraB beside any other: reading a sketch of the gradient."""

    def of(self, exchange: str) -> float:
        """Return that of an exchange."""
        found: float = getattr(self, exchange)
        return found

    def with_known(self, known: dict[str, float | None]) -> "Overheads":
        """Put what is known in the place of what was reckoned."""
        return replace(self, **{name: value for name, value in known.items() if value is not None})


_WORK = {"cpu": (64, 20e9), "cuda": (2048, 200e12)}
"""Device -> examples or tokens of a worker's step, operations a second: where nobody told more."""


def guessed_backward(device: str, params: float) -> float:
    """Return the seconds of a backward pass that nobody told: 4 operations for each number.

    >>> round(guessed_backward("cuda", 7e9), 2)
    0.29
    """
    examples, speed = _WORK[device]
    return 4 * params * examples / speed


def usual(device: str, params: float) -> Overheads:
    """Return what is to be expected of a model with so many parameters.

    >>> round(1e3 * usual("cpu", 10e6).exdyna)  # milliseconds
    21
    """
    fixed, rates = _FIXED[device], _PER_PARAMETER[device]
    return Overheads(**{name: fixed.get(name, 0.0) + rate * params for name, rate in rates.items()})
