"""When a run saves itself: every so many steps or seconds, and before it is ended by SIGTERM.

Ranks must do so at the same step. Where steps decide, all of them count alike. For clocks and
signals they exchange a few numbers about once a second, at a step that all of them know.
"""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from gradherd.comm.collectives import all_gather
from gradherd.comm.stopwatch import Stopwatch
from gradherd.comm.world import World
from gradherd.lab.train.checkpoint import CheckpointStore

_COST_RATIO = 50
"""Where the clock decides, a save comes after so many times what the last one took: 2 % at most."""


class RunStopped(Exception):
    """The run was told to end, and has saved itself."""


class Checkpointer:
    """Saves a run in time."""

    def __init__(
        self,
        checkpoints: CheckpointStore,
        world: World,
        *,
        every: int | None,
        seconds: float = 60.0,
        pulse: float = 1.0,
        device: str = "cpu",
    ) -> None:
        """Keep a run.

        Args:
            checkpoints: Where to.
            world: The ranks that take part.
            every: Steps between checkpoints; None goes by the clock.
            seconds: Seconds between checkpoints where the clock decides.
            pulse: Seconds between exchanges, about.
            device: Where the ranks' group works.
        """
        self._checkpoints, self._world = checkpoints, world
        self._every, self._seconds, self._seconds_ahead = every, seconds, pulse
        self._device = torch.device(device)
        self._told = False
        self.step = self._pulse = 0
        """Steps that were done."""
        self.clock = Stopwatch()
        """What saving has cost the training."""
        self._saved_at = self._felt_at = time.monotonic()
        self._felt_step = 0
        self._cost = 0.0  # seconds of the last save

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take SIGTERM as a wish to end after saving."""

        def tell(number: int, frame: FrameType | None) -> None:
            self._told = True

        before = signal.signal(signal.SIGTERM, tell)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def begin(self, step: int) -> None:
        """Count from here: so many steps were done before."""
        self.step = self._pulse = self._felt_step = step
        self._saved_at = self._felt_at = time.monotonic()

    def after_step(self, state: Callable[[], tuple[Callable[[], Any], Any]]) -> None:
        """Count a step; save if it is time. `state` returns what `Checkpoints.save` takes.

        Raises:
            Stopped: A rank was told to end; the run is saved.
        """
        self.step += 1
        due = self._every is not None and self.step % self._every == 0
        stop = False
        if self.step > self._pulse:
            stop, late = self._feel()
            due = due or stop or (late and self._every is None)
        if due:
            begin = time.monotonic()
            with self.clock:
                self._checkpoints.save(self.step, *state())
            self._saved_at = time.monotonic()
            self._cost = self._saved_at - begin
        if stop:
            raise RunStopped(f"stopped after {self.step} steps")

    def _feel(self) -> tuple[bool, bool]:
        """Ask all ranks whether one was told to end, and rank 0 for its clock."""
        now = time.monotonic()
        steps = max(1, self.step - self._felt_step)
        each = (now - self._felt_at) / steps
        # A few quick steps say little about those to come: look at most twice as far ahead.
        ahead = max(1, min(1000, 2 * steps, round(self._seconds_ahead / max(each, 1e-6))))
        late = now - self._saved_at >= max(self._seconds, _COST_RATIO * self._cost)
        mine = torch.tensor([int(self._told), int(late), ahead], device=self._device)
        table = all_gather(mine, self._world).value.tolist()
        self._felt_at, self._felt_step = time.monotonic(), self.step
        self._pulse = self.step + table[0][2]
        return any(row[0] for row in table), bool(table[0][1])
