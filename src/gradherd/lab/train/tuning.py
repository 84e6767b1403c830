"""Choose the learning rate of each arm on examples that are held out from training."""

import copy
import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor, nn

from gradherd.comm.world import World
from gradherd.lab.tasks.task import Split, Task, UnsuitableSettings
from gradherd.lab.train.config import RunConfig
from gradherd.lab.train.record import RunRecord
from gradherd.lab.train.trainer import full_loss

SEED = 10_000
"""Of runs that tune: beyond those of comparisons, so that more seeds do not change the choice."""
HELD_OUT = 0.2
"""Share of the training examples that rates are compared on."""
# Examples whose loss is computed at once; small enough for the models of our tasks.
_CHUNK = 256


def _judged_by_loss(task: Task) -> Task:
    """Return a task whose metric is the loss on training examples that are held out."""

    def metric(self: Task, model: nn.Module, *tensors: Tensor) -> float:
        loss = full_loss(self, model, tensors, World.single(), _CHUNK)
        return math.nan if loss is None else loss

    own = {"metric_name": "loss on held-out examples", "higher_is_better": False, "metric": metric}
    judged = copy.copy(task)
    object.__setattr__(judged, "__class__", type(type(task).__name__, (type(task),), own))
    return judged


def hold_out(task: Task, split: Split, share: float) -> tuple[Task, Split]:
    """Return the task with the loss on held-out examples as its metric, and these examples.

    Raises:
        UnsuitableSettings: Examples are too few.
    """
    count, exact = len(split.train[0]), Fraction(share).limit_denominator(1000)
    # Evenly spread, since examples may be sorted by class: wherever the share of those up to and
    # with an example reaches another whole number.
    reached = torch.arange(count + 1) * exact.numerator // exact.denominator
    held = reached[1:] > reached[:-1]
    if held.all() or not held.any():
        raise UnsuitableSettings(f"{count} examples are too few to hold out a share of {share}")
    parts = (tuple(tensor[which] for tensor in split.train) for which in (~held, held))
    return _judged_by_loss(task), Split(*parts)


def tuning_runs(configs: Sequence[RunConfig], rates: Sequence[float]) -> list[RunConfig]:
    """Return a run of each arm and rate, on a seed that is not compared."""
    arms = {config.arm: config for config in reversed(configs)}  # the first of each arm
    return [
        dataclasses.replace(config, seed=SEED, lr=rate, held_out=HELD_OUT)
        for config in reversed(arms.values())
        for rate in rates
    ]


def best_rates(
    runs: Sequence[RunConfig], records: Sequence[RunRecord]
) -> dict[tuple[str, str, float | None], float]:
    """Return the rate of each arm with the lowest loss on held-out examples.

    Raises:
        ValueError: All rates of an arm have diverged.
    """
    losses: dict[tuple[str, str, float | None], dict[float, float]] = {}
    for config, record in zip(runs, records, strict=True):
        metric = record.epochs[-1].metric if record.status == "done" else None
        losses.setdefault(config.arm, {})[config.lr] = math.inf if metric is None else metric
    best = {arm: min(rates, key=lambda rate: rates[rate]) for arm, rates in losses.items()}
    for arm, rate in best.items():
        if losses[arm][rate] == math.inf:
            tried = ", ".join(f"{one:g}" for one in losses[arm])
            raise ValueError(
                f"{arm[0]} with {arm[1]} diverges at all of lr={tried}: try lower ones"
            )
    return best


def with_rates(
    configs: Sequence[RunConfig], rates: dict[tuple[str, str, float | None], float]
) -> list[RunConfig]:
    """Return runs with the rates of their arms."""
    return [dataclasses.replace(config, lr=rates[config.arm]) for config in configs]


def what_to_try(record: RunRecord) -> str | None:
    """Return what to do about a run that ends above where it began; None if it does not.

    It has diverged if its loss is not finite, or more than twice what it was.
    """
    last = record.epochs[-1].train_loss if record.epochs else None
    start = record.start_loss
    if record.status != "diverged" and (last is None or start is None or last <= start):
        return None
    how = "has diverged: its loss is not finite"
    if last is not None and start is not None:
        end = "diverged" if last > 2 * abs(start) else "not improved"
        how = f"has {end}: its loss rose from {start:.3g} to {last:.3g}"
    lr, momentum = record.config.get("lr", 0.0), record.config.get("momentum")
    sparse = record.density is not None and " every " not in record.sparsify
    advice = f"try --lr {lr / 3:.2g}, or --lr-warmup 0.05"
    if sparse and momentum:
        advice += ", or --momentum 0: a sparse exchange repeats what momentum repeats already"
    return f"{record.order} with {record.sparsify}, seed {record.seed}, {how}; {advice}"
