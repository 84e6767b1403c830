"""A thread beside the training loop, for work that a step need not wait for."""

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import cache

# What forks and the end of the process wait for one job, all together: a job takes milliseconds,
# but one whose peer has died may never end.
_PATIENCE = 5.0


class BackgroundThread:
    """Runs jobs beside the training loop, in order and one at a time.

    Orders are needed at the end of an epoch only, so training does not wait for signs. Errors of a
    job are raised by the next `wait`, which everything that reads orders calls first. The thread
    ends with `close`, with this object, or before the interpreter does.
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
            self._thread = _Thread(self._name)
            self._thread.start()
            weakref.finalize(self, self._thread.wake.release).atexit = False
        self._thread.put(job)

    def wait(self) -> None:
        """Return when all jobs are done; raise the error of the last one, if it failed."""
        if self._thread is None:
            return
        self._thread.idle.wait()
        error, self._thread.error = self._thread.error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """End the thread once its job is done."""
        if self._thread is not None:
            self._thread.idle.wait()
            self._thread.end()
            self._thread = None


class _Thread(threading.Thread):
    """Runs the job that was put in; does not know the `BackgroundThread`, which can go before."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._job: Callable[[], None] | None = None
        self._patience = _PATIENCE
        self.error: BaseException | None = None
        # A semaphore and an event, not a queue: there is at most one job.
        self.wake, self.idle = threading.Semaphore(0), threading.Event()
        self.idle.set()
        _threads.add(self)

    def put(self, job: Callable[[], None]) -> None:
        self._job, self._patience = job, _PATIENCE
        self.idle.clear()
        self.wake.release()

    def run(self) -> None:
        """Run jobs until the thread is woken without one."""
        while True:
            self.wake.acquire()
            job, self._job = self._job, None
            if job is None:
                break
            try:
                job()
            except BaseException as error:  # or the thread would end, and `wait` never return
                self.error = error
            del job  # A job holds tensors: they are free as soon as it is done.
            self.idle.set()
        _threads.discard(self)

    def wait_idle(self) -> None:
        """Return when no job runs, or when this job was waited for too long."""
        if threading.current_thread() is not self:
            begun = time.monotonic()
            self.idle.wait(self._patience)
            self._patience = max(0.0, self._patience - (time.monotonic() - begun))

    def end(self) -> None:
        """End the thread, which has no job."""
        self.wake.release()
        self.join()


_threads: set[_Thread] = set()


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
        if thread.idle.is_set():
            thread.end()
