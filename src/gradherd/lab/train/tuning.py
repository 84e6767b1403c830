"""Choose the learning rate of each arm on examples that are held out from training."""

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction

import torch

from gradherd.lab.tasks.task import Split, UnsuitableSettings
from gradherd.lab.train.config import RunConfig
from gradherd.lab.train.record import RunRecord

SEED = 10_000
"""Of runs that tune: beyond those of comparisons, so that more seeds do not change the choice."""
HELD_OUT = 0.2
"""Share of the training examples that rates are compared on."""


def hold_out(split: Split, share: float) -> Split:
    """Return the training examples, of which a share is held out and takes the place of the test.

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
    return Split(*parts)


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
