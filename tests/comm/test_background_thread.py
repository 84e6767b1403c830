import gc
import os
import subprocess
import sys
import threading
import time

import pytest

from gradherd.comm import background_thread
from gradherd.comm.background_thread import BackgroundThread
from tests.comm import ends
from tests.gpu import only_gpu


def fail():
    raise ValueError("no luck")


def test_jobs_run_in_turn_beside_the_caller():
    thread, done = BackgroundThread("test"), []
    for number in range(5):
        thread.submit(lambda number=number: done.append((number, threading.get_ident())))
    thread.wait()
    thread.close()
    assert [number for number, _ in done] == [0, 1, 2, 3, 4]
    assert threading.get_ident() not in {ident for _, ident in done}


def test_submit_does_not_wait_for_its_job():
    thread, release, done = BackgroundThread("test"), threading.Event(), []
    thread.submit(lambda: done.append(release.wait(30)))
    assert not done
    release.set()
    thread.wait()
    thread.close()
    assert done == [True]


def test_an_error_comes_with_the_next_wait_and_only_once():
    thread, done = BackgroundThread("test"), []
    thread.submit(fail)
    with pytest.raises(ValueError, match="no luck"):
        thread.wait()
    thread.wait()
    thread.submit(fail)
    with pytest.raises(ValueError, match="no luck"):
        thread.submit(lambda: done.append(1))
    thread.submit(lambda: done.append(2))
    thread.wait()
    thread.close()
    assert done == [2]


def test_close_waits_for_the_last_job():
    thread, done = BackgroundThread("test"), []
    thread.submit(lambda: done.append(1))
    thread.close()
    assert done == [1]


def test_no_job_runs_while_the_process_forks():
    """As a loader does with its workers, before it asks the sampler for anything."""
    thread, begun, done = BackgroundThread("test"), threading.Event(), threading.Event()

    def job():
        begun.set()
        time.sleep(0.3)
        done.set()

    thread.submit(job)
    begun.wait()
    child = os.fork()
    if child == 0:
        os._exit(0 if done.is_set() else 1)
    _, status = os.waitpid(child, 0)
    thread.close()
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_stuck_job_delays_forks_once_and_not_for_long(monkeypatch):
    """As a job does whose peer has died."""
    monkeypatch.setattr(background_thread, "_PATIENCE", 0.1)
    thread, release, waits = BackgroundThread("test"), threading.Event(), []
    thread.submit(release.wait)
    job = thread._thread.last
    with monkeypatch.context() as patch:
        patch.setattr(job, "wait", lambda seconds: (waits.append(seconds), time.sleep(seconds)))
        for _ in range(3):
            child = os.fork()
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)
    release.set()
    thread.close()
    assert waits == [0.1, 0.0, 0.0]


def test_nothing_is_registered_before_a_thread_starts():
    """Neither at import nor for a thread that never has a job."""
    program = """
import atexit, os
calls = []
os.register_at_fork = lambda **hooks: calls.extend(hooks.values())
atexit.register = lambda hook: calls.append(hook)
from gradherd.comm import background_thread
thread = background_thread.BackgroundThread("test")
print(sum(call.__module__ == background_thread.__name__ for call in calls))
"""
    assert run_program(program).stdout == "0\n"


def test_a_thread_ends_with_its_object():
    thread, ended = BackgroundThread("test-dropped"), threading.Event()
    thread.submit(ended.set)
    thread.wait()
    (running,) = [each for each in threading.enumerate() if each.name == "test-dropped"]
    del thread
    gc.collect()
    running.join(100)
    assert not running.is_alive()


def run_program(text, *arguments):
    command = [sys.executable, "-c", text, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=500)


def test_the_interpreter_ends_after_the_job():
    """A thread that comes back from C++ while the interpreter ends would abort the process."""
    program = """
from datetime import timedelta
from torch.distributed import HashStore
from gradherd.comm.background_thread import BackgroundThread

def job():
    store = HashStore()
    for _ in range(300):
        try:
            store.wait(["never"], timedelta(milliseconds=2))
        except Exception:
            pass
    print("done", flush=True)

BackgroundThread("test").submit(job)
thread = BackgroundThread("kept")
thread.submit(job)
"""
    ended = run_program(program)
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stderr
    assert "done" in ended.stdout


def test_a_stuck_job_does_not_keep_the_process():
    program = """
import threading
from gradherd.comm.background_thread import BackgroundThread
thread = BackgroundThread("test")
thread.submit(threading.Event().wait)
"""
    assert run_program(program).returncode == 0  # within the timeout of `run_program`


