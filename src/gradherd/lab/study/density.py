"""Studies of what a sparsifier sends: density, build-up, padding and residual, step by step.

A small real training with plain averaging gives every worker's gradient at every step; each
sparsifier is shown the same gradients and keeps its own residuals.

Letters: T steps, R workers, D coordinates.
"""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradherd.lab.study.compact import thinned
from gradherd.lab.study.kind import Found, Number, Piece, Where, checked, positive, task_path
from gradherd.lab.study.spec import Study
from gradherd.lab.tasks.registry import find_task
from gradherd.lab.train.steps import flat_grad
from gradherd.sparsify.registry import SPARSIFIERS
from gradherd.sparsify.settings import Sparsify, make_settings
from gradherd.sparsify.virtual_workers import Workers

_POINTS = 32
"""Points of a series."""
_STREAM = ("task", "workers", "batch_size", "steps", "lr", "momentum")
"""What decides the gradients."""


@dataclass(frozen=True)
class Density:
    """Shows recorded gradients to sparsifiers."""

    alone: ClassVar = False
    keys: ClassVar[Mapping[str, Any]] = {
        "sparsify": str,
        "density": Number,
        "method": dict,
        "workers": int,
        "batch_size": int,
        "steps": int,
        "lr": Number,
        "momentum": Number,
    }

    def settings(self, study: Study, arm: Mapping[str, Any]) -> dict[str, Any]:
        """Return them; what the training needs and nothing says comes from the task."""
        if study.task is None:
            raise ValueError("a study of kind density needs a task")
        task = find_task(task_path(study.task, study.folder)).defaults
        base = {
            "density": None,
            "method": None,
            "batch_size": task.batch_size,
            "lr": task.lr,
            "momentum": task.momentum,
        }
        found = checked(self.keys, base, {**study.settings, **arm})
        positive(found, "workers", "steps", "batch_size")
        found["task"] = study.task
        _settings(found)
        return found

    def batches(self, pieces: Sequence[Piece], where: Where) -> list[list[Piece]]:
        """Put together what looks at the same gradients: they are computed once."""
        groups: dict[str, list[Piece]] = {}
        for piece in pieces:
            shared = [piece.seed, *(piece.settings[name] for name in _STREAM)]
            groups.setdefault(json.dumps(shared), []).append(piece)
        return list(groups.values())

    def run(self, pieces: Sequence[Piece], where: Where) -> list[Found]:
        """Train once, and let every sparsifier exchange each step's gradients."""
        first = pieces[0].settings
        where.told.begin(1, first["steps"])
        herds: list[Workers] = []
        steps: list[list[dict[str, Any]]] = [[] for _ in pieces]
        dim = 0
        for grads, layers in gradients(first, pieces[0].seed, where):
            dim = grads.shape[1]
            if not herds:
                herds = [
                    Workers(
                        _settings(piece.settings),
                        dim,
                        len(grads),
                        layers=layers,
                        device=grads.device,
                    )
                    for piece in pieces
                ]
            for herd, told in zip(herds, steps, strict=True):
                herd.step(grads)
                told.append(herd.metrics)
            where.told.step()
        return [
            Found(figures=figures(told, piece.settings["density"] or 1.0), about={"dim": dim})
            for piece, told in zip(pieces, steps, strict=True)
        ]


def gradients(
    settings: Mapping[str, Any], seed: int, where: Where
) -> Iterator[tuple[Tensor, list[int]]]:
    """Train with plain averaging; yield (R, D) gradients of each step, and the layers' lengths."""
    task = find_task(task_path(settings["task"], where.folder))
    split = task.load(where.data_dir, None).to(torch.device(where.device))
    torch.manual_seed(seed)
    model = task.model().to(where.device).train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    layers = [p.numel() for p in parameters]
    rule = torch.optim.SGD(parameters, lr=settings["lr"], momentum=settings["momentum"])
    draw = torch.Generator().manual_seed(seed)
    for _ in range(settings["steps"]):
        rows = []
        for _ in range(settings["workers"]):
            picks = torch.randint(len(split.train[0]), (settings["batch_size"],), generator=draw)
            rule.zero_grad()
            task.loss(model, *(c[picks.to(c.device)] for c in split.train)).backward()
            rows.append(flat_grad(parameters))
        grads = torch.stack(rows)
        for p, piece in zip(parameters, grads.mean(0).split(layers), strict=True):
            p.grad = piece.view_as(p)
        rule.step()
        yield grads, layers


def figures(steps: Sequence[Mapping[str, Any]], target: float) -> dict[str, Any]:
    """Return series over steps and what they come to.

    Load and residual are read over the last half: by then they have settled.
    """
    ratios = [step["density"] / target for step in steps]
    off = [abs(ratio - 1) for ratio in ratios]
    late = steps[len(steps) // 2 :]
    names = ("density", "padding", "residual_norm")
    series: dict[str, Any] = {}
    for name in names:
        series["step"], series[name] = thinned([float(step[name]) for step in steps], _POINTS)
    return {
        "series": series,
        "summary": {
            "density_error": statistics.fmean(off),
            "within_tenth": statistics.fmean(one <= 0.1 for one in off),
            "first_ratio": ratios[0],
            "build_up": statistics.fmean(ratios[len(steps) // 2 :]),
            "padding": statistics.fmean(step["padding"] for step in late),
            "residual_norm": statistics.fmean(step["residual_norm"] for step in late),
            "bytes": statistics.fmean(step["bytes"] for step in late),
        },
    }


def _settings(settings: Mapping[str, Any]) -> Sparsify:
    name, density = settings["sparsify"], settings["density"]
    if name == "dense":
        density = None
    elif density is None and name in SPARSIFIERS:
        raise ValueError(f"nothing says the density of {name}")
    return make_settings(name, density, **(settings["method"] or {}))
