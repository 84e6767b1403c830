"""Stacks of small runs that are divided among processes."""

import dataclasses
import os
import signal
import sys
from dataclasses import replace

import pytest

from gradherd.comm.world import World
from gradherd.lab.tasks.registry import find_task
from gradherd.lab.train import process_runs, runner
from gradherd.lab.train.config import count_steps, plan_runs
from gradherd.lab.train.loop import Progress
from gradherd.lab.train.record import RECORD_FILE, read_record
from gradherd.lab.train.runner import run_all
from gradherd.ordering.registry import POLICIES, make_policy

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are for Linux")


class _Seen(Progress):
    def __init__(self):
        self.steps, self.epochs = 0, 0

    def step(self, steps=1):
        self.steps += steps

    def epoch(self, number, losses):
        self.epochs += len(losses)


def _plan():
    return plan_runs(
        "digits",
        find_task("digits").defaults,
        orders=["d-rr", "cd-grab"],
        sparsifiers=["dense"],
        density=0.1,
        seeds=[0, 1],
        epochs=2,
        limit=64,
        virtual=True,
    )


def test_runs_in_two_processes_are_those_of_one(tmp_path, monkeypatch):
    configs = _plan()
    expected = run_all(configs, World.single())
    monkeypatch.setattr(process_runs, "_MIN_STEPS", 0)
    monkeypatch.setattr(runner, "usable_cores", lambda: 2)
    parts, start = [], process_runs.run_in_processes

    def watched(train, configs, progress):
        parts.extend(configs)
        return start(train, configs, progress)

    monkeypatch.setattr(runner, "run_in_processes", watched)
    seen = _Seen()
    found = run_all(configs, World.single(), out=tmp_path, progress=seen)
    assert len(parts) == 4  # two stacks, since the orders need rows of other sizes
    assert sorted(configs.index(one) for part in parts for one in part) == [0, 1, 2, 3]
    for one, other, config in zip(expected, found, configs, strict=True):
        assert (other.order, other.seed, other.status) == (one.order, one.seed, "done")
        for a, b in zip(one.epochs, other.epochs, strict=True):
            assert a.train_loss == pytest.approx(b.train_loss, rel=1e-3) and a.bytes == b.bytes
        assert read_record(tmp_path / config.folder() / RECORD_FILE) == other
    assert seen.epochs == 8
    assert seen.steps == sum(count_steps(config, 64) for config in configs)


def test_few_steps_and_large_models_stay_in_one_process():
    configs = _plan()
    assert process_runs.divide([0, 1, 2, 3], configs, 650, 100, 2) == [[0, 1, 2, 3]]
    assert process_runs.divide([0, 1, 2, 3], configs, 10**6, 10**9, 2) == [[0, 1, 2, 3]]
    assert process_runs.divide([0, 1, 2, 3], configs, 650, 10**9, 2) == [[0, 2], [1, 3]]
    assert process_runs.divide([3], configs, 650, 10**9, 2) == [[3]]


def test_what_only_this_process_knows_stays_here(monkeypatch):
    class Mine(type(make_policy("d-rr"))):
        pass

    monkeypatch.setitem(POLICIES, "mine", lambda: make_policy("cd-grab"))
    configs = _plan()
    known = [replace(configs[0], order="mine"), configs[1]]
    assert len(process_runs.divide([0, 1], known, 650, 10**9, 2)) == 2
    monkeypatch.setitem(POLICIES, "mine", lambda: Mine(*dataclasses.astuple(make_policy("d-rr"))))
    assert process_runs.divide([0, 1], known, 650, 10**9, 2) == [[0, 1]]


def fail(part, progress):
    """Train nothing, and fail in some way."""
    if part == "error":
        raise ValueError("lr is odd")
    if part == "unpicklable":
        raise _Local(lambda: None)
    progress.step(1)
    if part == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    return []


class _Local(Exception):
    pass


def test_an_error_of_a_process_is_raised_here():
    for part, error, text in [
        ("error", ValueError, "lr is odd"),
        ("unpicklable", RuntimeError, "_Local: <function"),
        ("killed", RuntimeError, "ended from outside"),
    ]:
        with pytest.raises(error, match=text):
            process_runs.run_in_processes(fail, ["fine", part], Progress())


@pytest.mark.parametrize(("limit", "cores"), [("1", 1), ("", None), ("0", None), ("many", None)])
def test_a_limit_of_threads_limits_processes(monkeypatch, limit, cores):
    monkeypatch.setenv("OMP_NUM_THREADS", limit)
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    assert process_runs.usable_cores() == (cores or len(os.sched_getaffinity(0)))


def test_a_script_of_a_user_is_not_started_again(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "/home/me/train.py", raising=False)
    assert process_runs.usable_cores() == 1