def test_a_collective_that_ends_while_the_interpreter_does(tmp_path):
    """A peer that is late by more than the process waits, but not by much."""
    program = """
import sys, time
import torch, torch.distributed as dist
from gradherd.comm import background_thread
from gradherd.comm.collectives import all_gather
from gradherd.comm.world import World

class Slow:
    def __del__(self):  # called while the interpreter shuts down
        time.sleep(3)

background_thread._PATIENCE = 0.1
rank, file = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
world = World.detect()
if rank == 1:
    time.sleep(1)
    all_gather(torch.zeros(3), world)
    time.sleep(3)
else:
    thread = background_thread.BackgroundThread("test")
    thread.submit(lambda: all_gather(torch.zeros(3), world))
    sys.slow = Slow()
"""
    command = [sys.executable, "-c", program]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE)
        for rank in (0, 1)
    ]
    ended = [(rank.communicate(timeout=500)[1], rank.returncode) for rank in ranks]
    assert [code for _, code in ended] == [0, 0], ended


INTERRUPTED = """
import importlib.util, os, sys, threading, time

start, goes, file = sys.argv[1:]
# Without its package, which imports torch: hundreds of processes end faster.
spec = importlib.util.spec_from_file_location("background_thread", file)
background_thread = importlib.util.module_from_spec(spec)
spec.loader.exec_module(background_thread)
BackgroundThread = background_thread.BackgroundThread
done, lines, last = [], 0, 0
# The start of a thread is Python's own, once in a process.
files = [background_thread.__file__] + [threading.__file__] * (start == "later")

def interrupt(frame, event, argument):
    global lines
    if frame.f_code.co_filename not in files:
        return None
    lines += 1
    if lines == last:
        sys.settrace(None)
        raise KeyboardInterrupt
    return interrupt

def ended(child):
    for _ in range(10_000):
        if os.waitpid(child, os.WNOHANG)[0]:
            return True
        time.sleep(0.01)
    os.kill(child, 9)
    return False

# A process each, which ends as a script does.
read, write = os.pipe()
os.set_blocking(read, False)
for last in range(1, 1000):
    if not (child := os.fork()):
        break
    if not ended(child):
        print(f"hangs after line {last}", flush=True)
    try:
        os.read(read, 1)
    except BlockingIOError:
        continue
    print(f"{last} lines")
    sys.exit()

thread = BackgroundThread("test")
if start == "later":
    thread.submit(lambda: done.append("first"))
    thread.wait()
sys.settrace(interrupt)
try:
    thread.submit(lambda: (time.sleep(0.02), done.append("lost or not")))
    thread.wait()
except KeyboardInterrupt:
    pass
else:
    os.write(write, b".")
sys.settrace(None)
if goes == "on":
    thread.submit(lambda: done.append("last"))
    thread.wait()
    assert done[-1] == "last", done
if goes == "closes":
    thread.close()
"""


@pytest.mark.parametrize("goes", ["ends", "on", "closes"])
@pytest.mark.parametrize("start", ["at once", "later"])
def test_an_interrupt_between_any_two_lines_leaves_no_hang(start, goes):
    """Ctrl-C in a notebook, whose next cell goes on, and Ctrl-C in a script."""
    ended = run_program(INTERRUPTED, start, goes, background_thread.__file__)
    assert (ended.returncode, ended.stderr) == (0, "")
    lines, word = ended.stdout.split()
    assert (int(lines) > 10, word) == (True, "lines")


def test_ranks_end_without_detach():
    """README's loop: the signs of the last batch may be under way when the group is destroyed."""
    assert ends.unexpected(3, "--kinds", "order", "--ends", "destroyed,destroyed-detached") == {}


def test_every_loop_ends_as_it_should():
    """Once each what differs most; `python -m tests.comm.ends` runs all of them, many times."""
    kinds, ways = "order,sparse,overlap,sharded", "left,cell-twice,raised-alone,interrupted"
    assert ends.unexpected(1, "--kinds", kinds, "--ends", ways) == {}


@pytest.mark.gpu
@only_gpu
def test_loops_with_an_exchange_beside_them_end_on_a_gpu():
    # Not "destroyed": nccl's own memory is gone while the thread is in it, and the process dies if
    # the exchange was late. `LocalSteps.overlap` says what to call first.
    ways = "detached,left,broken-off,raised"
    options = ("--kinds", "local,overlap", "--ends", ways, "--backend", "nccl")
    assert ends.unexpected(1, *options) == {}
    ways = "destroyed,destroyed-detached"
    assert ends.unexpected(1, "--kinds", "local", "--ends", ways, "--backend", "nccl") == {}
