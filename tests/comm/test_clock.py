"""Seconds of what is inside."""

import pytest

from gradherd.comm import clock as module
from gradherd.comm.clock import Clock


@pytest.fixture
def at(monkeypatch):
    """Set the time by hand."""
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return lambda value: now.__setitem__(0, value)


def test_one_inside_another_counts_once(at):
    clock = Clock()
    with clock:
        at(1.0)
        with clock:
            at(3.0)
        at(4.0)
    at(10.0)
    with clock:
        at(10.5)
    assert clock.seconds == 4.5


def test_what_fails_counts_too(at):
    clock = Clock()
    with pytest.raises(ValueError, match="no"), clock, clock:
        at(2.0)
        raise ValueError("no")
    assert clock.seconds == 2.0
    with clock:
        at(3.0)
    assert clock.seconds == 3.0
