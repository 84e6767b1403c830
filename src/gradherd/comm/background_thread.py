"""A thread beside the training loop, for work that a step need not wait for."""

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from queue import Empty, SimpleQueue

# What forks and the end of the process wait for one job, all together: a job takes milliseconds,
# but one whose peer has died may never end.
_PATIENCE = 5.0


class BackgroundThread:
    """Runs jobs beside the training loop, in order and one at a time.

    Orders are needed at the end of an epoch only, so a step does not wait for its own signs, but
    `submit` does for those of the batch before. Errors of a job are raised by the next `wait`,
    which everything that reads orders calls first. The thread ends with `close`, with this object,
    or before the interpreter does.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: _Thread | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` after the one before it, and wait for that one first."""
        # At most one job is behind the training loop: each reads memory that the next fills.
        self.wait()
        if self._thread is None:
            _watch_process()
            thread = _Thread(self._name)
            thread.start()
            self._thread = thread
            weakref.finalize(self, thread.jobs.put, None).atexit = False
        self._thread.put(_Job(job))

    def wait(self, *, raises: bool = True) -> None:
        """Return when all jobs are done.

        If the last one has failed, raise its error, or leave that to the next call unless `raises`.
        """
        if self._thread is None:
            return
        job = self._thread.last
        while not job.done:
            job.wait(1.0)
        if raises and job.error is not None:
            error, job.error = job.error, None
            raise error

    def close(self) -> None:
        """End the thread once its job is done."""
        if self._thread is not None:
            self._thread.end()
            self._thread = None


class _Job:
    """A call, and whether it has ended.

    Ctrl-C raises between any two lines of the main thread, also between those of `Event.wait`, and
    would leave the lock of an event or a semaphore taken. `SimpleQueue` is C, so it is either done
    with a call or has not begun it. A wake-up that gets lost costs the `wait` a second.
    """

    def __init__(self, call: Callable[[], None] | None = None) -> None:
        self._call = call
        self._ended: SimpleQueue[None] = SimpleQueue()
        self.done, self.error = call is None, None
        self.patience = _PATIENCE

    done: bool
    error: BaseException | None

    def run(self) -> None:
        call, self._call = self._call, None  # It holds tensors: they are free once it is done.
        assert call is not None, "this job has run"
        try:
            call()
        except BaseException as error:  # or the thread would end, and `wait` never return
            self.error = error
        del call
        self.done = True
        self._ended.put(None)

    def wait(self, seconds: float) -> None:
        """Return when the job has ended, or after some seconds."""
        with suppress(Empty):
            self._ended.get(timeout=seconds)


class _Thread(threading.Thread):
    """Runs jobs in turn until it gets None; does not know its `BackgroundThread`, which can go."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self.last = _Job()

    def put(self, job: _Job) -> None:
        # In this order: a job that is waited for has been put in.
        self.jobs.put(job)
        self.last = job

    def run(self) -> None:
        _threads.add(self)
        while (job := self.jobs.get()) is not None:
            job.run()
        _threads.discard(self)

    def wait_idle(self) -> None:
        """Return when no job runs, or when this job was waited for too long."""
        job = self.last
        if threading.current_thread() is not self and not job.done:
            begun = time.monotonic()
            job.wait(job.patience)
            job.patience = max(0.0, job.patience - (time.monotonic() - begun))

    def end(self, seconds: float | None = None) -> None:
        """End the thread once its jobs are done; wait so many seconds for it."""
        self.jobs.put(None)
        self.join(seconds)


_threads: set[_Thread] = set()


def in_background() -> bool:
    """Say whether the caller is a job of a `BackgroundThread`."""
    return isinstance(threading.current_thread(), _Thread)


@cache
def _watch_process() -> None:
    """Have forks and the end of this process wait for jobs; called when the first thread starts."""
    # A loader forks its workers before it asks the sampler for anything. A lock inside torch that a
    # job holds at that moment would stay locked in the worker for ever.
    if hasattr(os, "register_at_fork"):
        # A child has none of the threads.
        os.register_at_fork(before=_wait_for_all, after_in_child=_threads.clear)
    # The interpreter kills threads that come back to it from C++ (a collective, say) while it shuts
    # down, and C++ answers with "terminate called without an active exception".
    atexit.register(_end_all)


def _wait_for_all() -> None:
    for thread in list(_threads):
        thread.wait_idle()


def _end_all() -> None:
    _wait_for_all()
    for thread in list(_threads):
        if thread.last.done:
            thread.end(_PATIENCE)
