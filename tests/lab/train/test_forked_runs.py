"""Stacks of small runs that are divided among processes."""

import os

import pytest

from gradherd.comm.world import World
from gradherd.lab.tasks.registry import find_task
from gradherd.lab.train import forked_runs, runner
from gradherd.lab.train.config import count_steps, plan_runs
from gradherd.lab.train.loop import Progress
from gradherd.lab.train.record import RECORD_FILE, read_record
from gradherd.lab.train.runner import run_all

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")


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
    monkeypatch.setattr(forked_runs, "_MIN_STEPS", 0)
    monkeypatch.setattr(runner, "usable_cores", lambda: 2)
    parts, run_forked = [], forked_runs.run_forked
    monkeypatch.setattr(
        runner,
        "run_forked",
        lambda train, p, progress: parts.extend(p) or run_forked(train, p, progress),
    )
    seen = _Seen()
    found = run_all(configs, World.single(), out=tmp_path, progress=seen)
    assert sorted(at for part in parts for at in part) == [0, 1, 2, 3] and len(parts) == 2
    for one, other, config in zip(expected, found, configs, strict=True):
        assert (other.order, other.seed, other.status) == (one.order, one.seed, "done")
        for a, b in zip(one.epochs, other.epochs, strict=True):
            assert a.train_loss == pytest.approx(b.train_loss, rel=1e-3) and a.bytes == b.bytes
        assert read_record(tmp_path / config.folder() / RECORD_FILE) == other
    assert seen.epochs == 8
    assert seen.steps == sum(count_steps(config, 64) for config in configs)


def test_few_steps_and_large_models_stay_in_one_process():
    configs = _plan()
    assert forked_runs.divide([0, 1, 2, 3], configs, 650, 100, 2) == [[0, 1, 2, 3]]
    assert forked_runs.divide([0, 1, 2, 3], configs, 10**6, 10**9, 2) == [[0, 1, 2, 3]]
    assert forked_runs.divide([0, 1, 2, 3], configs, 650, 10**9, 2) == [[0, 2], [1, 3]]
    assert forked_runs.divide([3], configs, 650, 10**9, 2) == [[3]]


def _fail(part, progress):
    if 1 in part:
        raise ValueError("lr is odd")
    progress.step(1)
    os.kill(os.getpid(), 9) if 2 in part else None
    return [None for _ in part]


def test_an_error_of_a_process_is_raised_here():
    with pytest.raises(ValueError, match="lr is odd"):
        forked_runs.run_forked(_fail, [[0], [1]], Progress())
    with pytest.raises(RuntimeError, match="ended from outside"):
        forked_runs.run_forked(_fail, [[0], [2]], Progress())


@pytest.mark.parametrize(("limit", "cores"), [("1", 1), ("", None), ("0", None), ("many", None)])
def test_a_limit_of_threads_limits_processes(monkeypatch, limit, cores):
    monkeypatch.setenv("OMP_NUM_THREADS", limit)
    assert forked_runs.usable_cores() == (cores or len(os.sched_getaffinity(0)))
