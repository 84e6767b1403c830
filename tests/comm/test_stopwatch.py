"""The stopwatch: seconds inside its blocks, nested or failing."""

import pytest

from gradherd.comm import collectives as module
from gradherd.comm.collectives import Stopwatch


@pytest.fixture
def at(monkeypatch):
    """Set the time by hand."""
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return lambda value: now.__setitem__(0, value)


def test_one_inside_another_counts_once(at):
    stopwatch = Stopwatch()
    with stopwatch:
        at(1.0)
        with stopwatch:
            at(3.0)
        at(4.0)
    at(10.0)
    with stopwatch:
        at(10.5)
    assert stopwatch.seconds == 4.5


def test_what_fails_counts_too(at):
    stopwatch = Stopwatch()
    with pytest.raises(ValueError, match="no"), stopwatch, stopwatch:
        at(2.0)
        raise ValueError("no")
    assert stopwatch.seconds == 2.0
    with stopwatch:
        at(3.0)
    assert stopwatch.seconds == 3.0
