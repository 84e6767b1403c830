"""Read a study from its TOML file, and refuse bad files with a line that says what is allowed.

The checks are written out by hand: errors must name the table (`claim hmda-loss`), list the
allowed names and stay on one line, which schema libraries such as msgspec do not do.
"""

import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from gradherd.lab.study.results import result_path
from gradherd.lab.study.spec import (
    DEVICES,
    PAIRED,
    TESTS,
    THEMES,
    Arm,
    Claim,
    Figure,
    Study,
    expand_arms,
)
from gradherd.lab.text import printable
from gradherd.lab.train.record import read_bounded_text

_STRINGS = ("kind", "theme", "title", "task", "budget", "note", "left_out")
_TABLES = ("arms", "claim", "figure")
_KEYS = (*_STRINGS[:4], "seeds", "device", *_STRINGS[4:], "settings", "sources", *_TABLES)
_MAX_SEEDS = 1000
_MAX_MESSAGE = 400
"""Characters of an error message: it quotes the file, which may hold anything."""
_TYPE_WORDS = {str: "a string", bool: "true or false", int: "an integer", float: "a number"}


def read_study(path: Path) -> Study:
    """Read and check a study file.

    Args:
        path: The TOML file; its name without suffix becomes the name of the study.

    Raises:
        ValueError: The file cannot be read or is invalid; one line that names the file and what is
            wrong with it.
    """
    try:
        tables = tomllib.loads(read_bounded_text(path))
    except RecursionError:
        raise ValueError(printable(f"{path}: nested too deeply")) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(printable(f"{path}: {reason}")) from None
    try:
        return parse_study(tables, name=path.stem, folder=path.parent)
    # A table where a string is expected may only fail inside a comparison or a method call.
    except (ValueError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())
        if len(reason) > _MAX_MESSAGE:
            reason = f"{reason[:_MAX_MESSAGE]} ..."
        raise ValueError(printable(f"{path}: {reason}")) from None


def parse_study(tables: Mapping[str, Any], *, name: str, folder: Path) -> Study:
    """Return the study that a parsed TOML file describes.

    Args:
        tables: What `tomllib` returns.
        name: Name of the study.
        folder: Folder of the file; paths of custom tasks are relative to it.

    Raises:
        ValueError: A key, a name or a value is not allowed.
    """
    # The name becomes a folder of results, the start of chart files and part of a command.
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", name):
        raise ValueError(f"a study's name has lower-case letters, digits and -, got {name!r}")
    check_keys("key", tables, _KEYS)
    for key in _STRINGS:
        if key not in tables and key in ("kind", "theme", "title"):
            raise ValueError(f"there is no {key}: a study needs one")
        if not isinstance(tables.get(key, ""), str):
            raise ValueError(f"{key} must be a string, got {tables[key]!r}")
    check_known("theme", tables["theme"], THEMES)
    check_known("device", tables.get("device", "cpu"), DEVICES)
    for key in _TABLES:
        entries = tables.get(key, [])
        if not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
            raise ValueError(f"{key} must be tables, each under [[{key}]]")
    for key in ("settings", "sources"):
        if not isinstance(tables.get(key, {}), dict):
            raise ValueError(f"{key} must be a table, under [{key}]")
    study = Study(
        name=name,
        folder=folder,
        kind=tables["kind"],
        theme=tables["theme"],
        title=tables["title"],
        task=tables.get("task"),
        seeds=_seeds(tables.get("seeds", 1)),
        device=tables.get("device", "cpu"),
        budget=tables.get("budget", ""),
        note=tables.get("note", ""),
        left_out=tables.get("left_out", ""),
        settings=tables.get("settings", {}),
        sources=tables.get("sources", {}),
        arms=expand_arms(tables.get("arms", [])),
        claims=tuple(_claim(one) for one in tables.get("claim", [])),
        figures=tuple(_figure(one) for one in tables.get("figure", [])),
    )
    # Last, because these compare parts of the file with each other.
    _check_sources(study)
    _check_result_files(study)
    _check_names(study)
    return study


def _seeds(value: Any) -> tuple[int, ...]:
    # Before the range becomes a list: a file must not be able to exhaust memory.
    too_many = type(value) is int and value > _MAX_SEEDS
    seeds = list(range(value)) if type(value) is int and not too_many else value
    valid = isinstance(seeds, list) and all(type(s) is int and 0 <= s < 2**31 for s in seeds)
    if not valid or not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(
            f"seeds must be a count up to {_MAX_SEEDS}, or a list of distinct seeds below 2**31, "
            f"got {value!r}"
        )
    return tuple(seeds)


def _claim(table: Mapping[str, Any]) -> Claim:
    claim: Claim = from_table(Claim, "claim", table)
    where = f"claim {claim.id}"
    check_known(f"test of {where}", claim.test, TESTS)
    # A forgotten reference, or one that has no effect, would change what a claim says.
    compared = claim.test in ("less", "greater", "no-worse") or claim.measure in PAIRED
    if compared != (claim.against is not None):
        paired = " and ".join(PAIRED)
        raise ValueError(
            f"{where}: against goes with less, greater and no-worse, and with {paired}"
        )
    if (claim.test in ("no-worse", "at-most", "at-least")) != (claim.value is not None):
        raise ValueError(f"{where}: value goes with no-worse, at-most and at-least")
    if claim.epoch is not None and claim.epoch < 1:
        raise ValueError(f"{where}: epochs are counted from 1, got {claim.epoch}")
    return claim


