"""Start a training in this process, on local ranks or on torchrun's."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from gradherd.cli.folders import finished_record, mark_unfinished
from gradherd.cli.options import TrainingOptions
from gradherd.cli.parser import CommandFailed, UsageError
from gradherd.cli.progress import ProgressBar
from gradherd.cli.terminal import under_torchrun
from gradherd.comm.world import World
from gradherd.lab.ranks import ProcessDied, RankError, handling, one_thread, run_ranks
from gradherd.lab.tasks.data_files import DamagedData
from gradherd.lab.tasks.task import BadTask, UnsuitableSettings
from gradherd.lab.train.config import RunConfig
from gradherd.lab.train.loop import BadStart
from gradherd.lab.train.record import RunRecord
from gradherd.lab.train.runner import CheckpointOptions, run_all

# Deadlines only guard against hangs: training takes as long as it takes, and so does a benchmark
# of large sizes on few cores.
_TRAINING_DEADLINE = 30 * 24 * 3600.0
_MEASUREMENT_DEADLINE = 1800.0
# How long a rank waits for the others: rank 0 evaluates the test set while they wait.
_COLLECTIVE_TIMEOUT = 1800.0


def measure_on_ranks(fn: Callable[..., Any], workers: int, *args: Any) -> Any:
    """Run a module-level function on local gloo ranks; return what rank 0 returns."""
    with reported_errors():
        return run_ranks(fn, workers, *args, timeout=_MEASUREMENT_DEADLINE)[0]


@contextlib.contextmanager
def reported_errors(*, saves: bool = False) -> Iterator[None]:
    """Turn errors of training into those of the command line.

    Unless it `saves` itself, SIGTERM acts like Ctrl-C inside.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    try:
        with handling(() if saves else (signal.SIGTERM,), interrupt):
            yield
    # Sentences about a user's settings, data or task: no defect to trace.
    except (UnsuitableSettings, BadTask) as error:
        raise UsageError(str(error)) from None
    except (DamagedData, BadStart, ProcessDied) as error:
        raise CommandFailed(str(error)) from None
    except RankError as error:
        # The message has the rank's traceback; `reason` says the same in one line.
        if os.environ.get("GRADHERD_TRACEBACK"):
            raise
        usage = error.kind in (BadTask.__name__, UnsuitableSettings.__name__)
        raise (UsageError if usage else CommandFailed)(error.reason) from None


@contextlib.contextmanager
def torchrun_group(device: str) -> Iterator[None]:
    """Be in torchrun's process group inside; joined and left once, however often it is entered.

    Every rank gets one GPU or one CPU thread. Without torchrun nothing happens.
    """
    if not under_torchrun() or dist.is_initialized():
        yield
        return
    if device.startswith("cuda"):
        # Before the group exists: NCCL binds a rank to the current device, and every rank would
        # otherwise take GPU 0.
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        # One thread, as on local ranks: sums over several threads would have other bits.
        torch.set_num_threads(1)
    join_torchrun_group("nccl" if device.startswith("cuda") else "gloo")
    try:
        yield
    finally:
        # torch warns at exit about NCCL groups that are still alive.
        dist.destroy_process_group()


def join_torchrun_group(backend: str) -> None:
    """Initialise the default process group of a process that torchrun started.

    After a restart torchrun reuses its store, which still holds the addresses of the dead
    processes: gloo reads those first and its connection is refused (pytorch issue 135712 reports
    the same for nccl). On one machine a key prefix with the restart count keeps the attempts
    apart. On several machines each agent counts its own restarts, so the counts may differ and
    the keys stay torch's; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 there instead.

    Args:
        backend: "gloo" or "nccl".
    """
    if os.environ["LOCAL_WORLD_SIZE"] != os.environ["WORLD_SIZE"]:
        dist.init_process_group(backend)
        return
    # What init_process_group does without a store, but with a prefix in between.
    store, rank, size = next(rendezvous("env://"))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(
        backend, store=dist.PrefixStore(f"attempt-{attempt}", store), rank=rank, world_size=size
    )


def train_runs(
    configs: Sequence[RunConfig],
    out: Path,
    options: TrainingOptions,
    *,
    saving: CheckpointOptions | None = None,
) -> list[RunRecord]:
    """Train all runs and return their records; `out` holds every epoch that was finished.

    Without `saving`, which says how to save checkpoints, SIGTERM acts like Ctrl-C.
    """
    # One tuple for all ways of training: what local ranks get is pickled.
    job = (list(configs), out, options.data_dir, saving, options.quiet)
    try:
        # With checkpoints SIGTERM means save and stop, which `Checkpointer` handles.
        with reported_errors(saves=saving is not None), one_thread():
            if configs[0].virtual:
                return train_on_this_rank(*job)
            if under_torchrun():
                with torchrun_group(configs[0].device):
                    return train_on_this_rank(*job)
            records: list[RunRecord] = run_ranks(
                train_on_this_rank,
                configs[0].workers,
                *job,
                timeout=_TRAINING_DEADLINE,
                collective_timeout=_COLLECTIVE_TIMEOUT,
                # Ranks save themselves, so they must hear of SIGTERM, and this process must outlive
                # it to collect the records.
                forward_signals=() if saving is None else (signal.SIGTERM,),
            )[0]
            return records
    except BaseException as error:
        # The record would otherwise say "running" for ever. If the disk is what failed, marking
        # fails as well; the first error says more.
        interrupted = isinstance(error, KeyboardInterrupt)
        with contextlib.suppress(OSError):
            mark_unfinished(out, "interrupted" if interrupted else "failed")
        raise


def train_missing(
    configs: Sequence[RunConfig], out: Path, options: TrainingOptions, *, resume: bool
) -> list[RunRecord]:
    """Train the runs of a comparison, except those that a resumed folder already holds.

    A run that was interrupted is trained again from its start: runs of a comparison are many and
    short, and save no checkpoints. Records are in the order of `configs`.
    """
    # All ranks of torchrun read before any of them trains: none writes before all have joined.
    known = [
        finished_record(out / config.folder(), config, changeable=()) if resume else None
        for config in configs
    ]
    missing = [config for config, record in zip(configs, known, strict=True) if record is None]
    trained = iter(train_runs(missing, out, options) if missing else [])
    return [next(trained) if record is None else record for record in known]


def train_on_this_rank(
    configs: list[RunConfig],
    out: Path,
    data_dir: Path | None,
    saving: CheckpointOptions | None,
    quiet: bool,
) -> list[RunRecord]:
    """Train all runs on this rank, together with the other ranks."""
    # Variables that a launcher has left in the environment mean nothing: a group does.
    world = World.detect() if dist.is_initialized() else World.single()
    with ProgressBar(quiet=quiet or world.rank > 0) as bar:
        return run_all(configs, world, out=out, data_dir=data_dir, progress=bar, saving=saving)
