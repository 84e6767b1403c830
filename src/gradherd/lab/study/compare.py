"""Studies that train: arms are orders, sparsifiers and settings of one task.

All workers of a run are in one process: losses, orders and bytes are those of real ones.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from gradherd.comm.world import World
from gradherd.lab.study.compact import about, columns
from gradherd.lab.study.kind import Found, Number, Piece, Where, checked, task_path
from gradherd.lab.study.spec import Study
from gradherd.lab.tasks.registry import find_task
from gradherd.lab.train.config import RunConfig
from gradherd.lab.train.plan import run_all
from gradherd.lab.train.stacks import kept_by, stacks


@dataclass(frozen=True)
class Compare:
    """Trains."""

    alone: ClassVar = False
    keys: ClassVar[Mapping[str, Any]] = {
        "order": str,
        "sparsify": str,
        "density": Number,
        "method": dict,
        "workers": int,
        "batch_size": int,
        "unit": int,
        "rows": str,
        "sketch_size": int,
        "epochs": int,
        "optimizer": str,
        "lr": Number,
        "momentum": Number,
        "weight_decay": Number,
        "clip": Number,
        "lr_drop": Number,
        "lr_drop_every": int,
        "limit": int,
    }

    def settings(self, study: Study, arm: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of RunConfig."""
        if study.task is None:
            raise ValueError("a study of kind compare needs a task")
        given = checked(self.keys, dict.fromkeys(self.keys), {**study.settings, **arm})
        if given.get("sparsify") in (None, "dense"):
            given["density"] = None
        chosen = {name: value for name, value in given.items() if value is not None}
        defaults = find_task(task_path(study.task, study.folder)).defaults
        config = RunConfig.of(study.task, defaults, **chosen)
        own = dataclasses.asdict(config)
        return {k: v for k, v in own.items() if k not in ("seed", "virtual", "device")}

    def batches(self, pieces: Sequence[Piece], where: Where) -> list[list[Piece]]:
        """Put runs together that can go side by side."""
        if not pieces:
            return []
        task = find_task(task_path(pieces[0].settings["task"], where.folder))
        model, kept = task.model(), 0
        if where.device != "cpu":  # A GPU holds whole steps of a stack at once.
            split = task.load(where.data_dir, pieces[0].settings["limit"])
            kept = kept_by(task, model, split.train)
        configs = [_config(piece, where) for piece in pieces]
        return [[pieces[at] for at in places] for places in stacks(configs, model, kept)]

    def run(self, pieces: Sequence[Piece], where: Where) -> list[Found]:
        """Train them."""
        configs = [_config(piece, where) for piece in pieces]
        before = torch.get_num_threads()
        torch.set_num_threads(1)  # Small steps gain nothing from more, and bits are those of ranks.
        try:
            records = run_all(configs, World.single(), data_dir=where.data_dir, progress=where.told)
        finally:
            torch.set_num_threads(before)
        return [Found(figures=columns(one), about=about(one), status=one.status) for one in records]


def _config(piece: Piece, where: Where) -> RunConfig:
    settings = {**piece.settings, "task": task_path(piece.settings["task"], where.folder)}
    return RunConfig(**settings, seed=piece.seed, virtual=True, device=where.device)
