"""What a study consists of: arms, claims and figures; and how `[[arms]]` tables become arms."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = ("less", "greater", "no-worse", "at-most", "at-least")
"""Comparisons a claim can make; `lab.report.claims` defines them."""
PAIRED = ("epochs_share", "epochs_to_final")
"""Measures that are only defined relative to another arm, whatever the test."""
THEMES = ("ordering", "open", "sparsifying", "together")
"""Sections of the list of studies, in page order."""
DEVICES = ("cpu", "cuda")
"""Devices a study can ask for."""
MAX_ARMS = 1000
"""Most arms that one `[[arms]]` table may expand to; more is a typing error."""
HEAD_SETTINGS = ("order", "sparsify", "density", "case")
"""Settings that form the first part of an arm's name; all others follow after commas."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One configuration that a study runs with every seed."""

    name: str
    """Name used by claims, figures and `--only`."""
    settings: Mapping[str, Any]
    """Settings of this arm, on top of those that all arms of the study share."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A statement that the results of a study confirm or not."""

    id: str
    """Unique among all studies."""
    text: str
    """The statement itself."""
    source: str
    """Who makes it, and where."""
    paper: str
    """The paper's figures, in words."""
    paper_values: tuple[float, float] | None = None
    """The paper's figures for `arm` and `against`; None if the paper gives none."""
    measure: str
    """What is measured of each run; see `lab.report.measures`."""
    test: str
    """How the arm must compare: less, greater, no-worse, at-most, at-least."""
    arm: str
    """Name of the arm."""
    against: str | None = None
    """Name of the reference arm; required by less, greater, no-worse and PAIRED measures."""
    value: float | None = None
    """Bound of at-most and at-least; tolerance of no-worse, as a share."""
    epoch: int | None = None
    """Read the measure after this epoch; None reads it at the end."""
    note: str = ""
    """Remark added to the claim's row."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A chart of a study."""

    title: str
    """Title of the chart."""
    y: str
    """A series of the runs, or a measure where x is a setting."""
    x: str = "epoch"
    """epoch, step, round or bytes; or the name of a setting in which arms differ."""
    arms: tuple[str, ...] = ()
    """Names of the arms to draw; empty draws all of them."""
    lines: str = "arm"
    """What makes a line: each arm, or each value of the named setting."""
    log: bool = False
    """Whether the y axis is logarithmic."""
    zero: bool = False
    """Whether the y axis includes zero."""
    against: str | None = None
    """Name of a reference arm: the others are drawn as differences from it, seed by seed."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """Contents of a study file."""

    name: str
    """File name without its suffix."""
    folder: Path
    """Folder of the file; paths of custom tasks are relative to it."""
    kind: str
    theme: str
    title: str
    task: str | None
    seeds: tuple[int, ...]
    device: str
    """Device the study was sized for; a GPU study may take days on a CPU."""
    budget: str
    """How it falls short of the paper's experiment; shown in rows of the paper's claims."""
    note: str
    """Remarks, as paragraphs: the first is above the table, the others are folded."""
    left_out: str
    """What was not run, and why."""
    settings: Mapping[str, Any]
    """Settings that all arms share."""
    sources: Mapping[str, str]
    """Where each setting comes from."""
    arms: tuple[Arm, ...]
    claims: tuple[Claim, ...]
    figures: tuple[Figure, ...]

    def arms_in(self, figure: Figure) -> list[Arm]:
        """Return the arms that a figure draws."""
        return [arm for arm in self.arms if not figure.arms or arm.name in figure.arms]


def expand_arms(groups: Sequence[Mapping[str, Any]]) -> tuple[Arm, ...]:
    """Return the arms of `[[arms]]` tables; a list in a table stands for one arm per entry.

    Args:
        groups: The tables, as TOML gives them.

    Returns:
        All arms in file order, which is also the order of runs and of lines in charts.

    Raises:
        ValueError: There is no arm, two different arms have one name, or a table has too many.

    >>> [arm.name for arm in expand_arms([{"order": ["d-rr", "cd-grab"], "workers": [4, 16]}])]
    ['d-rr, workers 4', 'd-rr, workers 16', 'cd-grab, workers 4', 'cd-grab, workers 16']
    >>> [arm.name for arm in expand_arms([{"sparsify": ["dense", "topk"], "density": [0.1, 0.01]}])]
    ['dense', 'topk 0.1', 'topk 0.01']
    """
    arms: dict[str, Arm] = {}
    for group in groups:
        for settings in _product(group):
            label = settings.pop("label", None)
            if label is not None and not isinstance(label, str):
                raise ValueError(f"label of an [[arms]] table must be a string, got {label!r}")
            if settings.get("sparsify") == "dense":  # Everything is sent: there is no density.
                settings.pop("density", None)
            arm = Arm(name=arm_name(settings, label), settings=settings)
            # Equal arms may repeat: `dense` times a list of densities gives the same arm each time.
            if arms.setdefault(arm.name, arm).settings != settings:
                fix = "give one group a label"
                if label is not None:
                    fix = "a label hides the values of lists, so give each value its own group"
                raise ValueError(f"two arms are called {arm.name!r}: {fix}")
    if not arms:
        raise ValueError("there is no arm: a study needs at least one [[arms]] table")
    return tuple(arms.values())


def _product(group: Mapping[str, Any]) -> list[dict[str, Any]]:
    options = [value if isinstance(value, list) else [value] for value in group.values()]
    for name, option in zip(group, options, strict=True):
        if not option:
            raise ValueError(f"{name} of an [[arms]] table is an empty list")
    # Counted before the product is formed: a file must not be able to exhaust memory.
    count = math.prod(len(option) for option in options)
    if count > MAX_ARMS:
        raise ValueError(f"an [[arms]] table expands to {count:,} arms: at most {MAX_ARMS:,}")
    return [dict(zip(group, values, strict=True)) for values in itertools.product(*options)]


def arm_name(settings: Mapping[str, Any], label: str | None) -> str:
    """Return the name of an arm; a label replaces the settings after the first comma.

    Claims, `--only` and file names of results refer to arms by these names.

    Args:
        settings: The arm's own settings.
        label: Replaces the settings that are not part of the head; None lists them.

    >>> arm_name({"order": "cd-grab", "sparsify": "exdyna", "density": 0.01}, None)
    'cd-grab + exdyna 0.01'
    >>> arm_name({"order": "cd-grab", "workers": 64, "batch_size": 1}, "64 workers")
    'cd-grab, 64 workers'
    >>> arm_name({"sparsify": "exdyna", "density": 0.01, "method": {"blocks": 64}}, None)
    'exdyna 0.01, blocks 64'
    """
    sparsify = settings.get("sparsify")
    if sparsify is not None and "density" in settings:
        sparsify = f"{sparsify} {_word(settings['density'])}"
    # What is compared comes first; everything else after a comma, where a label can replace it.
    head = [str(one) for one in (settings.get("order"), sparsify, settings.get("case")) if one]
    others = {name: value for name, value in settings.items() if name not in HEAD_SETTINGS}
    rest = [label] if label is not None else _words(others)
    return ", ".join([*([" + ".join(head)] if head else []), *rest])


def _words(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as words; those of a method are listed like the arm's own."""
    words = []
    for name, value in settings.items():
        if isinstance(value, Mapping):
            words += _words(value)
        else:
            words.append(f"{name} {_word(value)}")
    return words


def _word(value: Any) -> str:
    # A name must not depend on how the file writes a number: 1e-2 and 0.01 are the same arm.
    return f"{value:g}" if isinstance(value, float) else str(value)
