"""A study as a TOML file: read, checked, and refused with a line that says what is allowed."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from gradherd.study.arms import Arm, arms_of
from gradherd.train.record import plain, read_text

TESTS = ("less", "greater", "no-worse", "at-most", "at-least")
"""What a claim can say: see `report.claims`."""
PAIRED = ("epochs_share", "epochs_to_final")
"""Measures of an arm that are taken against another, whatever the test."""
THEMES = ("ordering", "open", "sparsifying", "together")
"""Parts of the page, in its order."""
DEVICES = ("cpu", "cuda")
"""Where a study can be made to run."""
_TOP = (
    "kind",
    "theme",
    "title",
    "task",
    "seeds",
    "device",
    "budget",
    "note",
    "settings",
    "sources",
)
_MOST_SEEDS = 1000
_LONGEST = 400
"""Letters of a complaint."""
_TABLES = ("arms", "claim", "figure")


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


def read_study(path: Path) -> Study:
    """Read a study, or raise ValueError that names the file and what is wrong with it."""
    try:
        found = tomllib.loads(read_text(path))
    except RecursionError:
        raise ValueError(plain(f"{path}: nested too deeply")) from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ValueError(plain(f"{path}: {why}")) from None
    try:
        return study_of(found, name=path.stem, folder=path.parent)
    except (ValueError, TypeError, AttributeError) as error:
        why = " ".join(str(error).split())
        why = why if len(why) <= _LONGEST else f"{why[:_LONGEST]} ..."  # It quotes the file.
        raise ValueError(plain(f"{path}: {why}")) from None


def study_of(found: Mapping[str, Any], *, name: str, folder: Path) -> Study:
    """Return the study that a parsed file describes; ValueError says what is wrong."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", name):
        raise ValueError(f"a study is called by small letters, digits and -, got {name!r}")
    _check_keys("key", found, (*_TOP, *_TABLES))
    for key in ("kind", "theme", "title", "budget", "note"):
        there = found.get(key, "" if key in ("budget", "note") else None)
        if not isinstance(there, str):
            raise ValueError(f"{key} must be a text, got {there!r}")
    _check_one("theme", found["theme"], THEMES)
    _check_one("device", found.get("device", "cpu"), DEVICES)
    for key in _TABLES:
        tables = found.get(key, [])
        if not isinstance(tables, list) or not all(isinstance(one, dict) for one in tables):
            raise ValueError(f"{key} must be tables, each under [[{key}]]")
    for key in ("settings", "sources"):
        if not isinstance(found.get(key, {}), dict):
            raise ValueError(f"{key} must be a table, under [{key}]")
    arms = arms_of(found.get("arms", []))
    study = Study(
        name=name,
        folder=folder,
        kind=found["kind"],
        theme=found["theme"],
        title=found["title"],
        task=found.get("task"),
        seeds=_seeds(found.get("seeds", 1)),
        device=found.get("device", "cpu"),
        budget=found.get("budget", ""),
        note=found.get("note", ""),
        settings=found.get("settings", {}),
        sources=found.get("sources", {}),
        arms=arms,
        claims=tuple(_claim(one) for one in found.get("claim", [])),
        figures=tuple(_figure(one) for one in found.get("figure", [])),
    )
    _check_sources(study)
    _check_names(study)
    return study


def _seeds(found: Any) -> tuple[int, ...]:
    many = type(found) is int and found > _MOST_SEEDS
    seeds = list(range(found)) if type(found) is int and not many else found
    whole = isinstance(seeds, list) and all(type(s) is int and 0 <= s < 2**31 for s in seeds)
    if not whole or not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(
            f"seeds must be a number of them, up to {_MOST_SEEDS}, or a list of some below 2**31, "
            f"got {found!r}"
        )
    return tuple(seeds)


def _claim(found: Mapping[str, Any]) -> Claim:
    claim: Claim = _made(Claim, "claim", found)
    where = f"claim {claim.id}"
    _check_one(f"test of {where}", claim.test, TESTS)
    compared = claim.test in ("less", "greater", "no-worse") or claim.measure in PAIRED
    if compared != (claim.against is not None):
        also = " and ".join(PAIRED)
        raise ValueError(f"{where}: against goes with less, greater and no-worse, and with {also}")
    if (claim.test in ("no-worse", "at-most", "at-least")) != (claim.value is not None):
        raise ValueError(f"{where}: value goes with no-worse, at-most and at-least")
    return claim


def _figure(found: Mapping[str, Any]) -> Figure:
    figure: Figure = _made(Figure, "figure", found)
    if figure.against is not None:
        _check_one("x of a figure with against", figure.x, ("epoch", "step", "round"))
        if figure.lines != "arm":
            raise ValueError(f"figure {figure.title!r}: with against each arm is a line: no lines")
    if figure.log and (figure.zero or figure.against is not None):
        raise ValueError(f"figure {figure.title!r}: log goes with neither zero nor against")
    return figure


def _made(kind: Any, what: str, found: Mapping[str, Any]) -> Any:
    """Build a Claim or a Figure from a table."""
    _check_keys(f"key of a {what}", found, [field.name for field in fields(kind)])
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in found.items()}
    try:
        return kind(**values)
    except TypeError as error:  # It says which are missing.
        raise ValueError(f"{what} {found.get('id', '')}: {str(error).split('() ')[-1]}") from None


def _check_sources(study: Study) -> None:
    """Nobody can judge a setting without knowing who chose it."""
    given = {*study.settings, *(name for arm in study.arms for name in arm.settings)}
    wanted = given - {"order", "sparsify", "case"}
    lacking, idle = sorted(wanted - set(study.sources)), sorted(set(study.sources) - given)
    if lacking:
        raise ValueError(f"[sources] must say where {', '.join(lacking)} comes from")
    if idle:
        raise ValueError(f"[sources] tells of {', '.join(idle)}, which nothing sets")


def _check_names(study: Study) -> None:
    known = [arm.name for arm in study.arms]
    for claim in study.claims:
        for arm in (claim.arm, claim.against):
            if arm is not None:
                _check_one(f"arm of claim {claim.id}", arm, known)
    for figure in study.figures:
        for arm in (*figure.arms, *([] if figure.against is None else [figure.against])):
            _check_one("arm of a figure", arm, known)


def _check_keys(what: str, found: Mapping[str, Any], allowed: Sequence[str]) -> None:
    for key in found:
        _check_one(what, key, allowed)


def _check_one(what: str, found: str, allowed: Sequence[str]) -> None:
    if found not in allowed:
        raise ValueError(f"unknown {what} {found!r}; known are {', '.join(allowed)}")
