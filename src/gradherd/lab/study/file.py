"""A study as a TOML file: read, checked, and refused with a line that says what is allowed."""

import re
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradherd.lab.study.archive import file_of
from gradherd.lab.study.arms import Arm, arms_of
from gradherd.lab.study.checks import check_keys, check_one, made
from gradherd.lab.study.spec import DEVICES, PAIRED, TESTS, THEMES, Claim, Figure, Study
from gradherd.lab.train.record import plain, read_text

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
    check_keys("key", found, (*_TOP, *_TABLES))
    for key in ("kind", "theme", "title", "task", "budget", "note"):
        if key not in found and key in ("kind", "theme", "title"):
            raise ValueError(f"there is no {key}: a study needs one")
        if not isinstance(found.get(key, ""), str):
            raise ValueError(f"{key} must be a text, got {found[key]!r}")
    check_one("theme", found["theme"], THEMES)
    check_one("device", found.get("device", "cpu"), DEVICES)
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
    _check_files(study)
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
    claim: Claim = made(Claim, "claim", found)
    where = f"claim {claim.id}"
    check_one(f"test of {where}", claim.test, TESTS)
    compared = claim.test in ("less", "greater", "no-worse") or claim.measure in PAIRED
    if compared != (claim.against is not None):
        also = " and ".join(PAIRED)
        raise ValueError(f"{where}: against goes with less, greater and no-worse, and with {also}")
    if (claim.test in ("no-worse", "at-most", "at-least")) != (claim.value is not None):
        raise ValueError(f"{where}: value goes with no-worse, at-most and at-least")
    if claim.epoch is not None and claim.epoch < 1:
        raise ValueError(f"{where}: epochs are counted from 1, got {claim.epoch}")
    return claim


def _figure(found: Mapping[str, Any]) -> Figure:
    figure: Figure = made(Figure, "figure", found)
    if figure.against is not None:
        check_one("x of a figure with against", figure.x, ("epoch", "step", "round"))
        if figure.lines != "arm":
            raise ValueError(f"figure {figure.title!r}: with against each arm is a line: no lines")
    if figure.log and (figure.zero or figure.against is not None):
        raise ValueError(f"figure {figure.title!r}: log goes with neither zero nor against")
    return figure


def _check_sources(study: Study) -> None:
    """Nobody can judge a setting without knowing who chose it."""
    given = {*study.settings, *(name for arm in study.arms for name in arm.settings)}
    wanted = given - {"order", "sparsify", "case"}
    lacking, idle = sorted(wanted - set(study.sources)), sorted(set(study.sources) - given)
    if lacking:
        raise ValueError(f"[sources] must say where {', '.join(lacking)} comes from")
    if idle:
        raise ValueError(f"[sources] tells of {', '.join(idle)}, which nothing sets")


def _check_files(study: Study) -> None:
    """Every arm has a file of its own, whose name has fewer letters than an arm's may have."""
    taken: dict[str, str] = {}
    for arm in study.arms:
        file = file_of(Path(), arm.name).name.lower()  # Some disks see no capitals.
        if taken.setdefault(file, arm.name) != arm.name:
            raise ValueError(
                f"arms {taken[file]!r} and {arm.name!r} would share the file {file}: "
                "give one another label"
            )


def _check_names(study: Study) -> None:
    known = [arm.name for arm in study.arms]
    counts = Counter(claim.id for claim in study.claims)
    if counts and counts.most_common(1)[0][1] > 1:
        raise ValueError(f"two claims are called {counts.most_common(1)[0][0]!r}")
    for claim in study.claims:
        for name in (claim.arm, claim.against):
            if name is not None:
                check_one(f"arm of claim {claim.id}", name, known)
                _check_epoch(claim, study, study.arms[known.index(name)])
    for figure in study.figures:
        for name in (*figure.arms, *([] if figure.against is None else [figure.against])):
            check_one(f"arm of figure {figure.title}", name, known)


def _check_epoch(claim: Claim, study: Study, arm: Arm) -> None:
    last = {**study.settings, **arm.settings}.get("epochs")
    if claim.epoch is not None and isinstance(last, int) and claim.epoch > last:
        raise ValueError(
            f"claim {claim.id}: there is no epoch {claim.epoch}, {arm.name!r} has {last}"
        )
