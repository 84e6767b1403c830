"""A thread beside the training loop, for work that a step need not wait for."""

import os
import threading
import weakref
from collections.abc import Callable


class BackgroundThread:
    """Runs jobs beside the training loop, in order and one at a time.

    Orders are needed at the end of an epoch only, so training does not wait for signs. Errors of a
    job are raised by the next `wait`, which everything that reads orders calls first. The thread
    is a daemon: a process whose main thread ends does not wait for a peer that has died.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._job: Callable[[], None] | None = None
        self._error: BaseException | None = None
        # A semaphore and an event, not a queue: there is at most one job.
        self._wake, self._idle = threading.Semaphore(0), threading.Event()
        self._idle.set()
        _threads.add(self)

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` after the one before it, and wait for that one first."""
        # At most one job is behind the training loop: `comm.sliced_mean` fills one set of buffers
        # while the job reads the other, and a third batch would overwrite what is being read.
        self.wait()
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
            self._thread.start()
        self._job = job
        self._idle.clear()
        self._wake.release()

    def _loop(self) -> None:
        while True:
            self._wake.acquire()
            job, self._job = self._job, None
            if job is None:
                return
            try:
                job()
            except BaseException as error:  # or the thread would end, and `wait` never return
                self._error = error
            del job  # A job holds tensors: they are free as soon as it is done.
            self._idle.set()

    def wait(self) -> None:
        """Return when all jobs are done; raise the error of the last one, if it failed."""
        self._idle.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def settle(self) -> None:
        """Return when no job runs; an error is left to `wait`."""
        if threading.current_thread() is not self._thread:
            self._idle.wait(_MOST_SECONDS)

    def close(self) -> None:
        """End the thread once its job is done."""
        if self._thread is not None:
            self._idle.wait()
            self._wake.release()
            self._thread.join()
            self._thread = None


_MOST_SECONDS = 60  # a job that waits for a dead peer never ends
_threads: "weakref.WeakSet[BackgroundThread]" = weakref.WeakSet()


def _settle_all() -> None:
    for thread in list(_threads):
        thread.settle()


# A loader forks its workers before it asks the sampler for anything. A lock inside torch that a job
# holds at that moment would stay locked in the worker for ever.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_settle_all)
