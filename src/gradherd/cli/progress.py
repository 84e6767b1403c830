"""Progress on stderr, for people only: silent where stderr is not a terminal."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextlib.contextmanager
def steps(total: int, what: str = "rounds") -> Iterator[Callable[[], None]]:
    """Show a bar of `total` steps; call what this yields after each one."""
    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)
