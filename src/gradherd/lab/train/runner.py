"""Running the runs of a comparison, and resuming a run from its checkpoints."""

import dataclasses
import gc
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradherd.comm.world import World
from gradherd.lab.tasks.registry import find_task
from gradherd.lab.tasks.task import Split, Task, carries_state, load_split
from gradherd.lab.train.checkpoint import Checkpointer, CheckpointStore, LoadedCheckpoint
from gradherd.lab.train.config import RunConfig, count_steps
from gradherd.lab.train.loop import Progress, RunWriter, new_record, run_epochs
from gradherd.lab.train.process_runs import divide, run_in_processes, usable_cores
from gradherd.lab.train.rank_trainer import RankTrainer
from gradherd.lab.train.record import RunRecord
from gradherd.lab.train.stacked_trainer import StackedTrainer
from gradherd.lab.train.stacking import (
    saved_per_example,
    stack_runs,
    why_not_mean_loss,
    why_not_stackable,
)
from gradherd.lab.train.trainer import EpochCounters, Trainer, check_carried
from gradherd.lab.train.tuning import hold_out
from gradherd.lab.train.virtual_trainer import VirtualTrainer

log = logging.getLogger("gradherd")

CHECKPOINT_FOLDER = "checkpoints"
"""Name of the folder with a run's checkpoints, inside the run's folder."""
# It is the same run with more epochs, on another device, or with other workers, whose states are
# merged.
CHANGEABLE_SETTINGS = ("epochs", "virtual", "device", "workers")
"""Settings that may change when a run resumes (the record notes other numbers of workers)."""


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
        if self.every is not None and self.every < 1:
            raise ValueError(f"every must be at least 1 or None, got {self.every}")


def check_suitable(configs: Sequence[RunConfig], data_dir: Path | None = None) -> None:
    """Raise UnsuitableSettings if a run would be refused once its examples are loaded.

    Only tasks that carry a state refuse any; the examples of others are not loaded for this.
    """
    task, examples = find_task(configs[0].task), dict[int | None, int]()
    if not carries_state(task):
        return
    for config in configs:
        if config.limit not in examples:
            examples[config.limit] = len(load_split(task, data_dir, config.limit).train[0])
        check_carried(config, task, examples[config.limit])


