"""What commands share: usage errors, lists in options, output."""

import json
import math
import sys
from collections.abc import Iterable
from typing import Any


class UsageError(ValueError):
    """The call was wrong: one line that names the option, the value and what is allowed."""


class Failed(RuntimeError):
    """The call was right and something went wrong: one line that says what."""


def at_least(option: str, value: int, least: int) -> None:
    """Raise UsageError if a number is too small."""
    if value < least:
        raise UsageError(f"{option} must be at least {least}, got {value}")


def name(option: str, text: str, allowed: Iterable[str]) -> str:
    """Check one name."""
    known = list(allowed)
    if text not in known:
        raise UsageError(f"{option}: unknown {text!r}; known are {', '.join(known)}")
    return text


def names(option: str, text: str, allowed: Iterable[str]) -> list[str]:
    """Split a comma-separated list of names and check each."""
    known = list(allowed)
    chosen = [word.strip() for word in text.split(",") if word.strip()]
    for one in chosen:
        name(option, one, known)
    if not chosen:
        raise UsageError(f"{option} must name at least one of {', '.join(known)}")
    return list(dict.fromkeys(chosen))


def numbers(option: str, text: str) -> list[int]:
    """Split a comma-separated list of positive whole numbers; 1e6 is one."""
    chosen = []
    for word in filter(None, (word.strip() for word in text.split(","))):
        try:
            value = float(word)
        except ValueError:
            value = 0
        if not math.isfinite(value) or value < 1 or value != int(value):
            raise UsageError(f"{option}: {word!r} is not a positive whole number")
        if value > 2**53:
            raise UsageError(f"{option}: {word!r} is too large")
        chosen.append(int(value))
    if not chosen:
        raise UsageError(f"{option} must name at least one number, got {text!r}")
    return chosen


def print_json(result: dict[str, Any]) -> None:
    """Write a result for programs: one JSON object on stdout."""
    json.dump(result, sys.stdout)
    print()
