"""The progress bar of `gradherd study`."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from gradherd.lab.study.kinds import PlannedRun, StudyProgress


class Bar(StudyProgress):
    """One bar on stderr if that is a terminal: the steps of the batch at hand, and which it is."""

    def __init__(self, runs: int) -> None:
        console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[loss]}"),
            TextColumn("left of it"),
            TimeRemainingColumn(),
        )
        quiet = not console.is_terminal
        self._bar = Progress(*columns, console=console, transient=True, disable=quiet)
        self._task = self._bar.add_task("", total=None, loss="")
        self._runs, self._done = runs, 0

    def __enter__(self) -> "Bar":
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def begin_batch(self, batch: Sequence[PlannedRun]) -> None:
        """Name what goes on."""
        first, self._done = self._done + 1, self._done + len(batch)
        span = f"{first}" if len(batch) == 1 else f"{first}-{self._done}"
        what = f"{batch[0].arm}, seed {batch[0].seed}" if len(batch) == 1 else "together"
        text = f"run {span} of {self._runs}: {escape(what)}"
        self._bar.reset(self._task, total=None, description=text, loss="")

    def begin_parallel(self, runs: int, jobs: int) -> None:
        """Count runs instead of steps."""
        text = f"{runs} runs, {jobs} at a time"
        self._bar.reset(self._task, total=runs, description=text, loss="")

    def begin(self, runs: int, steps: int) -> None:
        """Draw an empty bar."""
        self._bar.reset(self._task, total=steps)

    def step(self, steps: int = 1) -> None:
        """Move on."""
        self._bar.advance(self._task, steps)

    def epoch(self, number: int, losses: list[float | None]) -> None:
        """Show the loss after an epoch: that of the last run."""
        loss = "not finite" if losses[-1] is None else f"{losses[-1]:.4g}"
        self._bar.update(self._task, loss=f"epoch {number}, loss {loss}")
