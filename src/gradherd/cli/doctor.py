"""`gradherd doctor`: check that this machine has what gradherd needs.

Checks import torch when they are run, so that --help does not wait for it.
"""

import importlib
import importlib.util
import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from gradherd.cli.data import find_local, tasks_of
from gradherd.cli.parser import CommandFailed
from gradherd.cli.terminal import print_json, print_table, say, under_torchrun
from gradherd.lab.tasks.data_files import cache_dir, data_dirs
from gradherd.lab.tasks.datasets import DATASETS

Status = Literal["ok", "missing", "problem"]
# Far more than the seconds that a start takes: a slow machine is not a broken one.
_DEADLINE = 60.0
MIN_FREE_BYTES = 200 << 20
"""Free disk space below which a training may not be able to write its records."""
# What torchrun and other launchers set, and what a sampler reads without a process group.
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    status: Status
    """ok, missing (optional and not installed) or problem (does not work)."""
    found: str
    hint: str = ""
    """What it is for, and how to fix it if it is not ok."""
    essential: bool = False
    """Whether no training works if this is a problem."""


@dataclass(frozen=True)
class Package:
    """A package that gradherd uses."""

    name: str
    module: str
    least: str
    """Oldest version that works."""
    purpose: str
    get: str
    """How to install it."""
    essential: bool = False


# A test compares these with the requirements in pyproject.toml.
PACKAGES = (
    Package("torch", "torch", "2.7", "everything", "pip install 'torch>=2.7'", essential=True),
    Package("numpy", "numpy", "1.26", "everything", "pip install 'numpy>=1.26'", essential=True),
    Package("scikit-learn", "sklearn", "1.5", "the data of digits, digits-mlp and the demo",
            "pip install 'scikit-learn>=1.5'"),
    Package("pillow", "PIL", "10", "CIFAR-10 in WebP sheets", "pip install 'pillow>=10'"),
    Package("jinja2", "jinja2", "3.1", "pages of compare, demo and report",
            "pip install 'jinja2>=3.1'"),
    Package("scipy", "scipy", "1.13", "intervals and tests", "pip install 'scipy>=1.13'"),
    Package("tensorboard", "tensorboard", "2", "train and compare with --tensorboard",
            "pip install tensorboard"),
    Package("triton", "triton", "3", "fused selection on a GPU",
            "comes with the CUDA builds of torch"),
)  # fmt: skip
"""Packages that gradherd uses, required ones first."""


@dataclass(frozen=True, kw_only=True)
class DoctorCommand:
    """Check what gradherd needs on this machine, and say how to fix what is wrong.

    Looks at versions, the build of torch, GPUs, cores, memory, disks and data sets, and starts two
    local workers to see whether they can talk to each other. Takes a few seconds. Every check is
    ok, missing (an optional part is not installed) or a problem (it does not work). Exit code 1 if
    something does not work that every training needs.

    Example: gradherd doctor
    """

    json: bool = False
    """Print {"checks": [{"name", "status", "found", "hint"}], "ok"}; status is ok, missing or
    problem."""

    def run(self) -> None:
        """Run all checks and print them."""
        checks = [Check("python", "ok", platform.python_version())]
        checks += [Check("gradherd", "ok", version("gradherd")), *map(check_package, PACKAGES)]
        checks += [*distributed(), launcher_variables(), gpu(), *machine(), local_workers()]
        checks += [data_folders(), *map(_data_set, DATASETS)]
        problems = [check for check in checks if check.status == "problem"]
        broken = [check.name for check in problems if check.essential]
        if self.json:
            keys = ("name", "status", "found", "hint")
            shown = [{key: getattr(check, key) for key in keys} for check in checks]
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

    def result(status: Status, found: str, hint: str = "") -> Check:
        hint = f"for {package.purpose}" + (f"; {hint}" if hint else "")
        return Check(package.name, status, found, hint, package.essential)

    # Looked up before it is imported: a package that is missing and one that is broken need
    # different advice.
    if importlib.util.find_spec(package.module) is None:
        return result("problem" if package.essential else "missing", "not installed", package.get)
    try:
        # Actually imported: a wheel for another CPU or another numpy installs but does not load.
        module = importlib.import_module(package.module)
    except Exception as error:  # a broken package may raise anything
        found = f"cannot be imported: {one_line(error)}"
        return result("problem", found, f"reinstall it: {package.get}")
    try:
        found = version(package.name)
    except PackageNotFoundError:  # not installed by pip
        found = str(getattr(module, "__version__", "unknown"))
    if _version_numbers(found) < _version_numbers(package.least):
        return result("problem", found, f"needs {package.least}: {package.get}")
    return result("ok", found)


