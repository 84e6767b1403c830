"""What stands behind the figures: settings, versions, hardware, runs, and numbers by epoch."""

from collections.abc import Mapping, Sequence
from typing import Any

from gradherd.lab.report.model import Comparison
from gradherd.lab.report.notes import COMPARED, shown
from gradherd.lab.text import in_bytes, listed, printable, significant
from gradherd.lab.train.record import RunRecord

Rows = list[list[str]]


def settings_of(comparison: Comparison) -> Rows:
    """Return [name, value] of all settings; values that differ are listed with their arms."""
    return _merged([(arm.label, run.config) for arm in comparison.arms for run in arm.runs])


def surroundings_of(comparison: Comparison) -> Rows:
    """Return [name, value] of versions and hardware."""
    runs = [(arm.label, run) for arm in comparison.arms for run in arm.runs]
    return [
        *_merged([(name, run.versions) for name, run in runs]),
        *_merged([(name, _readable(run.hardware)) for name, run in runs]),
    ]


def _merged(found: Sequence[tuple[str, Mapping[str, Any]]]) -> Rows:
    rows = []
    for name in dict.fromkeys(name for _, values in found for name in values):
        who: dict[str, dict[str, None]] = {}
        for arm, values in found:
            who.setdefault(shown(values.get(name)), {})[arm] = None
        if len(who) == 1 or name in COMPARED:  # Whose these are is what arms and seeds are about.
            rows.append([printable(name), ", ".join(who)])
        else:
            told = [f"{value} ({listed(list(arms))})" for value, arms in who.items()]
            rows.append([printable(name), "; ".join(told)])
    return rows


def _readable(hardware: Mapping[str, Any]) -> dict[str, Any]:
    memory = hardware.get("memory_bytes")
    if not isinstance(memory, int | float):
        return dict(hardware)
    return {**hardware, "memory_bytes": in_bytes(memory)}


def surroundings_line(records: Sequence[RunRecord]) -> str:
    """Return hardware and versions on one line, all of them if they differ."""
    lines = dict.fromkeys(_one_line(record) for record in records)
    return " / ".join(lines)


def _one_line(record: RunRecord) -> str:
    hardware, versions = record.hardware, record.versions
    cores = hardware.get("cores")
    parts = [
        printable(hardware["accelerator"], 80) if hardware.get("accelerator") else "",
        printable(hardware.get("cpu") or "", 80),
        f"{cores} cores" if cores else "",
        in_bytes(memory) if isinstance(memory := hardware.get("memory_bytes"), int | float) else "",
        printable(hardware.get("system") or "", 80),
        *(f"{printable(name, 40)} {printable(value, 40)}" for name, value in versions.items()),
    ]
    return " · ".join(part for part in parts if part)


def runs_of(comparison: Comparison, files: Mapping[int, str]) -> tuple[list[str], Rows]:
    """Return every run with its seed and how it ended.

    Args:
        comparison: the comparison.
        files: where a record was read, by the `id` of the record.
    """
    rows = [
        [
            arm.label,
            str(run.seed),
            printable(run.status),
            f"{len(run.epochs)} of {arm.planned}",
            significant(run.epochs[-1].train_loss, 6) if run.epochs else "none",
            significant(run.epochs[-1].metric, 6) if run.epochs else "none",
            printable(run.started),
            *([printable(files.get(id(run), ""))] if files else []),
        ]
        for arm in comparison.arms
        for run in arm.runs
    ]
    names = ["arm", "seed", "status", "epochs", "last loss", "last metric", "started"]
    return [*names, "file"] if files else names, rows


def numbers_of(comparison: Comparison) -> tuple[list[str], Rows]:
    """Return the mean loss and metric of each arm by epoch."""
    arms = comparison.arms
    names = ["epoch"]
    names += [f"loss, {arm.label}" for arm in arms] + [f"metric, {arm.label}" for arm in arms]
    rows = []
    for epoch in range(max(arm.epochs for arm in arms)):
        row = [str(epoch + 1)]
        for points in ([a.loss_by_epoch for a in arms], [a.metric_by_epoch for a in arms]):
            row += [significant(p[epoch].mean, 5) if epoch < len(p) else "" for p in points]
        rows.append(row)
    return names, rows