def _figure(table: Mapping[str, Any]) -> Figure:
    figure: Figure = from_table(Figure, "figure", table)
    if figure.against is not None:
        # Settings and bytes differ from arm to arm: there would be no common x to subtract at.
        check_known("x of a figure with against", figure.x, ("epoch", "step", "round"))
        if figure.lines != "arm":
            raise ValueError(
                f"figure {figure.title!r}: with against every arm is a line, so lines has no effect"
            )
    # A logarithmic axis has no zero, and differences may be negative.
    if figure.log and (figure.zero or figure.against is not None):
        raise ValueError(f"figure {figure.title!r}: log cannot be used with zero or against")
    return figure


def _check_sources(study: Study) -> None:
    """Require a source for every setting: a reader must be able to judge who chose it."""
    used = {*study.settings, *(name for arm in study.arms for name in arm.settings)}
    # These are what a study compares; nobody has to justify them.
    required = used - {"order", "sparsify", "case"}
    missing, unused = sorted(required - set(study.sources)), sorted(set(study.sources) - used)
    if missing:
        raise ValueError(f"[sources] must say where {', '.join(missing)} comes from")
    if unused:
        raise ValueError(f"[sources] names {', '.join(unused)}, which nothing sets")


def _check_result_files(study: Study) -> None:
    """Refuse arms that would share a result file: file names allow fewer characters than names."""
    owners: dict[str, str] = {}
    for arm in study.arms:
        file = result_path(Path(), arm.name).name.lower()  # Some file systems ignore case.
        if owners.setdefault(file, arm.name) != arm.name:
            raise ValueError(
                f"arms {owners[file]!r} and {arm.name!r} would share the file {file}: "
                "give one of them another label"
            )


def _check_names(study: Study) -> None:
    known = [arm.name for arm in study.arms]
    counts = Counter(claim.id for claim in study.claims)
    if counts and counts.most_common(1)[0][1] > 1:
        raise ValueError(f"two claims are called {counts.most_common(1)[0][0]!r}")
    for claim in study.claims:
        for name in (claim.arm, claim.against):
            if name is not None:
                check_known(f"arm of claim {claim.id}", name, known)
                _check_epoch(claim, study, study.arms[known.index(name)])
    for figure in study.figures:
        for name in (*figure.arms, *([] if figure.against is None else [figure.against])):
            check_known(f"arm of figure {figure.title}", name, known)


def _check_epoch(claim: Claim, study: Study, arm: Arm) -> None:
    # Otherwise the claim would stay unmeasured, however often the study runs.
    last = {**study.settings, **arm.settings}.get("epochs")
    if claim.epoch is not None and isinstance(last, int) and claim.epoch > last:
        raise ValueError(
            f"claim {claim.id}: there is no epoch {claim.epoch}, {arm.name!r} has {last}"
        )


def from_table(cls: Any, what: str, table: Mapping[str, Any]) -> Any:
    """Build a dataclass from a TOML table.

    Args:
        cls: The dataclass.
        what: What such a table is called in errors.
        table: The table.

    Raises:
        ValueError: A key is unknown or missing, or a value has the wrong type.
    """
    known = {field.name: field for field in fields(cls)}
    own_name = table.get("id", table.get("title"))
    where = f"{what} {own_name}" if isinstance(own_name, str) else f"a {what}"
    check_keys(f"key of {where}", table, list(known))
    missing = [name for name, one in known.items() if one.default is MISSING and name not in table]
    if missing:
        raise ValueError(f"{where} lacks {' and '.join(missing)}")
    for name, value in table.items():
        if not has_type(value, known[name].type):
            expected = _type_words(known[name].type)
            raise ValueError(f"{name} of {where} must be {expected}, got {value!r}")
    return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in table.items()})


def has_type(value: Any, expected: Any) -> bool:
    """Return whether a TOML value has a type; lists stand for tuples.

    >>> has_type(1, float), has_type(True, float), has_type(1.0, int)
    (True, False, False)
    >>> has_type([1, 2], tuple[float, float] | None), has_type([1], tuple[float, float])
    (True, False)
    >>> has_type(["a"], tuple[str, ...]), has_type("a", tuple[str, ...])
    (True, False)
    """
    # dataclass annotations are the schema: a field that is added is checked at once.
    if isinstance(expected, UnionType):
        return any(has_type(value, one) for one in get_args(expected))
    if get_origin(expected) is tuple:
        item, *rest = get_args(expected)
        count = len(value) if isinstance(value, list) else -1
        right_length = count >= 0 if rest == [...] else count == 1 + len(rest)
        return right_length and all(has_type(one, item) for one in value)
    if expected is float:  # TOML writes 1 where a float is meant; bool is a subclass of int.
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is expected


def _type_words(expected: Any) -> str:
    if isinstance(expected, UnionType):
        return " or ".join(_type_words(one) for one in get_args(expected) if one is not NoneType)
    if get_origin(expected) is tuple:
        item, *rest = get_args(expected)
        count = "any length" if rest == [...] else f"length {1 + len(rest)}"
        return f"a list of {count}, each {_TYPE_WORDS[item]}"
    return _TYPE_WORDS[expected]


def check_keys(what: str, table: Mapping[str, Any], allowed: Sequence[str]) -> None:
    """Raise ValueError if a table has a key that is not allowed."""
    for key in table:
        check_known(what, key, allowed)


def check_known(what: str, name: str, allowed: Sequence[str]) -> None:
    """Raise ValueError if a name is not one of those allowed.

    >>> check_known("arm", "d-rr", ["d-rr, 4 workers", "d-rr, 8 workers"])
    Traceback (most recent call last):
        ...
    ValueError: unknown arm 'd-rr'; known are 'd-rr, 4 workers', 'd-rr, 8 workers'
    """
    if name not in allowed:
        # Names of arms contain commas; without quotes the list could not be read.
        quoted = any(", " in one for one in allowed)
        known = ", ".join(repr(one) if quoted else one for one in allowed)
        raise ValueError(f"unknown {what} {name!r}; known are {known}")
