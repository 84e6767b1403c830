"""Running the runs of a comparison, in one or several processes, or one with its checkpoints.

A step of a small model is Python and call overhead, which neither torch's threads nor ours speed
up. So virtual runs are divided among processes, one per core; only progress and records travel
back.
"""

import dataclasses
import gc
import hashlib
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradherd.comm.checks import check_whole
from gradherd.comm.world import World
from gradherd.lab.ranks import run_parts, start_fork_server
from gradherd.lab.tasks.registry import find_task
from gradherd.lab.tasks.task import (
    Split,
    Task,
    UnsuitableSettings,
    augments,
    load_split,
    new_model,
)
from gradherd.lab.train.checkpoint import Checkpointer, CheckpointStore
from gradherd.lab.train.config import RunConfig, count_steps
from gradherd.lab.train.loop import Progress, RunWriter, new_record, run_epochs
from gradherd.lab.train.rank_trainer import RankTrainer
from gradherd.lab.train.record import RunRecord
from gradherd.lab.train.stacked_trainer import (
    StackedTrainer,
    saved_per_example,
    stack_runs,
    why_not_mean_loss,
    why_not_stackable,
)
from gradherd.lab.train.trainer import EpochCounters, Trainer, parameter_count
from gradherd.lab.train.tuning import hold_out
from gradherd.lab.train.virtual_trainer import VirtualTrainer
from gradherd.ordering.registry import make_policy
from gradherd.sparsify.registry import SPARSIFIERS

log = logging.getLogger("gradherd")

CHECKPOINT_FOLDER = "checkpoints"
"""Name of the folder with a run's checkpoints, inside the run's folder."""
# It is the same run with more epochs, on another device, or with other workers, whose states are
# merged.
CHANGEABLE_SETTINGS = ("epochs", "virtual", "device", "workers")
"""Settings that may change when a run resumes (the record notes other numbers of workers)."""

# Every process has the model, its gradients and the examples.
_MAX_SIZE = 2_000_000
# Elements of gradients below which runs take seconds anyway, and what the calls of a step count as.
_MIN_WORK, _CALLS = 1_000_000_000, 5_000


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """When a run saves itself, and whether it resumes."""

    every: int | None = None
    """Steps between checkpoints; None saves once a minute."""
    resume: bool = False
    """Resume from the newest usable checkpoint, if there is one."""
    poll_seconds: float = 1.0
    """Approximate seconds until all ranks notice that one of them received SIGTERM."""

    def __post_init__(self) -> None:
        if self.every is not None:
            check_whole("every", self.every, 1)


def check_suitable(configs: Sequence[RunConfig]) -> None:
    """Raise ValueError if a run would be refused once its examples are loaded."""
    task = find_task(configs[0].task)
    for config in configs:
        make_policy(config.order)  # BadMethod here, and not on every rank
        if config.augment and not augments(task):
            raise UnsuitableSettings(f"task {task.name!r} has no augmentation: leave out augment")


