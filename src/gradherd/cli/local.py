"""Run a measurement on local ranks."""

from collections.abc import Callable
from typing import Any

from gradherd.comm.ranks import run_ranks

# A deadline against hangs only: large sizes on few cores take their time.
_DEADLINE = 1800.0


def on_ranks(fn: Callable[..., Any], workers: int, *args: Any) -> Any:
    """Return what `fn(*args)` gives on rank 0 of `workers` local gloo processes."""
    return run_ranks(fn, workers, *args, timeout=_DEADLINE)[0]
