"""What a study is: its arms, what it claims, and what is drawn of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradherd.lab.study.arms import Arm

TESTS = ("less", "greater", "no-worse", "at-most", "at-least")
"""What a claim can say: see `report.claims`."""
PAIRED = ("epochs_share", "epochs_to_final")
"""Measures of an arm that are taken against another, whatever the test."""
THEMES = ("ordering", "open", "sparsifying", "together")
"""Parts of the page, in its order."""
DEVICES = ("cpu", "cuda")
"""Where a study can be made to run."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A sentence that the records of a study bear out or not."""

    id: str
    """A name of its own among all studies."""
    text: str
    """What is claimed."""
    source: str
    """Who says so, and where."""
    paper: str
    """The figure that is given there, in words."""
    paper_values: tuple[float, float] | None = None
    """... as two numbers, of the arm and of what it is held against; None if it gives none."""
    measure: str
    """What is measured of each run."""
    test: str
    """How the arm must compare: less, greater, no-worse, at-most, at-least."""
    arm: str
    """Name of the arm."""
    against: str | None = None
    """Name of the arm that it is held against: with less, greater and no-worse, and if PAIRED."""
    value: float | None = None
    """The bound of at-most and at-least; the share that no-worse allows."""
    epoch: int | None = None
    """Read after so many epochs; None is the end."""
    note: str = ""
    """What else a reader of the row should know."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A chart of a study."""

    title: str
    """What it shows."""
    y: str
    """A series of the runs, or a measure where x is a setting."""
    x: str = "epoch"
    """epoch, step, round, bytes; or the name of a setting that arms differ in."""
    arms: tuple[str, ...] = ()
    """Names of the arms that are drawn; none is all."""
    lines: str = "arm"
    """What makes a line: each arm, or each value of a setting."""
    log: bool = False
    """Whether the y axis is logarithmic."""
    zero: bool = False
    """Whether the y axis shows zero, so that heights can be compared."""
    against: str | None = None
    """Name of an arm: others are drawn by how far they are from it, seed by seed."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """Everything that a file says."""

    name: str
    """Of the file, without its ending."""
    folder: Path
    """Where the file is: tasks of its own are looked for from there."""
    kind: str
    theme: str
    title: str
    task: str | None
    seeds: tuple[int, ...]
    device: str
    """Where it is meant to run: on a CPU it may take days."""
    budget: str
    """Where it has less than the paper, or other data: told in the rows of the paper's claims."""
    note: str
    settings: Mapping[str, Any]
    """Of all arms."""
    sources: Mapping[str, str]
    """Where each setting comes from."""
    arms: tuple[Arm, ...]
    claims: tuple[Claim, ...]
    figures: tuple[Figure, ...]

    def drawn(self, figure: Figure) -> list[Arm]:
        """Return the arms of a figure."""
        return [arm for arm in self.arms if not figure.arms or arm.name in figure.arms]
