"""Tables of a study's file -> dataclasses, refused with a line that says what is allowed."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

_WORDS = {str: "a text", bool: "true or false", int: "a whole number", float: "a number"}


def made(kind: Any, what: str, found: Mapping[str, Any]) -> Any:
    """Build a dataclass from a table, or raise ValueError.

    Args:
        kind: The dataclass.
        what: What a table of this kind is called.
        found: The table.
    """
    wanted = {field.name: field for field in fields(kind)}
    own = found.get("id", found.get("title"))
    where = f"{what} {own}" if isinstance(own, str) else f"a {what}"
    check_keys(f"key of {where}", found, list(wanted))
    lacking = [name for name, one in wanted.items() if one.default is MISSING and name not in found]
    if lacking:
        raise ValueError(f"{where} lacks {' and '.join(lacking)}")
    for name, value in found.items():
        if not fits(value, wanted[name].type):
            raise ValueError(f"{name} of {where} must be {_told(wanted[name].type)}, got {value!r}")
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in found.items()})


def fits(value: Any, wanted: Any) -> bool:
    """Return whether a value of TOML is of a type; lists stand for tuples.

    >>> fits(1, float), fits(True, float), fits(1.0, int), fits([1, 2], tuple[float, float] | None)
    (True, False, False, True)
    >>> fits([1], tuple[float, float]), fits(["a"], tuple[str, ...]), fits("a", tuple[str, ...])
    (False, True, False)
    """
    if isinstance(wanted, UnionType):
        return any(fits(value, one) for one in get_args(wanted))
    if get_origin(wanted) is tuple:
        one, *others = get_args(wanted)
        count = len(value) if isinstance(value, list) else -1
        right = count >= 0 if others == [...] else count == 1 + len(others)
        return right and all(fits(item, one) for item in value)
    if wanted is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is wanted


def _told(wanted: Any) -> str:
    if isinstance(wanted, UnionType):
        return " or ".join(_told(one) for one in get_args(wanted) if one is not NoneType)
    if get_origin(wanted) is tuple:
        one, *others = get_args(wanted)
        many = "any number" if others == [...] else str(1 + len(others))
        return f"a list of {many}, each {_WORDS[one]}"
    return _WORDS[wanted]


def check_keys(what: str, found: Mapping[str, Any], allowed: Sequence[str]) -> None:
    """Raise ValueError if a table has a key that is not allowed."""
    for key in found:
        check_one(what, key, allowed)


def check_one(what: str, found: str, allowed: Sequence[str]) -> None:
    """Raise ValueError if something is none of what is allowed.

    >>> check_one("arm", "d-rr", ["d-rr, 4 workers", "d-rr, 8 workers"])
    Traceback (most recent call last):
        ...
    ValueError: unknown arm 'd-rr'; known are 'd-rr, 4 workers', 'd-rr, 8 workers'
    """
    if found not in allowed:
        quoted = any(", " in one for one in allowed)
        known = ", ".join(repr(one) if quoted else one for one in allowed)
        raise ValueError(f"unknown {what} {found!r}; known are {known}")
