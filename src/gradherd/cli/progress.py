"""Progress of everything that takes long, as one line on stderr.

On a terminal the line is replaced in place, and erased at the end. Elsewhere it is for logs (CI,
nohup, a batch system): lines become rarer the longer a command takes, and a command that takes
seconds prints none.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from gradherd.cli.terminal import terminal_width
from gradherd.lab.text import in_seconds, printable
from gradherd.lab.train.config import RunConfig
from gradherd.lab.train.loop import Progress

_FIRST_LINE = 10.0
"""Seconds until the first line, and at least between two lines."""
_LINES_PER_TIME = 10
"""After T seconds, lines are T / 10 seconds apart: a night prints less than a hundred."""
_REDRAW = 0.1
"""Seconds between two changes of the line on a terminal."""
_BAR = 20
QUIET = "GRADHERD_QUIET"
"""Environment variable that turns progress off, as --quiet does."""


class ProgressBar(Progress):
    """Show which run is being trained, how far it is, its loss, and the time left.

    A training is one bar from the first run to the last. A study starts the bar anew for each batch
    of runs, since batches differ too much to predict one from another.
    """

    def __init__(self, *, study_runs: int | None = None, quiet: bool = False) -> None:
        """Make a bar.

        Args:
            study_runs: Number of runs of a study; None for a training, where `begin` passes it.
            quiet: Show nothing, as asked by --quiet, or on all ranks but the first.
        """
        self._quiet = quiet or bool(os.environ.get(QUIET))
        self._on_terminal = sys.stderr.isatty()
        self._is_study = study_runs is not None
        self._runs, self._started = study_runs or 0, 0
        self._begin = self._shown = time.monotonic()
        self.start("", None)

    def start(self, name: str, total: int | None) -> None:
        """Start from nothing; without a total there is neither a share nor a time left."""
        self._name, self._total, self._loss = name, total, ""
        self._done, self._since = 0, time.monotonic()
        if self._on_terminal and name:
            self._draw()

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *error: object) -> None:
        if self._on_terminal and not self._quiet:
            # Erased, so that a terminal ends with the result alone.
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def begin(self, runs: int, steps: int) -> None:
        """Start a bar of `steps` steps."""
        if not self._is_study:
            self._runs = runs
        self.start(self._name, steps)

    def group(self, configs: Sequence[RunConfig]) -> None:
        """Name the runs of a training that start now."""
        if not self._is_study:  # a study has named them by their arms
            one = configs[0]
            sparse = "" if one.density is None else f" + {one.exchange} {one.density:g}"
            self._name = self._next_runs(f"{one.order}{sparse}, seed {one.seed}", len(configs))
            self._loss = ""  # that of the runs before

    def begin_arm(self, arm: str, seed: int, runs: int) -> None:
        """Name the runs of a study that start now."""
        self.start(self._next_runs(f"{arm}, seed {seed}", runs), None)

    def step(self, steps: int = 1) -> None:
        """Advance the bar."""
        self._done += steps
        self._show()

    def at(self, name: str, done: int, total: int | None) -> None:
        """Show how much of something is done; start anew for another name."""
        if name != self._name:
            self.start(name, total)
        self.step(done - self._done)

    def epoch(self, number: int, losses: list[float | None]) -> None:
        """Show the loss after an epoch; of several runs, that of the last one."""
        loss = "not finite" if losses[-1] is None else f"{losses[-1]:.4g}"
        self._loss = f"epoch {number}, loss {loss}"

    def _line(self, width: int = 1000) -> str:
        """Return what is done, how much of it, its loss and the time left; no number is cut."""
        parts = [self._loss]
        if self._total and self._done:  # steps are known once the data are loaded
            left = (time.monotonic() - self._since) * (self._total / self._done - 1)
            share = f"{100 * self._done / self._total:.0f} %"
            parts = [share, self._loss, f"{in_seconds(left)} left"]
        rest = "".join(f", {part}" for part in parts if part)
        return printable(self._name, max(1, width - len(rest))) + rest

    def _show(self) -> None:
        """Show the line, unless it was shown a moment ago."""
        now = time.monotonic()
        rare = max(_FIRST_LINE, (now - self._begin) / _LINES_PER_TIME)
        if self._quiet or now - self._shown < (_REDRAW if self._on_terminal else rare):
            return
        self._shown = now
        if self._on_terminal:
            self._draw()
        else:
            print(f"gradherd: {self._line()}", file=sys.stderr, flush=True)

    def _draw(self) -> None:
        """Replace the line on the terminal, with a bar if there is room for it."""
        if self._quiet:
            return
        width = terminal_width(sys.stderr) - 1
        text = self._line(width)
        if self._total and len(text) + _BAR + 1 <= width:
            full = min(_BAR, round(_BAR * self._done / self._total))
            text = f"{'#' * full}{'.' * (_BAR - full)} {text}"
        print(f"\r{text}\x1b[K", end="", file=sys.stderr, flush=True)

    def _next_runs(self, first: str, count: int) -> str:
        """Describe the next `count` runs, e.g. "run 3 of 6: cd-grab, seed 0"."""
        number, self._started = self._started + 1, self._started + count
        if self._runs == 1:  # nothing to count, and a narrow terminal needs the room
            return first
        span = f"{number}" if count == 1 else f"{number}-{self._started}"
        return f"run {span} of {self._runs}: {first if count == 1 else 'side by side'}"


@contextlib.contextmanager
def counted_loop(total: int, unit: str) -> Iterator[Callable[[], None]]:
    """Show a bar for a loop; call the function that this yields after each iteration."""
    with ProgressBar() as bar:
        bar.start(f"{total} {unit.removesuffix('s') if total == 1 else unit}", total)
        yield bar.step
