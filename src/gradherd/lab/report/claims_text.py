"""Our figures on a claim in words: means with spread, differences with intervals, margins."""

import statistics
from collections.abc import Callable, Mapping, Sequence

from gradherd.lab.report.claims_measures import Measured, share_more
from gradherd.lab.report.claims_words import scale_of
from gradherd.lab.report.stats import difference
from gradherd.lab.study.spec import PAIRED, Claim
from gradherd.lab.text import counted, fixed, mean_and_std, significant


def ours(
    claim: Claim, found: Measured, seeds: Sequence[int], beside: tuple[str, Measured] | None
) -> str:
    """Return what was measured.

    Args:
        claim: What it is about.
        found: Its measure.
        seeds: Those that count.
        beside: The same at another time or over another one, with words for it.
    """
    lost = "never there" if claim.measure in PAIRED else "not finite"
    arm = {seed: found.arm[seed] for seed in seeds}
    against = {} if found.against is None else {seed: found.against[seed] for seed in seeds}
    scale = scale_of(claim.measure, [*arm.values(), *against.values()])
    parts = [f"{found.of}: {_spread(arm, lost, scale)}"]
    if against and claim.measure != "epochs_share":
        parts[0] += f" against {_spread(against, lost, scale)}"
    parts += [
        change
        for change in (_change(found, seeds), _asked(claim, scale, found.in_percent))
        if change
    ]
    if beside is not None and (change := _change(beside[1], seeds)):
        parts.append(f"{beside[0]} {change}")
    return "; ".join([*parts, counted(len(seeds), "seed")])


def _change(found: Measured, seeds: Sequence[int]) -> str:
    """Return how the arm differs from what it is held against; nothing where a figure lacks."""
    if found.against is None:
        return ""
    more: list[float] = []
    for seed in seeds:
        here, there = found.arm[seed], found.against[seed]
        if here is None or there is None:
            return ""
        share = share_more(here, there, found.in_percent)
        if share is None:
            return ""
        more.append(share)
    return _more(more, _points, " points") if found.in_percent else _changed(more)


def _asked(claim: Claim, scale: tuple[float, str], in_percent: bool) -> str:
    """Return what the verdict hangs on, where that is a number of the claim."""
    if claim.value is None:
        return ""
    if claim.test == "no-worse":
        allowed = f"{_points(claim.value)} points" if in_percent else _percent(claim.value)
        return f"up to {allowed} worse is allowed"
    words = {"at-most": "at most", "at-least": "at least"}[claim.test]
    return f"{words} {significant(claim.value / scale[0], 3)}{scale[1]} is asked"


def _points(share: float) -> str:
    """Return a share as points.

    >>> _more([-0.02, -0.03], _points, " points")
    '2.5 points less (95 % interval \N{MINUS SIGN}3.9 to 8.9)'
    """
    return fixed(100 * share, 1 if abs(share) >= 0.00995 else 2)


def _changed(more: Sequence[float]) -> str:
    """Return by which share one is more than the other, with the interval.

    >>> _changed([-0.29, -0.3, -0.31]), _changed([4.0])
    ('30 % less (95 % interval 28 % to 32 %)', '5 times as much')
    """
    if statistics.fmean(more) < 2:
        return _more(more, _percent)
    interval = _interval(more)
    text = f"{significant(1 + statistics.fmean(more), 3)} times as much"
    if interval is None:
        return text
    return f"{text} (95 % interval {significant(1 + interval[0], 3)} to {significant(1 + interval[1], 3)})"  # noqa: E501


def _more(more: Sequence[float], written: Callable[[float], str], unit: str = "") -> str:
    mean, interval = statistics.fmean(more), _interval(more)
    turn = 1 if mean >= 0 else -1
    text = f"{written(turn * mean)}{unit} {'more' if turn > 0 else 'less'}"
    if interval is None:
        return text
    low, high = sorted(turn * end for end in interval)
    return f"{text} (95 % interval {written(low)} to {written(high)})"


def _interval(more: Sequence[float]) -> tuple[float, float] | None:
    found = difference(more, [0.0] * len(more), range(len(more)))
    if found is None or found.low is None or found.high is None:
        return None
    return found.low, found.high


def _spread(values: Mapping[int, float | None], lost: str, scale: tuple[float, str]) -> str:
    divisor, unit = scale
    known = [value / divisor for value in values.values() if value is not None]
    if len(known) < len(values):
        return f"{lost} in {len(values) - len(known)} of {counted(len(values), 'run')}"
    mean = statistics.fmean(known)
    std = statistics.stdev(known) if len(known) > 1 else 0.0
    return mean_and_std(mean, std, len(known)) + unit


def _percent(share: float) -> str:
    """Return a share in percent, with two digits that count.

    >>> _percent(0.1234), _percent(0.00123), _percent(-0.5), _percent(3.4)
    ('12 %', '0.12 %', '\N{MINUS SIGN}50 %', '340 %')
    """
    places = 0 if abs(share) >= 0.0995 else 1 if abs(share) >= 0.00995 else 2
    return f"{fixed(100 * share, places)} %"
