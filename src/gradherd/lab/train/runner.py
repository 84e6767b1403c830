"""Running the runs of a comparison, and resuming a run from its checkpoints."""

import dataclasses
import gc
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradherd.comm.world import World
from gradherd.lab.tasks.registry import find_task
from gradherd.lab.tasks.task import Split, Task
from gradherd.lab.train.checkpoint import CheckpointStore, LoadedCheckpoint
from gradherd.lab.train.checkpoint_schedule import Checkpointer
from gradherd.lab.train.config import RunConfig, count_steps
from gradherd.lab.train.loop import Progress, RunWriter, new_record, run_epochs
from gradherd.lab.train.rank_trainer import RankTrainer
from gradherd.lab.train.record import RunRecord
from gradherd.lab.train.stacked_trainer import StackedTrainer
from gradherd.lab.train.stacking import (
    saved_per_example,
    stack_runs,
    why_not_mean_loss,
    why_not_stackable,
)
from gradherd.lab.train.trainer import EpochCounters, Trainer
from gradherd.lab.train.virtual_trainer import VirtualTrainer

log = logging.getLogger("gradherd")


CHECKPOINT_FOLDER = "checkpoints"
"""Where a run's checkpoints lie in its folder."""


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """When a run saves itself, and whether it goes on with what is there."""

    every: int | None = None
    """Steps between checkpoints; None saves once a minute."""
    resume: bool = False
    """Go on with the newest good checkpoint, if there is one."""
    pulse: float = 1.0
    """How many seconds it may take until a rank's SIGTERM is heard by all, about."""

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise ValueError(f"every must be at least 1 or None, got {self.every}")


def run_all(
    configs: Sequence[RunConfig],
    world: World,
    *,
    out: Path | None = None,
    data_dir: Path | None = None,
    progress: Progress | None = None,
    tensorboard: bool = False,
    saving: CheckpointOptions | None = None,
) -> list[RunRecord]:
    """Run all of them, one after the other (small virtual ones side by side), on every rank.

    Records come in the order of `configs`, however the runs were put together.

    Args:
        configs: Runs of one task with the same data; at least one.
        world: The ranks that take part; one rank alone for virtual runs.
        out: Where rank 0 writes, a folder for each run; None writes nothing.
        data_dir: Folder to look for data in first.
        progress: Is told how it goes on.
        tensorboard: Write TensorBoard events, too.
        saving: When the only run, on real ranks, saves itself; it is written right into `out`.
    """
    task = find_task(configs[0].task)
    split = task.load(data_dir, configs[0].limit)
    told = progress or Progress()
    total = sum(count_steps(config, len(split.train[0])) for config in configs)
    records: dict[int, RunRecord] = {}
    told.begin(len(configs), total)
    if saving is not None and out is not None and not configs[0].virtual:
        told.group(configs)
        (config,) = configs
        return [
            run_with_checkpoints(
                config, task, split, world, out, saving, told, tensorboard=tensorboard
            )
        ]
    for places, side_by_side in _group_runs(configs, task, split):
        group = [configs[at] for at in places]
        folders = [_run_folder(out, config, saving is not None, world) for config in group]
        # No name for the fleet: it would be there until the next one is.
        made = _run_group(
            _make_trainer(group, task, split, world, side_by_side=side_by_side),
            group=group,
            task=task,
            split=split,
            folders=folders,
            told=told,
            tensorboard=tensorboard,
        )
        if group[0].device != "cpu":
            # For the next group, and for others on the same GPU. Torch's first imports of a
            # process leave a cycle that holds who asked for them, and with it the first fleet.
            gc.collect()
            torch.cuda.empty_cache()
        records.update(zip(places, made, strict=True))
    return [records[at] for at in range(len(configs))]


def _run_group(
    fleet: Trainer,
    *,
    group: Sequence[RunConfig],
    task: Task,
    split: Split,
    folders: Sequence[Path | None],
    told: Progress,
    tensorboard: bool,
) -> list[RunRecord]:
    """Run a group to its end, and let go of what its fleet holds."""
    size = sum(p.numel() for p in fleet.model.parameters())
    journals = [
        RunWriter(new_record(config, task, split, size), folder, tensorboard=tensorboard)
        for config, folder in zip(group, folders, strict=True)
    ]
    told.group(group)
    try:
        return run_epochs(fleet, group, journals, told)
    finally:
        fleet.close()