def _version_numbers(text: str) -> tuple[int, ...]:
    """Return the numbers that a version starts with; an unknown version counts as new.

    >>> _version_numbers("2.13.0+cpu") > _version_numbers("2.7")
    True
    """
    match = re.match(r"\d+(\.\d+)*", text)
    # Only the numbers that come first: local builds are called 2.13.0+cpu or 3.2.0a0.
    return tuple(map(int, match.group().split("."))) if match else (10**9,)


def one_line(error: BaseException) -> str:
    r"""Return the type and message of an error in one line.

    >>> one_line(OSError("no\nspace"))
    'OSError: no space'
    """
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def distributed() -> list[Check]:
    """Check the backends that torch was built with, and torchrun."""
    import torch.distributed as dist

    # torch can be built without torch.distributed, and then even is_gloo_available is missing.
    gloo = dist.is_available() and dist.is_gloo_available()
    nccl = dist.is_available() and dist.is_nccl_available()
    launcher = shutil.which("torchrun")
    there = {True: "in torch", False: "not in this torch"}
    return [
        Check("gloo", "ok" if gloo else "problem", there[gloo], "for worker processes" + (
            "" if gloo else "; use --virtual, or install another build of torch: see pytorch.org"),
            essential=True),
        Check("nccl", "ok" if nccl else "missing", there[nccl], "for workers on GPUs" + (
            "" if nccl else "; comes with the CUDA builds of torch")),
        Check("torchrun", "ok" if launcher else "missing", launcher or "not on PATH",
            "for workers on several machines" + (
            "" if launcher else "; python -m torch.distributed.run is the same")),
    ]  # fmt: skip


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

    purpose = "for --device cuda"
    if torch.version.cuda is None and torch.version.hip is None:
        hint = f"{purpose}; needs a CUDA build of torch: see pytorch.org"
        return Check("gpu", "missing", "torch is built without CUDA", hint)
    if not torch.cuda.is_available():
        hint = f"{purpose}; run nvidia-smi to see whether there is a GPU with a driver"
        return Check("gpu", "missing", "none that torch can see", hint)
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    try:
        for index in range(len(names)):
            # A kernel and a copy back: a GPU that torch lists may still lack kernels for its
            # architecture.
            torch.ones(8, device=f"cuda:{index}").sum().item()
    except RuntimeError as error:
        hint = f"{purpose}; run nvidia-smi: is the driver too old, or is another process using it?"
        return Check("gpu", "problem", f"{', '.join(names)}: {one_line(error)}", hint)
    return Check("gpu", "ok", ", ".join(names), purpose)


def machine() -> list[Check]:
    """Check cores, memory and disks."""
    from gradherd.lab.train.measurements import hardware

    known, free = hardware(), _available_memory()
    memory = "unknown" if known["memory_bytes"] is None else _gib(known["memory_bytes"])
    return [
        Check("cores", "ok", f"{known['cores']} ({known['cpu']})",
              "more workers than cores take turns"),
        Check("memory", "ok", memory if free is None else f"{memory}, {_gib(free)} available"),
        disk("disk, current folder", Path.cwd, "records and pages",
             "name a folder elsewhere with --out"),
        disk("disk, temporary folder", lambda: Path(tempfile.gettempdir()),
             "the rendezvous of local workers", "set TMPDIR to another one"),
    ]  # fmt: skip


