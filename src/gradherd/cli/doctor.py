"""`gradherd doctor`: check that this machine has what gradherd needs.

Checks import torch when they are run, so that --help does not wait for it.
"""

import contextlib
import importlib
import importlib.util
import os
import platform
import re
import shutil
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, NamedTuple

from gradherd.cli.parser import CommandFailed
from gradherd.cli.terminal import print_json, print_table, say, under_torchrun
from gradherd.lab.text import one_line

# Far more than the seconds that a start takes: a slow machine is not a broken one.
_DEADLINE = 60.0
MIN_FREE_BYTES = 200 << 20
"""Free disk space below which a training may not be able to write its records."""
# What torchrun and other launchers set, and what a sampler reads without a process group.
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class Check(NamedTuple):
    """The result of one check."""

    name: str
    status: Literal["ok", "missing", "problem"]
    """missing: optional and not installed; problem: does not work."""
    found: str
    hint: str = ""
    """What it is for, and how to fix it if it is not ok."""
    essential: bool = False
    """Whether no training works if this is a problem."""


class Package(NamedTuple):
    """A package that gradherd uses."""

    name: str
    module: str
    least: str
    """Oldest version that works."""
    purpose: str
    get: str = ""
    """How to get it, if not by pip install."""
    essential: bool = False


# A test compares these with the requirements in pyproject.toml.
PACKAGES = (
    Package("torch", "torch", "2.7", "everything", essential=True),
    Package("numpy", "numpy", "1.26", "everything", essential=True),
    Package("scikit-learn", "sklearn", "1.5", "the data of digits, digits-mlp and the demo"),
    Package("pillow", "PIL", "10", "CIFAR-10 in WebP sheets"),
    Package("jinja2", "jinja2", "3.1", "pages of compare, demo and report"),
    Package("scipy", "scipy", "1.13", "intervals and tests"),
    Package("triton", "triton", "3", "fused GPU selection", "comes with the CUDA builds of torch"),
)
"""Packages that gradherd uses, required ones first."""


@dataclass(frozen=True, kw_only=True)
class DoctorCommand:
    """Check what gradherd needs on this machine, and say how to fix what is wrong.

    Looks at versions, GPUs, cores, memory and the disk, and starts two local workers to see whether
    they can talk to each other. Takes a few seconds. Every check is ok,
    missing (an optional part is not installed) or a problem (it does not work). Exit code 1 if
    something does not work that every training needs. `gradherd data list` looks for data sets.

    Example: gradherd doctor
    """

    json: bool = False
    """Print {"checks": [{"name", "status", "found", "hint"}], "ok"}; status is ok, missing or
    problem."""

    def run(self) -> None:
        """Run all checks and print them."""
        checks = [Check("python", "ok", platform.python_version())]
        checks += [Check("gradherd", "ok", version("gradherd")), *map(check_package, PACKAGES)]
        checks += [launcher_variables(), gpu(), *machine(), local_workers()]
        problems = [check for check in checks if check.status == "problem"]
        broken = [check.name for check in problems if check.essential]
        if self.json:
            keys = ("name", "status", "found", "hint")
            shown = [dict(zip(keys, check, strict=False)) for check in checks]
            print_json({"checks": shown, "ok": not broken})
        else:
            # The hint gets its own line if there is a problem.
            gaps = {"ok": "  ", "missing": "  ", "problem": "\n"}
            rows = [
                (one.name, one.status, (one.found + gaps[one.status] + one.hint).rstrip())
                for one in checks
            ]
            print_table(rows, ("check", "status", "found"))
        if broken:
            # After the table, so that "above" is true; scripts see the exit code.
            raise CommandFailed(f"gradherd will not work well here: see {', '.join(broken)} above")
        if not self.json:
            look = f"Have a look at: {', '.join(check.name for check in problems)}."
            rest = f". {look}" if problems else "; what is missing is optional."
            say(f"Everything that training needs works{rest}")


def check_package(package: Package) -> Check:
    """Import a package and check its version."""
    name, module, least, purpose, get, essential = package
    get = get or f"pip install '{name}>={least}'"
    # Looked up before it is imported: a package that is missing and one that is broken need
    # different advice.
    if importlib.util.find_spec(module) is None:
        status: Literal["missing", "problem"] = "problem" if essential else "missing"
        return Check(name, status, "not installed", f"for {purpose}; {get}", essential)
    fix = ""
    try:
        # Actually imported: a wheel for another CPU or another numpy installs but does not load.
        imported = importlib.import_module(module)
        found = str(getattr(imported, "__version__", "unknown"))
        with contextlib.suppress(PackageNotFoundError):  # not installed by pip
            found = version(name)
        if _version_numbers(found) < _version_numbers(least):
            fix = f"; needs {least}: {get}"
    except Exception as error:  # a broken package may raise anything
        found, fix = f"cannot be imported: {one_line(error)}", f"; reinstall it: {get}"
    return Check(name, "problem" if fix else "ok", found, f"for {purpose}{fix}", essential)


