"""Progress of everything that takes long, on stderr: a bar on a terminal, lines elsewhere.

Lines are for logs (CI, nohup, a batch system). They become rarer the longer a command takes, and a
command that takes seconds prints none.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.markup import escape, render
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from gradherd.lab.study.kinds import PlannedRun, StudyProgress
from gradherd.lab.text import in_seconds, printable
from gradherd.lab.train.config import RunConfig

_FIRST_LINE = 10.0
"""Seconds until the first line, and at least between two lines."""
_LINES_PER_TIME = 10
"""After T seconds, lines are T / 10 seconds apart: a night prints less than a hundred."""
_LEAST_WIDTH_OF_BAR = 80
"""Columns of a terminal below which percent and time left take the room of the bar."""
QUIET = "GRADHERD_QUIET"
"""Environment variable that turns progress off, as --quiet does."""


def is_quiet(option: bool) -> bool:
    """Return whether to show no progress: asked by --quiet, or by the environment."""
    return option or bool(os.environ.get(QUIET))


class ProgressBar(StudyProgress):
    """Show which run is being trained, how far it is, its loss, and the time left.

    A training is one bar from the first run to the last. A study starts the bar anew for each batch
    of runs, since batches differ too much to predict one from another.
    """

    def __init__(self, *, study_runs: int | None = None, quiet: bool = False) -> None:
        """Make a bar.

        Args:
            study_runs: Number of runs of a study; None for a training, where `begin` passes it.
            quiet: Show nothing, as all ranks but the first.
        """
        # On stderr: stdout belongs to the result, which may be piped into a program.
        console = Console(stderr=True)
        self._bar = Progress(
            *_columns(console.width),
            console=console,
            # Erased when done, so that a terminal ends with the result alone.
            transient=True,
            # A log file would fill up with control characters.
            disable=quiet or not console.is_terminal,
        )
        # Steps are known only once the data are loaded; until then the bar pulses.
        self._task = self._bar.add_task("", total=None, loss="")
        self._is_study = study_runs is not None
        self._runs, self._started = study_runs or 0, 0
        self._prints_lines = not quiet and not console.is_terminal
        self._begin = self._last_line = time.monotonic()

    def __enter__(self) -> "ProgressBar":
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def begin(self, runs: int, steps: int) -> None:
        """Start a bar of `steps` steps."""
        if not self._is_study:
            self._runs = runs
        # Reset, not updated: the time left is estimated from the steps since then.
        self._bar.reset(self._task, total=steps)

    def begin_loop(self, total: int, unit: str) -> None:
        """Start a bar of `total` iterations."""
        one = unit.removesuffix("s") if total == 1 else unit
        for column in self._bar.columns:
            if isinstance(column, BarColumn):  # with neither run nor loss to name, there is room
                column.bar_width = 40
        self._bar.reset(self._task, total=total, description=f"{total} {one}")

    def group(self, configs: Sequence[RunConfig]) -> None:
        """Name the runs of a training that start now."""
        if not self._is_study:  # a study has named them by their arms
            text = self._next_runs(_run_name(configs[0]), len(configs))
            # The loss shown is the last run's; a new one has none yet.
            self._bar.update(self._task, description=text, loss="")

    def begin_batch(self, batch: Sequence[PlannedRun]) -> None:
        """Name the runs of a study that start now."""
        text = self._next_runs(f"{batch[0].arm}, seed {batch[0].seed}", len(batch))
        self._bar.reset(self._task, total=None, description=text, loss="")

    def begin_parallel(self, runs: int, jobs: int) -> None:
        """Count finished runs instead of steps, for runs in several processes."""
        # Steps happen in other processes, which report only a finished run.
        text = f"{runs} runs, {jobs} at a time"
        self._bar.reset(self._task, total=runs, description=text, loss="")

    def step(self, steps: int = 1) -> None:
        """Advance the bar."""
        self._bar.advance(self._task, steps)
        if self._prints_lines:
            self._print_line()

    def epoch(self, number: int, losses: list[float | None]) -> None:
        """Show the loss after an epoch; of several runs, that of the last one."""
        loss = "not finite" if losses[-1] is None else f"{losses[-1]:.4g}"
        self._bar.update(self._task, loss=f"epoch {number}, loss {loss}")

    def _print_line(self) -> None:
        """Print how far the work is, if the last line is long ago."""
        now = time.monotonic()
        if now - self._last_line < max(_FIRST_LINE, (now - self._begin) / _LINES_PER_TIME):
            return
        self._last_line = now
        (task,) = self._bar.tasks
        left = task.time_remaining
        parts = [
            render(task.description).plain,
            # No total yet: steps are known only once the data are loaded.
            "" if task.total is None else f"{task.percentage:.0f} %",
            task.fields["loss"],
            "" if left is None else f"{in_seconds(left)} left",
        ]
        print(f"gradherd: {printable(', '.join(filter(None, parts)))}", file=sys.stderr, flush=True)

    def _next_runs(self, first: str, count: int) -> str:
        """Describe the next `count` runs, e.g. "run 3 of 6: cd-grab, seed 0"."""
        number, self._started = self._started + 1, self._started + count
        if self._runs == 1:  # nothing to count, and a narrow terminal needs the room
            return escape(first)
        span = f"{number}" if count == 1 else f"{number}-{self._started}"
        return f"run {span} of {self._runs}: {escape(first) if count == 1 else 'side by side'}"


def _columns(width: int) -> list[ProgressColumn]:
    """Return the parts of a bar for a terminal of this width, which never cut a number."""
    # Only the text may be broken, into lines; rich would cut the other parts with an ellipsis.
    text = TextColumn("{task.description}  {task.fields[loss]}", table_column=Column())
    percent = TaskProgressColumn()
    left = [TimeRemainingColumn(table_column=Column(no_wrap=True)), TextColumn("left")]
    if width < _LEAST_WIDTH_OF_BAR:
        return [text, percent, *left]
    bar = BarColumn(min(40, width - 70), table_column=Column(no_wrap=True))
    # At 80 columns, run and loss fit one line without the time that has passed.
    if width < 100:
        return [text, bar, percent, *left]
    elapsed = [TextColumn("after"), TimeElapsedColumn(table_column=Column(no_wrap=True))]
    return [text, bar, percent, *elapsed, TextColumn("·"), *left]


@contextlib.contextmanager
def counted_loop(total: int, unit: str) -> Iterator[Callable[[], None]]:
    """Show a bar for a loop; call the function that this yields after each iteration.

    Args:
        total: Number of iterations.
        unit: What an iteration is, in the plural, e.g. "rounds".
    """
    with ProgressBar(quiet=is_quiet(False)) as bar:
        bar.begin_loop(total, unit)
        yield bar.step


def _run_name(config: RunConfig) -> str:
    sparse = "" if config.density is None else f" + {config.exchange} {config.density:g}"
    return f"{config.order}{sparse}, seed {config.seed}"
