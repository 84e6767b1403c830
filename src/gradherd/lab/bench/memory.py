"""How much memory a piece of work takes on top of what is there."""

import ctypes
import gc
from pathlib import Path
from types import TracebackType

import torch

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Peak:
    """Context that notes the highest memory inside it, above the level before it.

    On a GPU from torch's allocator, on Linux from the kernel's high-water mark; None elsewhere. The
    mark is the whole process's: let nothing else run in it meanwhile. An allocator that keeps what
    was freed hides what is taken from there: torch's wheels for ARM have mimalloc, which returns it
    at once with MIMALLOC_PURGE_DELAY=0 in the environment.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.bytes: int | None = None

    def __enter__(self) -> "Peak":
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
        elif _RESET.exists():
            # Hand free memory to the kernel, so that using it again shows; then reset the mark.
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
            if trim is not None:
                trim(0)
            _RESET.write_text("5")
            self._before = _kilobytes("VmRSS")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self.bytes = torch.cuda.max_memory_allocated(self._device) - self._before
        elif _RESET.exists():
            self.bytes = max(0, _kilobytes("VmHWM") - self._before) * 1024


def _kilobytes(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise RuntimeError(f"{_STATUS} has no {field}")
