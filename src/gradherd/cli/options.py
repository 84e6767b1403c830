"""Options of commands that train: which task, how, and on which device.

Imports no torch, as all modules that declare options: `gradherd train --help` answers at once. What
a check needs beyond names is imported where it is done.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from gradherd.cli.parser import (
    Arg,
    FolderOption,
    UsageError,
    one_of,
    separated,
    share,
    usage_errors,
    whole,
)
from gradherd.cli.terminal import under_torchrun
from gradherd.comm.message_sizes import DEFAULT_DENSITY, VALUE_FORMATS
from gradherd.lab.tasks.data_files import check_data_dir, find_dataset
from gradherd.lab.train import POWERSGD, ROWS, exchange_names
from gradherd.lab.train.config import Exchange, RunSetting, run_settings
from gradherd.sparsify.registry import takes_density

if TYPE_CHECKING:
    import torch

    from gradherd.lab.tasks.task import Task
    from gradherd.lab.train.config import RunConfig
    from gradherd.lab.train.record import RunRecord

DensityOption = Annotated[float | None, Arg(default=f"{DEFAULT_DENSITY:g}", parse=share)]
TaskArgument = Annotated[str, Arg(metavar="TASK", positional=True)]
MAX_PROCESSES = 256
"""Most worker processes on one machine. Each takes some 300 MB, and a slip starts thousands."""
MAX_SEEDS = 10_000  # seeds beyond these tune learning rates


def usable_device(name: str) -> torch.device:
    """Return the device cpu, cuda, cuda:1 or so; raise UsageError if it cannot be used here."""
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise UsageError(f"--device must be cpu or cuda, got {name!r}")
    import torch

    try:
        device = torch.device(name)
        # Parsing a name touches no device: only an allocation tells whether there is one.
        torch.empty(1, device=device)
    # A build without CUDA fails with an AssertionError, a missing device with a RuntimeError of
    # many lines, of which the first says what is wrong.
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"--device {name!r} cannot be used here: {reason}") from None
    return device


# Each command has its own options for these, or none.
_NO_OPTION = {"task", "order", "sparsify", "density", "method", "local_steps", "seed", "held_out"}
_METAVARS = {"clip": "NORM", "lr_drop": "FACTOR", "lr_drop_every": "EPOCHS", "lr_warmup": "SHARE"}
_HELP = {"rows": f"How gradients are read for ordering; one of {', '.join(ROWS)}."}
_HINTS = {"limit": "all", "sketch_size": "512", "lr_warmup": "none", "autocast": "none"}
# What None is called; records have None, as those from before there was a choice.
_NONE = {"lr_schedule": "constant"}


def _option(setting: RunSetting) -> tuple[str, Any, Any]:
    """Return a setting as a field of the options: its name, its type, and its default."""
    name, kind = setting.name, setting.kind
    if kind is bool:
        return name, Annotated[bool, Arg(help=setting.help)], False
    choices = tuple(dict.fromkeys((*filter(None, [_NONE.get(name)]), *setting.choices)))
    default = _NONE.get(name, None if setting.by_task else setting.default)
    hint = "the task's" if setting.by_task else _HINTS.get(name, default)
    help_text = _HELP.get(name, setting.help)
    argument = Arg(metavar=_METAVARS.get(name), help=help_text, default=str(hint))
    value: Any = Literal[choices] if choices else kind
    return name, Annotated[value | None if default is None else value, argument], default


if TYPE_CHECKING:

    class _RunOptions:
        """The options below; type checkers do not see what is made at run time."""

        def __init__(self, **values: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

else:
    _RunOptions = make_dataclass(
        "_RunOptions",
        [_option(one) for one in run_settings().values() if one.name not in _NO_OPTION],
        frozen=True,
        kw_only=True,
    )


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(_RunOptions):
    """How each run is trained. What you leave out comes from the task."""

    # Besides an option for each setting of `RunConfig`.
    data_dir: FolderOption = None
    """Folder to search for data first, before GRADHERD_DATA and the cache folder."""
    out: FolderOption = None
    """Folder to write to; by default a new one in gradherd-runs."""
    quiet: bool = False
    """Show no progress; so does the environment variable GRADHERD_QUIET=1."""

    def checked(self) -> dict[str, Any]:
        """Return the settings for RunConfig; raise UsageError if this machine cannot train so."""
        # Checked now: loading data and starting ranks take seconds.
        usable_device(self.device)
        names = [name for name in run_settings() if name not in _NO_OPTION]
        settings = {name: getattr(self, name) for name in names}
        for name, word in _NONE.items():
            settings[name] = None if settings[name] == word else settings[name]
        settings["augment"] = settings["augment"] or None
        return settings | self._world_size()

    def _world_size(self) -> dict[str, int]:
        """Return {"workers": processes of torchrun}, or nothing without torchrun."""
        if not under_torchrun():
            if not self.virtual and (self.workers or 1) > MAX_PROCESSES:
                raise UsageError(
                    f"--workers starts at most {MAX_PROCESSES} processes, got {self.workers}: "
                    "--virtual simulates more in one process"
                )
            if self.device != "cpu" and not self.virtual:
                raise UsageError(
                    f"--device {self.device} needs one GPU per worker: start with torchrun, "
                    "or add --virtual"
                )
            return {}
        size = int(os.environ["WORLD_SIZE"])
        if self.virtual:
            raise UsageError("--virtual runs in one process: start without torchrun")
        if self.workers not in (None, size):
            raise UsageError(f"--workers is {self.workers}, but torchrun started {size} processes")
        # torchrun decides; the default of the task would be another number.
        return {"workers": size}


def named_task(text: str) -> Task:
    """Return the task of that name, or raise UsageError."""
    from gradherd.lab.tasks.registry import find_task

    with usage_errors():
        return find_task(text)


def check_data(task: Task, data_dir: Path | None, configs: Sequence[RunConfig] = ()) -> None:
    """Raise UsageError if a data set of the task is missing, or does not go with the settings.

    Only looks for the files: content is verified when a run reads it, which takes seconds.
    """
    from gradherd.lab.train.runner import check_suitable

    with usage_errors(["data_dir"]):
        check_data_dir(data_dir)  # even if the task needs none
        for name in task.data:
            find_dataset(name, data_dir)
        if configs:
            check_suitable(configs)


def _exchange(word: str) -> Exchange:
    """Read a sparsifier, with values of few bits and a density of its own if given; or local steps.

    local-4 is dense@4: all coordinates in one bit after every fourth step.

    >>> _exchange("exdyna-int4:0.02"), _exchange("dense-int2@30").local_steps
    (Exchange(sparsify='exdyna', density=0.02, local_steps=None, values='int4'), 30)
    """
    # As `gradherd advise` calls it.
    recipe = re.fullmatch(r"local-(\w+)", word)
    rest, at, steps = (f"dense@{recipe[1]}" if recipe else word).partition("@")
    method, colon, part = rest.partition(":")
    name, dash, form = method.partition("-")
    one_of(exchange_names())(name)
    values = one_of(VALUE_FORMATS)(form) if dash else None
    try:
        density, local_steps = share(part) if colon else None, whole(1)(steps) if at else None
        if density is not None and name == "dense":
            raise ValueError("has a density, and dense sends all")
        if at and name != "dense":
            raise ValueError("has local steps, which send all coordinates")
        if values and (name == POWERSGD or (name == "dense" and not at)):
            raise ValueError(f"has a format of values, and {name} has only one")
    except ValueError as error:
        raise ValueError(
            f"{word!r} {error}; write NAME, NAME-VALUES, NAME:DENSITY, local-STEPS or "
            "dense-VALUES@STEPS"
        ) from None
    return Exchange(name, density, local_steps, values)


exchanges = separated(_exchange, f"of {', '.join(exchange_names())}")
"""Reads sparsifiers that are separated by commas."""


def density_for(sparsifiers: Sequence[str], density: float | None) -> float | None:
    """Return the density to train with, or None if nothing is sparsified.

    Raises:
        UsageError: Nothing would use the density.
    """
    if not any(one == POWERSGD or takes_density(one) for one in sparsifiers):
        if density is not None:
            raise UsageError(f"--density {density} has no effect: nothing is sparsified")
        return None
    return DEFAULT_DENSITY if density is None else density


def warn_of_divergence(records: Iterable[RunRecord]) -> None:
    """Say on stderr which runs have diverged or not improved, and what to try."""
    from gradherd.lab.train.tuning import what_to_try

    for record in records:
        if (advice := what_to_try(record)) is not None:
            print(f"gradherd: {advice}", file=sys.stderr)
