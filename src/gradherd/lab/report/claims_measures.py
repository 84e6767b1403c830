"""What is measured of each run of a study, by the names that claims and figures use.

Runs that train have the measures below; all others have the numbers of their summary.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from gradherd.lab.report.arms import late_epochs, values_at
from gradherd.lab.report.claims_words import OF_EPOCHS, words_of
from gradherd.lab.report.pairs import first_at_or_below
from gradherd.lab.report.stats import number, spread
from gradherd.lab.study.results import RunResult
from gradherd.lab.study.spec import PAIRED
from gradherd.lab.train.record import RunRecord

BySeed = Mapping[int, float | None]
"""A figure of each seed; None where a run has none, as when it diverged."""
_SUMS = ("bytes", "ordering_bytes", "seconds")
MEASURES = (*OF_EPOCHS, *(f"late_{one}" for one in OF_EPOCHS), *_SUMS, "density_off", *PAIRED)
"""All of runs that train."""
ALWAYS = ("train_loss", "late_train_loss", "metric", "late_metric", *PAIRED)
"""Measures that every run has unless it diverged or never got there: lacking them is a finding."""


@dataclass(frozen=True)
class Measured:
    """A measure of an arm, and of what it is held against."""

    arm: BySeed
    against: BySeed | None
    higher_is_better: bool
    of: str
    """What it is, in words."""
    in_percent: bool = False
    """Whether its figures are, so that they differ by points."""

    @property
    def there(self) -> bool:
        """Whether some run has it; what is too dear to watch, no run has."""
        arms = (self.arm, {0: 0.0} if self.against is None else self.against)
        return all(any(value is not None for value in arm.values()) for arm in arms)


def measured(
    name: str, epoch: int | None, arm: Sequence[RunResult], against: Sequence[RunResult] | None
) -> Measured:
    """Return a measure of each seed; ValueError if there is no such measure."""
    if "summary" in arm[0].figures:
        there = None if against is None else _summary(name, against)
        return Measured(_summary(name, arm), there, False, words_of(name))
    runs = [one.record() for one in arm]
    others = None if against is None else [one.record() for one in against]
    higher = name in ("metric", "late_metric") and runs[0].higher_is_better
    when = "after the last epoch" if epoch is None else f"after epoch {epoch}"
    words = words_of(name, runs[0].metric_name, when)
    if name in PAIRED:
        if others is None:
            raise ValueError(f"{name} needs an arm to be held against")
        if name == "epochs_to_final":
            reached = epochs_to_final(runs, others)
            return Measured(reached, epochs_to_final(others, others), False, words)
        shares = epochs_share(runs, others)
        return Measured(shares, dict.fromkeys(shares, 1.0), False, words)
    there = None if others is None else of_runs(name, epoch, others)
    percent = in_percent(name, runs[0].metric_name)
    return Measured(of_runs(name, epoch, runs), there, higher, words, percent)


def in_percent(name: str, metric: str) -> bool:
    """Return whether a measure is a metric in percent."""
    return name in ("metric", "late_metric") and "%" in metric


def share_more(here: float, there: float, in_percent: bool = False) -> float | None:
    """Return by which share one is more than the other; None if that cannot be said.

    >>> share_more(3.0, 2.0), share_more(62.0, 60.0, in_percent=True), share_more(1.0, 0.0)
    (0.5, 0.02, None)
    """
    if in_percent:
        return (here - there) / 100
    if there:
        return here / there - 1
    return 0.0 if here == there else None


def of_runs(name: str, epoch: int | None, runs: Sequence[RunRecord]) -> dict[int, float | None]:
    """Return a measure of runs that trained.

    `late_...` is the mean over the last half of the epochs, `bytes` and the like add up.
    """
    end = max(len(run.epochs) for run in runs) if epoch is None else epoch
    seeds = [run.seed for run in runs]
    if name in _SUMS:
        sums = [sum(getattr(row, name) for row in run.epochs[:end]) for run in runs]
        return dict(zip(seeds, sums, strict=True))
    if name == "density_off":
        return {run.seed: _density_off(run, end) for run in runs}
    field = name.removeprefix("late_")
    if field not in OF_EPOCHS:
        raise ValueError(f"unknown measure {name!r}; known are {', '.join(MEASURES)}")
    epochs = (late_epochs(end) or [end]) if name.startswith("late_") else [end]
    by_epoch = [values_at(runs, one, attrgetter(field)) for one in epochs]
    means = [spread(values).mean for values in zip(*by_epoch, strict=True)]
    return dict(zip(seeds, means, strict=True))


def _density_off(run: RunRecord, end: int) -> float | None:
    """Return how far the density of an epoch is from the wanted one, as a share, at most."""
    if run.density is None:
        return None
    return max(abs(row.density / run.density - 1) for row in run.epochs[:end])


def epochs_share(runs: Sequence[RunRecord], others: Sequence[RunRecord]) -> dict[int, float | None]:
    """Return how soon each run is at its other's best loss, as a share of what that one took."""
    reached, took = (_epochs_to(some, others, _best) for some in (runs, others))
    both = {seed: (at, took[seed]) for seed, at in reached.items()}
    return {seed: at / own if at and own else None for seed, (at, own) in both.items()}


def epochs_to_final(
    runs: Sequence[RunRecord], others: Sequence[RunRecord]
) -> dict[int, float | None]:
    """Return after how many epochs each run is at its other's final loss for the first time."""
    return dict(_epochs_to(runs, others, _final))


def _epochs_to(
    runs: Sequence[RunRecord],
    others: Sequence[RunRecord],
    target: Callable[[RunRecord], float | None],
) -> dict[int, int | None]:
    """Return when each run is at a loss of its other, the run with the same seed.

    None for a run that never is there, or whose other diverged.
    """
    losses = {run.seed: target(run) for run in others}
    found: dict[int, int | None] = {}
    for run in runs:
        if run.seed in losses:
            loss = losses[run.seed]
            mine = [row.train_loss for row in run.epochs]
            found[run.seed] = None if loss is None else first_at_or_below(mine, loss)
    return found


def _best(run: RunRecord) -> float | None:
    known = [row.train_loss for row in run.epochs if row.train_loss is not None]
    return min(known) if known and len(known) == len(run.epochs) else None


def _final(run: RunRecord) -> float | None:
    return run.epochs[-1].train_loss if run.epochs else None


def _summary(name: str, results: Sequence[RunResult]) -> dict[int, float | None]:
    found = {}
    for one in results:
        summary = one.figures["summary"]
        if name not in summary:
            raise ValueError(f"unknown measure {name!r}; known are {', '.join(summary)}")
        found[one.seed] = number(summary[name])
    return found


def mean_by_seed(values: BySeed) -> float | None:
    """Return the mean, None if a run has no figure."""
    known = [value for value in values.values() if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None
