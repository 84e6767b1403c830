"""How a study makes its runs: `compare` trains.

A study may bring a kind of its own, a `StudyKind` in a file beside it.
"""

import dataclasses
import functools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from gradherd.comm.world import World
from gradherd.lab.ranks import one_thread
from gradherd.lab.study.file import Study, check_types
from gradherd.lab.study.results import describe_run, to_columns
from gradherd.lab.tasks.registry import class_in_file, find_task
from gradherd.lab.tasks.task import new_model
from gradherd.lab.text import check_known
from gradherd.lab.train.config import RunConfig, run_settings
from gradherd.lab.train.loop import Progress
from gradherd.lab.train.runner import check_suitable, run_all
from gradherd.lab.train.stacked_trainer import stack_runs
from gradherd.ordering.policy import Policy
from gradherd.ordering.registry import POLICIES
from gradherd.sparsify.registry import SPARSIFIERS
from gradherd.sparsify.selector import Selector


def balances_gradients(order: str) -> bool:
    """Return whether an order of this name balances gradients; False if the name is unknown."""
    # Score orders read gradients, too, but a gain of theirs is not due to balancing.
    return order in POLICIES and hasattr(POLICIES[order](), "rule")


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One run of a study."""

    arm: str
    seed: int
    settings: Mapping[str, Any]
    """Everything that determines the run, except the seed and the device; plain JSON."""


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """What a run measured; see `results.RunResult`."""

    figures: Mapping[str, Any]
    about: Mapping[str, Any] = field(default_factory=dict)
    status: str = "done"


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """What runs depend on besides their settings."""

    folder: Path
    """Folder of the study file."""
    device: str = "cpu"
    data_dir: Path | None = None
    progress: Progress = field(default_factory=Progress)


class StudyKind(ABC):
    """A way to make runs; everything except `run` is a pure function."""

    alone: ClassVar[bool] = False
    """Whether runs measure time, so that nothing else may run beside them."""
    keys: ClassVar[Mapping[str, Any]]
    """Settings that the kind takes, with the type of each."""

    @abstractmethod
    def settings(self, study: Study, arm: Mapping[str, Any]) -> dict[str, Any]:
        """Return all settings of an arm's runs; raise ValueError if they are invalid."""

    def batches(self, runs: Sequence[PlannedRun], context: RunContext) -> list[list[PlannedRun]]:
        """Group runs that are made together, by default none; results are written after each."""
        return [[run] for run in runs]

    @abstractmethod
    def run(self, runs: Sequence[PlannedRun], context: RunContext) -> list[RunOutcome]:
        """Make the runs of a batch."""


def grouped(
    runs: Sequence[PlannedRun], shared: Callable[[PlannedRun], Any]
) -> list[list[PlannedRun]]:
    """Group runs of one seed that share something, which must be plain JSON."""
    groups: dict[str, list[PlannedRun]] = {}
    for run in runs:
        # As text: a list cannot be the key of a dict.
        groups.setdefault(json.dumps([run.seed, shared(run)]), []).append(run)
    return list(groups.values())


