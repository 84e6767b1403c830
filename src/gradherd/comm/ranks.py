"""Run a function on N gloo processes of this machine: for tests and for local training.

Ranks are forks of one warm server process, not fresh interpreters, so a start costs a fraction
of a second. They meet in a file store (no port to collide with a neighbour), they have a
deadline (a hang is a failure), and the error reported is that of the rank that failed first
(the others only know that a peer went away).
"""

import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# DDP's constructor imports torch._dynamo (900 modules, 2 s), so the server does it beforehand.
_WARM = ["torch._dynamo"]


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
    try:
        store = dist.FileStore(str(folder / "store"), size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
        )
        torch.save(fn(*args), folder / f"{rank}.pt")
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        (folder / f"{rank}.error").write_text(traceback.format_exc())
        raise


def _failure(
    folder: Path, error: mp.ProcessRaisedException | mp.ProcessExitedException
) -> RuntimeError:
    reports = list(folder.glob("*.error"))
    if reports:
        first = min(reports, key=lambda path: path.stat().st_mtime_ns)
        return RuntimeError(f"rank {first.stem} failed:\n{first.read_text()}")
    # No report: the process ended without Python's knowledge (a signal, os._exit).
    code = getattr(error, "exit_code", None)
    ended = (
        signal.Signals(-code).name if isinstance(code, int) and code < 0 else f"exit code {code}"
    )
    return RuntimeError(f"rank {error.error_index} died: {ended}")


def run_ranks(fn: Callable[..., Any], size: int, *args: Any, timeout: float = 60.0) -> list[Any]:
    """Return `fn(*args)` of every rank, in rank order.

    Args:
        fn: A module-level function; it runs with an initialised default gloo group.
        size: Number of ranks, at least 1.
        *args: Passed to `fn` on every rank; must be picklable.
        timeout: Seconds until all ranks are killed and TimeoutError names those still busy.

    Raises:
        RuntimeError: A rank failed; the message holds the traceback of the first one that did.
        TimeoutError: The deadline passed.
    """
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    multiprocessing.set_forkserver_preload(_WARM)
    with tempfile.TemporaryDirectory(prefix="gradherd-ranks-") as name:
        folder, deadline = Path(name), time.monotonic() + timeout
        ranks = mp.start_processes(  # type: ignore[no-untyped-call]
            _rank_main,
            (fn, size, folder, timeout, args),
            size,
            join=False,
            start_method="forkserver",
        )
        assert ranks is not None
        try:
            while not ranks.join(timeout=max(0.0, min(1.0, deadline - time.monotonic()))):
                if time.monotonic() >= deadline:
                    busy = [i for i, process in enumerate(ranks.processes) if process.is_alive()]
                    raise TimeoutError(
                        f"{getattr(fn, '__name__', fn)} on {size} ranks: not done after "
                        f"{timeout:g} s, ranks {busy} still busy"
                    )
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            raise _failure(folder, error) from None
        finally:
            for process in ranks.processes:
                process.kill()
                process.join()
        # Our own ranks wrote these files a moment ago into a private folder.
        return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]
