"""Studies of what a sparsifier sends: density, build-up, padding and residual, step by step.

A small real training with plain averaging produces every worker's gradient at every step; each
sparsifier sees the same gradients and has its own residuals. So sparsifiers are compared on equal
gradients, which they would not be if each trained its own model.

Letters: R workers, D elements of the gradient.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradherd.lab.study.file import Study
from gradherd.lab.study.kinds import (
    PlannedRun,
    RunContext,
    RunOutcome,
    StudyKind,
    check_settings,
    grouped,
    task_path,
)
from gradherd.lab.tasks.registry import find_task
from gradherd.lab.train.optimizers import flat_grad
from gradherd.sparsify.registry import SPARSIFIERS
from gradherd.sparsify.settings import Sparsify, make_settings
from gradherd.sparsify.virtual_workers import VirtualWorkers

_POINTS = 32
"""Points of a series."""
_GRADIENT_SETTINGS = ("task", "workers", "batch_size", "steps", "lr", "momentum")
"""Settings that determine the gradients."""


class DensityStudy(StudyKind):
    """Feeds the gradients of one training to several sparsifiers."""

    keys: ClassVar[Mapping[str, Any]] = {
        "sparsify": str,
        "density": float,
        "method": dict,
        "workers": int,
        "batch_size": int,
        "steps": int,
        "lr": float,
        "momentum": float,
    }

    def settings(self, study: Study, arm: Mapping[str, Any]) -> dict[str, Any]:
        """Return the checked settings; training settings default to the task's."""
        if study.task is None:
            raise ValueError("a study of kind density needs a task")
        task = find_task(task_path(study.task, study.folder)).defaults
        defaults = {
            "density": None,
            "method": None,
            "batch_size": task.batch_size,
            "lr": task.lr,
            "momentum": task.momentum,
        }
        settings = check_settings(self.keys, {**study.settings, **arm}, defaults)
        settings["task"] = study.task
        # Built once to check it: an invalid method must fail before any run.
        _sparsify(settings)
        return settings

    def batches(self, runs: Sequence[PlannedRun], context: RunContext) -> list[list[PlannedRun]]:
        """Group runs on the same gradients, which are computed once."""
        return grouped(runs, lambda run: [run.settings[name] for name in _GRADIENT_SETTINGS])

    def run(self, runs: Sequence[PlannedRun], context: RunContext) -> list[RunOutcome]:
        """Train once, and let every sparsifier exchange each step's gradients."""
        first = runs[0].settings
        context.progress.begin(1, first["steps"])
        exchanges: list[VirtualWorkers] = []
        metrics: list[list[dict[str, Any]]] = [[] for _ in runs]
        dim = 0
        for grads, layers in gradients(first, runs[0].seed, context):
            dim = grads.shape[1]
            # The number of elements and the device are known with the first gradient.
            if not exchanges:
                exchanges = [
                    VirtualWorkers(
                        _sparsify(run.settings),
                        dim,
                        len(grads),
                        layers=layers,
                        device=grads.device,
                    )
                    for run in runs
                ]
            for exchange, steps in zip(exchanges, metrics, strict=True):
                # Its mean is not applied: all sparsifiers must see equal gradients.
                exchange.step(grads)
                steps.append(exchange.metrics)
            context.progress.step()
        return [
            RunOutcome(
                figures=density_figures(steps, run.settings["density"] or 1.0), about={"dim": dim}
            )
            for run, steps in zip(runs, metrics, strict=True)
        ]


def gradients(
    settings: Mapping[str, Any], seed: int, context: RunContext
) -> Iterator[tuple[Tensor, list[int]]]:
    """Train with plain averaging, and yield the gradients of each step.

    Args:
        settings: Task, workers, batch size, steps, learning rate and momentum.
        seed: Seed of the weights and of the examples.
        context: Device and data.

    Yields:
        (R, D) gradients, and the length of each parameter, in model order.
    """
    task = find_task(task_path(settings["task"], context.folder))
    split = task.load(context.data_dir, None).to(torch.device(context.device))
    torch.manual_seed(seed)
    model = task.model().to(context.device).train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    layers = [p.numel() for p in parameters]
    optimizer = torch.optim.SGD(parameters, lr=settings["lr"], momentum=settings["momentum"])
    # On the CPU whatever the device is: the same seed draws the same examples everywhere.
    generator = torch.Generator().manual_seed(seed)
    for _ in range(settings["steps"]):
        # One model serves all workers: they would hold equal weights anyway.
        rows = []
        for _ in range(settings["workers"]):
            picks = torch.randint(
                len(split.train[0]), (settings["batch_size"],), generator=generator
            )
            # Each worker's gradient by itself: the mean is put into p.grad afterwards.
            optimizer.zero_grad()
            task.loss(model, *(c[picks.to(c.device)] for c in split.train)).backward()
            rows.append(flat_grad(parameters))
        grads = torch.stack(rows)
        for p, mean in zip(parameters, grads.mean(0).split(layers), strict=True):
            p.grad = mean.view_as(p)
        optimizer.step()
        yield grads, layers


def density_figures(steps: Sequence[Mapping[str, Any]], target: float) -> dict[str, Any]:
    """Return series over steps and their summary.

    Build-up, padding, residual and bytes are means over the last half, when they have settled.

    Args:
        steps: Metrics of each step.
        target: The density that was asked for.
    """
    # Relative to the target, so that densities of 0.1 and 0.001 can be compared.
    ratios = [step["density"] / target for step in steps]
    errors = [abs(ratio - 1) for ratio in ratios]
    # Thresholds and residuals start from nothing and need some steps to settle.
    late = steps[len(steps) // 2 :]
    series: dict[str, Any] = {}
    for name in ("density", "padding", "residual_norm"):
        series["step"], series[name] = downsample([float(step[name]) for step in steps])
    return {
        "series": series,
        "summary": {
            "density_error": statistics.fmean(errors),
            "within_tenth": statistics.fmean(one <= 0.1 for one in errors),
            "first_ratio": ratios[0],
            "build_up": statistics.fmean(ratios[len(steps) // 2 :]),
            "padding": statistics.fmean(step["padding"] for step in late),
            "residual_norm": statistics.fmean(step["residual_norm"] for step in late),
            "bytes": statistics.fmean(step["bytes"] for step in late),
        },
    }


def downsample(values: Sequence[float], max_points: int = _POINTS) -> tuple[list[int], list[float]]:
    """Return the start and the mean of each of at most `max_points` bins of a series.

    >>> downsample([1.0, 3.0, 5.0, 7.0, 9.0], max_points=3)
    ([0, 2, 4], [2.0, 6.0, 9.0])
    """
    # Rounded up: at most `max_points` bins, the last of which may be short.
    width = -(-len(values) // max_points) if values else 1
    starts = list(range(0, len(values), width))
    # Means of bins, not samples: a spike between two samples would be lost.
    return starts, [statistics.fmean(values[at : at + width]) for at in starts]


def _sparsify(settings: Mapping[str, Any]) -> Sparsify:
    name, density = settings["sparsify"], settings["density"]
    if name == "dense":
        density = None
    elif density is None and name in SPARSIFIERS:
        raise ValueError(f"no density is set for {name}")
    return make_settings(name, density, **(settings["method"] or {}))
