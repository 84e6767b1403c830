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
    if device.type == "cuda":
        return _on_gpu(fn, device, at_least, before)
    times: list[float] = []
    while len(times) < 3 or sum(times) < at_least:
        before()
        begin = time.perf_counter()
        fn()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _on_gpu(
    fn: Callable[[], object],
    device: torch.device,
    at_least: float,
    before: Callable[[], object],
) -> float:
    """Time by events on the stream, without a wait between calls: as a training loop has it.

    A call whose kernels are launched more slowly than they run takes as long as the launches.
    """
    times: list[float] = []
    with torch.cuda.device(device):
        while len(times) < 10 or sum(times) < at_least:
            marks = []
            for _ in range(10):
                before()
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                fn()
                end.record()
                marks.append((begin, end))
            torch.cuda.synchronize()
            times += [begin.elapsed_time(end) / 1e3 for begin, end in marks]
    return statistics.median(times)


def against(ceiling: float, taken: float) -> dict[str, float]:
    """Return a row's keys about the least that its case could take, measured in the same run."""
    return {"ceiling_seconds": ceiling, "ceiling_ratio": taken / ceiling}
