"""The seam between a study and how its runs are made."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from gradherd.lab.study.spec import Study
from gradherd.lab.train.loop import Progress

Number = (int, float)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One run of a study."""

    arm: str
    seed: int
    settings: Mapping[str, Any]
    """All that decides it, apart from the seed and the device: plain JSON."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a run found; see `archive.Result`."""

    figures: Mapping[str, Any]
    about: Mapping[str, Any] = field(default_factory=dict)
    status: str = "done"


class Told(Progress):
    """Is told how a study goes on; this one says nothing."""

    def pieces(self, batch: Sequence[Piece]) -> None:
        """These go on now, together."""

    def side_by_side(self, runs: int, jobs: int) -> None:
        """So many runs go on in several processes; each step from now on is one that has ended."""


@dataclass(frozen=True, kw_only=True)
class Where:
    """What runs depend on that is no setting of theirs."""

    folder: Path
    """Of the study's file."""
    device: str = "cpu"
    data_dir: Path | None = None
    told: Told = field(default_factory=Told)


class Kind(Protocol):
    """A way to make runs. What it is asked for, apart from `run`, is pure."""

    @property
    def alone(self) -> bool:
        """Whether nothing may run beside a run, since it measures time."""
        ...

    @property
    def keys(self) -> Mapping[str, Any]:
        """Settings that it takes, and their types."""
        ...

    def settings(self, study: Study, arm: Mapping[str, Any]) -> dict[str, Any]:
        """Return all settings of an arm's runs, or raise ValueError."""
        ...

    def batches(self, pieces: Sequence[Piece], where: Where) -> list[list[Piece]]:
        """Return which runs are made together: results are written after each batch."""
        ...

    def run(self, pieces: Sequence[Piece], where: Where) -> list[Found]:
        """Make the runs of a batch."""
        ...


class OneByOne:
    """What kinds have in common that train nothing: no task, and each run for itself."""

    alone: ClassVar = False

    def batches(self, pieces: Sequence[Piece], where: Where) -> list[list[Piece]]:
        """Make runs one by one."""
        return [[piece] for piece in pieces]


def task_path(task: str, folder: Path) -> str:
    """Return a task's name; a file with a task of the study's own is named from the study.

    >>> task_path("digits", Path("studies")), task_path("tasks/mine.py:Task", Path("studies"))
    ('digits', 'studies/tasks/mine.py:Task')
    """
    return (folder / task).as_posix() if ":" in task else task


def no_task(study: Study) -> None:
    """Raise ValueError if a study names a task."""
    if study.task is not None:
        raise ValueError(f"a study of kind {study.kind} has no task, got {study.task!r}")


def checked(
    keys: Mapping[str, Any], defaults: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return settings with their defaults filled in, or raise ValueError.

    >>> checked({"dim": int, "rounds": int}, {"rounds": 15}, {"dim": 16})
    {'rounds': 15, 'dim': 16}
    """
    for name, value in given.items():
        if name not in keys:
            raise ValueError(f"unknown setting {name!r}; known are {', '.join(keys)}")
        kinds = keys[name] if isinstance(keys[name], tuple) else (keys[name],)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            words = " or ".join(kind.__name__ for kind in kinds)
            raise ValueError(f"{name} must be {words}, got {value!r}")
    found = {**defaults, **given}
    lacking = [name for name in keys if name not in found]
    if lacking:
        raise ValueError(f"nothing says {', '.join(lacking)}")
    return found


def positive(settings: Mapping[str, Any], *names: str) -> None:
    """Raise ValueError if one of these is below 1."""
    for name in names:
        if settings[name] < 1:
            raise ValueError(f"{name} must be at least 1, got {settings[name]}")
