"""When a run saves itself: by steps, by the clock, and before it ends."""

import os
import signal

import pytest

from gradherd.comm.world import World
from gradherd.lab.train import checkpoint as module
from gradherd.lab.train.checkpoint import Checkpointer, RunStopped


class Noted:
    """Checkpoints that only note their steps."""

    def __init__(self):
        self.steps = []

    def save(self, step, shared, own):
        assert own == "own"
        self.steps.append(step)


def state():
    return (lambda: "shared"), "own"


@pytest.fixture
def at(monkeypatch):
    """Set the time by hand; the clock on the wall may show anything."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(module.time, "time", lambda: pytest.fail("the clock on the wall can jump"))
    return lambda value: now.__setitem__(0, 100.0 + value)


def steps(checkpointer, count):
    for _ in range(count):
        checkpointer.after_step(state)


def test_every_third_step(at):
    noted = Noted()
    checkpointer = Checkpointer(noted, World.single(), every=3)
    steps(checkpointer, 10)
    at(10_000.0)  # Time does not matter then.
    steps(checkpointer, 1)
    assert noted.steps == [3, 6, 9]
    checkpointer.start_at(20)
    steps(checkpointer, 2)
    assert noted.steps == [3, 6, 9, 21]


def test_once_a_minute(at):
    noted = Noted()
    checkpointer = Checkpointer(noted, World.single(), every=None, seconds=60.0)
    for second in range(200):
        at(float(second))
        steps(checkpointer, 1)
    assert len(noted.steps) == 3
    gaps = [b - a for a, b in zip([0, *noted.steps], noted.steps, strict=False)]
    assert all(60 <= gap <= 63 for gap in gaps), "looked at about once a second"


def test_saves_that_take_long_come_seldom(at):
    now = [0]

    class Slow(Noted):
        def save(self, step, shared, own):
            super().save(step, shared, own)
            now[0] += 5
            at(float(now[0]))

    noted = Slow()
    checkpointer = Checkpointer(noted, World.single(), every=None, seconds=60.0)
    while now[0] < 1000:
        now[0] += 1
        at(float(now[0]))
        steps(checkpointer, 1)
    assert len(noted.steps) == 4, "after a minute, then every 250 s: 2 %"


def test_a_wish_to_end_saves_first(at):
    noted = Noted()
    checkpointer = Checkpointer(noted, World.single(), every=None, poll_seconds=0.0)
    before = signal.getsignal(signal.SIGTERM)
    with checkpointer.handle_sigterm():
        steps(checkpointer, 5)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(RunStopped, match="after"):
            steps(checkpointer, 10)
    assert len(noted.steps) == 1 and noted.steps[0] > 5
    assert signal.getsignal(signal.SIGTERM) is before


def test_quick_steps_at_first_do_not_make_it_deaf(at):
    noted = Noted()
    checkpointer = Checkpointer(noted, World.single(), every=None, seconds=60.0)
    steps(checkpointer, 8)  # no time at all
    for second in range(70):
        at(float(second))
        steps(checkpointer, 1)
    assert len(noted.steps) == 1
