"""The checks of `gradherd doctor`: packages, the build of torch, the machine, the data sets."""

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

import torch
import torch.distributed as dist

from gradherd.cli.data import find_local, tasks_of
from gradherd.comm.collectives import all_reduce
from gradherd.comm.world import World
from gradherd.lab.ranks import RankError, run_ranks
from gradherd.lab.tasks.data_files import cache_dir, data_dirs
from gradherd.lab.tasks.datasets import DATASETS
from gradherd.lab.train.measurements import hardware

Status = Literal["ok", "missing", "problem"]
# Far more than the seconds that a start takes: a slow machine is not a broken one.
_DEADLINE = 60.0
MIN_FREE_BYTES = 200 << 20
"""Free disk space below which a training may not be able to write its records."""
# What torchrun and other launchers set, and what a sampler reads without a process group.
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
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


def packages() -> list[Check]:
    """Check Python and every package."""
    python = Check(name="python", status="ok", found=platform.python_version())
    own = Check(name="gradherd", status="ok", found=version("gradherd"))
    return [python, own, *(check_package(package) for package in PACKAGES)]


def check_package(package: Package) -> Check:
    """Import a package and check its version."""
    # Looked up before it is imported: a package that is missing and one that is broken need
    # different advice.
    if importlib.util.find_spec(package.module) is None:
        hint = f"for {package.purpose}; {package.get}"
        status: Status = "problem" if package.essential else "missing"
        return _package_check(package, status, "not installed", hint)
    try:
        # Actually imported: a wheel for another CPU or another numpy installs but does not load.
        module = importlib.import_module(package.module)
    except Exception as error:  # a broken package may raise anything
        found = f"cannot be imported: {one_line(error)}"
        hint = f"for {package.purpose}; reinstall it: {package.get}"
        return _package_check(package, "problem", found, hint)
    found = _version(package, module)
    if _version_numbers(found) < _version_numbers(package.least):
        return _package_check(
            package,
            "problem",
            found,
            f"for {package.purpose}; needs {package.least}: {package.get}",
        )
    return _package_check(package, "ok", found, f"for {package.purpose}")


def _package_check(package: Package, status: Status, found: str, hint: str) -> Check:
    return Check(
        name=package.name, status=status, found=found, hint=hint, essential=package.essential
    )


def _version(package: Package, module: object) -> str:
    try:
        return version(package.name)
    except PackageNotFoundError:  # not installed by pip
        return str(getattr(module, "__version__", "unknown"))


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
    """Check the backends that torch was built with, torchrun, and its variables."""
    # torch can be built without torch.distributed, and then even is_gloo_available is missing.
    build = "install another build of torch: see pytorch.org"
    gloo = dist.is_available() and dist.is_gloo_available()
    nccl = dist.is_available() and dist.is_nccl_available()
    launcher = shutil.which("torchrun")
    return [
        Check(
            name="gloo",
            status="ok" if gloo else "problem",
            found="in torch" if gloo else "not in this torch",
            hint="for worker processes" + ("" if gloo else f"; use --virtual, or {build}"),
            essential=True,
        ),
        Check(
            name="nccl",
            status="ok" if nccl else "missing",
            found="in torch" if nccl else "not in this torch",
            hint="for workers on GPUs" + ("" if nccl else "; comes with the CUDA builds of torch"),
        ),
        Check(
            name="torchrun",
            status="ok" if launcher else "missing",
            found=launcher or "not on PATH",
            hint="for workers on several machines"
            + ("" if launcher else "; python -m torch.distributed.run is the same"),
        ),
        _launcher_variables(),
    ]


def _launcher_variables() -> Check:
    """Check for variables that a launcher left in the environment: samplers would trust them."""
    left = [name for name in LAUNCHER_VARIABLES if name in os.environ]
    # torchrun always sets its run id: with it, the variables are current.
    if not left or "TORCHELASTIC_RUN_ID" in os.environ:
        return Check(name="launcher variables", status="ok", found=", ".join(left) or "none set")
    return Check(
        name="launcher variables",
        status="problem",
        found=", ".join(f"{name}={os.environ[name]}" for name in left),
        hint="samplers read rank and world size from these, but torchrun did not set them; "
        f"unset {' '.join(left)}",
    )


