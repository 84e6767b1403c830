"""Records of one task -> a comparison of its arms.

The first arm is the baseline. Seeds are pairs: differences are taken seed by seed, over the seeds
that both arms have. An arm's figures are over those of its runs that went through all epochs; if
none did, over those that came farthest.
"""

from collections.abc import Sequence
from typing import Any

from gradherd.lab.report.arms import arms_of, key_of
from gradherd.lab.report.model import Comparison, Difference, Pair, Spread
from gradherd.lab.report.notes import notes_of
from gradherd.lab.report.pairs import pair_of, questions_of
from gradherd.lab.report.verdict import verdicts_of
from gradherd.lab.text import printable
from gradherd.lab.train.record import RunRecord


def compare(records: Sequence[RunRecord]) -> Comparison:
    """Compare the runs of one task; ValueError if they are of several, or of none."""
    if not records:
        raise ValueError("there is no record to compare")
    first = records[0]
    for record in records:
        _check_same(first, record)
    _check_seeds(records)
    arms = arms_of(records)
    return Comparison(
        task=printable(first.task, 200),
        description=printable(first.description, 200),
        metric_name=printable(first.metric_name, 60),
        higher_is_better=first.higher_is_better,
        arms=arms,
        pairs=tuple(pair_of(arm, arms[0]) for arm in arms),
        questions=questions_of(arms),
        notes=notes_of(arms),
    )


def compare_all(records: Sequence[RunRecord]) -> list[Comparison]:
    """Compare the runs of each task, tasks in the order they are given."""
    by_task: dict[str, list[RunRecord]] = {}
    for record in records:
        by_task.setdefault(record.task, []).append(record)
    return [compare(group) for group in by_task.values()]


def _check_same(first: RunRecord, record: RunRecord) -> None:
    for what in ("task", "metric_name", "higher_is_better"):
        here, there = getattr(first, what), getattr(record, what)
        if here != there:
            raise ValueError(
                f"records of one comparison must share their {what}, got {printable(here)!r} and "
                f"{printable(there)!r}; compare them apart"
            )


def _check_seeds(records: Sequence[RunRecord]) -> None:
    seen = set()
    for record in records:
        run = (*key_of(record), record.seed)
        if run in seen:
            order, sparsify, density, seed = run
            asked = "" if density is None else f" {density:g}"
            raise ValueError(
                f"two records of {printable(order)} + {printable(sparsify)}{asked} on "
                f"{printable(record.task)} with seed {seed}: a seed counts once; leave one of them out"  # noqa: E501
            )
        seen.add(run)


def as_json(comparison: Comparison, report: str | None) -> dict[str, Any]:
    """Return a comparison for programs; keys are added, never renamed."""
    return {
        "task": comparison.task,
        "baseline": comparison.baseline.label,
        "arms": [_arm_json(pair) for pair in comparison.pairs],
        "metric": comparison.metric_name,
        "higher_is_better": comparison.higher_is_better,
        "verdicts": [verdict.text for verdict in verdicts_of(comparison)],
        "notes": list(comparison.notes),
        "report": report,
    }


def _arm_json(pair: Pair) -> dict[str, Any]:
    arm = pair.arm
    return {
        "label": arm.label,
        "order": printable(arm.order),
        "sparsify": printable(arm.sparsify),
        "density": arm.density,
        "seeds": list(arm.seeds),
        "epochs": arm.epochs,
        "finished": arm.finished,
        "final_loss": _spread_json(arm.final_loss),
        "final_metric": _spread_json(arm.final_metric),
        "loss_by_epoch": [point.mean for point in arm.loss_by_epoch],
        "metric_by_epoch": [point.mean for point in arm.metric_by_epoch],
        "epochs_to_baseline": pair.epochs_to,
        "epochs_to_baseline_by_seed": list(pair.epochs_to_by_seed),
        "seconds_to_baseline": pair.seconds_to,
        "bytes_to_baseline": pair.bytes_to,
        "bytes": arm.bytes,
        "seconds": arm.seconds,
        "mean_density": arm.mean_density,
        "padding": arm.padding,
        "loss_difference": _difference_json(pair.loss),
        "late_loss_difference": _difference_json(pair.late_loss),
        "metric_difference": _difference_json(pair.metric),
    }


def _spread_json(one: Spread) -> dict[str, float | None]:
    return {"mean": one.mean, "std": one.std}


def _difference_json(one: Difference | None) -> dict[str, Any] | None:
    if one is None:
        return None
    return {
        "mean": one.mean,
        "low": one.low,
        "high": one.high,
        "p": one.p,
        "sign_flip_p": one.sign_flip_p,
        "seeds": list(one.seeds),
        "epoch": one.epoch,
    }
