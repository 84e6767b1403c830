"""What the commands that train share: options, the folder, ranks, and how a run ends."""

import contextlib
import dataclasses
import importlib.util
import os
import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import torch
import torch.distributed as dist
import tyro

from gradherd.comm.ranks import RankError, run_ranks
from gradherd.comm.world import World
from gradherd.commands.bench_show import usable_device
from gradherd.commands.train_progress import Bar
from gradherd.commands.usage import Failed, UsageError, at_least, name
from gradherd.tasks.data import find_set
from gradherd.tasks.read import DamagedData
from gradherd.tasks.registry import find_task
from gradherd.tasks.task import Task
from gradherd.train.config import ROWS, RunConfig
from gradherd.train.plan import run_all
from gradherd.train.record import FILE, RunRecord, read_record, write_record
from gradherd.train.resume import FOLDER, Saving

# Against hangs only: a training takes as long as it takes.
_DEADLINE = 30 * 24 * 3600.0
# So long a rank waits for the others; rank 0 measures the test set meanwhile.
_PATIENCE = 1800.0


_OF_TASK = "(default: the task's)"
OfTaskInt = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint=_OF_TASK)]
OfTaskFloat = Annotated[float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint=_OF_TASK)]
AnyPath = Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="")]
AnyInt = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: all)")]
Density = Annotated[
    float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="(default: 0.001)")
]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of every command that trains; what is not given comes from the task."""

    workers: OfTaskInt = None
    """Number of workers (under torchrun: the processes it started)."""
    epochs: OfTaskInt = None
    """Number of epochs."""
    batch_size: OfTaskInt = None
    """Examples of one worker in one step."""
    unit: OfTaskInt = None
    """Consecutive examples that are ordered as one; the batch size orders whole batches."""
    lr: OfTaskFloat = None
    """Learning rate."""
    momentum: OfTaskFloat = None
    """Momentum of SGD."""
    weight_decay: OfTaskFloat = None
    """Weight decay."""
    rows: str = "auto"
    """How gradients are read for ordering: auto, batch, exact or sketch."""
    limit: AnyInt = None
    """Use only so many examples of the training and of the test set."""
    virtual: bool = False
    """All workers in this process: the same maths, and room for a thousand of them."""
    device: str = "cpu"
    """Where: cpu, or cuda (with --virtual, or under torchrun)."""
    data_dir: AnyPath = None
    """Folder to look for data in first; then come GRADHERD_DATA and the cache folder."""
    out: AnyPath = None
    """Folder to write to; by default a new one in gradherd-runs."""
    tensorboard: bool = False
    """Write TensorBoard events, too."""

    def chosen(self) -> dict[str, Any]:
        """Return the settings of a run that were given, checked."""
        name("--rows", self.rows, ROWS)
        for option, value in (
            ("--workers", self.workers),
            ("--epochs", self.epochs),
            ("--batch-size", self.batch_size),
            ("--unit", self.unit),
            ("--limit", self.limit),
        ):
            if value is not None:
                at_least(option, value, 1)
        usable_device(self.device)
        if self.tensorboard and not _installed("tensorboard"):
            raise UsageError(
                "--tensorboard: tensorboard is not installed: pip install 'gradherd[tensorboard]'"
            )
        own = ("workers", "epochs", "batch_size", "unit", "lr", "momentum", "weight_decay")
        more = ("rows", "limit", "virtual", "device")
        chosen = {key: getattr(self, key) for key in (*own, *more)}
        return chosen | self._world_size()

    def _world_size(self) -> dict[str, int]:
        """Return the number of workers that torchrun started, if it did."""
        if not under_torchrun():
            if self.device != "cpu" and not self.virtual:
                raise UsageError(
                    f"--device {self.device} needs a GPU for each worker: start with torchrun, "
                    "or use --virtual"
                )
            return {}
        size = int(os.environ["WORLD_SIZE"])
        if self.virtual:
            raise UsageError("--virtual needs one process: start without torchrun")
        if self.workers not in (None, size):
            raise UsageError(f"--workers {self.workers}, but torchrun started {size} processes")
        return {"workers": size}


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # It is marked as missing.
        return False


def under_torchrun() -> bool:
    """Return whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def known_task(text: str) -> Task:
    """Return the task of that name whose data is there, or raise UsageError."""
    try:
        return find_task(text)
    except ValueError as error:
        raise UsageError(str(error)) from None


def check_data(task: Task, data_dir: Path | None) -> None:
    """Raise UsageError if a data set of the task is missing."""
    for one in task.data:
        try:
            find_set(one, data_dir)
        except ValueError as error:
            raise UsageError(str(error)) from None


