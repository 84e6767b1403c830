"""How long a call takes, measured fairly."""

import statistics
import time
from collections.abc import Callable

import torch


def seconds(
    fn: Callable[[], object],
    device: torch.device,
    *,
    at_least: float = 0.3,
    before: Callable[[], object] = lambda: None,
) -> float:
    """Return the median time of a call: one to warm up, then for `at_least` seconds, 3 or more.

    `before` is called before each one, and not measured.
    """
    before()
    fn()
    times: list[float] = []
    while len(times) < 3 or sum(times) < at_least:
        before()
        _synchronize(device)
        begin = time.perf_counter()
        fn()
        _synchronize(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
