"""Training from the command line: here, on local ranks, or on those that torchrun started."""

import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from gradherd.cli.train_folder import mark_unfinished
from gradherd.cli.train_options import Options, under_torchrun
from gradherd.cli.train_progress import Bar
from gradherd.cli.usage import Failed
from gradherd.comm.ranks import RankError, run_ranks
from gradherd.comm.world import World, join_torchrun_group
from gradherd.lab.tasks.safe_readers import DamagedData
from gradherd.lab.train.config import RunConfig
from gradherd.lab.train.record import RunRecord
from gradherd.lab.train.runner import CheckpointOptions, run_all

# Against hangs only: a training takes as long as it takes.
_DEADLINE = 30 * 24 * 3600.0
# So long a rank waits for the others; rank 0 measures the test set meanwhile.
_PATIENCE = 1800.0


def execute(
    configs: Sequence[RunConfig],
    out: Path,
    options: Options,
    *,
    saving: CheckpointOptions | None = None,
) -> list[RunRecord]:
    """Run all of them here, on local ranks, or on the ranks that torchrun started.

    Whatever happens, what was done so far is in `out`.
    """
    # Where nothing is saved, to end is to be interrupted.
    before = signal.getsignal(signal.SIGTERM)
    if saving is None:
        signal.signal(signal.SIGTERM, _interrupt)
    job = (list(configs), out, options.data_dir, options.tensorboard, saving)
    try:
        if options.virtual:
            return _virtual(job)
        if under_torchrun():
            return _joined(job, options.device)
        return _local(job, configs[0].workers)
    except KeyboardInterrupt:
        mark_unfinished(out, "interrupted")
        raise
    except BaseException:
        with contextlib.suppress(OSError):  # The disk may be what failed: that is told below.
            mark_unfinished(out, "failed")
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _virtual(job: tuple[Any, ...]) -> list[RunRecord]:
    """One thread: small steps gain nothing from more, and bits are those of ranks."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return train_here(*job)
    except DamagedData as error:
        raise Failed(str(error)) from None
    finally:
        torch.set_num_threads(before)


def _local(job: tuple[Any, ...], workers: int) -> list[RunRecord]:
    try:
        found: list[RunRecord] = run_ranks(
            train_here,
            workers,
            *job,
            timeout=_DEADLINE,
            collective_timeout=_PATIENCE,
            forward_signals=() if job[-1] is None else (signal.SIGTERM,),
        )[0]
    except RankError as error:
        if os.environ.get("GRADHERD_TRACEBACK"):
            raise
        raise Failed(error.reason) from None
    return found


def _joined(job: tuple[Any, ...], device: str) -> list[RunRecord]:
    if device.startswith("cuda"):
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    join_torchrun_group("nccl" if device.startswith("cuda") else "gloo")
    try:
        return train_here(*job)
    finally:
        dist.destroy_process_group()


def train_here(
    configs: list[RunConfig],
    out: Path,
    data_dir: Path | None,
    tensorboard: bool,
    saving: CheckpointOptions | None,
) -> list[RunRecord]:
    """Run on this rank, together with the others."""
    world = World.single() if configs[0].virtual else World.detect()
    with Bar(quiet=world.rank > 0) as bar:
        return run_all(
            configs,
            world,
            out=out,
            data_dir=data_dir,
            progress=bar,
            tensorboard=tensorboard,
            saving=saving,
        )
