"""Our figures on a claim in words: means, the change with its interval, limits and p values."""

import statistics
from collections.abc import Mapping, Sequence
from functools import partial

from gradherd.lab.study.results import RunResult
from gradherd.lab.text import counted, fixed, in_bytes, p_value, significant
from studies.evidence.claims import (
    EPOCH_FIELDS,
    ClaimVerdict,
    Measurement,
    against_zero,
    mean_text,
    measure,
)
from studies.evidence.file import Claim

_WORDS = {
    "bound": "herding bound after the last round",
    "mean": "herding bound, mean over rounds",
    "train_loss": "train loss",
    "bytes": "sent per worker",
    "ordering_bytes": "sent per worker for ordering",
    "epochs_share": "epochs to reach the other arm's best loss (same seed), relative to its own",
    "epochs_to_final": "epochs until the other arm's final loss (same seed) is first reached",
    "density_error": "relative error of the density, mean over steps",
    "density_off": "relative error of an epoch's density, maximum",
    "build_up": "density / target density, last half of the steps",
}
_CASE_WORDS = {
    "seconds": "seconds of {}",
    "ratio": "time of {} / time of the plain case",
    "bytes": "sent by {}",
    "bytes_ratio": "bytes of {} / bytes of the plain case",
    "peak_bytes": "peak memory of {}",
    "steps_per_second": "steps per second of {}",
}


def percent(share: float) -> str:
    """Return a share in percent, with about two significant digits.

    >>> percent(0.1234), percent(0.00123), percent(-0.5), percent(3.4)
    ('12 %', '0.12 %', '\N{MINUS SIGN}50 %', '340 %')
    """
    # The bounds are where rounding would carry: 9.96 % is shown as 10 %, not as 10.0 %.
    places = 0 if abs(share) >= 0.0995 else 1 if abs(share) >= 0.00995 else 2
    return f"{fixed(100 * share, places)} %"


def measure_words(name: str, metric: str = "metric", when: str = "") -> str:
    """Return a measure in words; `when` is appended where it is of one epoch.

    >>> measure_words("late_metric", "test accuracy (%)")
    'test accuracy (%), mean over the last half of the epochs'
    >>> measure_words("train_loss", when="after epoch 5"), measure_words("train_loss")
    ('train loss after epoch 5', 'train loss')
    >>> measure_words("nine runs.ratio"), measure_words("padding")
    ('time of nine runs / time of the plain case', 'padding')
    """
    case, _, kind = name.partition(".")
    if kind:
        return _CASE_WORDS.get(kind, f"{kind} of {{}}").format(case)
    field = name.removeprefix("late_")
    words = metric if field == "metric" else _WORDS.get(field, field.replace("_", " "))
    if field not in EPOCH_FIELDS:
        return words
    if name != field:
        return f"{words}, mean over the last half of the epochs"
    return f"{words} {when}" if when else words


def our_figures(verdict: ClaimVerdict, results: Mapping[str, Sequence[RunResult]]) -> str:
    """Return our figures on a claim in words, over the seeds that both arms have."""
    claim, measured, corrected = verdict.claim, verdict.measured, verdict.corrected_p
    seeds, test = list(verdict.effects), verdict.test
    metric, when = "", ""
    if "summary" not in (first := results[claim.arm][0]).figures:  # a training
        metric = first.record().metric_name
        when = "after the last epoch" if claim.epoch is None else f"after epoch {claim.epoch}"
    figures = measure_words(claim.measure, metric, when)
    figures += f": {mean_text(claim, measured.arm, seeds)}"
    if measured.against is not None and claim.measure != "epochs_share":
        figures += f" against {mean_text(claim, measured.against, seeds)}"
    parts = [figures, change_text(changes_of(measured, seeds), in_points=measured.in_percent)]
    parts.append(threshold(claim, measured.in_percent))
    if (reading := _other_reading(claim, results)) is not None:
        when, other = reading
        change = change_text(changes_of(other, seeds), in_points=other.in_percent)
        parts.append(f"{when} {change}" if change else "")
    if test is not None and corrected is not None:
        told = p_value(test.p)
        if p_value(corrected) != told:
            told += f", corrected for {counted(verdict.tests, 'claim')} {p_value(corrected)}"
        parts.append(told)
    return "; ".join([*(part for part in parts if part), counted(len(seeds), "seed")])


