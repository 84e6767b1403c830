"""Where the figures come from: caveats, settings, versions, hardware, runs and values by epoch."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gradherd.lab.report.arms import ArmSummary, diverged
from gradherd.lab.text import counted, in_bytes, listed, printable, significant

COMPARED = ("order", "sparsify", "density", "local_steps", "seed")
"""Settings that are meant to differ between runs."""
Rows = list[list[str]]


def caveats(arms: Sequence[ArmSummary], *, same_settings: bool = True) -> tuple[str, ...]:
    """Return one sentence for each thing that limits the conclusions.

    Args:
        arms: The arms.
        same_settings: Whether runs should differ in nothing but `COMPARED`.
    """
    sources = [_cut_short, _diverged, _seeds, _environment, _virtual, _skipped]
    if same_settings:
        sources.insert(3, _settings)
    return tuple(sentence for source in sources for sentence in source(arms))


def _cut_short(arms: Sequence[ArmSummary]) -> Iterator[str]:
    for arm in arms:
        if not arm.epochs:
            yield f"{arm.label}: no run finished its first epoch, so there are no figures."
            continue
        runs = [
            f"seed {run.seed} ({printable(run.status, 20)} after {len(run.epochs)})"
            for run in arm.runs
            if run not in arm.used
        ]
        if runs:
            yield (f"{arm.label}: runs without epoch {arm.epochs} are left out: {listed(runs)}.")
    short = [arm for arm in arms if arm.epochs and not arm.finished]
    # Arms that diverged have a sentence of their own.
    short = [arm for arm in short if not all(diverged(run) for run in arm.used)]
    # One sentence for all arms that stopped at the same epoch, as after Ctrl-C.
    for epochs, planned in dict.fromkeys((arm.epochs, arm.planned) for arm in short):
        labels = [arm.label for arm in short if (arm.epochs, arm.planned) == (epochs, planned)]
        verb = "is" if len(labels) == 1 else "are"
        yield (
            f"{listed(labels)} reached epoch {epochs} of {planned} and {verb} compared after the "
            "epochs that both arms have."
        )


def _diverged(arms: Sequence[ArmSummary]) -> Iterator[str]:
    for arm in arms:
        for run in arm.used:
            losses = [row.train_loss for row in run.epochs[: arm.epochs]]
            if None in losses or diverged(run):
                epoch = losses.index(None) + 1 if None in losses else len(losses) + 1
                yield (
                    f"{arm.label}, seed {run.seed}: the loss was not finite after epoch {epoch}; "
                    "the mean over seeds is missing there."
                )


def _seeds(arms: Sequence[ArmSummary]) -> Iterator[str]:
    # Figures of one seed look as exact as any others, so the page says what they lack.
    if all(len(arm.seeds) <= 1 for arm in arms):
        yield (
            "One seed: the variation between seeds is unknown, and no difference can be shown. "
            "A standard deviation of 0 means nothing here."
        )
    base = arms[0]
    for arm in arms[1:]:
        if arm.epochs and base.epochs and set(arm.seeds) != set(base.seeds):
            common = [str(seed) for seed in arm.seeds if seed in base.seeds]
            seeds = "none, since they share no seed"
            if common:
                seeds = f"seed{'s' if len(common) > 1 else ''} {listed(common)}"
            yield (
                f"{arm.label} and {base.label} have different seeds: means are over all seeds of "
                f"each, differences over {seeds}."
            )


def _settings(arms: Sequence[ArmSummary]) -> Iterator[str]:
    runs = [run for arm in arms for run in arm.runs]
    configs = [run.config for run in runs]
    names = dict.fromkeys(name for config in configs for name in config if name not in COMPARED)
    differing = []
    for name in names:
        # As text: settings may be lists or tables, which cannot be put in a set.
        values = list(dict.fromkeys(setting_text(_beside(config, name)) for config in configs))
        if len(values) > 1:
            differing.append(f"{printable(name, 40)} ({', '.join(values[:4])})")
    # Equal settings can still mean other data: a file may differ between machines.
    for field in ("parameters", "train_examples", "test_examples"):
        if len(counts := {getattr(run, field) for run in runs}) > 1:
            differing.append(f"{field.replace('_', ' ')} ({', '.join(map(str, sorted(counts)))})")
    if differing:
        # At most eight, with four values each: the table of settings lists all of them.
        yield (
            "The runs differ in more than what is compared, which may explain a difference: "
            f"{listed(differing[:8])}."
        )


def _beside(config: Mapping[str, Any], name: str) -> Any:
    """Return a setting without what the name of an arm tells: how values are sent at every step."""
    value = config.get(name)
    if name != "method" or not isinstance(value, dict) or config.get("local_steps") is not None:
        return value
    return {key: one for key, one in value.items() if key != "values"} or None


def setting_text(value: Any) -> str:
    """Return the value of a setting as text.

    >>> setting_text(0.1), setting_text(None), setting_text({"a": 1})
    ('0.1', 'none', '{"a": 1}')
    """
    if value is None:
        return "none"
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return printable(text, 60)


def _environment(arms: Sequence[ArmSummary]) -> Iterator[str]:
    runs = [run for arm in arms for run in arm.runs]
    for field, consequence in (
        ("hardware", "seconds cannot be compared"),
        ("versions", "losses may differ for that reason alone"),
    ):
        # As text with sorted keys: dicts cannot be in a set.
        if len({json.dumps(getattr(run, field), sort_keys=True, default=str) for run in runs}) > 1:
            yield f"The runs differ in {field}: {consequence} (see below)."


def _virtual(arms: Sequence[ArmSummary]) -> Iterator[str]:
    if any(run.config.get("virtual") is True for arm in arms for run in arm.runs):
        yield (
            "All workers ran inside one process: bytes equal those of real workers, losses do up "
            "to rounding, after which orders may differ; seconds do not."
        )


def _skipped(arms: Sequence[ArmSummary]) -> Iterator[str]:
    for arm in arms:
        skipped = sum(row.skipped_steps for run in arm.used for row in run.epochs)
        if skipped:
            yield (f"{arm.label}: {counted(skipped, 'step')} skipped: a gradient was not finite.")


def merged_rows(arms: Sequence[ArmSummary], field: str) -> Rows:
    """Return [name, value] of runs' config, versions or hardware.

    Values that differ are listed with their arms.
    """
    runs = [(arm.label, getattr(run, field)) for arm in arms for run in arm.runs]
    rows = []
    for name in dict.fromkeys(name for _, values in runs for name in values):
        # Dicts instead of sets keep the order of first appearance, so that pages are reproducible.
        labels: dict[str, dict[str, None]] = {}
        for label, values in runs:
            value = values.get(name)
            if name == "memory_bytes" and isinstance(value, int | float):
                value = in_bytes(value)
            labels.setdefault(setting_text(value), {})[label] = None
        if len(labels) == 1 or name in COMPARED:  # The tables above list the arms of these.
            rows.append([printable(name), ", ".join(labels)])
        else:
            words = [f"{value} ({listed(list(some))})" for value, some in labels.items()]
            rows.append([printable(name), "; ".join(words)])
    return rows


def run_rows(arms: Sequence[ArmSummary], files: Mapping[int, str]) -> tuple[list[str], Rows]:
    """Return every run with its seed, how it ended, and its file by the `id` of the record."""
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
        for arm in arms
        for run in arm.runs
    ]
    names = ["arm", "seed", "status", "epochs", "last loss", "last metric", "started"]
    return [*names, "file"] if files else names, rows


def epoch_rows(arms: Sequence[ArmSummary]) -> tuple[list[str], Rows]:
    """Return the mean loss and metric of each arm by epoch."""
    names = ["epoch"]
    names += [f"loss, {arm.label}" for arm in arms] + [f"metric, {arm.label}" for arm in arms]
    rows = []
    # Arms that were cut short have empty cells at the end.
    for epoch in range(max(arm.epochs for arm in arms)):
        row = [str(epoch + 1)]
        for points in ([a.loss_by_epoch for a in arms], [a.metric_by_epoch for a in arms]):
            row += [significant(p[epoch].mean, 5) if epoch < len(p) else "" for p in points]
        rows.append(row)
    return names, rows
