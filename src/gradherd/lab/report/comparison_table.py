"""A comparison as a table for page and terminal, and as JSON for programs."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from gradherd.lab.report.comparison import ArmPair, Comparison
from gradherd.lab.report.stats import MeanStd, PairedDifference
from gradherd.lab.report.verdicts import all_verdicts, decimal_places
from gradherd.lab.text import (
    counted,
    fixed,
    in_bytes,
    in_seconds,
    mean_and_std,
    p_value,
    printable,
)

NONE = "–"  # noqa: RUF001
"""An en dash, in cells that have no value."""


@dataclass(frozen=True, kw_only=True)
class TableCell:
    """One cell of the table."""

    text: str
    more: tuple[str, ...] = ()
    """Lines of small print below the text."""
    best: bool = False


@dataclass(frozen=True, kw_only=True)
class ComparisonTable:
    """Column names, and one row of cells per arm; the first cell is the arm's name."""

    columns: tuple[str, ...]
    rows: tuple[tuple[TableCell, ...], ...]


def comparison_table(comparison: Comparison) -> ComparisonTable:
    """Return the table of a comparison: one row per arm, the baseline first.

    It has a column of densities only if an arm is sparse.
    """
    late = any(pair.late_loss is not None for pair in comparison.pairs)
    columns: dict[str, Callable[[Comparison], list[TableCell]]] = {
        "arm": lambda c: [TableCell(text=arm.label) for arm in c.arms],
        "seeds": _seeds,
        "final loss": lambda c: _means(c, [arm.final_loss for arm in c.arms]),
        comparison.metric_name: lambda c: _means(
            c, [arm.final_metric for arm in c.arms], lower=not c.higher_is_better
        ),
        f"loss − baseline{', last half' if late else ''}": _loss_difference,  # noqa: RUF001
        "metric − baseline": lambda c: [_difference(p, p.metric, c) for p in c.pairs],  # noqa: RUF001
        "epochs to baseline's final loss": _epochs_to,
        "seconds to reach it": lambda c: _seconds([p.seconds_to for p in c.pairs], c),
        "bytes to reach it": lambda c: _bytes([p.bytes_to for p in c.pairs]),
        "total seconds": lambda c: _seconds([arm.seconds for arm in c.arms], c),
        "total bytes": lambda c: _bytes([arm.bytes for arm in c.arms]),
    }
    if any(arm.density is not None for arm in comparison.arms):
        columns["density"] = _density
    cells = [make(comparison) for make in columns.values()]
    return ComparisonTable(columns=tuple(columns), rows=tuple(zip(*cells, strict=True)))


def best_of(values: Sequence[float | None], *, lower: bool = True) -> set[int]:
    """Return the positions of the best values; empty if all are equal or only one is known.

    >>> sorted(best_of([2.0, None, 1.0, 1.0])), best_of([1.0, 1.0]), best_of([1.0, None])
    ([2, 3], set(), set())
    """
    known = [value for value in values if value is not None]
    # With one value, or with a tie of all, "best" would say nothing.
    if len(set(known)) < 2:
        return set()
    best = min(known) if lower else max(known)
    return {index for index, value in enumerate(values) if value == best}


def _seeds(comparison: Comparison) -> list[TableCell]:
    cells = []
    for arm in comparison.arms:
        # Runs that ended before the others' last epoch; a reader must know that means lack them.
        left_out = len(arm.runs) - len(arm.used)
        more = [f"{left_out} left out"] if left_out else []
        more += [] if arm.finished else [f"epoch {arm.epochs}", f"of {arm.planned}"]
        cells.append(TableCell(text=str(len(arm.seeds)), more=tuple(more)))
    return cells


def _means(
    comparison: Comparison, means: Sequence[MeanStd], *, lower: bool = True
) -> list[TableCell]:
    counts = [len(arm.seeds) for arm in comparison.arms]
    texts = [mean_and_std(one.mean, one.std, n) for one, n in zip(means, counts, strict=True)]
    return _cells(texts, [one.mean for one in means], lower=lower)


def _cells(
    texts: Sequence[str], values: Sequence[float | None], *, lower: bool = True
) -> list[TableCell]:
    """Return a cell for each text; those with the best values are marked."""
    best = best_of(values, lower=lower)
    return [TableCell(text=text, best=index in best) for index, text in enumerate(texts)]


def _loss_difference(comparison: Comparison) -> list[TableCell]:
    # In one column both kinds may occur; the rarer one is named in its cell.
    some_late = any(pair.late_loss is not None for pair in comparison.pairs)
    cells = []
    for pair in comparison.pairs:
        # The steadier of the two differences; the verdict rests on it as well.
        cell = _difference(pair, pair.late_loss or pair.loss, comparison)
        if some_late and pair.late_loss is None and pair.loss is not None:
            epoch = "the last epoch" if pair.loss.epoch is None else f"epoch {pair.loss.epoch}"
            cell = replace(cell, more=(f"after {epoch}", *cell.more))
        cells.append(cell)
    return cells


