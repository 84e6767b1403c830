"""Take signs off the critical path: in a thread, in order, one job at a time."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Sorter:
    """Runs jobs one after the other beside the training loop.

    Orders are needed at the end of an epoch only, so nobody waits for a sign: a job's errors
    are raised by the next `wait`, which everything that reads orders calls first.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gradherd-sorter")
        self._last: Future[None] | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` after those before it; waits for them, so no more than one is behind."""
        self.wait()
        self._last = self._executor.submit(job)

    def wait(self) -> None:
        """Return when all jobs are done; raise what the last one raised."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def close(self) -> None:
        """End the thread."""
        self._executor.shutdown(wait=True)
