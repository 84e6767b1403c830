"""What a reader has to know before trusting a comparison: what is missing, and what differs."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from gradherd.lab.report.arms import diverged
from gradherd.lab.report.model import Arm
from gradherd.lab.report.stats import number
from gradherd.lab.text import counted, listed, printable

COMPARED = ("order", "sparsify", "density", "seed")
"""Settings that are meant to differ."""


def notes_of(arms: Sequence[Arm]) -> tuple[str, ...]:
    """Return one sentence for each thing that limits what can be said."""
    return tuple(
        note
        for source in (_cut_short, _diverged, _seeds, _settings, _surroundings, _seconds, _skipped)
        for note in source(arms)
    )


def _cut_short(arms: Sequence[Arm]) -> Iterator[str]:
    for arm in arms:
        if not arm.epochs:
            yield f"{arm.label}: no run finished its first epoch, so there are no figures."
            continue
        left = [run for run in arm.runs if run not in arm.used]
        if left:
            runs = [
                f"seed {run.seed} ({printable(run.status, 20)} after {len(run.epochs)})"
                for run in left
            ]
            yield (
                f"{arm.label}: left out what did not come to epoch {arm.epochs}: {listed(runs)}."
            )
    short = [arm for arm in arms if arm.epochs and not arm.finished]
    short = [arm for arm in short if not all(diverged(run) for run in arm.used)]
    for epochs, planned in dict.fromkeys((arm.epochs, arm.planned) for arm in short):
        these = [arm.label for arm in short if (arm.epochs, arm.planned) == (epochs, planned)]
        yield (
            f"{listed(these)} came to epoch {epochs} of {planned}, and {_is(these)} compared after "
            "the epochs that both arms have."
        )


def _is(these: list[str]) -> str:
    return "is" if len(these) == 1 else "are"


def _diverged(arms: Sequence[Arm]) -> Iterator[str]:
    for arm in arms:
        for run in arm.used:
            losses = [number(row.train_loss) for row in run.epochs[: arm.epochs]]
            if None in losses or diverged(run):
                epoch = losses.index(None) + 1 if None in losses else len(losses) + 1
                yield (
                    f"{arm.label}, seed {run.seed}: the loss was not finite after epoch {epoch}; "
                    "the mean over seeds is missing there."
                )


def _seeds(arms: Sequence[Arm]) -> Iterator[str]:
    if all(len(arm.seeds) <= 1 for arm in arms):
        yield (
            "One seed: how much luck there is in these figures is unknown, and no difference can "
            "be shown. A standard deviation of 0 says nothing here."
        )
    base = arms[0]
    for arm in arms[1:]:
        if arm.epochs and base.epochs and set(arm.seeds) != set(base.seeds):
            common = [str(seed) for seed in arm.seeds if seed in base.seeds]
            yield (
                f"{arm.label} and {base.label} do not have the same seeds: means are over all of "
                f"each, differences over {_named(common)}."
            )


def _named(seeds: list[str]) -> str:
    if not seeds:
        return "none, since they share no seed"
    return f"seed{'s' if len(seeds) > 1 else ''} {listed(seeds)}"


def _settings(arms: Sequence[Arm]) -> Iterator[str]:
    configs = [run.config for arm in arms for run in arm.runs]
    names = dict.fromkeys(name for config in configs for name in config if name not in COMPARED)
    differing = []
    for name in names:
        values = list(dict.fromkeys(shown(config.get(name)) for config in configs))
        if len(values) > 1:
            differing.append(f"{printable(name, 40)} ({', '.join(values[:4])})")
    runs = [run for arm in arms for run in arm.runs]
    for what in ("parameters", "train_examples", "test_examples"):
        if len(counts := {getattr(run, what) for run in runs}) > 1:
            differing.append(f"{what.replace('_', ' ')} ({', '.join(map(str, sorted(counts)))})")
    if differing:
        yield (
            "More differs than what is compared, and may be the reason for a difference: "
            f"{listed(differing[:8])}."
        )


def shown(value: Any) -> str:
    """Return a setting's value as text.

    >>> shown(0.1), shown(None), shown({"a": 1})
    ('0.1', 'none', '{"a": 1}')
    """
    if value is None:
        return "none"
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return printable(text, 60)


def _surroundings(arms: Sequence[Arm]) -> Iterator[str]:
    runs = [run for arm in arms for run in arm.runs]
    for what, then in (
        ("hardware", "seconds cannot be compared"),
        ("versions", "losses may differ for that reason alone"),
    ):
        if len({json.dumps(getattr(run, what), sort_keys=True, default=str) for run in runs}) > 1:
            yield f"The runs do not share their {what}: {then} (see below)."


def _seconds(arms: Sequence[Arm]) -> Iterator[str]:
    if any(run.config.get("virtual") is True for arm in arms for run in arm.runs):
        yield (
            "All workers ran inside one process: losses, orders and bytes are those of real "
            "workers, seconds are not."
        )


def _skipped(arms: Sequence[Arm]) -> Iterator[str]:
    for arm in arms:
        skipped = sum(row.skipped_steps for run in arm.used for row in run.epochs)
        if skipped:
            yield (
                f"{arm.label}: {counted(skipped, 'step')} called off because a gradient was not "
                "finite."
            )
