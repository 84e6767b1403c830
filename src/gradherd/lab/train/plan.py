"""Which runs make a comparison, and running them all."""

import gc
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gradherd.comm.world import World
from gradherd.lab.tasks.registry import find_task
from gradherd.lab.tasks.task import Defaults, Split, Task
from gradherd.lab.train.batched import BatchedFleet
from gradherd.lab.train.config import RunConfig
from gradherd.lab.train.fleet import Fleet
from gradherd.lab.train.journal import Journal
from gradherd.lab.train.loop import Progress, new_record, run_epochs
from gradherd.lab.train.ranks import RankFleet
from gradherd.lab.train.record import RunRecord
from gradherd.lab.train.resume import Saving, run_saved
from gradherd.lab.train.stacks import kept_by, stacks, why_no_mean, why_not
from gradherd.lab.train.virtual import VirtualFleet
from gradherd.ordering.sharding import UnitSharding

log = logging.getLogger("gradherd")


def plan(
    task: str,
    defaults: Defaults,
    *,
    orders: Sequence[str],
    sparsifiers: Sequence[str],
    density: float | None,
    seeds: Sequence[int],
    **chosen: Any,
) -> list[RunConfig]:
    """Return a run for each seed and each arm; the arms of a seed stand together.

    A comparison that is broken off then has whole pairs.

    >>> from gradherd.lab.tasks.digits import Digits
    >>> runs = plan("digits", Digits.defaults, orders=["d-rr", "cd-grab"],
    ...             sparsifiers=["dense"], density=None, seeds=[0, 1])
    >>> [(run.seed, run.order) for run in runs]
    [(0, 'd-rr'), (0, 'cd-grab'), (1, 'd-rr'), (1, 'cd-grab')]
    """
    return [
        RunConfig.of(
            task,
            defaults,
            order=order,
            sparsify=sparsify,
            density=None if sparsify == "dense" else density,
            seed=seed,
            **chosen,
        )
        for seed in seeds
        for order in orders
        for sparsify in sparsifiers
    ]


def steps_of(config: RunConfig, examples: int) -> int:
    """Return how many steps a run takes."""
    deal = UnitSharding(examples, config.unit, config.workers, drop_last=False)
    return -(-deal.length * config.unit // config.batch_size) * config.epochs


def run_all(
    configs: Sequence[RunConfig],
    world: World,
    *,
    out: Path | None = None,
    data_dir: Path | None = None,
    progress: Progress | None = None,
    tensorboard: bool = False,
    saving: Saving | None = None,
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
    total = sum(steps_of(config, len(split.train[0])) for config in configs)
    records: dict[int, RunRecord] = {}
    told.begin(len(configs), total)
    if saving is not None and out is not None and not configs[0].virtual:
        told.group(configs)
        (config,) = configs
        return [run_saved(config, task, split, world, out, saving, told, tensorboard=tensorboard)]
    for places, side_by_side in _groups(configs, task, split):
        group = [configs[at] for at in places]
        folders = [_folder(out, config, saving is not None, world) for config in group]
        # No name for the fleet: it would be there until the next one is.
        made = _run_group(
            _fleet(group, task, split, world, side_by_side=side_by_side),
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
    fleet: Fleet,
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
        Journal(new_record(config, task, split, size), folder, tensorboard=tensorboard)
        for config, folder in zip(group, folders, strict=True)
    ]
    told.group(group)
    try:
        return run_epochs(fleet, group, journals, told)
    finally:
        fleet.close()


def _fleet(
    group: Sequence[RunConfig], task: Task, split: Split, world: World, *, side_by_side: bool
) -> Fleet:
    if side_by_side:
        return BatchedFleet(group, task, split)
    if group[0].virtual:
        return VirtualFleet(group[0], task, split)
    return RankFleet(group[0], task, split, world)


def _groups(configs: Sequence[RunConfig], task: Task, split: Split) -> list[tuple[list[int], bool]]:
    """Return the places of runs in groups, and whether a group's go side by side."""
    if not configs[0].virtual:
        return [([at], False) for at in range(len(configs))]
    model = task.model()
    groups: list[tuple[list[int], bool]] = []
    on_gpu = configs[0].device != "cpu"
    kept = kept_by(task, model, split.train) if on_gpu else 0
    for places in stacks(configs, model, kept):
        first = configs[places[0]]
        why = why_not(first, model) or why_no_mean(task, model, split.train)
        if why is None:
            groups.append((places, True))
            continue
        log.info("%s trains alone: %s", first.folder(), why)
        groups += [([at], False) for at in places]
    return groups


def _folder(out: Path | None, config: RunConfig, flat: bool, world: World) -> Path | None:
    if out is None or world.rank:
        return None
    return out if flat else out / config.folder()