def _make_trainer(
    group: Sequence[RunConfig], task: Task, split: Split, world: World, *, side_by_side: bool
) -> Trainer:
    if side_by_side:
        return StackedTrainer(group, task, split)
    if group[0].virtual:
        return VirtualTrainer(group[0], task, split)
    return RankTrainer(group[0], task, split, world)


def _group_runs(
    configs: Sequence[RunConfig], task: Task, split: Split
) -> list[tuple[list[int], bool]]:
    """Return the places of runs in groups, and whether a group's go side by side."""
    if not configs[0].virtual:
        return [([at], False) for at in range(len(configs))]
    model = task.model()
    groups: list[tuple[list[int], bool]] = []
    on_gpu = configs[0].device != "cpu"
    kept = saved_per_example(task, model, split.train) if on_gpu else 0
    for places in stack_runs(configs, model, kept):
        first = configs[places[0]]
        why = why_not_stackable(first, model) or why_not_mean_loss(task, model, split.train)
        if why is None:
            groups.append((places, True))
            continue
        log.info("%s trains alone: %s", first.folder(), why)
        groups += [([at], False) for at in places]
    return groups


def _run_folder(out: Path | None, config: RunConfig, flat: bool, world: World) -> Path | None:
    if out is None or world.rank:
        return None
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
    """Train a run into `out`, saving it as `saving` says."""
    fleet = RankTrainer(config, task, split, world)
    checkpoints = CheckpointStore(
        out / CHECKPOINT_FOLDER,
        world,
        run_identity(config, split, fleet.model),
        device=config.device,
    )
    loaded = checkpoints.load() if saving.resume else None
    size = sum(p.numel() for p in fleet.model.parameters())
    record = new_record(config, task, split, size)
    if loaded is not None:
        before = RunRecord.from_json(loaded.shared["record"])
        settings = record.config | {"world_sizes": _world_sizes(before, loaded, config.workers)}
        record = dataclasses.replace(before, status="running", config=settings)
        if world.rank == 0:
            log.info("going on after step %d", loaded.step)
    journal = RunWriter(record, None if world.rank else out, tensorboard=tensorboard)
    keeper = Checkpointer(
        checkpoints, world, every=saving.every, pulse=saving.pulse, device=config.device
    )
    fleet.keeper, fleet.record = keeper, lambda: journal.record.to_json()
    first = 1
    if loaded is not None:
        first = fleet.load(loaded)
        keeper.begin(loaded.step)
        progress.step(loaded.step)
    try:
        with keeper.listening():
            (found,) = run_epochs(
                fleet, [config], [journal], progress, first=first, resumed=loaded is not None
            )
        trained = first <= config.epochs  # else the checkpoint says more than we could
        if journal.record.status == "done" and trained:  # More epochs may follow.
            checkpoints.save(keeper.step, *fleet.state(config.epochs + 1, EpochCounters()))
        return found
    finally:
        fleet.close()


def _world_sizes(before: RunRecord, loaded: LoadedCheckpoint, workers: int) -> list[list[int]]:
    """Return [step, workers] for each time that a run went on with another number of ranks."""
    known: list[list[int]] = before.config.get("world_sizes") or [[0, loaded.workers]]
    return known if loaded.workers == workers else [*known, [loaded.step, workers]]


CHANGEABLE_SETTINGS = ("epochs", "virtual", "device", "workers")
"""Settings that may change when a run goes on (another number of workers is told)."""


def run_identity(config: RunConfig, split: Split, model: nn.Module) -> dict[str, Any]:
    """Return what a run must have in common with one that it continues."""
    settings = {k: v for k, v in dataclasses.asdict(config).items() if k not in CHANGEABLE_SETTINGS}
    settings["task"] = settings["task"].rpartition("/")[2]  # its file may have moved
    shapes = [(name, list(p.shape)) for name, p in model.named_parameters()]
    return settings | {
        "model": hashlib.blake2b(repr(shapes).encode(), digest_size=8).hexdigest(),
        "data": _data_digest(split.train),
    }


def _data_digest(columns: tuple[Tensor, ...]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for column in columns:
        digest.update(f"{column.dtype} {tuple(column.shape)}".encode())
        digest.update(column.contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()