def run_all(
    configs: Sequence[RunConfig],
    world: World,
    *,
    out: Path | None = None,
    data_dir: Path | None = None,
    progress: Progress | None = None,
    tensorboard: bool = False,
    saving: CheckpointOptions | None = None,
    stop_at: float | None = None,
) -> list[RunRecord]:
    """Train all runs, on every rank: one after the other, small virtual ones side by side.

    Args:
        configs: Runs of one task with the same data; at least one.
        world: The participating ranks; a single one for virtual runs.
        out: Where rank 0 writes, a folder for each run; None writes nothing.
        data_dir: Folder to search for data first.
        progress: Receives the progress.
        tensorboard: Whether to write TensorBoard events, too.
        saving: When to save checkpoints; for a single run on real ranks, written into `out` itself.
        stop_at: Unix time from which virtual runs stop after their epoch; None trains them all.

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
        task, split = hold_out(task, split, share)
    progress = progress or Progress()
    steps = sum(count_steps(config, len(split.train[0])) for config in configs)
    records: dict[int, RunRecord] = {}
    progress.begin(len(configs), steps)
    if saving is not None and out is not None and not configs[0].virtual:
        progress.group(configs)
        (config,) = configs
        return [
            run_with_checkpoints(
                config, task, split, world, out, saving, progress, tensorboard=tensorboard
            )
        ]
    for indices, stacked in _group_runs(configs, task, split):
        parts = _parts(indices, configs, task, split) if stacked else [indices]
        if len(parts) > 1:
            how = {"out": out, "data_dir": data_dir, "tensorboard": tensorboard}
            records |= _run_parts(parts, configs, progress, **how, stop_at=stop_at)
            continue
        group = [configs[at] for at in indices]
        folders = [_run_folder(out, config, saving is not None, world) for config in group]
        # The trainer gets no name here: it would stay alive while the next one is built.
        group_records = _run_group(
            _make_trainer(group, task, split, world, stacked=stacked),
            group=group,
            task=task,
            split=split,
            folders=folders,
            progress=progress,
            tensorboard=tensorboard,
            stop_at=stop_at,
        )
        records.update(zip(indices, group_records, strict=True))
        if group[0].device != "cpu":
            # Frees the GPU for the next group and for other processes. Torch's first imports in a
            # process leave a reference cycle that holds the importing frame, and with it the first
            # trainer.
            gc.collect()
            torch.cuda.empty_cache()
    # Groups are formed by what can be stacked; callers expect their own order.
    return [records[at] for at in range(len(configs))]


def _parts(
    indices: Sequence[int], configs: Sequence[RunConfig], task: Task, split: Split
) -> list[list[int]]:
    """Return the runs of a stack by the process that trains them."""
    size = sum(p.numel() for p in task.model().parameters())
    steps = sum(count_steps(configs[at], len(split.train[0])) for at in indices)
    return divide(indices, configs, size, steps, usable_cores())


def _run_parts(
    parts: Sequence[Sequence[int]],
    configs: Sequence[RunConfig],
    progress: Progress,
    **how: Any,
) -> dict[int, RunRecord]:
    """Train each part in a process of its own; `how` are arguments of `run_all`."""
    train = partial(_train_apart, **how)
    done = run_in_processes(train, [[configs[at] for at in part] for part in parts], progress)
    return {
        at: record
        for part, records in zip(parts, done, strict=True)
        for at, record in zip(part, records, strict=True)
    }


def _train_apart(group: list[RunConfig], progress: Progress, **how: Any) -> list[RunRecord]:
    """Train the runs of a part, in the process of that part."""
    return run_all(group, World.single(), progress=progress, **how)


def _run_group(
    trainer: Trainer,
    *,
    group: Sequence[RunConfig],
    task: Task,
    split: Split,
    folders: Sequence[Path | None],
    progress: Progress,
    tensorboard: bool,
    stop_at: float | None,
) -> list[RunRecord]:
    """Train a group of runs to the end, and close its trainer."""
    size = sum(p.numel() for p in trainer.model.parameters())
    writers = [
        RunWriter(new_record(config, task, split, size), folder, tensorboard=tensorboard)
        for config, folder in zip(group, folders, strict=True)
    ]
    progress.group(group)
    try:
        return run_epochs(trainer, group, writers, progress, stop_at=stop_at)
    finally:
        trainer.close()


def _make_trainer(
    group: Sequence[RunConfig], task: Task, split: Split, world: World, *, stacked: bool
) -> Trainer:
    if stacked:
        return StackedTrainer(group, task, split)
    if group[0].virtual:
        return VirtualTrainer(group[0], task, split)
    return RankTrainer(group[0], task, split, world)


def _group_runs(
    configs: Sequence[RunConfig], task: Task, split: Split
) -> list[tuple[list[int], bool]]:
    """Return groups of run indices, and whether the runs of a group are stacked."""
    if not configs[0].virtual:
        return [([at], False) for at in range(len(configs))]
    model = task.model()
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


def _run_folder(out: Path | None, config: RunConfig, flat: bool, world: World) -> Path | None:
    if out is None or world.rank:
        return None
    # A single saved run is written into --out itself, where --resume looks for it.
    return out if flat else out / config.folder()


def run_with_checkpoints(
    config: RunConfig,
    task: Task,
    split: Split,
    world: World,
    out: Path,
    saving: CheckpointOptions,
    progress: Progress,
    *,
    tensorboard: bool = False,
) -> RunRecord:
    """Train a run into `out` with checkpoints, resuming from them if asked to.

    Raises:
        NoUsableCheckpoint: It should resume, but no checkpoint can be used.
    """
    trainer = RankTrainer(config, task, split, world)
    identity = run_identity(config, split, trainer.model)
    store = CheckpointStore(out / CHECKPOINT_FOLDER, world, identity, device=config.device)
    checkpoint = store.load() if saving.resume else None
    size = sum(p.numel() for p in trainer.model.parameters())
    record = new_record(config, task, split, size)
    if checkpoint is not None:
        before = RunRecord.from_json(checkpoint.shared["record"])
        world_sizes = _world_sizes(before, checkpoint, config.workers)
        settings = record.config | {"world_sizes": world_sizes}
        # The record of the checkpoint, not of the folder: that one may be some epochs ahead.
        record = dataclasses.replace(before, status="running", config=settings)
        if world.rank == 0:
            log.info("resuming after step %d", checkpoint.step)
    writer = RunWriter(record, None if world.rank else out, tensorboard=tensorboard)
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


def _world_sizes(before: RunRecord, checkpoint: LoadedCheckpoint, workers: int) -> list[list[int]]:
    """Return [step, workers] for the start and each resumption with another number of ranks."""
    known: list[list[int]] = before.config.get("world_sizes") or [[0, checkpoint.workers]]
    return known if checkpoint.workers == workers else [*known, [checkpoint.step, workers]]


def run_identity(config: RunConfig, split: Split, model: nn.Module) -> dict[str, Any]:
    """Return what a run must have in common with one that it resumes, as JSON values.

    Args:
        config: Its settings; those in CHANGEABLE_SETTINGS are left out.
        split: Its examples, which count by their content.
        model: Its model, which counts by the names and shapes of its parameters.
    """
    settings = {k: v for k, v in dataclasses.asdict(config).items() if k not in CHANGEABLE_SETTINGS}
    settings["task"] = settings["task"].rpartition("/")[2]  # A task's file may have moved.
    shapes = [(name, list(p.shape)) for name, p in model.named_parameters()]
    return settings | {
        "model": hashlib.blake2b(repr(shapes).encode(), digest_size=8).hexdigest(),
        "data": _data_digest(split.train),
    }


def _data_digest(tensors: tuple[Tensor, ...]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        # Shape and type, too: the same bytes can be different examples.
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()
