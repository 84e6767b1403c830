"""What a run depends on besides its settings: versions and hardware."""

import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch


def versions() -> dict[str, str]:
    """Return the versions of gradherd, torch, numpy and Python."""
    return {
        "gradherd": version("gradherd"),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def hardware(device: str = "cpu") -> dict[str, Any]:
    """Return a description of the machine."""
    gpu = torch.cuda.get_device_name() if device.startswith("cuda") else None
    return {
        "cpu": _cpu(),
        "cores": _cores(),
        "memory_bytes": _memory(),
        "accelerator": gpu,
        "system": f"{platform.system()} {platform.release()}",
    }


def _cores() -> int:
    """Return the number of cores that this process may use; containers may limit it."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory() -> int | None:
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


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
