"""Run a function on N gloo processes of this machine, or in a pool of processes.

Ranks are forks of one warm server process, not fresh interpreters, so a start takes a fraction of
a second. They meet in a file store, which has no port that could be taken. They have a deadline,
so a hang is a failure. The error raised is that of the rank that failed first; the others only
see that a peer went away.
"""

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from datetime import timedelta
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from gradherd.comm.collectives import all_reduce
from gradherd.comm.world import World

# A rank notices at once that a peer has failed. This many seconds it gets to report its own error.
_GRACE = 3.0
# Imported once by the server instead of once per rank: DDP's constructor needs torch._dynamo (900
# modules, 2 s), and most ranks need what attach imports (0.25 s).
_PRELOAD = ["torch._dynamo", "gradherd.hooks.attach"]


_POLL_SECONDS = 0.05


class ProcessDied(RuntimeError):
    """A process of a pool ended without returning its results."""


class RankError(RuntimeError):
    """A rank failed. The message says which one failed first, and why.

    Args:
        message: With the traceback of that rank, if it left one.
        reason: The same in one line, for a command line that prints no tracebacks; None if the
            message is one.
        kind: Name of the class of the exception that the rank raised, if it raised one.
    """

    def __init__(self, message: str, reason: str | None = None, kind: str = "") -> None:
        super().__init__(message)
        self.reason = message if reason is None else reason
        """The same in one line."""
        self.kind = kind

    # Exceptions are pickled by their `args`, which hold the message only.
    def __reduce__(self) -> tuple[type["RankError"], tuple[str, str, str]]:
        return RankError, (str(self), self.reason, self.kind)


def run_ranks(
    fn: Callable[..., Any],
    size: int,
    *args: Any,
    timeout: float = 150.0,
    collective_timeout: float | None = None,
    forward_signals: Sequence[int] = (),
    on_start: Callable[[list[int]], None] | None = None,
) -> list[Any]:
    """Run `fn(*args)` on every rank and return the results in rank order.

    Args:
        fn: A module-level function. It runs with an initialised default gloo group.
        size: Number of ranks, at least 1.
        *args: Arguments of `fn`, the same on every rank; must be picklable.
        timeout: Seconds until all ranks are killed and TimeoutError names those still running.
        collective_timeout: Seconds a rank waits for its peers in a collective; None is `timeout`.
        forward_signals: Signals to forward to the ranks; they do not end this process.
        on_start: Called with the process ids of the ranks.

    Returns:
        What `fn` returned on each rank; pickled, so tensors are copies.

    Raises:
        ValueError: `size` is less than 1.
        RankError: A rank failed; the message holds the traceback of the first one that did.
        TimeoutError: The ranks did not finish in time.
    """
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    start_fork_server(fn)
    with tempfile.TemporaryDirectory(prefix="gradherd-ranks-") as name:
        folder, deadline = Path(name), time.monotonic() + timeout
        peer_timeout = timeout if collective_timeout is None else collective_timeout
        ranks = mp.start_processes(
            _rank_main,
            (fn, size, folder, peer_timeout, args),
            size,
            join=False,
            # Not "fork": this process may have threads by now (autograd, OpenMP), whose locks a
            # copy would inherit locked. Not "spawn": importing torch takes seconds per rank.
            start_method="forkserver",
        )
        assert ranks is not None

        def forward(number: int, frame: FrameType | None) -> None:
            for process in ranks.processes:
                if process.is_alive() and process.pid is not None:
                    os.kill(process.pid, number)

        try:
            with handling(forward_signals, forward):
                if on_start is not None:
                    on_start([process.pid for process in ranks.processes])
                _join(ranks.processes, getattr(fn, "__name__", str(fn)), folder, deadline, timeout)
        finally:
            # Killed, not terminated: a rank that is stuck in a collective runs no signal handler.
            for process in ranks.processes:
                process.kill()
                process.join()
        # A rank may leave with exit code 0 and no result, as by os._exit(0).
        if not all((folder / f"{rank}.pt").exists() for rank in range(size)):
            raise _failure(folder, ranks.processes)
        # Safe to unpickle: our own ranks have just written these files, in a private folder.
        return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _rank_main(
    rank: int,
    fn: Callable[..., Any],
    size: int,
    folder: Path,
    timeout: float,
    args: tuple[Any, ...],
) -> None:
    # What the server has imported stays: each search for garbage in it would take half a second
    # and copy the memory that ranks share.
    gc.freeze()
    # More threads would compete for the cores. Besides, sums of long vectors have other bits with
    # another number of threads, and virtual workers must get the same ones.
    torch.set_num_threads(1)
    # Otherwise gloo resolves the host name, which may name no interface of this machine.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # A rank that dies of a segmentation fault raises nothing, but leaves the stacks of its threads.
    faulthandler.enable((folder / f"stacks-{rank}").open("w"))
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    try:
        # A TCP store would need a free port, which another run may take first.
        store = dist.FileStore(str(folder / "store"), size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
        )
        torch.save(fn(*args), folder / f"{rank}.pt")
        # A rank that left early would make the collectives of its peers fail.
        all_reduce(torch.zeros(1), World.detect())  # a barrier
        dist.destroy_process_group()
    except BaseException as error:
        # Our own errors are whole sentences; others need the name of their class to make sense.
        ours = type(error).__module__.startswith("gradherd.")
        text = str(error) if ours else "".join(traceback.format_exception_only(error))
        reason = " ".join(text.split())
        # Written under another name first: a peer's failure may end this process in mid-write.
        draft = folder / f"{rank}.draft"
        head = f"{time.monotonic_ns()}\n{type(error).__name__}\n{reason}"
        draft.write_text(f"{head}\n{traceback.format_exc()}")
        draft.rename(folder / f"{rank}.error")
        raise