class CompareStudy(StudyKind):
    """Trains: arms are orders, sparsifiers and settings of one task.

    All workers of a run share one process: bytes equal those of real workers, losses do up to
    rounding, after which orders may differ.
    """

    # What is left out belongs to one run or one machine, not to an arm.
    keys: ClassVar[Mapping[str, Any]] = {
        one.name: one.kind
        for one in run_settings().values()
        if one.name not in ("task", "seed", "held_out", "virtual", "device")
    }

    def settings(self, study: Study, arm: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of RunConfig."""
        if study.task is None:
            raise ValueError("a study of kind compare needs a task")
        # An arm's own settings come last, so they override those of the study.
        given = check_settings(self.keys, {**study.settings, **arm}, dict.fromkeys(self.keys))
        # A density that all arms share means nothing to a dense one, nor may its results name it.
        if given.get("sparsify") in (None, "dense"):
            given["density"] = None
        chosen = {name: value for name, value in given.items() if value is not None}
        defaults = find_task(task_path(study.task, study.folder)).defaults
        # Defaults are written out, so that results stay valid when a task's defaults change.
        config = RunConfig.of(study.task, defaults, **chosen, virtual=True)
        fields = dataclasses.asdict(config)
        # A result must count wherever it was computed; its seed is stored beside the settings.
        return {k: v for k, v in fields.items() if k not in ("seed", "virtual", "device")}

    def batches(self, runs: Sequence[PlannedRun], context: RunContext) -> list[list[PlannedRun]]:
        """Group runs that can be trained side by side."""
        if not runs:
            return []
        task = find_task(task_path(runs[0].settings["task"], context.folder))
        configs = [_config(run, context) for run in runs]
        # All arms before the first is trained: the last one must not fail after hours.
        check_suitable(configs)
        # Runs with small models share steps, which costs little more than one run alone.
        return [[runs[at] for at in places] for places in stack_runs(configs, new_model(task))]

    def run(self, runs: Sequence[PlannedRun], context: RunContext) -> list[RunOutcome]:
        """Train the runs of a batch."""
        configs = [_config(run, context) for run in runs]
        with one_thread():
            records = run_all(
                configs, World.single(), data_dir=context.data_dir, progress=context.progress
            )
        return [
            RunOutcome(figures=to_columns(one), about=describe_run(one), status=one.status)
            for one in records
        ]


def _config(run: PlannedRun, context: RunContext) -> RunConfig:
    settings = {**run.settings, "task": task_path(run.settings["task"], context.folder)}
    return RunConfig(**settings, seed=run.seed, virtual=True, device=context.device)


KINDS: dict[str, StudyKind] = {"compare": CompareStudy()}
"""Kinds of studies by name."""


def kind_of(study: Study) -> StudyKind:
    """Return the kind of a study; it may be `path/to/file.py:ClassName`, relative to its file.

    Registers the study's own methods first: whoever makes or reads runs asks for the kind.

    Raises:
        ValueError: There is no such kind, or no such method.
    """
    for name, home in study.methods.items():
        own = _own_class(task_path(home, study.folder), f"method {name!r}", Selector, Policy)
        registry: Any = SPARSIFIERS if issubclass(own, Selector) else POLICIES
        if registry.setdefault(name, own) is not own:
            raise ValueError(f"method {name!r}: there is another one of that name")
    if ":" not in study.kind:
        check_known("kind", study.kind, (*KINDS, "path/to/file.py:ClassName"))
        return KINDS[study.kind]
    what = f"kind {study.kind!r}"
    made: StudyKind = _own_class(task_path(study.kind, study.folder), what, StudyKind)()
    return made


# A file is executed once: its classes would differ each time.
_own_class = functools.cache(class_in_file)


def task_path(task: str, folder: Path) -> str:
    """Return a task's name; the path of a study's own task is relative to the study file.

    >>> task_path("digits", Path("studies")), task_path("tasks/mine.py:Task", Path("studies"))
    ('digits', 'studies/tasks/mine.py:Task')
    """
    # Relative to the file, so that a study runs from any folder.
    return (folder / task).as_posix() if ":" in task else task


def check_settings(
    keys: Mapping[str, Any], given: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Return settings with their defaults filled in; `keys` has the types of those allowed.

    Raises:
        ValueError: A setting is unknown, missing, of the wrong type, or a count below 1.

    >>> check_settings({"dim": int, "rounds": int}, {"dim": 16}, {"rounds": 15})
    {'rounds': 15, 'dim': 16}
    """
    # Here, before a task or a benchmark fails on them in words of its own.
    check_types("setting", keys, given)
    settings = {**defaults, **given}
    if missing := [name for name in keys if name not in settings]:
        raise ValueError(f"missing settings: {', '.join(missing)}")
    for name, value in given.items():
        if keys[name] is int and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    return settings
