"""What is watched while a run trains: prefix sums, densities of steps, and where time goes."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

# Up to this many numbers the gradients of an epoch are kept.
_MAX_TRACKED = 64_000_000
# So many of them are looked at in double precision at a time, in columns of whole vectors: sums
# have the same bits as if all were.
_MAX_DOUBLES, _VECTORS = 4_000_000, 64


def can_track_prefix_sums(steps: int, parameters: int) -> bool:
    """Return whether the prefix sums of an epoch are cheap enough to be watched."""
    return steps * parameters <= _MAX_TRACKED


def herding_bound(means: Tensor, examples: int) -> float:
    """Return the largest entry of any prefix sum of (gradient - mean), summed over examples.

    Args:
        means: (T, D) averaged gradient of each step of an epoch, as it was applied.
        examples: Examples of a step, of all workers.

    >>> import torch
    >>> herding_bound(torch.tensor([[1.0], [1.0], [-1.0], [-1.0]]), examples=4)
    8.0
    """
    columns = max(1, _MAX_DOUBLES // len(means) // _VECTORS) * _VECTORS
    largest = []
    for part in means.split(columns, dim=1):
        wide = part.double()
        largest.append((wide - wide.mean(0)).cumsum(0).abs().max())
    return float(torch.stack(largest).max()) * examples


class DeviceTimer:
    """Adds up the time of stretches of work; on a GPU by its own clock, without waiting for it.

    >>> stretches = DeviceTimer(torch.device("cpu"))
    >>> with stretches.one():
    ...     pass
    >>> stretches.take() >= 0, stretches.take()
    (True, 0.0)
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Count what is done inside."""
        if not self._on_gpu:
            begin = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - begin
            return
        pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        pair[0].record()
        yield
        pair[1].record()
        self._pairs.append(pair)

    def take(self) -> float:
        """Return the seconds so far, and start again from zero; waits for the GPU."""
        if self._pairs:
            self._pairs[-1][1].synchronize()
        pairs, self._pairs = self._pairs, []
        seconds, self._seconds = self._seconds, 0.0
        return seconds + sum(float(begin.elapsed_time(end)) for begin, end in pairs) / 1000


class BinnedSeries:
    """A series of any length in a few hundred bins, each with its mean, least and largest.

    >>> bins = BinnedSeries(most=2)
    >>> for value in (1.0, 3.0, 5.0, 7.0, 9.0):
    ...     bins.add(value)
    >>> [(b["step"], b["mean"], b["max"]) for b in bins.listed()]
    [(0, 4.0, 7.0), (4, 9.0, 9.0)]
    """

    def __init__(self, most: int = 400) -> None:
        self._most = most
        self._width = 1
        self._bins: list[tuple[int, float, float, float]] = []  # count, sum, least, largest

    def add(self, value: float) -> None:
        """Add the next value."""
        if self._bins and self._bins[-1][0] < self._width:
            count, total, least, largest = self._bins[-1]
            self._bins[-1] = count + 1, total + value, min(least, value), max(largest, value)
            return
        if len(self._bins) == self._most:
            self._halve()
            self.add(value)
            return
        self._bins.append((1, value, value, value))

    def _halve(self) -> None:
        """Join neighbours: half as many bins, twice as wide."""
        pairs = [self._bins[at : at + 2] for at in range(0, len(self._bins), 2)]
        self._bins = [
            (sum(b[0] for b in p), sum(b[1] for b in p), min(b[2] for b in p), max(b[3] for b in p))
            for p in pairs
        ]
        self._width *= 2

    def state(self) -> dict[str, Any]:
        """Return all that it holds."""
        return {"most": self._most, "width": self._width, "bins": [list(b) for b in self._bins]}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "BinnedSeries":
        """Return the bins that `state` described."""
        bins = cls(state["most"])
        bins._width = state["width"]
        bins._bins = [(b[0], b[1], b[2], b[3]) for b in state["bins"]]
        return bins

    def listed(self) -> list[dict[str, float]]:
        """Return the bins as the record holds them."""
        return [
            {"step": at * self._width, "mean": total / count, "min": least, "max": largest}
            for at, (count, total, least, largest) in enumerate(self._bins)
        ]
