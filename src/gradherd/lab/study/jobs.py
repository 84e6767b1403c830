"""Runs side by side in several processes, on the cores of one machine or sharing one GPU."""

import dataclasses
import math
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

import torch

from gradherd.lab.study.archive import Result
from gradherd.lab.study.kind import Piece, Told, Where

Made = Callable[[Sequence[Piece], Where], list[Result]]


class ProcessDied(RuntimeError):
    """A process that made runs is no more."""


def run_jobs(
    make: Made, batches: Sequence[Sequence[Piece]], where: Where, jobs: int
) -> Iterator[list[Result]]:
    """Make batches in so many processes, and yield what each gave when it ends.

    One that fails does not stop the others; the first error is raised after the last of them. A
    process that is killed ends them all, and what they were at is to be run again; to be
    interrupted does so, too.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    parts = shared_out(batches, jobs)
    if not parts:
        return
    quiet = dataclasses.replace(where, told=Told())
    # Forked processes cannot use a GPU that this one has looked at.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(jobs, len(parts)), mp_context=context, initializer=_begin)
    failed: Exception | None = None
    try:
        futures = [pool.submit(_one, make, part, quiet) for part in parts]
        for future in as_completed(futures):
            try:
                yield future.result()
            except BrokenProcessPool:
                raise ProcessDied(_died(futures, jobs)) from None
            except Exception as error:  # Raised below, once the others are done.
                failed = failed or error
        if failed is not None:
            raise failed
    except BaseException:
        for child in multiprocessing.active_children():
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def shared_out(batches: Sequence[Sequence[Piece]], jobs: int) -> list[list[Piece]]:
    """Split batches so that each process has one, if there are enough runs.

    Runs of a batch share work, so that no batch is cut smaller than it must be.
    """
    runs = sum(map(len, batches))
    most = max(1, math.ceil(runs / jobs))
    parts: list[list[Piece]] = []
    for batch in batches:
        pieces = math.ceil(len(batch) / most)
        parts += [list(batch[at::pieces]) for at in range(pieces)]
    return parts


def _begin() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The process that started this one ends it.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)


def _end_with_parent() -> None:
    """End when the process that started this one does, also if it was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _one(make: Made, part: Sequence[Piece], where: Where) -> list[Result]:
    results = make(part, where)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # What this one keeps, the others lack.
    return results


def _died(futures: Sequence[Future[list[Result]]], jobs: int) -> str:
    lost = sum(not future.done() or future.exception() is not None for future in futures)
    return (
        f"a process was killed, perhaps for want of memory: {lost} of {len(futures)} batches are "
        f"not done; fewer --jobs than {jobs} take less of it"
    )
