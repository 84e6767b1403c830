"""How long training waited for something; the hooks of three rooms share it."""

import time


class Stopwatch:
    """Add up the seconds spent inside `with stopwatch:`. Nested use counts once.

    >>> stopwatch = Stopwatch()
    >>> with stopwatch:
    ...     pass
    >>> stopwatch.seconds >= 0
    True
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0
        self._started = 0.0

    def __enter__(self) -> "Stopwatch":
        # Hooks call each other; without the depth, the inner one's time would count twice.
        if self._depth == 0:
            self._started = time.perf_counter()
        self._depth += 1
        return self

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.seconds += time.perf_counter() - self._started
