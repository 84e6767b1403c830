"""What a run depends on apart from its settings: versions and hardware."""

import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch


def versions() -> dict[str, str]:
    """Return the versions of what computes."""
    return {
        "gradherd": version("gradherd"),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def hardware(device: str = "cpu") -> dict[str, Any]:
    """Return what it computes on."""
    gpu = torch.cuda.get_device_name() if device.startswith("cuda") else None
    return {
        "cpu": _cpu(),
        "cores": _cores(),
        "memory_bytes": _memory(),
        "accelerator": gpu,
        "system": f"{platform.system()} {platform.release()}",
    }


def _cores() -> int:
    """Return how many cores this process may use, which a container may have cut."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory() -> int | None:
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# Implementer 0x41 is Arm Ltd; Linux on Arm tells part numbers instead of names.
_ARM_PARTS = {
    "0xd07": "Cortex-A57",
    "0xd08": "Cortex-A72",
    "0xd0b": "Cortex-A76",
    "0xd0c": "Neoverse-N1",
    "0xd40": "Neoverse-V1",
    "0xd49": "Neoverse-N2",
    "0xd4f": "Neoverse-V2",
}


def _cpu() -> str:
    """Return the processor's name as well as the system tells it."""
    known = platform.processor() or platform.machine()
    if sys.platform != "linux":
        return known
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return known
    pairs = [line.split(":", 1) for line in text.splitlines() if ":" in line]
    told = {name.strip(): value.strip() for name, value in pairs}
    arm = told.get("CPU implementer") == "0x41"
    part = _ARM_PARTS.get(told.get("CPU part", "")) if arm else None
    return told.get("model name") or part or known
