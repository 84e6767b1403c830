"""A study: arms, claims and figures, read from a TOML file.

A bad file is refused with a line that says what is allowed. The dataclasses are the schema: their
annotations are checked here. Schema libraries such as msgspec do not name the table in their errors
(`claim hmda-loss`), nor list the allowed names on one line.
"""

import itertools
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from gradherd.lab.study.results import result_path
from gradherd.lab.text import check_known, printable
from gradherd.lab.train.record import has_type, read_bounded, type_words

TESTS = ("less", "greater", "no-worse", "at-most", "at-least")
"""Comparisons a claim can make; `lab.report.claims` defines them."""
PAIRED = ("epochs_share", "epochs_to_final")
"""Measures that are only defined relative to another arm, whatever the test."""
DEVICES = ("cpu", "cuda")
"""Devices a study can ask for."""
MAX_ARMS = 1000
"""Most arms that one `[[arms]]` table may expand to; more is a typing error."""
HEAD_SETTINGS = ("order", "sparsify", "density", "case")
"""Settings that form the first part of an arm's name; all others follow after commas."""
_MAX_SEEDS = 1000
_MAX_MESSAGE = 400
"""Characters of an error message: it quotes the file, which may hold anything."""
_TABLES = {"arms": "arms", "claim": "claims", "figure": "figures"}
"""Keys of lists of tables, and the fields that they become."""


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
    """What is measured of each run; see `lab.report.claims`."""
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
class Study:
    """Contents of a study file."""

    name: str
    """File name without its suffix."""
    folder: Path
    """Folder of the file; paths of custom tasks are relative to it."""
    kind: str
    theme: str = "open"
    """Section of the list of studies that it is in."""
    title: str
    task: str | None = None
    seeds: tuple[int, ...] = (0,)
    device: str = "cpu"
    """Device the study was sized for; a GPU study may take days on a CPU."""
    budget: str = ""
    """How it falls short of the paper's experiment; shown in rows of the paper's claims."""
    note: str = ""
    """Remarks, as paragraphs: the first is above the table, the others are folded."""
    left_out: str = ""
    """What was not run, and why."""
    methods: Mapping[str, str] = field(default_factory=dict)
    """Its own sparsifiers and orders: name -> path/to/file.py:ClassName, relative to the file."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that all arms share."""
    sources: Mapping[str, Any] = field(default_factory=dict)
    """Where each setting comes from."""
    arms: tuple[Arm, ...]
    claims: tuple[Claim, ...] = ()
    figures: tuple[Mapping[str, Any], ...] = ()
    """Charts of the study, as its file has them: pages of evidence draw them."""


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
    lists = {key: given.pop(key, []) for key in _TABLES}
    for key, entries in lists.items():
        if not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
            raise ValueError(f"{key} must be tables, each under [[{key}]]")
    seeds = _seeds(given.pop("seeds", 1))
    filled = ("name", "folder", "seeds", *_TABLES.values())
    check_table(Study, given, filled=filled, others=("seeds", *_TABLES))
    check_known("device", given.get("device", "cpu"), DEVICES)
    study = Study(
        **given,
        name=name,
        folder=folder,
        seeds=seeds,
        arms=expand_arms(lists["arms"]),
        claims=tuple(_claim(one) for one in lists["claim"]),
        figures=tuple(lists["figure"]),
    )
    _check_names(study)  # last, because it compares parts of the file with each other
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


def _check_names(study: Study) -> None:
    """Refuse arms that would share a result file, and claims about what the study does not have."""
    owners: dict[str, str] = {}
    for arm in study.arms:
        # File names allow fewer characters than names, and some file systems ignore case.
        file = result_path(Path(), arm.name).name.lower()
        if owners.setdefault(file, arm.name) != arm.name:
            raise ValueError(
                f"arms {owners[file]!r} and {arm.name!r} would share the file {file}: "
                "give one of them another label"
            )
    arms = {arm.name: arm for arm in study.arms}
    ids: set[str] = set()
    for claim in study.claims:
        if claim.id in ids:
            raise ValueError(f"two claims are called {claim.id!r}")
        ids.add(claim.id)
        for name in (claim.arm, claim.against):
            if name is None:
                continue
            check_known(f"arm of claim {claim.id}", name, tuple(arms))
            # Otherwise the claim would stay unmeasured, however often the study runs.
            last = {**study.settings, **arms[name].settings}.get("epochs")
            if claim.epoch is not None and isinstance(last, int) and claim.epoch > last:
                raise ValueError(
                    f"claim {claim.id}: there is no epoch {claim.epoch}, {name!r} has {last}"
                )


def from_table(cls: Any, what: str, table: Mapping[str, Any]) -> Any:
    """Build a dataclass from a TOML table; `what` is what such a table is called in errors."""
    own_name = table.get("id", table.get("title"))
    check_table(cls, table, f"{what} {own_name}" if isinstance(own_name, str) else f"a {what}")
    return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in table.items()})


def check_table(
    cls: Any,
    table: Mapping[str, Any],
    where: str = "",
    *,
    filled: Sequence[str] = (),
    others: Sequence[str] = (),
) -> None:
    """Raise ValueError unless a table has the fields of a dataclass.

    Args:
        cls: The dataclass.
        table: The table.
        where: What the table is called in errors; "" for the whole file.
        filled: Fields that the table does not hold.
        others: Keys that the file may have besides, named in errors.
    """
    known = {one.name: one for one in fields(cls) if one.name not in filled}
    types = {name: one.type for name, one in known.items()} | dict.fromkeys(others)
    check_types("key", types, table, where)
    missing = [
        name
        for name, one in known.items()
        if one.default is MISSING and one.default_factory is MISSING and name not in table
    ]
    if missing:
        lacks = f"{where} lacks {' and '.join(missing)}"
        raise ValueError(lacks if where else f"there is no {missing[0]}: a study needs one")


def check_types(
    what: str, types: Mapping[str, Any], table: Mapping[str, Any], where: str = ""
) -> None:
    """Raise ValueError if a key of a table is not among `types`, or its value is of another."""
    of = f" of {where}" if where else ""
    for name, value in table.items():
        check_known(f"{what}{of}", name, types)
        if not has_type(value, types[name]):
            raise ValueError(f"{name}{of} must be {type_words(types[name])}, got {value!r}")


def expand_arms(groups: Sequence[Mapping[str, Any]]) -> tuple[Arm, ...]:
    """Return the arms of `[[arms]]` tables; a list in a table stands for one arm per entry.

    The order of the file is also that of runs and of lines in charts. Raises ValueError if there is
    no arm, if two different arms have one name, or if a table has too many.

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