def run_all(
    configs: Sequence[RunConfig],
    world: World,
    *,
    out: Path | None = None,
    data_dir: Path | None = None,
    progress: Progress | None = None,
    saving: CheckpointOptions | None = None,
) -> list[RunRecord]:
    """Train all runs, on every rank: one after the other, small virtual ones side by side.

    Args:
        configs: Runs of one task with the same data; at least one.
        world: The participating ranks; a single one for virtual runs.
        out: Where rank 0 writes, a folder for each run; None writes nothing.
        data_dir: Folder to search for data first.
        progress: Receives the progress.
        saving: When to save checkpoints; for a single run on real ranks, written into `out` itself.

    Returns:
        The records, in the order of `configs`.

    Raises:
        ValueError: The runs have several tasks, or different data.
    """
    if len({(config.task, config.limit, config.held_out) for config in configs}) > 1:
        raise ValueError("runs that are trained together must have one task and the same data")
    task = find_task(configs[0].task)
    # Once for all runs: they have the same data.
    split = load_split(task, data_dir, configs[0].limit)
    if (share := configs[0].held_out) is not None:
        split = hold_out(split, share)
    progress = progress or Progress()
    steps = sum(count_steps(config, len(split.train[0])) for config in configs)
    records: dict[int, RunRecord] = {}
    progress.begin(len(configs), steps)
    if saving is not None and out is not None and not configs[0].virtual:
        progress.group(configs)
        (config,) = configs
        return [run_with_checkpoints(config, task, split, world, out, saving, progress)]
    groups = _group_runs(configs, task, split)
    pays = configs[0].virtual and pays_in_processes(
        configs, parameter_count(new_model(task)), steps
    )
    cores = usable_cores() if pays else 1
    if cores > 1:
        # Dealt out, not cut: runs of a stack are sorted by what their orders need.
        parts = [part for ids, _ in groups for at in range(cores) if (part := ids[at::cores])]
        done = run_in_processes(
            partial(run_all, world=World.single(), out=out, data_dir=data_dir),
            [[configs[at] for at in part] for part in parts],
            cores,
            progress,
        )
        for part, part_records in zip(parts, done, strict=True):
            records.update(zip(part, part_records, strict=True))
        return [records[at] for at in range(len(configs))]
    for indices, stacked in groups:
        group = [configs[at] for at in indices]
        # A single saved run is written into --out itself, where --resume looks for it.
        folders = [
            None if out is None or world.rank else out if saving else out / config.folder()
            for config in group
        ]
        group_records = _run_group(group, task, split, world, folders, progress, stacked=stacked)
        records.update(zip(indices, group_records, strict=True))
        if group[0].device != "cpu":
            # Frees the GPU for the next group and for other processes. Torch's first imports in a
            # process leave a reference cycle that holds the importing frame, and with it the first
            # trainer.
            gc.collect()
            torch.cuda.empty_cache()
    # Groups are formed by what can be stacked; callers expect their own order.
    return [records[at] for at in range(len(configs))]


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


def pays_in_processes(configs: Sequence[RunConfig], size: int, steps: int) -> bool:
    """Return whether virtual runs are divided among processes: CPU runs of more than a few seconds.

    They have one model of so many parameters, and so many steps together.
    """
    first = configs[0]
    if not first.virtual or first.device != "cpu" or size > _MAX_SIZE or len(configs) < 2:
        return False
    # A step of a small model is mostly calls from Python.
    work = steps * max(size * first.workers, _CALLS)
    return work >= _MIN_WORK and all(_is_known_elsewhere(config) for config in configs)


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


Train = Callable[..., list[RunRecord]]
"""Trains the runs of a part, given its `progress` by name, and returns their records; picklable."""
_progress = Progress()  # in a process of the pool, it sends each call to the one that shows it


def run_in_processes(
    train: Train, parts: Sequence[list[RunConfig]], processes: int, progress: Progress
) -> list[list[RunRecord]]:
    """Train the parts in so many processes; return the records of each.

    Raises:
        Exception: That of the first part that failed; the others are stopped.
    """
    # A server that has imported torch is forked, as for ranks. Not this process: its threads
    # (autograd, OpenMP) hold locks that a copy would wait for forever.
    start_fork_server(run_in_processes)
    messages = multiprocessing.get_context("forkserver").SimpleQueue()

    def show() -> None:
        while not messages.empty():
            name, values = messages.get()
            getattr(progress, name)(*values)

    records: dict[int, list[RunRecord]] = {}
    pool = ("forkserver", _send_progress, messages)
    for at, done in run_parts(partial(_train_part, train), parts, processes, *pool, poll=show):
        if isinstance(done, Exception):
            raise done
        records[at] = done
    return [records[at] for at in range(len(parts))]


def _send_progress(messages: Any) -> None:
    def send(name: str, *values: Any) -> None:
        messages.put((name, values))

    for name in ("group", "step", "epoch"):
        setattr(_progress, name, partial(send, name))


def _train_part(train: Train, part: list[RunConfig]) -> list[RunRecord]:
    return train(part, progress=_progress)


def _run_group(
    group: Sequence[RunConfig],
    task: Task,
    split: Split,
    world: World,
    folders: Sequence[Path | None],
    progress: Progress,
    *,
    stacked: bool,
) -> list[RunRecord]:
    """Train a group of runs to the end; their trainer is gone before the next one is built."""
    trainer: Trainer
    if stacked:
        trainer = StackedTrainer(group, task, split)
    elif group[0].virtual:
        trainer = VirtualTrainer(group[0], task, split)
    else:
        trainer = RankTrainer(group[0], task, split, world)
    size = parameter_count(trainer.model)
    writers = [
        RunWriter(new_record(config, task, split, size), folder)
        for config, folder in zip(group, folders, strict=True)
    ]
    progress.group(group)
    try:
        return run_epochs(trainer, group, writers, progress)
    finally:
        trainer.close()


