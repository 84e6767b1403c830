"""When a run saves itself: every N steps or seconds, and before SIGTERM ends it.

All ranks must save at the same step. If steps decide, every rank counts the same. For clocks and
signals the ranks exchange a few integers about once a second, at a step that all of them know.
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
"""If the clock decides, at least this many times the last save's duration passes between saves."""
# Bounds how late SIGTERM is noticed if steps become slow after a time of fast ones.
_MAX_STEPS_AHEAD = 1000


class RunStopped(Exception):
    """The run received SIGTERM and has saved itself, or its time was over."""


class Checkpointer:
    """Saves a run on schedule."""

    def __init__(
        self,
        store: CheckpointStore,
        world: World,
        *,
        every: int | None,
        seconds: float = 60.0,
        poll_seconds: float = 1.0,
        device: str = "cpu",
    ) -> None:
        """Set the schedule.

        Args:
            store: Where checkpoints are written.
            world: The participating ranks.
            every: Steps between checkpoints; None goes by the clock.
            seconds: Seconds between checkpoints if the clock decides.
            poll_seconds: Approximate seconds between exchanges of clocks and signals.
            device: Device of the process group's tensors.
        """
        self._store, self._world = store, world
        self._every, self._seconds, self._poll_seconds = every, seconds, poll_seconds
        self._device = torch.device(device)
        self._stop_requested = False
        self.step = self._next_poll = 0
        """Steps that are done."""
        self.stopwatch = Stopwatch()
        """Time that saving has cost the training."""
        # Monotonic: the wall clock can jump.
        self._saved_at = self._polled_at = time.monotonic()
        self._polled_step = 0
        self._save_seconds = 0.0  # duration of the last save

    @contextmanager
    def handle_sigterm(self) -> Iterator[None]:
        """Take SIGTERM as a request to save and stop."""

        def request_stop(number: int, frame: FrameType | None) -> None:
            # Only a flag: the handler may run in the middle of a step, or of writing a checkpoint.
            self._stop_requested = True

        before = signal.signal(signal.SIGTERM, request_stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def start_at(self, step: int) -> None:
        """Start counting after `step` steps."""
        self.step = self._next_poll = self._polled_step = step
        self._saved_at = self._polled_at = time.monotonic()

    def after_step(self, state: Callable[[], tuple[Callable[[], Any], Any]]) -> None:
        """Count a step and save if it is time.

        Args:
            state: Returns the arguments of `CheckpointStore.save` after the step.

        Raises:
            RunStopped: A rank received SIGTERM; the run is saved.
        """
        self.step += 1
        due = self._every is not None and self.step % self._every == 0
        stop = False
        # All ranks compare the same two numbers, so they enter the collective together.
        if self.step > self._next_poll:
            stop, late = self._poll()
            due = due or stop or (late and self._every is None)
        if due:
            begin = time.monotonic()
            # Counted on its own, so that saving does not pass for compute.
            with self.stopwatch:
                self._store.save(self.step, *state())
            # Counted from the end: a save that takes a minute must not be due again at once.
            self._saved_at = time.monotonic()
            self._save_seconds = self._saved_at - begin
        if stop:
            raise RunStopped(f"stopped after {self.step} steps")

    def _poll(self) -> tuple[bool, bool]:
        """Ask all ranks whether one of them should stop, and rank 0 whether a save is due."""
        now = time.monotonic()
        steps = max(1, self.step - self._polled_step)
        step_seconds = (now - self._polled_at) / steps
        # A few fast steps say little about later ones: look ahead at most twice as far.
        ahead = round(self._poll_seconds / max(step_seconds, 1e-6))
        ahead = max(1, min(_MAX_STEPS_AHEAD, 2 * steps, ahead))
        late = now - self._saved_at >= max(self._seconds, _COST_RATIO * self._save_seconds)
        own = torch.tensor([int(self._stop_requested), int(late), ahead], device=self._device)
        all_ranks = all_gather(own, self._world).value.tolist()
        self._polled_at, self._polled_step = time.monotonic(), self.step
        # Rank 0's clock decides for all: other clocks would pick other steps.
        _, rank0_late, rank0_ahead = all_ranks[0]
        self._next_poll = self.step + rank0_ahead
        # A scheduler may signal only some of the processes.
        return any(stop for stop, _, _ in all_ranks), bool(rank0_late)
