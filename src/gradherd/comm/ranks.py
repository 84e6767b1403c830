"""Run a function on N gloo processes of this machine: for tests and for local training.

Ranks are forks of one warm server process, not fresh interpreters, so a start costs a fraction
of a second. They meet in a file store (no port to collide with a neighbour), they have a
deadline (a hang is a failure), and the error reported is that of the rank that failed first
(the others only know that a peer went away).
"""

import contextlib
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing import connection, forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Ranks whose peer has failed notice that at once; so long they get to say so.
_GRACE = 3.0
# DDP's constructor imports torch._dynamo (900 modules, 2 s), so the server does it beforehand.
_WARM = ["torch._dynamo"]


class RankError(RuntimeError):
    """A rank failed; the message tells which one was the first, and how."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason
        """The same in one line."""

    def __reduce__(self) -> tuple[type["RankError"], tuple[str, str]]:
        return RankError, (str(self), self.reason)


def _end_with_parent() -> None:
    """End this rank when the process that started it is gone, however that ended."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _rank_main(
    rank: int,
    fn: Callable[..., Any],
    size: int,
    folder: Path,
    timeout: float,
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        store = dist.FileStore(str(folder / "store"), size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
        )
        torch.save(fn(*args), folder / f"{rank}.pt")
        dist.barrier()
        dist.destroy_process_group()
    except BaseException as error:
        # Errors of our own are whole sentences; of others the name is part of what they say.
        ours = type(error).__module__.startswith("gradherd.")
        text = str(error) if ours else "".join(traceback.format_exception_only(error))
        reason = " ".join(text.split())
        # Under another name first: a peer's failure may end this process in mid-write.
        draft = folder / f"{rank}.draft"
        draft.write_text(f"{time.monotonic_ns()}\n{reason}\n{traceback.format_exc()}")
        draft.rename(folder / f"{rank}.error")
        raise


def _failure(folder: Path, processes: Sequence[BaseProcess]) -> RankError:
    """Say which rank failed first; its peers fail too, but only because it went away."""
    end = time.monotonic() + _GRACE
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    for rank, process in enumerate(processes):
        told = any((folder / f"{rank}.{kind}").exists() for kind in ("pt", "error"))
        code = process.exitcode
        if not told and code is not None:
            ended = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            return _plain_error(f"rank {rank} died: {ended}")
    reports = [(path.stem, *path.read_text().split("\n", 2)) for path in folder.glob("*.error")]
    if not reports:
        return _plain_error("a rank ended without a result and without a reason")
    name, _, reason, report = min(reports, key=lambda found: int(found[1]))
    quiet = [r for r in range(len(processes)) if not list(folder.glob(f"{r}.*"))]
    busy = [rank for rank in quiet if processes[rank].is_alive()]
    if busy and "timed out" in reason.lower():
        hang = f"rank {busy[0]} does not answer: rank {name} has waited for it"
        return RankError(f"{hang}:\n{report}", f"{hang} ({reason})")
    return RankError(f"rank {name} failed:\n{report}", reason)


def _plain_error(text: str) -> RankError:
    return RankError(text, text)


def _warm_server() -> None:
    """Start the server that ranks are forks of, unless it runs.

    Its libraries read their number of threads when they are loaded: one per rank, or ranks
    would fight for cores.
    """
    multiprocessing.set_forkserver_preload(_WARM)
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    # Ctrl-C goes to all processes of a terminal. It is this one that ends the ranks.
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def _join(
    processes: Sequence[BaseProcess], what: str, folder: Path, deadline: float, timeout: float
) -> None:
    """Wait for all ranks, but not beyond the deadline; raise as soon as one fails."""
    waiting: dict[Any, BaseProcess] = {process.sentinel: process for process in processes}
    while waiting:
        left = max(0.0, min(1.0, deadline - time.monotonic()))
        for sentinel in connection.wait(list(waiting), timeout=left):
            ended = waiting.pop(sentinel)
            ended.join()
            if ended.exitcode != 0:
                raise _failure(folder, processes)
        if waiting and time.monotonic() >= deadline:
            # Those that are done wait for the others, too.
            busy = [r for r in range(len(processes)) if not (folder / f"{r}.pt").exists()]
            raise TimeoutError(
                f"{what} on {len(processes)} ranks: not done after {timeout:g} s, ranks {busy} "
                "still busy"
            )


@contextlib.contextmanager
def _forwarding(signals: Sequence[int], processes: Sequence[BaseProcess]) -> Iterator[None]:
    """Hand signals that this process gets on to the ranks."""

    def hand_on(number: int, frame: FrameType | None) -> None:
        for process in processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, number)

    before = {number: signal.signal(number, hand_on) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_ranks(
    fn: Callable[..., Any],
    size: int,
    *args: Any,
    timeout: float = 60.0,
    patience: float | None = None,
    forward: Sequence[int] = (),
    started: Callable[[list[int]], None] | None = None,
) -> list[Any]:
    """Return `fn(*args)` of every rank, in rank order.

    Args:
        fn: A module-level function; it runs with an initialised default gloo group.
        size: Number of ranks, at least 1.
        *args: Passed to `fn` on every rank; must be picklable.
        timeout: Seconds until all ranks are killed and TimeoutError names those still busy.
        patience: Seconds that a rank waits for its peers in a collective; `timeout` if None.
        forward: Signals that are handed on to the ranks instead of ending this process.
        started: Is told the process ids of the ranks.

    Raises:
        RankError: A rank failed; the message holds the traceback of the first one that did.
        TimeoutError: The deadline passed.
    """
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    _warm_server()
    with tempfile.TemporaryDirectory(prefix="gradherd-ranks-") as name:
        folder, deadline = Path(name), time.monotonic() + timeout
        ranks = mp.start_processes(
            _rank_main,
            (fn, size, folder, timeout if patience is None else patience, args),
            size,
            join=False,
            start_method="forkserver",
        )
        assert ranks is not None
        if started is not None:
            started([process.pid for process in ranks.processes])
        try:
            with _forwarding(forward, ranks.processes):
                _join(ranks.processes, getattr(fn, "__name__", str(fn)), folder, deadline, timeout)
        finally:
            for process in ranks.processes:
                process.kill()
                process.join()
        if not all((folder / f"{rank}.pt").exists() for rank in range(size)):
            raise _failure(folder, ranks.processes)
        # Our own ranks wrote these files a moment ago into a private folder.
        return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]