def _exit_with_parent() -> None:
    """Exit when the process that started this rank has gone, however it ended."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        # sys.exit would end this thread only, and the rank may be stuck in a collective.
        os._exit(1)


@contextlib.contextmanager
def process_pool(
    count: int, method: str, start: Callable[..., None] | None = None, *args: Any
) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of processes with one thread each, which end with the block, whatever ends it.

    An executor by itself waits for what its processes are doing, and leaves them alone if this
    process is killed.

    Args:
        count: Number of processes.
        method: How they are started: "spawn" (a forked process cannot use a GPU that its parent
            has initialised) or "forkserver" (after `start_fork_server`).
        start: Called in each process when it starts, with `args`.
        *args: What only a process that starts can be given, such as a queue.
    """
    context: Any = multiprocessing.get_context(method)
    # Closed, the lifeline ends the processes of this pool, and no other child of the caller.
    end, lifeline = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(
        count, mp_context=context, initializer=_start_in_pool, initargs=(end, start, *args)
    )
    try:
        yield pool
    # Also on Ctrl-C, and when a generator is closed: children would work on unseen.
    except BaseException:
        lifeline.close()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        lifeline.close()
        end.close()


def in_pool(fn: Callable[..., Any], *args: Any) -> Any:
    """Return `fn(*args)`, in a process of a pool; what it raises arrives whatever it is.

    An error that cannot be sent, or not be built again from its text, would break the pool.
    """
    try:
        return fn(*args)
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # An error of a user's task need not be picklable.
            raise RuntimeError(f"{type(error).__name__}: {error}") from None
        raise


def run_parts(
    fn: Callable[[Any], Any],
    parts: Sequence[Any],
    count: int,
    method: str,
    *start: Any,
    poll: Callable[[], None] | None = None,
) -> Iterator[tuple[int, Any]]:
    """Run `fn(part)` of each part in a pool; yield its index with its result or error, as it ends.

    `method` and `start` are for `process_pool`; `poll` is called now and then while parts run.

    Raises:
        ProcessDied: A process of the pool was killed.
    """
    with process_pool(min(count, len(parts)), method, *start) as pool:
        with _deaf_to_ctrl_c():
            futures = {pool.submit(in_pool, fn, part): at for at, part in enumerate(parts)}
        running = set(futures)
        while running:
            done, running = wait(running, _POLL_SECONDS if poll else None, FIRST_COMPLETED)
            if poll:
                poll()
            for future in done:
                error = future.exception()
                if isinstance(error, BrokenProcessPool):
                    # It fails all futures that were not done, whichever process died.
                    lost = sum(not one.done() or one.exception() is not None for one in futures)
                    raise ProcessDied(
                        f"a process was killed, perhaps out of memory: {lost} of {len(parts)} "
                        f"batches are not done; fewer than {count} processes need less memory"
                    )
                yield futures[future], future.result() if error is None else error


