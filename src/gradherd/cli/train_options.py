"""The options of every command that trains, checked."""

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from gradherd.cli.bench_show import usable_device
from gradherd.cli.usage import UsageError, at_least, name
from gradherd.lab.tasks.data_files import find_dataset
from gradherd.lab.tasks.registry import find_task
from gradherd.lab.tasks.task import Task
from gradherd.lab.train.config import ROWS

_OF_TASK = "(default: the task's)"
OfTaskInt = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint=_OF_TASK)]
OfTaskFloat = Annotated[float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint=_OF_TASK)]
AnyPath = Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="")]
AnyInt = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: all)")]
SketchSize = Annotated[
    int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: 512)")
]
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
    sketch_size: SketchSize = None
    """Numbers of a sketched row; with --rows sketch only."""
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
            ("--sketch-size", self.sketch_size),
            ("--limit", self.limit),
        ):
            if value is not None:
                at_least(option, value, 1)
        if self.sketch_size is not None and self.rows != "sketch":
            raise UsageError(
                f"--sketch-size {self.sketch_size} has no effect on --rows {self.rows}: "
                "add --rows sketch"
            )
        usable_device(self.device)
        if self.tensorboard and not _installed("tensorboard"):
            raise UsageError(
                "--tensorboard: tensorboard is not installed: pip install 'gradherd[tensorboard]'"
            )
        own = ("workers", "epochs", "batch_size", "unit", "lr", "momentum", "weight_decay")
        more = ("rows", "sketch_size", "limit", "virtual", "device")
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
    """Return the task of that name, or raise UsageError."""
    try:
        return find_task(text)
    except ValueError as error:
        raise UsageError(str(error)) from None


def check_data(task: Task, data_dir: Path | None) -> None:
    """Raise UsageError if a data set of the task is missing."""
    for one in task.data:
        try:
            find_dataset(one, data_dir)
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
