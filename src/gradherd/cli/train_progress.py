"""The bar over a training: which run, how far, what loss, how long still."""

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from gradherd.lab.train.config import RunConfig
from gradherd.lab.train.loop import Progress as Told


class Bar(Told):
    """Draws on stderr if that is a terminal, else says nothing."""

    def __init__(self, *, quiet: bool = False) -> None:
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=quiet or not console.is_terminal,
        )
        self._runs = self._done = 0

    def __enter__(self) -> "Bar":
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def begin(self, runs: int, steps: int) -> None:
        """Draw an empty bar."""
        self._runs = runs
        self._task = self._bar.add_task("", total=steps, loss="")

    def group(self, configs: Sequence[RunConfig]) -> None:
        """Name what goes on."""
        first = self._done + 1
        self._done += len(configs)
        span = f"{first}" if len(configs) == 1 else f"{first}-{self._done}"
        what = escape(_name(configs[0])) if len(configs) == 1 else "side by side"
        self._bar.update(self._task, description=f"run {span} of {self._runs}: {what}")

    def step(self, steps: int = 1) -> None:
        """Move on."""
        self._bar.advance(self._task, steps)

    def epoch(self, number: int, losses: list[float | None]) -> None:
        """Show the loss after an epoch: that of the last run."""
        loss = "not finite" if losses[-1] is None else f"{losses[-1]:.4g}"
        self._bar.update(self._task, loss=f"epoch {number}, loss {loss}")


def _name(config: RunConfig) -> str:
    sent = "" if config.density is None else f" + {config.sparsify} {config.density:g}"
    return f"{config.order}{sent}, seed {config.seed}"
