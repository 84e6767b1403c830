import dataclasses
import multiprocessing
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradherd.lab.ranks import ProcessDied
from gradherd.lab.study import run
from gradherd.lab.study.kinds import PlannedRun, RunContext
from gradherd.lab.study.results import RunResult, read_arms
from gradherd.lab.study.run import run_parallel, split_batches, store_results

WHERE = RunContext(folder=Path())


def piece(number, arm="a"):
    return PlannedRun(arm=arm, seed=number, settings={})


def result(one):
    return RunResult(
        arm=one.arm,
        seed=one.seed,
        settings={},
        status="done",
        about={},
        figures={},
        versions={},
        hardware={"process": os.getpid()},
        started="",
    )


def works(part, context):
    return [result(one) for one in part]


def fails_at_one(part, context):
    if any(one.seed == 1 for one in part):
        raise KeyError("one")
    return works(part, context)


def dies(part, context):
    os._exit(9)


class Odd(Exception):
    """Can be sent to another process, but not be built there: it takes two arguments."""

    def __init__(self, first, second):
        super().__init__(f"{first}, {second}")


def fails_oddly(part, context):
    raise Odd("bad labels", "in row 7")


@given(st.lists(st.integers(1, 12), max_size=8), st.integers(1, 9))
def test_every_run_is_in_one_part_and_no_process_idles_for_want_of_cutting(sizes, jobs):
    batches = [[piece(n, str(at)) for n in range(size)] for at, size in enumerate(sizes)]
    parts = split_batches(batches, jobs)
    flat = [one for part in parts for one in part]
    assert sorted((p.arm, p.seed) for p in flat) == [(p.arm, p.seed) for b in batches for p in b]
    assert all(len({one.arm for one in part}) == 1 for part in parts)
    assert len(parts) >= min(jobs, len(sizes))
    if len(sizes) == 1:
        assert max(map(len, parts)) <= -(-sizes[0] // jobs)
    if jobs == 1:
        assert parts == batches


def test_batches_are_made_in_other_processes_and_one_that_fails_stops_no_other():
    found = []
    with pytest.raises(KeyError, match="one"):
        batches = [[piece(0), piece(4)], [piece(1)], [piece(2)], [piece(3)]]
        for part in run_parallel(fails_at_one, batches, WHERE, 2):
            found += part
    assert sorted(one.seed for one in found) == [0, 2, 3, 4]
    assert os.getpid() not in {one.hardware["process"] for one in found}
    assert list(run_parallel(fails_at_one, [], WHERE, 2)) == []


def test_a_process_that_dies_is_told_of():
    with pytest.raises(ProcessDied, match="2 of 2 batches are not done; fewer than 1 processes"):
        list(run_parallel(dies, [[piece(0)], [piece(1)]], WHERE, 1))


def test_an_error_that_cannot_be_sent_is_told_in_its_words():
    with pytest.raises(RuntimeError, match="Odd: bad labels, in row 7") as told:
        list(run_parallel(fails_oddly, [[piece(0)]], WHERE, 1))
    assert not isinstance(told.value, ProcessDied)  # No process was killed.


def test_what_else_the_caller_has_started_goes_on(tmp_path, monkeypatch):
    """A batch that is given up ends its own processes alone, and at once."""
    monkeypatch.setenv("TOLD", str(tmp_path))
    other = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    other.start()
    try:
        batches = run_parallel(works_or_sleeps, [[piece(0)], [piece(1)]], WHERE, 2)
        next(batches)
        (number,) = waited_for(lambda: [int(p.name) for p in tmp_path.glob("[0-9]*")], 1)
        batches.close()  # as on Ctrl-C
        waited_for(lambda: [n for n in [number] if not Path(f"/proc/{n}/stat").exists()], 1)
        other.join(0.5)
        assert other.is_alive()
    finally:
        other.kill()
        other.join()


def works_or_sleeps(part, context):
    return works(part, context) if part[0].seed == 0 else sleeps(part, context)


def test_processes_end_with_the_one_that_started_them(tmp_path):
    """Also if that one was killed and could not tell them."""
    script = tmp_path / "start.py"
    script.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_run import WHERE, piece, run_parallel, sleeps\n"
        "if __name__ == '__main__':\n"
        "    list(run_parallel(sleeps, [[piece(0)], [piece(1)]], WHERE, 2))\n"
    )
    environment = {**os.environ, "TOLD": str(tmp_path)}
    with subprocess.Popen([sys.executable, script], env=environment, cwd=tmp_path) as parent:
        numbers = waited_for(lambda: [int(p.name) for p in tmp_path.glob("[0-9]*")], 2)
        parent.kill()
    waited_for(lambda: [n for n in numbers if not Path(f"/proc/{n}/stat").exists()], 2)


def sleeps(part, context):
    (Path(os.environ["TOLD"]) / str(os.getpid())).touch()
    time.sleep(600)


def waited_for(look, count):
    """Return what is seen once there are so many; against hangs the test has its own limit."""
    while len(seen := look()) < count:
        time.sleep(0.05)
    return seen


def test_seeds_that_are_stored_at_once_are_all_kept(tmp_path, monkeypatch):
    def read_slowly(*args):
        found = read_arms(*args)
        time.sleep(0.02)  # Others would write meanwhile, if they could.
        return found

    monkeypatch.setattr(run, "read_arms", read_slowly)
    study = SimpleNamespace(name="study", kind="compare")
    # A lock belongs to an opened folder, so threads wait for each other as processes do.
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: store_results(study, tmp_path, [result(piece(n))]), range(4)))
    assert [one.seed for one in read_arms(tmp_path, ["a"])["a"]] == [0, 1, 2, 3]
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]  # and no lock file


def test_results_of_other_seeds_stay(tmp_path):
    study = SimpleNamespace(name="study", kind="compare")

    def store(seed, status):
        store_results(study, tmp_path, [dataclasses.replace(result(piece(seed)), status=status)])
        return [(each.seed, each.status) for each in read_arms(tmp_path, ["a"])["a"]]

    assert store(0, "stopped") == [(0, "stopped")]
    assert store(1, "done") == [(0, "stopped"), (1, "done")]
    assert store(0, "done") == [(0, "done"), (1, "done")]
