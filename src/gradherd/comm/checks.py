"""Checks of arguments and of training: one sentence for what is wrong, in place of a late error."""

import logging
import operator
from collections.abc import Mapping
from numbers import Real
from typing import Any

log = logging.getLogger("gradherd")

MOST_BROKEN = 100
"""Batches in a row whose gradients may be not finite. A GradScaler needs a few dozen at most until
it has found its scale."""


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
    """Raise ValueError unless all `values` are numbers; ranges are for the caller to check."""
    for name, value in values.items():
        if type(value) is bool or not isinstance(value, Real):
            raise ValueError(f"{name} must be a number, got {value!r}")


def check_in(interval: str, **values: Any) -> None:
    """Raise ValueError unless all `values` are numbers in an interval, such as "[0, 1)".

    >>> check_in("[0, 1)", momentum=1.5)
    Traceback (most recent call last):
        ...
    ValueError: momentum must be in [0, 1), got 1.5
    """
    check_numbers(**values)
    low, high = map(float, interval[1:-1].split(","))
    for name, value in values.items():
        above = value >= low if interval[0] == "[" else value > low
        below = value <= high if interval[-1] == "]" else value < high
        if not (above and below):  # also for NaN
            raise ValueError(f"{name} must be in {interval}, got {value}")


def check_choice(name: str, value: Any, *allowed: Any) -> None:
    """Raise ValueError unless `value` is one of those `allowed`; 1 is not True.

    >>> check_choice("drop_last", "no", True, False)
    Traceback (most recent call last):
        ...
    ValueError: drop_last must be True or False, got 'no'
    """
    if not any(type(value) is type(one) and value == one for one in allowed):
        names = [str(one) for one in allowed]
        known = f"{', '.join(names[:-1])} or {names[-1]}"
        raise ValueError(f"{name} must be {known}, got {value!r}")


def check_state(state: Any, *needed: str) -> None:
    """Raise ValueError unless `state` is a mapping with the keys `needed`."""
    if not isinstance(state, Mapping):
        raise ValueError(f"state must be what state_dict() returned, got {type(state).__name__}")
    missing = [key for key in needed if key not in state]
    if missing:
        raise ValueError(f"state must be what state_dict() returned: it has no {missing[0]!r}")


class TrainingDiverged(RuntimeError):
    """Gradients or weights were not finite many times in a row, on all ranks alike."""


class BrokenBatches:
    """Says once that gradients are not finite, and ends a run that has no others any more.

    Args:
        meaning: What happens to such a batch, in words.
        rank: Rank of this process; the first one speaks for all.
    """

    def __init__(self, meaning: str, rank: int) -> None:
        self._meaning = meaning
        self._told = rank != 0

    def note(self, in_a_row: int) -> None:
        """Take note of so many batches in a row up to now, on all ranks alike.

        Raises:
            TrainingDiverged: They are too many.
        """
        if not self._told:
            self._told = True
            log.warning(
                "gradients are not finite: %s (a few at the start are normal with a GradScaler)",
                self._meaning,
            )
        if in_a_row >= MOST_BROKEN:
            raise TrainingDiverged(
                f"gradients were not finite in {in_a_row} batches in a row ({self._meaning}): "
                "training has diverged; try a lower learning rate, a warm-up or gradient clipping"
            )
