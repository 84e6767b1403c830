"""A run on real ranks that saves itself and goes on where it was saved."""

import dataclasses
import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from gradherd.comm.world import World
from gradherd.lab.tasks.task import Split, Task
from gradherd.lab.train.checkpoint import Checkpoints, Loaded
from gradherd.lab.train.config import RunConfig
from gradherd.lab.train.fleet import Tally
from gradherd.lab.train.journal import Journal
from gradherd.lab.train.keeper import Keeper
from gradherd.lab.train.loop import Progress, new_record, run_epochs
from gradherd.lab.train.ranks import RankFleet
from gradherd.lab.train.record import RunRecord

log = logging.getLogger("gradherd")

FOLDER = "checkpoints"
"""Where a run's checkpoints lie in its folder."""


@dataclass(frozen=True, kw_only=True)
class Saving:
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


def run_saved(
    config: RunConfig,
    task: Task,
    split: Split,
    world: World,
    out: Path,
    saving: Saving,
    progress: Progress,
    *,
    tensorboard: bool = False,
) -> RunRecord:
    """Train a run into `out`, saving it as `saving` says."""
    fleet = RankFleet(config, task, split, world)
    checkpoints = Checkpoints(
        out / FOLDER, world, identity(config, split, fleet.model), device=config.device
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
    journal = Journal(record, None if world.rank else out, tensorboard=tensorboard)
    keeper = Keeper(
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
            checkpoints.save(keeper.step, *fleet.state(config.epochs + 1, Tally()))
        return found
    finally:
        fleet.close()


def _world_sizes(before: RunRecord, loaded: Loaded, workers: int) -> list[list[int]]:
    """Return [step, workers] for each time that a run went on with another number of ranks."""
    known: list[list[int]] = before.config.get("world_sizes") or [[0, loaded.workers]]
    return known if loaded.workers == workers else [*known, [loaded.step, workers]]


FREE = ("epochs", "virtual", "device", "workers")
"""Settings that may change when a run goes on (another number of workers is told)."""


def identity(config: RunConfig, split: Split, model: nn.Module) -> dict[str, Any]:
    """Return what a run must have in common with one that it continues."""
    settings = {k: v for k, v in dataclasses.asdict(config).items() if k not in FREE}
    settings["task"] = settings["task"].rpartition("/")[2]  # its file may have moved
    shapes = [(name, list(p.shape)) for name, p in model.named_parameters()]
    return settings | {
        "model": hashlib.blake2b(repr(shapes).encode(), digest_size=8).hexdigest(),
        "data": _digest(split.train),
    }


def _digest(columns: tuple[Tensor, ...]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for column in columns:
        digest.update(f"{column.dtype} {tuple(column.shape)}".encode())
        digest.update(column.contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()
