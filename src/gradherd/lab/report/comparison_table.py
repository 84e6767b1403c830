"""A comparison as a table for page and terminal, and as JSON for programs."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from gradherd.lab.report.arms import ArmSummary
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


def comparison_table(comparison: Comparison) -> dict[str, list[TableCell]]:
    """Return the table of a comparison by column: a cell for each arm, the baseline first.

    The first column has their names; there is one of densities only if an arm is sparse.
    """
    arms, pairs = comparison.arms, comparison.pairs
    late = any(pair.late_loss is not None for pair in pairs)
    # No seconds are marked best where clocks cannot be compared.
    same_clock = all(p.same_clock for p in pairs if p.arm.used and p.reference.used)

    def means(values: Sequence[MeanStd], *, lower: bool = True) -> list[TableCell]:
        counts = [len(arm.seeds) for arm in arms]
        texts = [mean_and_std(one.mean, one.std, n) for one, n in zip(values, counts, strict=True)]
        return _cells(texts, [one.mean for one in values], lower=lower)

    def seconds(values: Sequence[float | None]) -> list[TableCell]:
        texts = [NONE if value is None else in_seconds(value) for value in values]
        return _cells(texts, values if same_clock else [])

    def sent(values: Sequence[float | None]) -> list[TableCell]:
        return _cells([NONE if value is None else in_bytes(value) for value in values], values)

    columns = {
        "arm": [TableCell(text=arm.label) for arm in arms],
        "seeds": [_seeds(arm) for arm in arms],
        "final loss": means([arm.final_loss for arm in arms]),
        comparison.metric_name: means(
            [arm.final_metric for arm in arms], lower=not comparison.higher_is_better
        ),
        f"loss − baseline{', last half' if late else ''}": [  # noqa: RUF001
            _loss_difference(pair, late) for pair in pairs
        ],
        "metric − baseline": [_difference(pair, pair.metric) for pair in pairs],  # noqa: RUF001
        "epochs to baseline's final loss": _epochs_to(pairs),
        "seconds to reach it": seconds([pair.seconds_to for pair in pairs]),
        "bytes to reach it": sent([pair.bytes_to for pair in pairs]),
        "total seconds": seconds([arm.seconds for arm in arms]),
        "total bytes": sent([arm.bytes for arm in arms]),
    }
    if any(arm.density is not None for arm in arms):
        columns["density"] = [_density(arm) for arm in arms]
    return columns


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


def _cells(
    texts: Sequence[str], values: Sequence[float | None], *, lower: bool = True
) -> list[TableCell]:
    """Return a cell for each text; those with the best values are marked."""
    best = best_of(values, lower=lower)
    return [TableCell(text=text, best=index in best) for index, text in enumerate(texts)]


def _seeds(arm: ArmSummary) -> TableCell:
    # Runs that ended before the others' last epoch; a reader must know that means lack them.
    left_out = len(arm.runs) - len(arm.used)
    more = [f"{left_out} left out"] if left_out else []
    more += [] if arm.finished else [f"epoch {arm.epochs}", f"of {arm.planned}"]
    return TableCell(text=str(len(arm.seeds)), more=tuple(more))


def _loss_difference(pair: ArmPair, some_late: bool) -> TableCell:
    # The steadier of the two differences; the verdict rests on it as well.
    cell = _difference(pair, pair.late_loss or pair.loss)
    # In one column both kinds may occur; the rarer one is named in its cell.
    if some_late and pair.late_loss is None and pair.loss is not None:
        epoch = "the last epoch" if pair.loss.epoch is None else f"epoch {pair.loss.epoch}"
        cell = replace(cell, more=(f"after {epoch}", *cell.more))
    return cell


def _difference(pair: ArmPair, difference: PairedDifference | None) -> TableCell:
    if pair.arm is pair.reference:
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
    return TableCell(text=text, more=(f"{low} to {high}", p_value(difference.p)))


def _epochs_to(pairs: Sequence[ArmPair]) -> list[TableCell]:
    best, cells = best_of([pair.epochs_to for pair in pairs]), []
    for at, pair in enumerate(pairs):
        # The mean over seeds may reach the goal earlier than some runs, and later than others.
        by_seed = pair.epochs_to_by_seed
        known = [epoch for epoch in by_seed if epoch is not None]
        has_goal = pair.reference.final_loss.mean is not None
        text, more = "never" if pair.epochs_to is None else str(pair.epochs_to), [""]
        if len(by_seed) > 1 and pair.arm is not pair.reference and has_goal:
            text = "not on average" if pair.epochs_to is None and known else text
            span = " to ".join(map(str, sorted({min(known), max(known)}))) if known else ""
            never = len(by_seed) - len(known)
            # No seed may have got there, and yet the mean: one low run is enough for that.
            more = [f"by seed {span}", f"{never} never" if never else ""] if known else ["no seed"]
        cells.append(TableCell(text=text, more=tuple(filter(None, more)), best=at in best))
    return cells


def _density(arm: ArmSummary) -> TableCell:
    return TableCell(
        text=NONE if arm.mean_density is None else f"{arm.mean_density:.3g}",
        more=() if arm.padding is None else ("padding", f"{arm.padding:.2f}"),
    )


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
