"""Checks of arguments: one sentence for a wrong type, instead of an error from a comparison."""

import operator
from collections.abc import Mapping
from numbers import Real
from typing import Any


def check_whole(name: str, value: Any, least: int) -> None:
    """Raise ValueError unless `value` is an integer of at least `least`.

    >>> check_whole("batch_size", "4", 1)
    Traceback (most recent call last):
        ...
    ValueError: batch_size must be a whole number, got '4'
    """
    try:
        # Integers of numpy and torch are as good as Python's; True is an int by accident.
        whole = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        whole = None
    if whole is None:
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    if whole < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def check_numbers(**values: Any) -> None:
    """Raise ValueError unless all `values` are numbers; their ranges are for the caller to check.

    >>> check_numbers(momentum="high")
    Traceback (most recent call last):
        ...
    ValueError: momentum must be a number, got 'high'
    """
    for name, value in values.items():
        if type(value) is bool or not isinstance(value, Real):
            raise ValueError(f"{name} must be a number, got {value!r}")


def check_state(state: Any, *needed: str) -> None:
    """Raise ValueError unless `state` is a mapping with the keys `needed`."""
    if not isinstance(state, Mapping):
        raise ValueError(f"state must be what state_dict() returned, got {type(state).__name__}")
    missing = [key for key in needed if key not in state]
    if missing:
        raise ValueError(f"state must be what state_dict() returned: it has no {missing[0]!r}")