def disk(name: str, where: Callable[[], Path], purpose: str, fix: str) -> Check:
    """Check that a folder can be written to and has room.

    Args:
        name: Name of the check.
        where: Returns the folder; it may raise OSError, as for a current folder that was deleted.
        purpose: What is written there.
        fix: What to do if it cannot be used.
    """
    try:
        folder = where()
        # Permission bits do not tell about read-only file systems and quotas; writing does.
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
        free = shutil.disk_usage(folder).free
    except OSError as error:
        found, broken = f"cannot be written to: {one_line(error)}", True
    else:
        found, broken = f"{folder}: {_gib(free)} free", free < MIN_FREE_BYTES
    hint = f"for {purpose}" + (f"; {fix}" if broken else "")
    return Check(name, "problem" if broken else "ok", found, hint, essential=True)


def _available_memory() -> int | None:
    """Return the bytes of memory that are not in use; None where /proc does not say."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.M)
    return int(match.group(1)) * 1024 if match else None


def local_workers(deadline: float = _DEADLINE) -> Check:
    """Check that two local processes can start, connect and add up a number.

    Args:
        deadline: Seconds until they count as hanging.
    """
    from gradherd.lab.ranks import RankError, run_ranks

    name, purpose = "two local workers", "for train, compare and demo"
    fix = f"{purpose}; --virtual trains without worker processes"
    begin = time.monotonic()
    try:
        sums = run_ranks(sum_of_ranks, 2, timeout=deadline)
    # Everything that starting can raise: no fork server, no folder for the rendezvous, no socket.
    except (RankError, TimeoutError, OSError, RuntimeError) as error:
        found = error.reason if isinstance(error, RankError) else one_line(error)
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        # `run_ranks` uses lo unless the variable names another.
        tried = f"GLOO_SOCKET_IFNAME is {interface}" if interface else "They use interface lo"
        hint = f"{fix}. {tried}: a firewall may block it, or a container may lack it"
        return Check(name, "problem", found, hint, essential=True)
    if sums != [3.0, 3.0]:
        return Check(name, "problem", f"1 + 2 gave {sums}", fix, essential=True)
    seconds = time.monotonic() - begin
    found = f"started, added up and ended in {seconds:.1f} s"
    return Check(name, "ok", found, purpose, essential=True)


def sum_of_ranks() -> float:
    """Return the sum of rank + 1 over all ranks."""
    import torch

    from gradherd.comm.collectives import all_reduce
    from gradherd.comm.world import World

    world = World.detect()
    return float(all_reduce(torch.tensor([world.rank + 1.0]), world).value.item())


def data_folders() -> Check:
    """Check the folders in which data sets are searched."""
    found = ", ".join(str(folder) for folder in data_dirs())
    named = os.environ.get("GRADHERD_DATA", "")
    if named and not Path(named).expanduser().is_dir():
        hint = f"GRADHERD_DATA is {named!r}, which is not a folder: correct or unset it"
        return Check("data folders", "problem", found, hint)
    hint = "searched in this order; GRADHERD_DATA adds one"
    if not named and not cache_dir().is_dir():
        hint = "not there yet: gradherd data get creates it; GRADHERD_DATA adds another"
    return Check("data folders", "ok", found, hint)


def _data_set(name: str) -> Check:
    local, purpose = find_local(name, None), f"for {', '.join(tasks_of(name))}"
    if local is not None:
        return Check(f"data {name}", "ok", f"{local.folder} ({local.form.name})", purpose)
    downloads = DATASETS[name].downloads
    get = f"gradherd data get {name}" if downloads else "gradherd data list says how"
    return Check(f"data {name}", "missing", "not found", f"{purpose}; {get}")


def _gib(size: int) -> str:
    """Return a number of bytes in GiB.

    >>> _gib(23 << 30)
    '23.0 GiB'
    """
    return f"{size / 2**30:.1f} GiB"