def checked_density(density: float | None, sparsifiers: Sequence[str]) -> float | None:
    """Return the density to use, or raise UsageError."""
    if density is not None and not 0 < density <= 1:
        raise UsageError(f"--density must be in (0, 1], got {density}")
    if all(one == "dense" for one in sparsifiers):
        if density is not None:
            raise UsageError(f"--density {density} has no effect: nothing is sparsified")
        return None
    return 0.001 if density is None else density


@contextlib.contextmanager
def new_folder(out: Path | None, what: str, *, resume: bool = False) -> Iterator[Path]:
    """Give a folder that is ours alone: the one that was named, or a new one.

    To resume, it may be one that a run was written to. If nothing was written in the end, no folder
    is left that was not there before.
    """
    if out is None:
        what = re.sub(r"[^A-Za-z0-9._-]+", "-", what)  # a task of one's own may be called anything
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        out = Path("gradherd-runs") / f"{what}-{stamp}"
        if out.exists():  # two in one second
            out = out.with_name(f"{out.name}-{os.getpid()}")
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {str(out)!r} is a file, not a folder")
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        ours = resume and ((out / FILE).exists() or (out / FOLDER).exists())
        if out.exists() and any(out.iterdir()) and not ours:
            raise UsageError(f"--out {str(out)!r} is not empty: name a new folder, or remove it")
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {str(out)!r} cannot be used: {error.strerror}") from None
    try:
        yield out
    finally:
        if World.detect().rank == 0:
            remove_empty(out, made)


def execute(
    configs: Sequence[RunConfig], out: Path, options: Options, *, saving: Saving | None = None
) -> list[RunRecord]:
    """Run all of them here, on local ranks, or on the ranks that torchrun started.

    Whatever happens, what was done so far is in `out`.
    """
    # Where nothing is saved, to end is to be interrupted.
    before = signal.getsignal(signal.SIGTERM)
    if saving is None:
        signal.signal(signal.SIGTERM, _interrupt)
    job = (list(configs), out, options.data_dir, options.tensorboard, saving)
    try:
        if options.virtual:
            return _virtual(job)
        if under_torchrun():
            return _joined(job, options.device)
        return _local(job, configs[0].workers)
    except KeyboardInterrupt:
        mark_unfinished(out, "interrupted")
        raise
    except BaseException:
        with contextlib.suppress(OSError):  # The disk may be what failed: that is told below.
            mark_unfinished(out, "failed")
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _virtual(job: tuple[Any, ...]) -> list[RunRecord]:
    """One thread: small steps gain nothing from more, and bits are those of ranks."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return train_here(*job)
    except DamagedData as error:
        raise Failed(str(error)) from None
    finally:
        torch.set_num_threads(before)


def _local(job: tuple[Any, ...], workers: int) -> list[RunRecord]:
    try:
        found: list[RunRecord] = run_ranks(
            train_here,
            workers,
            *job,
            timeout=_DEADLINE,
            patience=_PATIENCE,
            forward=() if job[-1] is None else (signal.SIGTERM,),
        )[0]
    except RankError as error:
        if os.environ.get("GRADHERD_TRACEBACK"):
            raise
        raise Failed(error.reason) from None
    return found


def _joined(job: tuple[Any, ...], device: str) -> list[RunRecord]:
    if device.startswith("cuda"):
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    try:
        return train_here(*job)
    finally:
        dist.destroy_process_group()


def train_here(
    configs: list[RunConfig],
    out: Path,
    data_dir: Path | None,
    tensorboard: bool,
    saving: Saving | None,
) -> list[RunRecord]:
    """Run on this rank, together with the others."""
    world = World.single() if configs[0].virtual else World.detect()
    with Bar(quiet=world.rank > 0) as bar:
        return run_all(
            configs,
            world,
            out=out,
            data_dir=data_dir,
            progress=bar,
            tensorboard=tensorboard,
            saving=saving,
        )


def mark_unfinished(out: Path, status: str) -> None:
    """Say in the records that were still written to how their runs ended."""
    if World.detect().rank > 0:
        return
    for path in out.rglob(FILE):
        record = read_record(path)
        if record.status == "running":
            write_record(dataclasses.replace(record, status=status), path.parent)


def remove_empty(folder: Path, made: Sequence[Path]) -> None:
    """Remove folders without a file: all below `folder`, and those that were made for it."""
    below = sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True)
    for path in [*below, *made]:  # the deepest first
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
