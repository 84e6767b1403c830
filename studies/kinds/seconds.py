"""Studies of what an order gains in seconds: both loops compiled, on the same machine, in turn.

Fewer epochs must outweigh slower ones. So an order and random reshuffling train the same model with
the same seed, one after the other, and what counts is the time in which the order comes to where
random reshuffling ends.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import gradherd as gh
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
from gradherd.lab.tasks.task import Split, Task
from gradherd.lab.train.config import RunConfig
from gradherd.lab.train.optimizers import make_optimizer, set_lr
from gradherd.lab.train.trainer import EpochExamples, evaluate, passes

BASELINE = "d-rr"
_WARMUP = 6  # batches that change nothing: compiling is not training


class SecondsStudy(StudyKind):
    """Trains a task by single examples in a plain loop, in an order and in a random one."""

    alone: ClassVar = True
    keys: ClassVar[Mapping[str, Any]] = {
        "order": str,
        "epochs": int,
        "batch_size": int,
        "lr": float,
        "weight_decay": float,
        "lr_warmup": float,
        "lr_schedule": str,
        "augment": bool,
        "autocast": str,
        "limit": int,
    }

    def settings(self, study: Study, arm: Mapping[str, Any]) -> dict[str, Any]:
        """Return the checked settings, and the task."""
        if study.task is None:
            raise ValueError(f"a study of kind {study.kind} needs a task")
        optional = ("weight_decay", "lr_warmup", "lr_schedule", "augment", "autocast", "limit")
        settings = check_settings(self.keys, {**study.settings, **arm}, dict.fromkeys(optional))
        settings["task"] = study.task
        return settings

    def batches(self, runs: Sequence[PlannedRun], context: RunContext) -> list[list[PlannedRun]]:
        """Group runs that are compared with the same one of random reshuffling."""
        return grouped(runs, lambda run: {**run.settings, "order": None})

    def run(self, runs: Sequence[PlannedRun], context: RunContext) -> list[RunOutcome]:
        """Train random reshuffling, then the orders of a batch, one after the other."""
        given = {name: value for name, value in runs[0].settings.items() if value is not None}
        path = task_path(given.pop("task"), context.folder)
        task, own = (
            find_task(path),
            {"workers": 1, "unit": 1, "virtual": True, "device": context.device},
        )
        config = RunConfig.of(path, task.defaults, **given | own, seed=runs[0].seed)
        split = task.load(context.data_dir, config.limit).to(torch.device(context.device))
        orders = dict.fromkeys([BASELINE, *(run.settings["order"] for run in runs)])
        context.progress.begin(len(orders), len(orders) * config.epochs)
        curves = {
            order: train(order, config, task, split, context.progress.step) for order in orders
        }
        return [
            RunOutcome(figures=figures(curves[BASELINE], curves[run.settings["order"]]))
            for run in runs
        ]


Curve = dict[str, list[float]]
"""Seconds of training until the end of each epoch, train loss and metric after it."""


def train(
    order: str, config: RunConfig, task: Task, split: Split, on_epoch: Callable[[], None]
) -> Curve:
    """Train with single examples in an order; seconds are those of the loop alone."""
    device = torch.device(config.device)
    torch.manual_seed(config.seed)
    net = task.model().to(device).train()
    model = net
    if device.type == "cuda":
        model = torch.compile(net, fullgraph=True, mode="reduce-overhead")  # type: ignore[assignment]
    optimizer = make_optimizer(list(net.parameters()), config)
    examples = EpochExamples(config, task, split.train)
    places = TensorDataset(torch.arange(len(split.train[0])))
    options: dict[str, Any] = {"batch_size": config.batch_size, "drop_last": True}
    sampler = gh.OrderedSampler(places, order, seed=config.seed, **options)
    herd = gh.attach(model, order=sampler)
    loader = DataLoader(places, sampler=sampler, **options)

    def backward(batch: Tensor) -> None:
        with passes(config):
            loss = task.loss(model, *(tensor[batch] for tensor in examples.tensors))
        loss.backward()

    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with herd.pause():
        for _ in range(_WARMUP):
            backward(torch.arange(config.batch_size, device=device))
            optimizer.zero_grad()
    net.load_state_dict(state)
    curve: Curve = {"seconds": [], "train_loss": [], "metric": []}
    seconds = 0.0
    for epoch in range(1, config.epochs + 1):
        examples.begin_epoch(epoch)
        sampler.set_epoch(epoch - 1)
        _wait(device)
        begin = time.perf_counter()
        for at, (batch,) in enumerate(loader):
            backward(batch.to(device))
            set_lr(optimizer, config.lr_at(epoch, at, len(loader)))
            optimizer.step()
            optimizer.zero_grad()
        _wait(device)
        seconds += time.perf_counter() - begin
        with passes(config):
            found = evaluate(config, task, net, split)
        net.train()
        curve["seconds"].append(seconds)
        curve["train_loss"].append(float("nan" if found.loss is None else found.loss))
        curve["metric"].append(float("nan" if found.metric is None else found.metric))
        on_epoch()
    herd.detach()
    return curve


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def figures(plain: Curve, own: Curve) -> dict[str, Any]:
    """Return what the order has gained; times are shares of random reshuffling's whole time.

    >>> plain = {"seconds": [2.0, 4.0], "train_loss": [0.9, 0.5], "metric": [60.0, 70.0]}
    >>> own = {"seconds": [3.0, 6.0], "train_loss": [0.4, 0.3], "metric": [59.0, 69.0]}
    >>> found = figures(plain, own)["summary"]
    >>> found["time_to_loss"], found["time_to_metric"], found["epoch_time"]
    (0.75, None, 1.5)
    """
    whole = plain["seconds"][-1]
    loss, metric = plain["train_loss"][-1], plain["metric"][-1]

    def time_until(reached: Iterable[bool]) -> float | None:
        return next(
            (s / whole for s, yes in zip(own["seconds"], reached, strict=True) if yes), None
        )

    summary = {
        "time_to_loss": time_until(one <= loss for one in own["train_loss"]),
        "time_to_metric": time_until(one >= metric for one in own["metric"]),
        # Medians: in the first epoch of an order, layers are chosen and compiled once more.
        "epoch_time": _epoch(own) / _epoch(plain),
        "loss_ratio": own["train_loss"][-1] / loss,
        "metric_gain": own["metric"][-1] - metric,
        "seconds": own["seconds"][-1],
    }
    return {"series": own, "summary": summary}


def _epoch(curve: Curve) -> float:
    ends = curve["seconds"]
    return statistics.median(b - a for a, b in zip([0.0, *ends], ends, strict=False))
