"""Measure the time and the peak memory of calls, and make the rows of a benchmark."""

import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
Rows = list[dict[str, Any]]
"""One row for each case."""


def measure_cases(
    cases: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    at_least: float = 0.3,
    setup: Callable[[], object] = lambda: None,
    **shared: Any,
) -> Rows:
    """Measure cases one after the other, and return a row for each.

    `at_least` and `setup` are those of `median_seconds`, `shared` is what `make_rows` takes.
    """
    seconds: dict[str, float] = {}
    peaks: dict[str, int | None] = {}
    for case, fn in cases.items():
        setup()
        peaks[case] = peak_memory(fn, device)
        seconds[case] = median_seconds(fn, device, at_least=at_least, setup=setup)
    return make_rows(seconds, peaks, **shared)


def median_seconds(
    fn: Callable[[], object],
    device: torch.device,
    *,
    at_least: float = 0.3,
    setup: Callable[[], object] = lambda: None,
) -> float:
    """Return the median time of a call, in seconds.

    Args:
        fn: The call. The first one warms up and is not counted.
        device: Where `fn` computes; on a GPU, time is taken from CUDA events.
        at_least: Repeat for so many seconds, and at least three times (ten on a GPU).
        setup: Runs before each call and is not part of the time.
    """
    setup()
    fn()
    times: list[float] = []
    if device.type != "cuda":
        # A median of three ignores one outlier.
        while len(times) < 3 or sum(times) < at_least:
            setup()
            times.append(elapsed_seconds(fn, device))
        return statistics.median(times)
    # No synchronisation between calls, as in a training loop. If launching the kernels takes
    # longer than running them, the time is that of the launches.
    with torch.cuda.device(device):
        while len(times) < 10 or sum(times) < at_least:
            events = []
            # Ten at a time: a synchronisation after each would add its own wait.
            for _ in range(10):
                setup()
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                fn()
                end.record()
                events.append((begin, end))
            torch.cuda.synchronize()
            times += [begin.elapsed_time(end) / 1e3 for begin, end in events]
    return statistics.median(times)


def elapsed_seconds(fn: Callable[[], object], device: torch.device) -> float:
    """Return the time of one call, until the device has done all of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    fn()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def medians_in_turns(cases: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """Return the median of each case, a function that measures once.

    Cases take turns, so that noise hits all alike.
    """
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, measure in cases.items():
            times[name].append(measure())
    return {name: statistics.median(values) for name, values in times.items()}


def make_rows(
    seconds: Mapping[str, float],
    peaks: Mapping[str, int | None],
    *,
    workers: int,
    dim: int,
    sent: Mapping[str, int] | None = None,
    **shared: Any,
) -> Rows:
    """Return a row for each case, with its time and its bytes relative to the first case.

    Args:
        seconds: Time of each case.
        peaks: Peak memory of each case.
        workers: Number of workers.
        dim: Elements of a gradient.
        sent: Bytes that a worker sends in each case; None if nothing is sent.
        **shared: What else all rows have.
    """
    first = next(iter(seconds))
    rows = []
    for case, time_of_case in seconds.items():
        row = {"case": case, "workers": workers, "dim": dim, **shared, "seconds": time_of_case}
        row |= {"bytes": 0 if sent is None else sent[case], "peak_bytes": peaks[case]}
        row["ratio"] = time_of_case / seconds[first]
        if sent is not None:
            row["bytes_ratio"] = sent[case] / max(1, sent[first])  # one worker sends nothing
        rows.append(row)
    return rows


def ceiling_keys(ceiling: float, seconds: float) -> dict[str, float]:
    """Return the keys that compare a row with its ceiling, the least time its case could take."""
    return {"ceiling_seconds": ceiling, "ceiling_ratio": seconds / ceiling}


def peak_memory(fn: Callable[[], object], device: torch.device) -> int | None:
    """Return the peak memory of a call, in bytes above the level before it.

    On a GPU the number comes from torch's allocator, on Linux from the kernel's high-water mark;
    elsewhere it is None. The mark covers the whole process, so run nothing else at the same time.
    An allocator that keeps freed memory hides whatever is served from it. PyTorch's ARM wheels use
    mimalloc: set MIMALLOC_PURGE_DELAY=0 in the environment to make it return memory at once.
    """
    # Garbage that is freed inside the call would hide what the call allocates.
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        fn()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    if not _CLEAR_REFS.exists():
        fn()
        return None
    # Return free memory to the kernel: reusing it would not raise the mark otherwise.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    _CLEAR_REFS.write_text("5")  # resets VmHWM, see proc(5)
    resident = _status_kilobytes("VmRSS")
    fn()
    # The process may have shrunk below the level before.
    return max(0, _status_kilobytes("VmHWM") - resident) * 1024


def _status_kilobytes(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise RuntimeError(f"{_STATUS} has no {field}")