def gpu() -> Check:
    """Check that every GPU computes."""
    purpose = "for --device cuda"
    if torch.version.cuda is None and torch.version.hip is None:
        hint = f"{purpose}; needs a CUDA build of torch: see pytorch.org"
        return Check(name="gpu", status="missing", found="torch is built without CUDA", hint=hint)
    if not torch.cuda.is_available():
        hint = f"{purpose}; run nvidia-smi to see whether there is a GPU with a driver"
        return Check(name="gpu", status="missing", found="none that torch can see", hint=hint)
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    try:
        for index in range(len(names)):
            # A kernel and a copy back: a GPU that torch lists may still lack kernels for its
            # architecture.
            torch.ones(8, device=f"cuda:{index}").sum().item()
    except RuntimeError as error:
        found = f"{', '.join(names)}: {one_line(error)}"
        hint = f"{purpose}; run nvidia-smi: is the driver too old, or is another process using it?"
        return Check(name="gpu", status="problem", found=found, hint=hint)
    return Check(name="gpu", status="ok", found=", ".join(names), hint=purpose)


def machine() -> list[Check]:
    """Check cores, memory and disks."""
    known = hardware()
    memory = known["memory_bytes"]
    free = _available_memory()
    size = "unknown" if memory is None else _gib(memory)
    return [
        Check(name="cores", status="ok", found=f"{known['cores']} ({known['cpu']})",
              hint="more workers than cores take turns"),
        Check(name="memory", status="ok",
              found=size if free is None else f"{size}, {_gib(free)} available"),
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
    status: Status = "problem" if broken else "ok"
    return Check(name=name, status=status, found=found, hint=hint, essential=True)


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
    name = "two local workers"
    purpose = "for train, compare and demo"
    fix = "--virtual trains without worker processes"
    begin = time.monotonic()
    try:
        sums = run_ranks(sum_of_ranks, 2, timeout=deadline)
    # Everything that starting can raise: no fork server, no folder for the rendezvous, no socket.
    except (RankError, TimeoutError, OSError, RuntimeError) as error:
        found = error.reason if isinstance(error, RankError) else one_line(error)
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        # `run_ranks` uses lo unless the variable names another.
        tried = f"GLOO_SOCKET_IFNAME is {interface}" if interface else "They use interface lo"
        hint = f"{purpose}; {fix}. {tried}: a firewall may block it, or a container may lack it"
        return Check(name=name, status="problem", found=found, hint=hint, essential=True)
    seconds = time.monotonic() - begin
    if sums != [3.0, 3.0]:
        found, hint = f"1 + 2 gave {sums}", f"{purpose}; {fix}"
        return Check(name=name, status="problem", found=found, hint=hint, essential=True)
    found = f"started, added up and ended in {seconds:.1f} s"
    return Check(name=name, status="ok", found=found, hint=purpose, essential=True)


def sum_of_ranks() -> float:
    """Return the sum of rank + 1 over all ranks."""
    world = World.detect()
    return float(all_reduce(torch.tensor([world.rank + 1.0]), world).value.item())


def data() -> list[Check]:
    """Check the data folders and every data set."""
    return [_data_folders(), *(_data_set(name) for name in DATASETS)]


def _data_folders() -> Check:
    found = ", ".join(str(folder) for folder in data_dirs())
    named = os.environ.get("GRADHERD_DATA", "")
    if named and not Path(named).expanduser().is_dir():
        hint = f"GRADHERD_DATA is {named!r}, which is not a folder: correct or unset it"
        return Check(name="data folders", status="problem", found=found, hint=hint)
    hint = "searched in this order; GRADHERD_DATA adds one"
    if not named and not cache_dir().is_dir():
        hint = "not there yet: gradherd data get creates it; GRADHERD_DATA adds another"
    return Check(name="data folders", status="ok", found=found, hint=hint)


def _data_set(name: str) -> Check:
    local, purpose = find_local(name, None), f"for {', '.join(tasks_of(name))}"
    if local is None:
        get = (
            f"gradherd data get {name}"
            if DATASETS[name].downloads
            else "gradherd data list says how"
        )
        hint = f"{purpose}; {get}"
        return Check(name=f"data {name}", status="missing", found="not found", hint=hint)
    place = f"{local.folder} ({local.form.name})"
    return Check(name=f"data {name}", status="ok", found=place, hint=purpose)


def _gib(size: int) -> str:
    """Return a number of bytes in GiB.

    >>> _gib(23 << 30)
    '23.0 GiB'
    """
    return f"{size / 2**30:.1f} GiB"