def _group_runs(
    configs: Sequence[RunConfig], task: Task, split: Split
) -> list[tuple[list[int], bool]]:
    """Return groups of run indices, and whether the runs of a group are stacked."""
    if not configs[0].virtual:
        return [([at], False) for at in range(len(configs))]
    model = new_model(task)
    groups: list[tuple[list[int], bool]] = []
    on_gpu = configs[0].device != "cpu"
    # Costs a forward pass; on a CPU, parameters bound the size of a stack.
    saved = saved_per_example(task, model, split.train) if on_gpu else 0
    for indices in stack_runs(configs, model, saved):
        first = configs[indices[0]]
        reason = why_not_stackable(first, model) or why_not_mean_loss(task, model, split.train)
        if reason is None:
            groups.append((indices, True))
            continue
        log.info("%s is trained alone: %s", first.folder(), reason)
        groups += [([at], False) for at in indices]
    return groups


def run_with_checkpoints(
    config: RunConfig,
    task: Task,
    split: Split,
    world: World,
    out: Path,
    saving: CheckpointOptions,
    progress: Progress,
) -> RunRecord:
    """Train a run into `out` with checkpoints, resuming from them if asked to.

    Raises:
        NoUsableCheckpoint: It should resume, but no checkpoint can be used.
    """
    trainer = RankTrainer(config, task, split, world)
    identity = run_identity(config, split, trainer.model)
    store = CheckpointStore(out / CHECKPOINT_FOLDER, world, identity)
    checkpoint = store.load() if saving.resume else None
    record = new_record(config, task, split, parameter_count(trainer.model))
    if checkpoint is not None:
        before = RunRecord.from_json(checkpoint.shared["record"])
        # [step, workers] of the start, and of each resumption with another number of ranks.
        sizes = before.config.get("world_sizes") or [[0, checkpoint.workers]]
        if checkpoint.workers != config.workers:
            sizes = [*sizes, [checkpoint.step, config.workers]]
        settings = record.config | {"world_sizes": sizes}
        # The record of the checkpoint, not of the folder: that one may be some epochs ahead.
        record = dataclasses.replace(before, status="running", config=settings)
        if world.rank == 0:
            log.info("resuming after step %d", checkpoint.step)
    writer = RunWriter(record, None if world.rank else out)
    checkpointer = Checkpointer(
        store, world, every=saving.every, poll_seconds=saving.poll_seconds, device=config.device
    )
    # The writer holds the record, so the trainer asks for it when it saves.
    trainer.checkpointer, trainer.record = checkpointer, lambda: writer.record.to_json()
    first = 1
    if checkpoint is not None:
        first = trainer.load(checkpoint)
        checkpointer.start_at(checkpoint.step)
        progress.step(checkpoint.step)
    try:
        with checkpointer.handle_sigterm():
            (final,) = run_epochs(
                trainer, [config], [writer], progress, first=first, resumed=checkpoint is not None
            )
        # A final checkpoint lets more epochs follow. Not if nothing was trained: a run resumed with
        # fewer epochs than it has must not overwrite its later checkpoint.
        if writer.record.status == "done" and first <= config.epochs:
            store.save(checkpointer.step, *trainer.state(config.epochs + 1, EpochCounters()))
        return final
    finally:
        trainer.close()


def run_identity(config: RunConfig, split: Split, model: nn.Module) -> dict[str, Any]:
    """Return what a run must have in common with one that it resumes, as JSON values.

    Args:
        config: Its settings; those in CHANGEABLE_SETTINGS are left out.
        split: Its examples, which count by their content.
        model: Its model, which counts by the names and shapes of its parameters.
    """
    settings = {k: v for k, v in dataclasses.asdict(config).items() if k not in CHANGEABLE_SETTINGS}
    settings["task"] = settings["task"].rpartition("/")[2]  # A task's file may have moved.
    digest = hashlib.blake2b(digest_size=8)
    for tensor in split.train:
        # Shape and type, too: the same bytes can be different examples.
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().cpu().numpy().tobytes())
    shapes = [(name, list(p.shape)) for name, p in model.named_parameters()]
    return settings | {
        "model": hashlib.blake2b(repr(shapes).encode(), digest_size=8).hexdigest(),
        "data": digest.hexdigest(),
    }
