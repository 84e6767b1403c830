"""Is a claim borne out? One rule for all of them.

Every claim becomes an *effect* of each seed, a share that is above zero if the claim holds there:

- less:      1 - arm / against          - greater:   arm / against - 1
- at-most:   1 - arm / value            - at-least:  arm / value - 1
- no-worse:  value - (share by which the arm is worse than against)

Then, over seeds:

- **confirmed**: the 95 % t interval of the mean effect is above zero (or the effect is the same
  in all of two or more seeds), and the mean is at least half of the paper's, if the paper has one;
- **weaker**: only one of the two, or every single seed agrees but the interval reaches zero;
- **not confirmed**: all else; also if a run diverged or never got there.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gradherd.report.claims_measures import ALWAYS, Measured, measured
from gradherd.report.claims_words import scale_of
from gradherd.report.stats import difference
from gradherd.report.text import counted, figure, fixed, with_std
from gradherd.study.archive import Result
from gradherd.study.file import PAIRED, Claim

CONFIRMED, WEAKER, NOT = "confirmed", "weaker", "not confirmed"
_LEAST_SEEDS = 2
"""One run has no spread to hold a difference against."""


@dataclass(frozen=True)
class Verdict:
    """What the records say about a claim."""

    claim: Claim
    word: str
    """confirmed, weaker or not confirmed."""
    ours: str
    """Our figures with seeds and spread."""


def judge(claim: Claim, results: Mapping[str, Sequence[Result]]) -> Verdict | None:
    """Return the verdict on a claim; None if what it speaks of has not been measured yet."""
    arm = results.get(claim.arm)
    against = results.get(claim.against) if claim.against is not None else None
    if not arm or (claim.against is not None and not against):
        return None
    if any(_short(one, claim.epoch) for one in [*arm, *(against or ())]):
        return None
    found = measured(claim.measure, claim.epoch, arm, against)
    effects = effects_of(claim, found)
    if len(effects) < _LEAST_SEEDS or not (found.there or claim.measure in ALWAYS):
        return None
    word = word_of(list(effects.values()), paper_effect(claim))
    return Verdict(claim, word, _ours(claim, found, effects))


def effects_of(claim: Claim, found: Measured) -> dict[int, float | None]:
    """Return the effect of each seed that both arms have; None where there is no figure."""
    seeds = [seed for seed in found.arm if found.against is None or seed in found.against]
    effects: dict[int, float | None] = {}
    for seed in seeds:
        here = found.arm[seed]
        bounded = claim.test in ("at-most", "at-least")
        there = claim.value if bounded or found.against is None else found.against[seed]
        if here is None or there is None:
            effects[seed] = None
            continue
        ratio = here / there if there else (1.0 if here == there else None)
        effects[seed] = None if ratio is None else _effect(claim, ratio, found.higher_is_better)
    return effects


def _effect(claim: Claim, ratio: float, higher_is_better: bool) -> float:
    if claim.test == "no-worse":
        assert claim.value is not None
        return claim.value - (1 - ratio if higher_is_better else ratio - 1)
    return 1 - ratio if claim.test in ("less", "at-most") else ratio - 1


def paper_effect(claim: Claim) -> float | None:
    """Return the paper's effect, if it gives numbers.

    >>> claim = Claim(id="a", text="", source="", paper="9 of 36", paper_values=(9, 36),
    ...               measure="epochs_share", test="less", arm="a", against="b")
    >>> paper_effect(claim)
    0.75
    """
    if claim.paper_values is None:
        return None
    return _effect(claim, claim.paper_values[0] / claim.paper_values[1], False)


def word_of(effects: Sequence[float | None], paper: float | None = None) -> str:
    """Return the verdict on these effects, by the rule above.

    >>> word_of([0.3, 0.31, 0.29]), word_of([0.3, 0.31, 0.29], paper=0.9), word_of([0.3, -0.1])
    ('confirmed', 'weaker', 'not confirmed')
    >>> word_of([0.5]), word_of([0.2, None]), word_of([0.1, 0.9]), word_of([0.2, 0.2])
    ('weaker', 'not confirmed', 'weaker', 'confirmed')
    """
    known = [effect for effect in effects if effect is not None]
    if not known or len(known) < len(effects) or statistics.fmean(known) <= 0:
        return NOT
    shown = _shown(known)
    large = paper is None or statistics.fmean(known) >= paper / 2
    if shown and large:
        return CONFIRMED
    return WEAKER if shown or all(effect > 0 for effect in known) else NOT


def _shown(effects: Sequence[float]) -> bool:
    found = difference(effects, [0.0] * len(effects), range(len(effects)))
    if found is None:
        return False
    # No spread at all: what is counted, as bytes are, does not depend on the seed.
    return found.low > 0 if found.low is not None else found.mean > 0


def _short(result: Result, epoch: int | None) -> bool:
    """Return whether a run ended in peace before the epoch that is asked for."""
    there = result.figures.get("epochs")
    return epoch is not None and there is not None and result.status == "done" and there < epoch


def _ours(claim: Claim, found: Measured, effects: Mapping[int, float | None]) -> str:
    """Return our figures in words."""
    lost = "never there" if claim.measure in PAIRED else "not finite"
    arm = {seed: found.arm[seed] for seed in effects}
    against = {} if found.against is None else {seed: found.against[seed] for seed in effects}
    scale = scale_of(claim.measure, [*arm.values(), *against.values()])
    text = f"{found.of}: {_spread(arm, lost, scale)}"
    if against and claim.measure != "epochs_share":
        text += f" against {_spread(against, lost, scale)}"
    if found.against is not None and None not in effects.values():
        pairs = [(found.arm[seed] or 0.0, found.against[seed] or 0.0) for seed in effects]
        in_percent = "%" in found.of and claim.measure not in PAIRED
        text += f"; {_points(pairs) if in_percent else _changed(_shares(pairs))}"
    return f"{text}; {counted(len(effects), 'seed')}"


def _shares(pairs: Sequence[tuple[float, float]]) -> list[float]:
    return [here / there - 1 if there else 0.0 for here, there in pairs]


def _points(pairs: Sequence[tuple[float, float]]) -> str:
    """Return by how many points one is more than the other, of figures in percent.

    >>> _points([(60.0, 62.0), (61.0, 64.0)])
    '2.5 points less (95 % interval \N{MINUS SIGN}3.9 to 8.9)'
    """
    by = [here - there for here, there in pairs]
    return _more(by, lambda part: fixed(part, 1 if abs(part) >= 0.995 else 2), " points")


def _changed(more: Sequence[float]) -> str:
    """Return by which share one is more than the other, with the interval.

    >>> _changed([-0.29, -0.3, -0.31]), _changed([4.0])
    ('30 % less (95 % interval 28 % to 32 %)', '5 times as much')
    """
    if statistics.fmean(more) < 2:
        return _more(more, _percent)
    interval = _interval(more)
    text = f"{figure(1 + statistics.fmean(more), 3)} times as much"
    if interval is None:
        return text
    return f"{text} (95 % interval {figure(1 + interval[0], 3)} to {figure(1 + interval[1], 3)})"


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
    return with_std(mean, std, len(known)) + unit


def _percent(share: float) -> str:
    """Return a share in percent, with two digits that count.

    >>> _percent(0.1234), _percent(0.00123), _percent(-0.5), _percent(3.4)
    ('12 %', '0.12 %', '\N{MINUS SIGN}50 %', '340 %')
    """
    places = 0 if abs(share) >= 0.0995 else 1 if abs(share) >= 0.00995 else 2
    return f"{fixed(100 * share, places)} %"
