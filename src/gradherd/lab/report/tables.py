"""A comparison as a table: one row for each arm, for the page and for the terminal."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gradherd.lab.report.model import Comparison, Difference, Pair
from gradherd.lab.report.wording import places_for, same_clock
from gradherd.lab.text import counted, fixed, in_bytes, in_seconds, mean_and_std, p_value


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One field."""

    text: str
    more: tuple[str, ...] = ()
    """Small print below it, line by line."""
    best: bool = False


@dataclass(frozen=True, kw_only=True)
class Table:
    """Column names, and one row of cells for each arm; the first cell is the arm's name."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


def table_of(comparison: Comparison) -> Table:
    """Return the table of a comparison."""
    late = any(pair.late_loss is not None for pair in comparison.pairs)
    makers: dict[str, Callable[[Comparison], list[Cell]]] = {
        "arm": lambda c: [Cell(text=arm.label) for arm in c.arms],
        "seeds": _seeds,
        "final loss": _loss,
        comparison.metric_name: _metric,
        f"loss − baseline{', last half' if late else ''}": _loss_difference,  # noqa: RUF001
        "metric − baseline": lambda c: [_difference(p, p.metric, c) for p in c.pairs],  # noqa: RUF001
        "epochs to baseline's final loss": _epochs_to,
        "seconds to it": lambda c: _seconds([p.seconds_to for p in c.pairs], c),
        "bytes to it": lambda c: _amounts([p.bytes_to for p in c.pairs], in_bytes),
        "seconds in all": lambda c: _seconds([arm.seconds for arm in c.arms], c),
        "bytes in all": lambda c: _amounts([arm.bytes for arm in c.arms], in_bytes),
    }
    if any(arm.density is not None for arm in comparison.arms):
        makers["density"] = _density
    columns = [make(comparison) for make in makers.values()]
    return Table(columns=tuple(makers), rows=tuple(zip(*columns, strict=True)))


def best_of(values: Sequence[float | None], *, lower: bool = True) -> set[int]:
    """Return which values are best; none where all are equal or only one is known.

    >>> sorted(best_of([2.0, None, 1.0, 1.0])), best_of([1.0, 1.0]), best_of([1.0, None])
    ([2, 3], set(), set())
    """
    known = [value for value in values if value is not None]
    if len(set(known)) < 2:
        return set()
    best = min(known) if lower else max(known)
    return {index for index, value in enumerate(values) if value == best}


def _seeds(comparison: Comparison) -> list[Cell]:
    cells = []
    for arm in comparison.arms:
        left = len(arm.runs) - len(arm.used)
        more = [f"{left} left out"] if left else []
        more += [] if arm.finished else [f"epoch {arm.epochs}", f"of {arm.planned}"]
        cells.append(Cell(text=str(len(arm.seeds)), more=tuple(more)))
    return cells


def _loss(comparison: Comparison) -> list[Cell]:
    best = best_of([arm.final_loss.mean for arm in comparison.arms])
    return [
        Cell(
            text=mean_and_std(arm.final_loss.mean, arm.final_loss.std, len(arm.seeds)),
            best=index in best,
        )
        for index, arm in enumerate(comparison.arms)
    ]


def _metric(comparison: Comparison) -> list[Cell]:
    means = [arm.final_metric.mean for arm in comparison.arms]
    best = best_of(means, lower=not comparison.higher_is_better)
    return [
        Cell(
            text=mean_and_std(arm.final_metric.mean, arm.final_metric.std, len(arm.seeds)),
            best=index in best,
        )
        for index, arm in enumerate(comparison.arms)
    ]


def _loss_difference(comparison: Comparison) -> list[Cell]:
    some_late = any(pair.late_loss is not None for pair in comparison.pairs)
    cells = []
    for pair in comparison.pairs:
        cell = _difference(pair, pair.late_loss or pair.loss, comparison)
        if some_late and pair.late_loss is None and pair.loss is not None:
            epoch = "the last epoch" if pair.loss.epoch is None else f"epoch {pair.loss.epoch}"
            cell = replace(cell, more=(f"after {epoch}", *cell.more))
        cells.append(cell)
    return cells


def _difference(pair: Pair, found: Difference | None, comparison: Comparison) -> Cell:
    if pair.arm is comparison.baseline:
        return Cell(text="baseline")
    if found is None:
        common = len(pair.common_seeds)
        return Cell(text="–", more=() if common > 1 else (counted(common, "common seed"),))  # noqa: RUF001
    places = places_for(found.mean, found)
    text = fixed(found.mean, places, sign=True)
    if found.low is None or found.high is None:
        return Cell(text=text, more=("the same with each seed",))
    ends = f"{fixed(found.low, places, sign=True)} to {fixed(found.high, places, sign=True)}"
    flips = [] if found.sign_flip_p is None else [f"flips {p_value(found.sign_flip_p)}"]
    return Cell(text=text, more=(ends, p_value(found.p), *flips))


def _epochs_to(comparison: Comparison) -> list[Cell]:
    best = best_of([pair.epochs_to for pair in comparison.pairs])
    cells = []
    for index, pair in enumerate(comparison.pairs):
        text = "never" if pair.epochs_to is None else str(pair.epochs_to)
        cells.append(Cell(text=text, more=_range(pair), best=index in best))
    return cells


def _range(pair: Pair) -> tuple[str, ...]:
    """Return between which epochs the single seeds got there."""
    found = pair.epochs_to_by_seed
    if len(found) < 2 or pair.arm is pair.reference or pair.reference.final_loss.mean is None:
        return ()
    known = [epoch for epoch in found if epoch is not None]
    if not known:
        return ("no seed",)
    never = len(found) - len(known)
    span = str(known[0]) if min(known) == max(known) else f"{min(known)} to {max(known)}"
    return (f"by seed {span}", *([f"{never} never"] if never else []))


def _amounts(values: Sequence[float | None], shown: Callable[[float | None], str]) -> list[Cell]:
    best = best_of(values)
    return [
        Cell(text="–" if value is None else shown(value), best=index in best)  # noqa: RUF001
        for index, value in enumerate(values)
    ]


def _seconds(values: Sequence[float | None], comparison: Comparison) -> list[Cell]:
    """Return seconds; none is the best where clocks cannot be compared."""
    cells = _amounts(values, in_seconds)
    used = [pair for pair in comparison.pairs if pair.arm.used and pair.reference.used]
    if all(same_clock(pair) for pair in used):
        return cells
    return [replace(cell, best=False) for cell in cells]


def _density(comparison: Comparison) -> list[Cell]:
    return [
        Cell(
            text="–" if arm.mean_density is None else f"{arm.mean_density:.3g}",  # noqa: RUF001
            more=() if arm.padding is None else ("padding", f"{arm.padding:.2f}"),
        )
        for arm in comparison.arms
    ]