def _start_in_pool(end: Connection, start: Callable[..., None] | None, *args: Any) -> None:
    # A server that a host program has started hears Ctrl-C, and so do its processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_lifeline, args=(end,), daemon=True).start()
    torch.set_num_threads(1)  # The processes together already use the cores.
    if start is not None:
        start(*args)


def _exit_with_lifeline(end: Connection) -> None:
    """Exit when the parent closes the lifeline, or ends: even if it was killed."""
    with contextlib.suppress(EOFError):
        end.recv()
    os._exit(1)  # sys.exit would end this thread alone


def start_fork_server(fn: Callable[..., Any]) -> None:
    """Start the server that ranks are forked from, unless it is running.

    Its libraries read their number of threads when they are loaded. Ranks get one thread each;
    with more they would compete for the cores.

    Args:
        fn: What the first ranks will run. Its module is imported by the server, if it is ours: a
            user's module may start threads when it is imported, which do not survive a fork.
    """
    ours = [fn.__module__] if fn.__module__.startswith("gradherd.") else []
    multiprocessing.set_forkserver_preload([*_PRELOAD, *ours])
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        with _deaf_to_ctrl_c():
            forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


@contextlib.contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """Let processes that are started inside never hear Ctrl-C.

    It reaches every process of the terminal, but it is this process that ends the others. They must
    be deaf from their first moment: until they have imported what they need, they would print a
    traceback.
    """
    resource_tracker.ensure_running()  # Later, its start would unblock the signal.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def handling(
    signals: Sequence[int], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """Handle signals inside, and as before afterwards."""
    before = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, one in before.items():
            signal.signal(number, one)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread inside, as each rank does: sums then have the same bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _join(
    processes: Sequence[BaseProcess], name: str, folder: Path, deadline: float, timeout: float
) -> None:
    """Wait for all ranks until the deadline; raise as soon as one fails."""
    running: dict[Any, BaseProcess] = {process.sentinel: process for process in processes}
    while running:
        seconds = max(0.0, min(1.0, deadline - time.monotonic()))
        for sentinel in connection.wait(list(running), timeout=seconds):
            ended = running.pop(sentinel)
            ended.join()
            if ended.exitcode != 0:
                raise _failure(folder, processes)
        if running and time.monotonic() >= deadline:
            # Ranks with a result are running too: they wait in the barrier for the others.
            busy = [r for r in range(len(processes)) if not (folder / f"{r}.pt").exists()]
            raise TimeoutError(
                f"{name} on {len(processes)} ranks: not done after {timeout:g} s, ranks {busy} "
                "are still running"
            )


def _failure(folder: Path, processes: Sequence[BaseProcess]) -> RankError:
    """Return the error of the rank that failed first; its peers fail because it went away."""
    end = time.monotonic() + _GRACE
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    # A rank that died without a report (a segmentation fault, the kernel's memory killer) came
    # first: the reports of the others are about losing it.
    for rank, process in enumerate(processes):
        reported = any((folder / f"{rank}.{suffix}").exists() for suffix in ("pt", "error"))
        code = process.exitcode
        if not reported and code is not None:
            cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            died, stacks = f"rank {rank} died: {cause}", folder / f"stacks-{rank}"
            where = stacks.read_text().strip() if stacks.exists() else ""
            return RankError(f"{died}\n{where}".rstrip(), died)
    reports = [(path.stem, *path.read_text().split("\n", 3)) for path in folder.glob("*.error")]
    if not reports:
        return RankError("a rank ended without a result and without an error")
    name, _, kind, reason, report = min(reports, key=lambda report: int(report[1]))
    silent = [r for r in range(len(processes)) if not list(folder.glob(f"{r}.*"))]
    stuck = [rank for rank in silent if processes[rank].is_alive()]
    # The rank that reports a timeout is the healthy one; the stuck one reports nothing.
    if stuck and "timed out" in reason.lower():
        hang = f"rank {stuck[0]} does not answer: rank {name} timed out waiting for it"
        return RankError(f"{hang}:\n{report}", f"{hang} ({reason})")
    return RankError(f"rank {name} failed:\n{report}", reason, kind)
