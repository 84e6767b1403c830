"""What a record reports beside settings and losses: environment, herding bound, time, density."""

import contextlib
import os
import platform
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Gradients of an epoch are stored for the herding bound up to this many elements.
_MAX_TRACKED = 64_000_000
# Elements converted to double precision at a time, in groups of whole vector registers: column
# sums then have the same bits as if all columns were summed at once.
_MAX_DOUBLES, _VECTOR_COLUMNS = 4_000_000, 64

# Linux on Arm reports part numbers instead of names; implementer 0x41 is Arm Ltd.
_ARM_PARTS = {
    "0xd07": "Cortex-A57",
    "0xd08": "Cortex-A72",
    "0xd0b": "Cortex-A76",
    "0xd0c": "Neoverse-N1",
    "0xd40": "Neoverse-V1",
    "0xd49": "Neoverse-N2",
    "0xd4f": "Neoverse-V2",
}


def can_track_prefix_sums(steps: int, parameters: int) -> bool:
    """Return whether the gradients of an epoch are few enough to be stored."""
    return steps * parameters <= _MAX_TRACKED


def herding_bound(means: Tensor, examples: int) -> float:
    """Return the largest entry of any prefix sum of (gradient - mean), summed over examples.

    This is the herding objective of GraB (arXiv:2205.10733), in the infinity norm.

    Args:
        means: (T, D) averaged gradient of each step of an epoch, before clipping.
        examples: Examples per step, over all workers.

    >>> import torch
    >>> herding_bound(torch.tensor([[1.0], [1.0], [-1.0], [-1.0]]), examples=4)
    8.0
    """
    columns = max(1, _MAX_DOUBLES // len(means) // _VECTOR_COLUMNS) * _VECTOR_COLUMNS
    largest = []
    for part in means.split(columns, dim=1):
        # The sums of thousands of gradients nearly cancel: float32 would lose the digits that
        # matter.
        doubles = part.double()
        largest.append((doubles - doubles.mean(0)).cumsum(0).abs().max())
    return float(torch.stack(largest).max()) * examples


class DeviceTimer:
    """Accumulates the time of blocks of work; on a GPU by CUDA events, without a host sync.

    >>> timer = DeviceTimer(torch.device("cpu"))
    >>> with timer.measure():
    ...     pass
    >>> timer.reset() >= 0, timer.reset()
    (True, 0.0)
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def measure(self) -> Iterator[None]:
        """Add the time of the block."""
        if not self._on_gpu:
            begin = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - begin
            return
        events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # Recorded on the stream; nothing waits until the epoch ends.
        events[0].record()
        yield
        events[1].record()
        self._events.append(events)

    def reset(self) -> float:
        """Return the seconds so far and start again from zero; waits for the GPU."""
        if self._events:
            # Events of one stream end in order, so waiting for the last is enough.
            self._events[-1][1].synchronize()
        events, self._events = self._events, []
        seconds, self._seconds = self._seconds, 0.0
        return seconds + sum(float(begin.elapsed_time(end)) for begin, end in events) / 1000


def versions() -> dict[str, str]:
    """Return the versions of gradherd, torch, numpy and Python."""
    return {
        "gradherd": version("gradherd"),
        "torch": str(torch.__version__),  # of a class of its own
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def hardware(device: str = "cpu") -> dict[str, Any]:
    """Return a description of the machine.

    Returns:
        cpu, cores, memory_bytes (None if unknown), accelerator (None on a CPU) and system.
    """
    # Asked only for runs on a GPU: it would initialise CUDA, which takes seconds and memory.
    gpu = torch.cuda.get_device_name() if device.startswith("cuda") else None
    pages, has_affinity = "SC_PHYS_PAGES", hasattr(os, "sched_getaffinity")
    has_pages = pages in getattr(os, "sysconf_names", {})  # not on Windows
    return {
        "cpu": _cpu(),
        # Those that this process may use; containers may limit it.
        "cores": len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf(pages) if has_pages else None,
        "accelerator": gpu,
        "system": f"{platform.system()} {platform.release()}",
    }


def _cpu() -> str:
    """Return the name of the processor as far as the system knows it."""
    fallback = platform.processor() or platform.machine()
    if sys.platform != "linux":
        return fallback
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return fallback
    pairs = [line.split(":", 1) for line in text.splitlines() if ":" in line]
    info = {name.strip(): value.strip() for name, value in pairs}
    is_arm = info.get("CPU implementer") == "0x41"
    part = _ARM_PARTS.get(info.get("CPU part", "")) if is_arm else None
    return info.get("model name") or part or fallback
