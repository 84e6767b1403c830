"""A study: its arms and seeds, read from a TOML file.

A bad file is refused with a line that says what is allowed. The dataclasses are the schema: their
annotations are checked here. Schema libraries such as msgspec do not list the allowed names.
"""

import itertools
import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from gradherd.lab.study.results import result_path
from gradherd.lab.text import check_known, printable
from gradherd.lab.train.record import has_type, read_bounded, type_words

PAGE_KEYS = ("theme", "budget", "note", "left_out", "sources", "claim", "figure")
"""Keys that a page about the study needs and its runs do not; `studies/evidence` reads them."""
DEVICES = ("cpu", "cuda")
"""Devices a study can ask for."""
MAX_ARMS = 1000
"""Most arms that one `[[arms]]` table may expand to; more is a typing error."""
HEAD_SETTINGS = ("order", "sparsify", "density", "case")
"""Settings that form the first part of an arm's name; all others follow after commas."""
_NO_KEYS = ("name", "folder", "seeds", "arms", "page")
"""Fields of a study that its file does not have as they are."""
_MAX_SEEDS = 1000
_MAX_MESSAGE = 400
"""Characters of an error message: it quotes the file, which may hold anything."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """Contents of a study file."""

    name: str
    """File name without its suffix."""
    folder: Path
    """Folder of the file; paths of custom tasks are relative to it."""
    kind: str
    title: str
    task: str | None = None
    seeds: tuple[int, ...] = (0,)
    device: str = "cpu"
    """Device the study was sized for; a GPU study may take days on a CPU."""
    methods: Mapping[str, str] = field(default_factory=dict)
    """Its own sparsifiers and orders: name -> path/to/file.py:ClassName, relative to the file."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that all arms share."""
    arms: Mapping[str, Mapping[str, Any]]
    """The configurations that are run with every seed: the name that `--only` and all that is said
    about the study use -> settings, on top of those that all arms share."""
    page: Mapping[str, Any] = field(default_factory=dict)
    """What its file has under `PAGE_KEYS`."""


def read_study(path: Path) -> Study:
    """Read and check a study file, whose name without suffix becomes the name of the study.

    Raises:
        ValueError: The file cannot be read or is invalid; one line that names the file and what is
            wrong with it.
    """
    try:
        tables = tomllib.loads(read_bounded(path).decode())
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
    """Return the study that a parsed TOML file describes; raise ValueError if it is invalid."""
    # The name becomes a folder of results, the start of chart files and part of a command.
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", name):
        raise ValueError(f"a study's name has lower-case letters, digits and -, got {name!r}")
    given = dict(tables)
    page = {key: given.pop(key) for key in PAGE_KEYS if key in given}
    groups = given.pop("arms", [])
    if not isinstance(groups, list) or not all(isinstance(one, dict) for one in groups):
        raise ValueError("arms must be tables, each under [[arms]]")
    seeds = _seeds(given.pop("seeds", 1))
    keys = {one.name: one.type for one in fields(Study) if one.name not in _NO_KEYS}
    check_types("key", {**keys, **dict.fromkeys(("seeds", "arms", *PAGE_KEYS))}, given)
    for needed in ("kind", "title"):
        if needed not in given:
            raise ValueError(f"there is no {needed}: a study needs one")
    check_known("device", given.get("device", "cpu"), DEVICES)
    arms = expand_arms(groups)
    _check_files(arms)
    return Study(**given, name=name, folder=folder, seeds=seeds, arms=arms, page=page)


def _check_files(names: Iterable[str]) -> None:
    """Refuse arms that would share a result file."""
    owners: dict[str, str] = {}
    for name in names:
        # File names allow fewer characters than names, and some file systems ignore case.
        file = result_path(Path(), name).name.lower()
        if owners.setdefault(file, name) != name:
            raise ValueError(
                f"arms {owners[file]!r} and {name!r} would share the file {file}: "
                "give one of them another label"
            )


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


def check_types(
    what: str, types: Mapping[str, Any], table: Mapping[str, Any], where: str = ""
) -> None:
    """Raise ValueError if a key of a table is not among `types`, or its value is of another."""
    of = f" of {where}" if where else ""
    for name, value in table.items():
        check_known(f"{what}{of}", name, types)
        if not has_type(value, types[name]):
            raise ValueError(f"{name}{of} must be {type_words(types[name])}, got {value!r}")


def expand_arms(groups: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the settings of the arms of `[[arms]]` tables by name; a list stands for several arms.

    The order of the file is also that of runs and of lines in charts. Raises ValueError if there is
    no arm, if two different arms have one name, or if a table has too many.

    >>> list(expand_arms([{"order": ["d-rr", "cd-grab"], "workers": [4, 16]}]))
    ['d-rr, workers 4', 'd-rr, workers 16', 'cd-grab, workers 4', 'cd-grab, workers 16']
    >>> list(expand_arms([{"sparsify": ["dense", "topk"], "density": [0.1, 0.01]}]))
    ['dense', 'topk 0.1', 'topk 0.01']
    """
    arms: dict[str, dict[str, Any]] = {}
    for group in groups:
        for settings in _product(group):
            label = settings.pop("label", None)
            if label is not None and not isinstance(label, str):
                raise ValueError(f"label of an [[arms]] table must be a string, got {label!r}")
            if settings.get("sparsify") == "dense":  # Everything is sent: there is no density.
                settings.pop("density", None)
            name = arm_name(settings, label)
            # Equal arms may repeat: `dense` times a list of densities gives the same arm each time.
            if arms.setdefault(name, settings) != settings:
                fix = "give one group a label"
                if label is not None:
                    fix = "a label hides the values of lists, so give each value its own group"
                raise ValueError(f"two arms are called {name!r}: {fix}")
    if not arms:
        raise ValueError("there is no arm: a study needs at least one [[arms]] table")
    return arms


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

    Everything refers to arms by these names: `--only`, files of results, pages.

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