def _other_reading(
    claim: Claim, results: Mapping[str, Sequence[RunResult]]
) -> tuple[str, Measurement] | None:
    """Return the measure at the end for one over the last half, and the other way round.

    Rows show both, so that nobody has to trust our choice between them.
    """
    name, field = claim.measure, claim.measure.removeprefix("late_")
    if field not in ("train_loss", "metric") or claim.against is None:
        return None
    arm, against = results[claim.arm], results[claim.against]
    if name != field:
        return "after the last epoch alone", measure(field, claim.epoch, arm, against)
    # At an earlier epoch there is no end to compare with.
    last = max(one.figures.get("epochs", 0) for one in arm)
    if claim.epoch not in (None, last):
        return None
    return "over the last half of the epochs", measure(f"late_{field}", None, arm, against)


def changes_in(verdict: ClaimVerdict) -> list[float]:
    """Return by how much the arm differs from the reference in each seed; empty if unknown."""
    return changes_of(verdict.measured, list(verdict.effects))


def changes_of(measured: Measurement, seeds: Sequence[int]) -> list[float]:
    """Return by how much the arm differs in each seed; empty where a value is missing."""
    changes: list[float] = []
    for seed in seeds if measured.against is not None else ():
        change = measured.change(measured.arm[seed], (measured.against or {})[seed])
        # The change over the remaining seeds would look like a result.
        if change is None:
            return []
        changes.append(change)
    return changes


def change_text(changes: Sequence[float], *, in_points: bool = False) -> str:
    """Return a mean change with its interval in words; empty without changes.

    Args:
        changes: A change per seed, as a share.
        in_points: Whether they are differences of percentages.

    >>> change_text([-0.29, -0.3, -0.31]), change_text([4.0])
    ('30 % less (95 % interval 28 % to 32 %)', '5 times as much')
    >>> change_text([-0.02, -0.03], in_points=True)
    '2.5 points less (95 % interval \N{MINUS SIGN}3.9 to 8.9)'
    """
    if not changes:
        return ""
    mean, interval = statistics.fmean(changes), interval_of(changes) or ()
    if mean >= 2 and not in_points:  # Easier to read than "400 % more".
        text, *ends = (significant(1 + one, 3) for one in (mean, *interval))
        text += " times as much"
    else:
        # The interval turns around with the mean, so that its ends agree with the word "less".
        sign = 1 if mean >= 0 else -1
        turned = (sign * mean, *sorted(sign * end for end in interval))
        text, *ends = (_points(one) if in_points else percent(one) for one in turned)
        text += f"{' points' if in_points else ''} {'more' if sign > 0 else 'less'}"
    # Bytes hardly differ from seed to seed.
    return f"{text} (95 % interval {ends[0]} to {ends[1]})" if len(set(ends)) > 1 else text


def _points(share: float) -> str:
    return fixed(100 * share, 1 if abs(share) >= 0.00995 else 2)


def interval_of(changes: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % t interval of the mean; None without variance or with a single value."""
    difference = against_zero(changes)
    if difference is None or difference.low is None or difference.high is None:
        return None
    return difference.low, difference.high


def threshold(claim: Claim, in_percent: bool) -> str:
    """Return the number of the claim that the verdict depends on, if it has one."""
    if claim.value is None:
        return ""
    if claim.test == "no-worse":
        tolerance = f"{_points(claim.value)} points" if in_percent else percent(claim.value)
        return f"up to {tolerance} worse is allowed"
    value = in_bytes if claim.measure.endswith("bytes") else partial(significant, digits=3)
    return f"must be {claim.test.replace('-', ' ')} {value(claim.value)}"
