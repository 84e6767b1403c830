"""Virtual runs that are divided among processes."""

import dataclasses
import os
import signal
import sys
from dataclasses import replace

import pytest

from gradherd.comm.world import World
from gradherd.lab.tasks.registry import find_task
from gradherd.lab.train import runner
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
    monkeypatch.setattr(runner, "_MIN_WORK", 0)
    monkeypatch.setattr(runner, "usable_cores", lambda: 2)
    parts, start = [], runner.run_in_processes

    def watched(train, configs, processes, progress):
        parts.extend(configs)
        return start(train, configs, processes, progress)

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


def test_runs_that_are_trained_alone_go_to_processes_too(monkeypatch):
    configs = [replace(one, task="digits-mlp", limit=32) for one in _plan()]
    expected = run_all(configs, World.single())
    monkeypatch.setattr(runner, "_MIN_WORK", 0)
    monkeypatch.setattr(runner, "usable_cores", lambda: 2)
    for one, other in zip(expected, run_all(configs, World.single()), strict=True):
        assert (other.order, other.seed, other.status) == (one.order, one.seed, "done")
        for a, b in zip(one.epochs, other.epochs, strict=True):
            # Libraries add up products in an order that depends on addresses.
            assert a.train_loss == pytest.approx(b.train_loss, rel=1e-6) and a.bytes == b.bytes


def test_few_steps_and_large_models_stay_in_one_process():
    configs, pays = _plan(), runner.pays_in_processes
    assert not pays(configs, 650, 100)
    assert not pays(configs, 10**7, 10**9)
    assert pays(configs, 650, 10**9)
    assert pays(configs, 300_000, 2_000)
    assert not pays(configs[:1], 650, 10**9)
    assert not pays([replace(one, virtual=False) for one in configs], 650, 10**9)


def test_what_only_this_process_knows_stays_here(monkeypatch):
    class Mine(type(make_policy("d-rr"))):
        pass

    monkeypatch.setitem(POLICIES, "mine", lambda: make_policy("cd-grab"))
    configs = _plan()
    known = [replace(configs[0], order="mine"), configs[1]]
    assert runner.pays_in_processes(known, 650, 10**9)
    monkeypatch.setitem(POLICIES, "mine", lambda: Mine(*dataclasses.astuple(make_policy("d-rr"))))
    assert not runner.pays_in_processes(known, 650, 10**9)


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
        ("killed", RuntimeError, "batches are not done; fewer than 2 processes"),
    ]:
        with pytest.raises(error, match=text):
            runner.run_in_processes(fail, ["fine", part], 2, Progress())


@pytest.mark.parametrize(("limit", "cores"), [("1", 1), ("", None), ("0", None), ("many", None)])
def test_a_limit_of_threads_limits_processes(monkeypatch, limit, cores):
    monkeypatch.setenv("OMP_NUM_THREADS", limit)
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    assert runner.usable_cores() == (cores or len(os.sched_getaffinity(0)))


def test_a_script_of_a_user_is_not_started_again(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "/home/me/train.py", raising=False)
    assert runner.usable_cores() == 1
