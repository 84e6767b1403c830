"""What `gradherd doctor` looks at apart from packages: torch's build, the machine, the data."""

import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from gradherd.cli.data_list import look, tasks_of
from gradherd.cli.doctor_checks import Check, Status, line
from gradherd.comm.collectives import all_reduce
from gradherd.comm.ranks import RankError, run_ranks
from gradherd.comm.world import World
from gradherd.lab.tasks.data_files import cache_dir, data_dirs
from gradherd.lab.tasks.datasets import DATASETS
from gradherd.lab.train.environment import hardware

_DEADLINE = 60.0
LITTLE = 200 << 20
"""Bytes of disk below which a training may not be able to write its records."""
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def distributed() -> list[Check]:
    """Look at what torch was built with, and at torchrun."""
    build = "another build of torch is needed: see pytorch.org"
    gloo = dist.is_available() and dist.is_gloo_available()
    nccl = dist.is_available() and dist.is_nccl_available()
    launcher = shutil.which("torchrun")
    return [
        Check(
            name="gloo",
            status="ok" if gloo else "problem",
            found="in torch" if gloo else "not in this torch",
            hint="for workers as processes" + ("" if gloo else f"; --virtual works, or {build}"),
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
        _variables(),
    ]


def _variables() -> Check:
    """Look for what a launcher left behind: a sampler would believe it."""
    left = [name for name in LAUNCHER if name in os.environ]
    if not left or "TORCHELASTIC_RUN_ID" in os.environ:
        return Check(name="launcher variables", status="ok", found=", ".join(left) or "none set")
    return Check(
        name="launcher variables",
        status="problem",
        found=", ".join(f"{name}={os.environ[name]}" for name in left),
        hint="samplers take these for their world, and no torchrun set them; "
        f"unset {' '.join(left)}",
    )


def gpu() -> Check:
    """Compute something on every GPU."""
    virtual = "for --device cuda and bench --device cuda"
    if torch.version.cuda is None and torch.version.hip is None:
        hint = f"{virtual}; needs a CUDA build of torch: see pytorch.org"
        return Check(name="gpu", status="missing", found="torch is built for CPUs", hint=hint)
    if not torch.cuda.is_available():
        hint = f"{virtual}; nvidia-smi tells whether there is a GPU with a driver"
        return Check(name="gpu", status="missing", found="none that torch can see", hint=hint)
    names = [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())]
    try:
        for at in range(len(names)):
            torch.ones(8, device=f"cuda:{at}").sum().item()
    except RuntimeError as error:
        said = f"{', '.join(names)}: {line(error)}"
        hint = f"{virtual}; look at nvidia-smi: is the driver too old, or another process on it?"
        return Check(name="gpu", status="problem", found=said, hint=hint)
    return Check(name="gpu", status="ok", found=", ".join(names), hint=virtual)


def machine() -> list[Check]:
    """Look at cores, memory and disks."""
    told = hardware()
    memory = told["memory_bytes"]
    free = _available()
    size = "unknown" if memory is None else _size(memory)
    return [
        Check(name="cores", status="ok", found=f"{told['cores']} ({told['cpu']})",
              hint="more workers than cores take turns"),
        Check(name="memory", status="ok",
              found=size if free is None else f"{size}, {_size(free)} available"),
        disk("disk, current folder", Path.cwd, "records and pages",
             "name a folder elsewhere with --out"),
        disk("disk, temporary folder", lambda: Path(tempfile.gettempdir()),
             "local workers to meet", "name another one in TMPDIR"),
    ]  # fmt: skip


def disk(name: str, where: Callable[[], Path], purpose: str, way_out: str) -> Check:
    """Look whether a folder can be written to and has room."""
    try:
        folder = where()
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
        free = shutil.disk_usage(folder).free
    except OSError as error:
        found, broken = f"cannot be written to: {line(error)}", True
    else:
        found, broken = f"{folder}: {_size(free)} free", free < LITTLE
    hint = f"for {purpose}" + (f"; {way_out}" if broken else "")
    status: Status = "problem" if broken else "ok"
    return Check(name=name, status=status, found=found, hint=hint, essential=True)


def _available() -> int | None:
    """Return the bytes of memory that are not in use, where the system tells."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.M)
    return int(found.group(1)) * 1024 if found else None


def local_workers(deadline: float = _DEADLINE) -> Check:
    """Start two processes and let them add up a number."""
    name = "two local workers"
    way_out = "for train, compare and demo; --virtual trains without processes"
    begin = time.monotonic()
    try:
        sums = run_ranks(add_up, 2, timeout=deadline)
    except (RankError, TimeoutError, OSError, RuntimeError) as error:
        said = error.reason if isinstance(error, RankError) else line(error)
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        tried = f"GLOO_SOCKET_IFNAME is {interface}" if interface else "they meet on interface lo"
        hint = f"{way_out}. {tried}: a firewall, or a container without it, may be in the way"
        return Check(name=name, status="problem", found=said, hint=hint, essential=True)
    took = time.monotonic() - begin
    if sums != [3.0, 3.0]:
        return Check(name=name, status="problem", found=f"1 + 2 gave {sums}",
                     hint=way_out, essential=True)  # fmt: skip
    found = f"started, added up and gone in {took:.1f} s"
    hint = "for train, compare and demo"
    return Check(name=name, status="ok", found=found, hint=hint, essential=True)


def add_up() -> float:
    """Return the sum of rank + 1 over all ranks."""
    world = World.detect()
    return float(all_reduce(torch.tensor([world.rank + 1.0]), world).value.item())


def data() -> list[Check]:
    """Look for the folders and for every data set."""
    return [_folders(), *(_data_set(name) for name in DATASETS)]


def _folders() -> Check:
    found = ", ".join(str(folder) for folder in data_dirs())
    named = os.environ.get("GRADHERD_DATA", "")
    if named and not Path(named).expanduser().is_dir():
        hint = f"GRADHERD_DATA is {named!r}, and there is no such folder: correct or unset it"
        return Check(name="data folders", status="problem", found=found, hint=hint)
    hint = "the first with all files of a set wins; GRADHERD_DATA names one more"
    if not named and not cache_dir().is_dir():
        hint = "not there yet: gradherd data get makes it; GRADHERD_DATA names another"
    return Check(name="data folders", status="ok", found=found, hint=hint)


def _data_set(name: str) -> Check:
    found, purpose = look(name, None), f"for {', '.join(tasks_of(name))}"
    if found is None:
        get = (
            f"gradherd data get {name}"
            if DATASETS[name].downloads
            else "gradherd data list tells how"
        )
        hint = f"{purpose}; {get}"
        return Check(name=f"data {name}", status="missing", found="not found", hint=hint)
    place = f"{found.folder} ({found.form.name})"
    return Check(name=f"data {name}", status="ok", found=place, hint=purpose)


def _size(number: int) -> str:
    """Return bytes for people.

    >>> _size(23 << 30)
    '23.0 GiB'
    """
    return f"{number / 2**30:.1f} GiB"
