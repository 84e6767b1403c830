"""Runs of small models in several processes, one per core.

A step of a model with a few parameters is Python and call overhead, which neither torch's threads
nor ours speed up. So a stack of such runs is divided among forks of this process: they have its
data and its registered methods at once, and only progress and records travel back.
"""

import multiprocessing
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any

import torch

from gradherd.lab.train.config import RunConfig
from gradherd.lab.train.loop import Progress
from gradherd.lab.train.record import RunRecord

# Beyond this many parameters torch's threads keep the cores busy.
_MAX_SIZE = 10_000
# Steps of all runs below which a comparison takes seconds anyway.
_MIN_STEPS = 200_000


def usable_cores() -> int:
    """Return how many processes may run at once here; 1 where forking is not safe.

    Torch's own data loader forks on Linux as well, and gives its forks one thread as we do: the
    thread pool of the parent does not exist in them.
    """
    if sys.platform != "linux" or torch.cuda.is_initialized():
        return 1
    # Others run beside a process that was started for its share (`gradherd study --jobs`).
    if multiprocessing.parent_process() is not None:
        return 1
    # Whoever limits the threads of a process means its share of the machine.
    limit = os.environ.get("OMP_NUM_THREADS", "")
    cores = len(os.sched_getaffinity(0))
    return min(cores, int(limit)) if limit.isdecimal() and int(limit) else cores


def divide(
    indices: Sequence[int], configs: Sequence[RunConfig], size: int, steps: int, cores: int
) -> list[list[int]]:
    """Return the runs of a stack in as many parts as are trained at once.

    Args:
        indices: Which runs the stack consists of.
        configs: The settings of all runs.
        size: Number of parameters.
        steps: Steps of all runs of the stack.
        cores: Result of `usable_cores`.
    """
    if configs[indices[0]].device != "cpu" or size > _MAX_SIZE or steps < _MIN_STEPS:
        return [list(indices)]
    # Dealt out, not cut: runs are sorted by what their orders need, and each part gets some of all.
    return [list(indices[core::cores]) for core in range(min(cores, len(indices)))]


class _SentProgress(Progress):
    """Sends each call through a pipe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def group(self, configs: Sequence[RunConfig]) -> None:
        """Send which runs begin."""
        self._pipe.send(("group", (configs,)))

    def step(self, steps: int = 1) -> None:
        """Send how many steps are done."""
        self._pipe.send(("step", (steps,)))

    def epoch(self, number: int, losses: list[float | None]) -> None:
        """Send the losses of an epoch."""
        self._pipe.send(("epoch", (number, losses)))


Train = Callable[[Sequence[int], Progress], list[RunRecord]]
"""Trains the runs of a part, and returns their records."""


def run_forked(train: Train, parts: Sequence[Sequence[int]], progress: Progress) -> dict[int, Any]:
    """Train each part in a fork of this process.

    Args:
        train: Trains a part.
        parts: Indices of the runs of each part.
        progress: Receives the progress of all parts.

    Returns:
        The record of each run.

    Raises:
        Exception: That of the first part that failed; the others are stopped.
    """
    context = multiprocessing.get_context("fork")
    waiting: dict[Connection, Sequence[int]] = {}
    processes, records = [], {}
    try:
        for part in parts:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_train_part, args=(train, part, theirs), daemon=True)
            with warnings.catch_warnings():
                # Python warns of threads that hold locks while forking; see `usable_cores`.
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            theirs.close()  # so that the end of the process ends our side, too
            processes.append(process)
            waiting[ours] = part
        while waiting:
            for pipe in connection.wait(list(waiting)):
                assert isinstance(pipe, Connection)
                try:
                    kind, values = pipe.recv()
                except EOFError:
                    raise RuntimeError(
                        "a process that trained some of the runs was ended from outside: was there "
                        "enough memory?"
                    ) from None
                if kind == "error":
                    raise values
                if kind == "records":
                    records.update(zip(waiting.pop(pipe), values, strict=True))
                else:
                    getattr(progress, kind)(*values)
    finally:
        for process in processes:
            process.terminate()
            process.join()
    return records


def _train_part(train: Train, part: Sequence[int], pipe: Connection) -> None:
    # Ctrl-C reaches all processes of a terminal; it is the parent that ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    try:
        pipe.send(("records", train(part, _SentProgress(pipe))))
    except BrokenPipeError:
        return  # The parent has gone: nobody waits for these runs.
    except Exception as error:
        error.add_note(traceback.format_exc())
        try:
            pipe.send(("error", error))
        except Exception:  # An error of a user's task need not be picklable.
            pipe.send(("error", RuntimeError(f"{type(error).__name__}: {error}")))