def _version_numbers(text: str) -> tuple[int, ...]:
    """Return the numbers that a version starts with; an unknown version counts as new.

    >>> _version_numbers("2.13.0+cpu") > _version_numbers("2.7")
    True
    """
    match = re.match(r"\d+(\.\d+)*", text)
    # Only the numbers that come first: local builds are called 2.13.0+cpu or 3.2.0a0.
    return tuple(map(int, match.group().split("."))) if match else (10**9,)


def launcher_variables() -> Check:
    """Check for variables that a launcher left in the environment: samplers would trust them."""
    name, left = "launcher variables", [name for name in LAUNCHER_VARIABLES if name in os.environ]
    if not left or under_torchrun():  # then the variables are current
        return Check(name, "ok", ", ".join(left) or "none set")
    found = ", ".join(f"{name}={os.environ[name]}" for name in left)
    hint = "samplers read rank and world size from these, but torchrun did not set them; unset"
    return Check(name, "problem", found, f"{hint} {' '.join(left)}")


def gpu() -> Check:
    """Check that every GPU computes."""
    import torch

    if not torch.cuda.is_available():
        fix = "needs a GPU that nvidia-smi lists, and a CUDA build of torch: see pytorch.org"
        return Check("gpu", "missing", "none that torch can see", f"for --device cuda; {fix}")
    count = torch.cuda.device_count()
    found = ", ".join(torch.cuda.get_device_name(index) for index in range(count))
    try:
        for index in range(count):
            # A kernel and a copy back: a GPU that is listed may lack kernels for its architecture.
            torch.ones(8, device=f"cuda:{index}").sum().item()
    except RuntimeError as error:
        hint = "run nvidia-smi: is the driver too old, or is another process using it?"
        return Check("gpu", "problem", f"{found}: {one_line(error)}", f"for --device cuda; {hint}")
    return Check("gpu", "ok", found, "for --device cuda")


def machine() -> list[Check]:
    """Check cores, memory and the disk."""
    from gradherd.lab.train.measurements import hardware

    known = hardware()
    memory = "unknown" if known["memory_bytes"] is None else _gib(known["memory_bytes"])
    cores = f"{known['cores']} ({known['cpu']})"
    return [
        Check("cores", "ok", cores, "more workers than cores take turns"),
        Check("memory", "ok", memory),
        disk(),
    ]


def disk() -> Check:
    """Check that the current folder can be written to and has room."""
    try:
        folder = Path.cwd()
        # Permission bits do not tell about read-only file systems and quotas; writing does.
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
        free = shutil.disk_usage(folder).free
    except OSError as error:
        found, broken = f"cannot be written to: {one_line(error)}", True
    else:
        found, broken = f"{folder}: {_gib(free)} free", free < MIN_FREE_BYTES
    hint = "for records and pages" + "; name another with --out" * broken
    status: Literal["ok", "problem"] = "problem" if broken else "ok"
    return Check("disk, current folder", status, found, hint, essential=True)


def local_workers(deadline: float = _DEADLINE) -> Check:
    """Check that two local processes can start, connect and add up a number."""
    from gradherd.lab.ranks import RankError, run_ranks

    name, purpose = "two local workers", "for train, compare and demo"
    fix, begin = f"{purpose}; --virtual trains without worker processes", time.monotonic()
    try:
        sums = run_ranks(sum_of_ranks, 2, timeout=deadline)
    # Everything that starting can raise: no fork server, no folder for the rendezvous, no socket.
    except (RankError, TimeoutError, OSError, RuntimeError) as error:
        found = error.reason if isinstance(error, RankError) else one_line(error)
        # `run_ranks` uses lo unless the variable names another.
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        hint = f"{fix}. They use {interface}: a firewall may block it, a container may lack it"
        return Check(name, "problem", found, hint, essential=True)
    if sums != [3.0, 3.0]:
        return Check(name, "problem", f"1 + 2 gave {sums}", fix, essential=True)
    found = f"started, added up and ended in {time.monotonic() - begin:.1f} s"
    return Check(name, "ok", found, purpose, essential=True)


def sum_of_ranks() -> float:
    """Return the sum of rank + 1 over all ranks."""
    import torch

    from gradherd.comm.collectives import all_reduce
    from gradherd.comm.world import World

    world = World.detect()
    return float(all_reduce(torch.tensor([world.rank + 1.0]), world).value.item())


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
