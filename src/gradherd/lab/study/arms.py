"""Groups of settings -> the arms of a study: lists multiply, and every arm gets a name."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_MOST = 1000
"""Arms of one table."""
HEAD = ("order", "sparsify", "density", "case")
"""Settings that name an arm; all others are told after a comma."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One thing that a study tries, with every seed."""

    name: str
    """What claims, figures and `--only` call it."""
    settings: Mapping[str, Any]
    """What makes it this arm, apart from what all arms of the study share."""


def arms_of(groups: Sequence[Mapping[str, Any]]) -> tuple[Arm, ...]:
    """Return the arms of `[[arms]]` tables: a list in a group stands for one arm per entry.

    >>> [arm.name for arm in arms_of([{"order": ["d-rr", "cd-grab"], "workers": [4, 16]}])]
    ['d-rr, workers 4', 'd-rr, workers 16', 'cd-grab, workers 4', 'cd-grab, workers 16']
    >>> [arm.name for arm in arms_of([{"sparsify": ["dense", "topk"], "density": [0.1, 0.01]}])]
    ['dense', 'topk 0.1', 'topk 0.01']
    """
    found: dict[str, Arm] = {}
    for group in groups:
        for settings in _expanded(group):
            label = settings.pop("label", None)
            if label is not None and not isinstance(label, str):
                raise ValueError(f"label of an [[arms]] table must be a text, got {label!r}")
            if settings.get("sparsify") == "dense":  # All of it travels: there is no density.
                settings.pop("density", None)
            arm = Arm(name=name_of(settings, label), settings=settings)
            if found.setdefault(arm.name, arm).settings != settings:
                way = "give one group a label"
                if label is not None:
                    way = "a label hides what lists make different, so give each its own group"
                raise ValueError(f"two arms are called {arm.name!r}: {way}")
    if not found:
        raise ValueError("there is no arm: a study needs at least one [[arms]] table")
    return tuple(found.values())


def _expanded(group: Mapping[str, Any]) -> list[dict[str, Any]]:
    options = [value if isinstance(value, list) else [value] for value in group.values()]
    for name, option in zip(group, options, strict=True):
        if not option:
            raise ValueError(f"{name} of an [[arms]] table is an empty list")
    count = math.prod(len(option) for option in options)
    if count > _MOST:
        raise ValueError(f"an [[arms]] table stands for {count:,} arms: at most {_MOST:,}")
    return [dict(zip(group, chosen, strict=True)) for chosen in itertools.product(*options)]


def name_of(settings: Mapping[str, Any], label: str | None) -> str:
    """Return the name of an arm.

    >>> name_of({"order": "cd-grab", "sparsify": "exdyna", "density": 0.01}, None)
    'cd-grab + exdyna 0.01'
    >>> name_of({"order": "cd-grab", "workers": 64, "batch_size": 1}, "64 workers")
    'cd-grab, 64 workers'
    >>> name_of({"sparsify": "exdyna", "density": 0.01, "method": {"blocks": 64}}, None)
    'exdyna 0.01, blocks 64'
    """
    sent = settings.get("sparsify")
    if sent is not None and "density" in settings:
        sent = f"{sent} {_word(settings['density'])}"
    head = [str(one) for one in (settings.get("order"), sent, settings.get("case")) if one]
    others = {name: value for name, value in settings.items() if name not in HEAD}
    rest = [label] if label is not None else _told(others)
    return ", ".join([*([" + ".join(head)] if head else []), *rest])


def _told(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as words; those of a method are told without saying that they are its."""
    words = []
    for name, value in settings.items():
        if isinstance(value, Mapping):
            words += _told(value)
        else:
            words.append(f"{name} {_word(value)}")
    return words


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
