"""Runs of small models in several processes, one per core.

A step of a model with a few parameters is Python and call overhead, which neither torch's threads
nor ours speed up. So a stack of such runs is divided among processes; only progress and records
travel back.
"""

import multiprocessing
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from gradherd.lab.ranks import process_pool, start_fork_server
from gradherd.lab.tasks.registry import find_task
from gradherd.lab.train.config import RunConfig
from gradherd.lab.train.loop import Progress
from gradherd.lab.train.record import RunRecord
from gradherd.ordering.registry import make_policy
from gradherd.sparsify.registry import SPARSIFIERS

# Beyond this many parameters torch's threads keep the cores busy.
_MAX_SIZE = 10_000
# Steps of all runs below which a comparison takes seconds anyway.
_MIN_STEPS = 200_000


def usable_cores() -> int:
    """Return how many processes may train at once; 1 where starting them is not safe."""
    # Others run beside a process that was started for its share (`gradherd study --jobs`).
    if sys.platform != "linux" or multiprocessing.parent_process() is not None:
        return 1
    # New processes import the main module of this one. Ours may be imported; a script of a user,
    # which calls the command line, would start all over.
    path = getattr(sys.modules["__main__"], "__file__", None)
    if path is not None and Path(path).stem not in ("gradherd", "__main__"):
        return 1
    # Whoever limits the threads of a process means its share of the machine.
    limit = os.environ.get("OMP_NUM_THREADS", "")
    cores = len(os.sched_getaffinity(0))
    return min(cores, int(limit)) if limit.isdecimal() and int(limit) else cores


def divide(
    indices: Sequence[int], configs: Sequence[RunConfig], size: int, steps: int, cores: int
) -> list[list[int]]:
    """Return the runs of a stack in as many parts as are trained at once."""
    first = configs[indices[0]]
    if first.device != "cpu" or size > _MAX_SIZE or steps < _MIN_STEPS:
        return [list(indices)]
    if not all(_is_known_elsewhere(configs[at]) for at in indices):
        return [list(indices)]
    # Dealt out, not cut: runs are sorted by what their orders need, and each part gets some of all.
    return [list(indices[core::cores]) for core in range(min(cores, len(indices)))]


def _is_known_elsewhere(config: RunConfig) -> bool:
    """Return whether another process knows the task and the methods of a run.

    Those that a program has registered itself are known in its process only.
    """
    made: list[object] = [make_policy(config.order)]
    if config.sparsify in SPARSIFIERS:
        made.append(SPARSIFIERS[config.sparsify]())
    if ":" not in config.task:  # else it is a file, which can be read again
        made.append(find_task(config.task))
    return all(type(one).__module__.startswith("gradherd.") for one in made)


class _SentProgress(Progress):
    """Sends each call to the process that shows it."""

    def __init__(self, messages: Any) -> None:
        self._messages = messages

    def group(self, configs: Sequence[RunConfig]) -> None:
        """Send which runs begin."""
        self._messages.put(("group", (configs,)))

    def step(self, steps: int = 1) -> None:
        """Send how many steps are done."""
        self._messages.put(("step", (steps,)))

    def epoch(self, number: int, losses: list[float | None]) -> None:
        """Send the losses of an epoch."""
        self._messages.put(("epoch", (number, losses)))


Train = Callable[[list[RunConfig], Progress], list[RunRecord]]
"""Trains the runs of a part, and returns their records; it must be picklable."""
_POLL_SECONDS = 0.05
_progress = Progress()  # in a process of the pool, the one that sends


def run_in_processes(
    train: Train, parts: Sequence[list[RunConfig]], progress: Progress
) -> list[list[RunRecord]]:
    """Train each part in a process of its own; return the records of each.

    Raises:
        Exception: That of the first part that failed; the others are stopped.
    """
    # A server that has imported torch is forked, as for ranks. Not this process: its threads
    # (autograd, OpenMP) hold locks that a copy would wait for forever.
    start_fork_server(run_in_processes)
    messages = multiprocessing.get_context("forkserver").SimpleQueue()
    with process_pool(len(parts), "forkserver", _send_progress, messages) as pool:
        futures = [pool.submit(_train_part, train, part) for part in parts]
        running = set(futures)
        while running:
            done, running = wait(running, _POLL_SECONDS, FIRST_COMPLETED)
            while not messages.empty():
                name, values = messages.get()
                getattr(progress, name)(*values)
            try:
                for future in done:
                    future.result()
            except BrokenProcessPool:
                raise RuntimeError(
                    "a process that trained some of the runs was ended from outside: was there "
                    "enough memory?"
                ) from None
        return [future.result() for future in futures]


def _send_progress(messages: Any) -> None:
    global _progress
    _progress = _SentProgress(messages)


def _train_part(train: Train, part: list[RunConfig]) -> list[RunRecord]:
    try:
        return train(part, _progress)
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # An error of a user's task need not be picklable.
            raise RuntimeError(f"{type(error).__name__}: {error}") from None
        raise
