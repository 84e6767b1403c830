import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gradherd.lab.ranks import RankError, run_ranks
from tests.comm import rank_functions


@pytest.fixture(scope="module", autouse=True)
def warm():
    run_ranks(rank_functions.nothing, 1)  # Start the server now: the deadlines below are short.


@pytest.mark.parametrize("size", [1, 2, 4])
def test_results_come_in_rank_order(size):
    results = run_ranks(rank_functions.rank_and_args, size, "a", 7)
    assert results == [(rank, size, ("a", 7)) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 3])
def test_ranks_know_their_world(size):
    assert run_ranks(rank_functions.detected, size) == [(rank, size) for rank in range(size)]


@pytest.mark.parametrize("size", [0, -2])
def test_size_must_be_positive(size):
    with pytest.raises(ValueError, match=f"size must be at least 1, got {size}"):
        run_ranks(rank_functions.nothing, size)


@pytest.mark.parametrize("fn", [rank_functions.raise_on, rank_functions.raise_late_on])
def test_the_traceback_is_that_of_the_rank_that_failed_first(fn):
    with pytest.raises(RuntimeError, match=r"^rank 2 failed:\nTraceback") as caught:
        run_ranks(fn, 4, 2)
    assert "ValueError: no luck on 2" in str(caught.value)
    assert "in raise_" in str(caught.value)


def test_a_result_that_cannot_be_pickled_is_an_error():
    with pytest.raises(RuntimeError, match=r"rank 0 failed:[\s\S]*[Pp]ickle"):
        run_ranks(rank_functions.unpicklable, 1)


@pytest.fixture(scope="module")
def stuck(tmp_path_factory, warm):
    folder = tmp_path_factory.mktemp("pids")
    with pytest.raises(TimeoutError) as caught:
        run_ranks(rank_functions.hang_on, 3, 1, str(folder), timeout=10.0)
    return str(caught.value), [int(path.read_text()) for path in folder.glob("*.pid")]


def test_a_stuck_rank_ends_in_a_timeout_that_leaves_no_process(stuck):
    message, pids = stuck
    assert "hang_on on 3 ranks: not done after 10 s" in message
    assert len(pids) == 3
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert multiprocessing.active_children() == []


def test_a_timeout_names_the_stuck_rank_and_no_other(stuck):
    busy = re.search(r"ranks \[(.*)\] are still running", stuck[0])
    assert busy.group(1) == "1"


# Several times: the peers of a dead rank fail a moment later and must not be blamed instead.
def test_a_rank_that_leaves_is_named():
    for _ in range(5):
        with pytest.raises(RuntimeError, match=r"^rank 2 died: exit code 3$"):
            run_ranks(rank_functions.exit_on, 4, 2, 3)


def test_a_rank_that_leaves_without_a_result_is_named():
    with pytest.raises(RuntimeError, match=r"rank 0 .*exit code 0"):
        run_ranks(rank_functions.exit_on, 1, 0, 0)


def test_a_rank_that_is_killed_is_named():
    for _ in range(5):
        with pytest.raises(RuntimeError, match=r"^rank 1 died: SIGKILL$"):
            run_ranks(rank_functions.kill_on, 4, 1)


def test_a_rank_that_dies_of_a_fault_says_where():
    with pytest.raises(RankError, match=r"^rank 1 died: SIGSEGV\nFatal Python error") as caught:
        run_ranks(rank_functions.fault_on, 2, 1)
    assert "in fault_on" in str(caught.value)
    assert caught.value.reason == "rank 1 died: SIGSEGV"


def test_a_rank_that_does_not_answer_is_named(tmp_path):
    with pytest.raises(RankError, match=r"^rank 1 does not answer: rank \d timed out") as caught:
        run_ranks(rank_functions.hang_on, 3, 1, str(tmp_path), collective_timeout=8.0)
    assert "\n" not in caught.value.reason
    assert multiprocessing.active_children() == []


def test_signals_are_forwarded(tmp_path):
    def started(pids):
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGUSR1)  # forwarded from here on, and no end of this process

    received = run_ranks(
        rank_functions.signalled,
        2,
        str(tmp_path),
        forward_signals=[signal.SIGUSR1],
        on_start=started,
    )
    assert received == [True, True]


def test_ranks_end_when_their_caller_fails_at_their_start(tmp_path):
    def started(pids):
        raise ValueError("no luck")

    with pytest.raises(ValueError, match="no luck"):
        run_ranks(rank_functions.hang_on, 2, 0, str(tmp_path), on_start=started)
    assert multiprocessing.active_children() == []


def test_a_failure_leaves_no_process():
    with pytest.raises(RuntimeError):
        run_ranks(rank_functions.raise_on, 3, 0)
    assert multiprocessing.active_children() == []


def hears_ctrl_c(part=None) -> bool:
    return signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_no_process_hears_ctrl_c():
    # In a new process: what starts first, and may unblock signals, has started here already.
    script = (
        "from gradherd.lab.ranks import run_parts, run_ranks\n"
        "from tests.lab.test_ranks import hears_ctrl_c as fn\n"
        "print([*run_ranks(fn, 2), *run_parts(fn, [1], 1, 'spawn'), fn()])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert ran.stdout == "[False, False, (0, False), True]\n", ran.stderr
