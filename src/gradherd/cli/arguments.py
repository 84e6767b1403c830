"""What the options of all commands share: types, checks of values, JSON output.

Imports no torch: a command that needs none, such as `gradherd data list`, answers at once.
"""

import json
import math
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from gradherd.cli.errors import UsageError
from gradherd.cli.parser import Arg
from gradherd.sparsify.registry import SPARSIFIERS

FolderOption = Annotated[Path | None, Arg(metavar="DIR")]
FileArgument = Annotated[Path, Arg(metavar="FILE", positional=True)]
MAX_PROCESSES = 256
"""Most worker processes on one machine. Each takes some 300 MB, and a slip starts thousands."""
MAX_SEEDS = 10_000


def check_at_least(option: str, value: int, least: int, most: int | None = None) -> None:
    """Raise UsageError if a number is too small, or so large that it must be a slip."""
    if value < least:
        raise UsageError(f"{option} must be at least {least}, got {value}")
    if most is not None and value > most:
        raise UsageError(f"{option} must be at most {most:,}, got {value}")


def check_density(density: float) -> None:
    """Raise UsageError if a density is not in (0, 1]."""
    if not 0 < density <= 1:  # also refuses nan
        raise UsageError(f"--density must be in (0, 1], got {density}")


def check_name(option: str, name: str, known: Iterable[str]) -> str:
    """Return a name if it is known.

    Args:
        option: The option that holds it, for the error.
        name: What the user wrote.
        known: All valid names.

    Raises:
        UsageError: It is not known; the message lists those that are.
    """
    known = list(known)
    if name not in known:
        moved = SPARSIFIERS.hint(name)
        raise UsageError(f"{option}: unknown {name!r}; choose from {', '.join(known)}{moved}")
    return name


def parse_names(option: str, text: str, known: Iterable[str]) -> list[str]:
    """Split comma-separated names, check each, and drop duplicates.

    >>> parse_names("--orders", "d-rr, cd-grab,d-rr", ["d-rr", "cd-grab"])
    ['d-rr', 'cd-grab']
    """
    # A generator could be read only once, and an error lists all names.
    known = list(known)
    names = [word.strip() for word in text.split(",") if word.strip()]
    for name in names:
        check_name(option, name, known)
    if not names:
        raise UsageError(f"{option} must name at least one of {', '.join(known)}")
    # A name given twice would train twice, into the same folder.
    return list(dict.fromkeys(names))


def parse_counts(option: str, text: str) -> list[int]:
    """Split comma-separated positive whole numbers.

    >>> parse_counts("--dim", "4, 1e6")
    [4, 1000000]
    """
    counts = []
    for word in filter(None, (word.strip() for word in text.split(","))):
        try:
            value = float(word)
        except ValueError:
            value = 0
        # 1e400 parses as infinity, which int() refuses with an OverflowError.
        if not math.isfinite(value) or value < 1 or value != int(value):
            raise UsageError(f"{option}: {word!r} is not a positive whole number")
        if value > 2**53:  # larger floats are not exact
            raise UsageError(f"{option}: {word!r} is too large")
        counts.append(int(value))
    if not counts:
        raise UsageError(f"{option} must name at least one number, got {text!r}")
    return counts


def under_torchrun() -> bool:
    """Return whether torchrun started this process."""
    # RANK and WORLD_SIZE prove nothing: other launchers set them, and shells keep them.
    return "TORCHELASTIC_RUN_ID" in os.environ


def torchrun_rank() -> int:
    """Return the rank that torchrun gave this process; 0 without torchrun."""
    return int(os.environ["RANK"]) if under_torchrun() else 0


def print_json(result: dict[str, Any]) -> None:
    """Print a result as one JSON object on stdout."""
    json.dump(result, sys.stdout)
    print()