def _difference(
    pair: ArmPair, difference: PairedDifference | None, comparison: Comparison
) -> TableCell:
    if pair.arm is comparison.baseline:
        return TableCell(text="baseline")
    if difference is None:
        common = len(pair.common_seeds)
        return TableCell(text=NONE, more=() if common > 1 else (counted(common, "common seed"),))
    # The mean and both ends get the same decimals, so that they line up.
    places = decimal_places(difference)
    text = fixed(difference.mean, places, sign=True)
    if difference.low is None or difference.high is None:
        return TableCell(text=text, more=("equal for each seed",))
    low, high = (fixed(end, places, sign=True) for end in (difference.low, difference.high))
    # A t test assumes normal differences, which a few seeds cannot show; sign flips need no such
    # assumption, so both are given.
    flip_p = difference.sign_flip_p
    flips = [] if flip_p is None else [f"flips {p_value(flip_p)}"]
    return TableCell(text=text, more=(f"{low} to {high}", p_value(difference.p), *flips))


def _epochs_to(comparison: Comparison) -> list[TableCell]:
    texts = []
    for pair in comparison.pairs:
        text = "never" if pair.epochs_to is None else str(pair.epochs_to)
        if pair.epochs_to is None and any(pair.epochs_to_by_seed) and len(pair.arm.seeds) > 1:
            text = "not on average"  # single seeds got there, as the small print says
        texts.append(text)
    cells = _cells(texts, [pair.epochs_to for pair in comparison.pairs])
    return [
        replace(cell, more=_range_by_seed(pair))
        for cell, pair in zip(cells, comparison.pairs, strict=True)
    ]


def _range_by_seed(pair: ArmPair) -> tuple[str, ...]:
    """Return the range of epochs after which single seeds got there."""
    # The mean over seeds may reach the goal earlier than some runs, and later than others.
    epochs = pair.epochs_to_by_seed
    if len(epochs) < 2 or pair.arm is pair.reference or pair.reference.final_loss.mean is None:
        return ()
    known = [epoch for epoch in epochs if epoch is not None]
    if not known:  # and yet the mean may have: one low run is enough for that
        return ("no seed",)
    never = len(epochs) - len(known)
    span = str(known[0]) if min(known) == max(known) else f"{min(known)} to {max(known)}"
    return (f"by seed {span}", *([f"{never} never"] if never else []))


def _bytes(values: Sequence[float | None]) -> list[TableCell]:
    return _cells([NONE if value is None else in_bytes(value) for value in values], values)


def _seconds(values: Sequence[float | None], comparison: Comparison) -> list[TableCell]:
    """Return seconds; none is marked best where clocks cannot be compared."""
    cells = _cells([NONE if value is None else in_seconds(value) for value in values], values)
    used = [pair for pair in comparison.pairs if pair.arm.used and pair.reference.used]
    if all(pair.same_clock for pair in used):
        return cells
    return [replace(cell, best=False) for cell in cells]


def _density(comparison: Comparison) -> list[TableCell]:
    return [
        TableCell(
            text=NONE if arm.mean_density is None else f"{arm.mean_density:.3g}",
            more=() if arm.padding is None else ("padding", f"{arm.padding:.2f}"),
        )
        for arm in comparison.arms
    ]


def comparison_json(comparison: Comparison, report: str | None) -> dict[str, Any]:
    """Return a comparison for programs; keys are added, never renamed."""
    verdicts = all_verdicts(comparison)
    return {
        "task": comparison.task,
        "baseline": comparison.baseline.label,
        "arms": [_arm_json(pair) for pair in comparison.pairs],
        "metric": comparison.metric_name,
        "higher_is_better": comparison.higher_is_better,
        "headlines": [verdict.headline for verdict in verdicts],
        "verdicts": [verdict.text for verdict in verdicts],
        "notes": list(comparison.notes),
        "report": report,
    }


def _arm_json(pair: ArmPair) -> dict[str, Any]:
    arm = pair.arm
    return {
        "label": arm.label,
        "order": printable(arm.order),
        "sparsify": printable(arm.sparsify),
        "density": arm.density,
        "seeds": list(arm.seeds),
        "epochs": arm.epochs,
        "finished": arm.finished,
        "final_loss": asdict(arm.final_loss),
        "final_metric": asdict(arm.final_metric),
        "loss_by_epoch": [point.mean for point in arm.loss_by_epoch],
        "metric_by_epoch": [point.mean for point in arm.metric_by_epoch],
        # All of these refer to the final mean loss of the baseline.
        "epochs_to_baseline": pair.epochs_to,
        "epochs_to_baseline_by_seed": list(pair.epochs_to_by_seed),
        "seconds_to_baseline": pair.seconds_to,
        "bytes_to_baseline": pair.bytes_to,
        "bytes": arm.bytes,
        "seconds": arm.seconds,
        "mean_density": arm.mean_density,
        "padding": arm.padding,
        "loss_difference": pair.loss and asdict(pair.loss),
        "late_loss_difference": pair.late_loss and asdict(pair.late_loss),
        "metric_difference": pair.metric and asdict(pair.metric),
    }
