"""Options of commands that train: which task, how, and on which device.

Imports no torch, as all modules that declare options: `gradherd train --help` answers at once. What
a check needs beyond names is imported where it is done.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from gradherd.cli.arguments import (
    MAX_PROCESSES,
    FolderOption,
    check_density,
    check_name,
    under_torchrun,
)
from gradherd.cli.errors import CommandFailed, UsageError
from gradherd.cli.parser import Arg
from gradherd.lab.tasks.data_files import find_dataset
from gradherd.lab.train import POWERSGD, ROWS, exchange_names
from gradherd.lab.train.config import RunSetting, run_settings
from gradherd.ordering.registry import POLICIES
from gradherd.sparsify.message_sizes import DEFAULT_DENSITY
from gradherd.sparsify.registry import SPARSIFIERS, takes_density

if TYPE_CHECKING:
    import torch

    from gradherd.lab.tasks.task import Task
    from gradherd.lab.train.config import Exchange, RunConfig
    from gradherd.lab.train.record import RunRecord

# Names in help texts come from the registries: a new method needs no edit here.
ORDERS = ", ".join(POLICIES)
METHODS = ", ".join(SPARSIFIERS)
EXCHANGES = ", ".join(exchange_names())
IntByTask = Annotated[int | None, Arg(default="the task's")]
DensityOption = Annotated[float | None, Arg(default=f"{DEFAULT_DENSITY:g}")]
TaskArgument = Annotated[str, Arg(metavar="TASK", positional=True)]


def usable_device(name: str) -> torch.device:
    """Return the device of that name.

    Args:
        name: cpu, cuda, cuda:1, ...

    Raises:
        UsageError: It cannot be used on this machine.
    """
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
_NONE = {"parallel": "ddp", "lr_schedule": "constant"}


def _option(setting: RunSetting) -> tuple[str, Any, Any]:
    """Return a setting as a field of the options: its name, its type, and its default."""
    name, kind = setting.name, setting.types[-1]
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
    """How each run is trained. What you leave out comes from the task.

    An option for each setting of `RunConfig`, see `lab.train.config`, and these.
    """

    data_dir: FolderOption = None
    """Folder to search for data first, before GRADHERD_DATA and the cache folder."""
    out: FolderOption = None
    """Folder to write to; by default a new one in gradherd-runs."""
    tensorboard: bool = False
    """Also write TensorBoard events."""
    quiet: bool = False
    """Show no progress; so does the environment variable GRADHERD_QUIET=1."""

    def checked(self) -> dict[str, Any]:
        """Return the settings for RunConfig, which checks them; None is the task's value.

        Raises:
            UsageError: This machine cannot train so.
        """
        # Checked now: loading data and starting ranks take seconds.
        usable_device(self.device)
        if self.tensorboard and not _is_installed("tensorboard"):
            raise UsageError("--tensorboard: tensorboard is not installed: pip install tensorboard")
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


@contextlib.contextmanager
def naming_options() -> Iterator[None]:
    """Turn a ValueError of `RunConfig` inside into a UsageError that names the option."""
    try:
        yield
    except ValueError as error:
        found = re.match(r"(unknown )?(\w+)", str(error))
        if found is None or found[2] not in run_settings():
            raise UsageError(str(error)) from None
        option, rest = f"--{found[2].replace('_', '-')}", str(error)[found.end() :]
        raise UsageError(f"{option}: unknown{rest}" if found[1] else option + rest) from None


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # sys.modules holds None for it: importing it is blocked
        return False


def named_task(text: str) -> Task:
    """Return the task of that name, or raise UsageError."""
    from gradherd.lab.tasks.registry import find_task

    try:
        return find_task(text)
    except ValueError as error:
        raise UsageError(str(error)) from None


def check_data(task: Task, data_dir: Path | None, configs: Sequence[RunConfig] = ()) -> None:
    """Raise UsageError if a data set of the task is missing, or does not go with the settings.

    Only looks for the files, unless the task carries a state: which settings it takes depends on
    its examples. Else content is verified when a run reads it, which takes seconds.

    Args:
        task: The task.
        data_dir: Folder to search first.
        configs: The settings of runs of the task.
    """
    for name in task.data:
        try:
            find_dataset(name, data_dir)
        except ValueError as error:
            raise UsageError(str(error)) from None
    if not configs:
        return
    from gradherd.lab.tasks.data_files import DamagedData
    from gradherd.lab.tasks.task import UnsuitableSettings
    from gradherd.lab.train.runner import check_suitable

    try:
        check_suitable(configs, data_dir)
    except UnsuitableSettings as error:
        raise UsageError(str(error)) from None
    except DamagedData as error:
        raise CommandFailed(str(error)) from None


def parse_exchanges(option: str, text: str, known: Iterable[str]) -> list[Exchange]:
    """Split comma-separated sparsifiers, each with a density and local steps of its own if given.

    local-4 is dense@4: all coordinates in one bit after every fourth step.

    >>> parse_exchanges("--sparsifiers", "dense,exdyna,exdyna:0.02@30", ["dense", "exdyna"])[2]
    Exchange(sparsify='exdyna', density=0.02, local_steps=30)
    """
    from gradherd.lab.train.config import Exchange

    known, exchanges = list(known), []
    for word in filter(None, (word.strip() for word in text.split(","))):
        # As `gradherd advise` calls it.
        recipe = re.fullmatch(r"local-(\w+)", word)
        rest, at, steps = (f"dense@{recipe[1]}" if recipe else word).partition("@")
        name, colon, share = rest.partition(":")
        check_name(option, name, known)
        try:
            density = float(share) if colon else None
            local_steps = int(steps) if at else None
        except ValueError:
            raise UsageError(
                f"{option}: {word!r} is not NAME, NAME:DENSITY, NAME:DENSITY@STEPS or local-STEPS"
            ) from None
        if density is not None and (name == "dense" or not 0 < density <= 1):
            raise UsageError(f"{option}: {word!r}: a density is in (0, 1], and dense has none")
        if local_steps is not None and local_steps < 1:
            raise UsageError(f"{option}: {word!r}: local steps must be at least 1")
        exchanges.append(Exchange(name, density, local_steps))
    if not exchanges:
        raise UsageError(f"{option} must name at least one of {', '.join(known)}")
    # Given twice it would train twice, into the same folder.
    return list(dict.fromkeys(exchanges))


def density_for(sparsifiers: Sequence[str], density: float | None) -> float | None:
    """Return the density to train with.

    Args:
        sparsifiers: Names of the sparsifiers that will run.
        density: Value of --density; None if it was not given.

    Returns:
        The density, or None if nothing is sparsified.

    Raises:
        UsageError: The density is out of range, or nothing would use it.
    """
    if density is not None:
        check_density(density)
    if not any(one == POWERSGD or takes_density(one) for one in sparsifiers):
        if density is not None:
            raise UsageError(f"--density {density} has no effect: nothing is sparsified")
        return None
    return DEFAULT_DENSITY if density is None else density


def warn_of_divergence(records: Iterable[RunRecord]) -> None:
    """Say on stderr which runs have diverged, and what to try."""
    from gradherd.lab.train.tuning import what_to_try

    for record in records:
        if (advice := what_to_try(record)) is not None:
            print(f"gradherd: {advice}", file=sys.stderr)
