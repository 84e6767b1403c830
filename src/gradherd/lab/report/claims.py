"""Is a claim borne out? One rule for all of them.

Every claim becomes an *effect* of each seed, a share that is above zero if the claim holds there:

- less:      1 - arm / against          - greater:   arm / against - 1
- at-most:   1 - arm / value            - at-least:  arm / value - 1
- no-worse:  value - (share by which the arm is worse than against)

Of figures in percent, such as accuracies, the difference in points counts instead of the share.

Then, over seeds:

- **confirmed**: the 95 % t interval of the mean effect is above zero (or the effect is the same
  in all of two or more seeds), and the mean is at least half of the paper's, if the paper has one;
- **weaker**: only one of the two, or every single seed agrees but the interval reaches zero;
- **not confirmed**: all else; also if a run diverged or never got there.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradherd.lab.report.claims_measures import ALWAYS, Measured, measured, share_more
from gradherd.lab.report.claims_text import ours
from gradherd.lab.report.stats import difference
from gradherd.lab.study.results import RunResult
from gradherd.lab.study.spec import Claim

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


def judge(claim: Claim, results: Mapping[str, Sequence[RunResult]]) -> Verdict | None:
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
    paper = paper_effect(claim, found.in_percent, found.higher_is_better)
    word = word_of(list(effects.values()), paper)
    beside = None if against is None else _beside(claim, arm, against)
    return Verdict(claim, word, ours(claim, found, list(effects), beside))


def _beside(
    claim: Claim, arm: Sequence[RunResult], against: Sequence[RunResult]
) -> tuple[str, Measured] | None:
    """Return how else the same could be read, when: nobody should have to trust our choice."""
    name, plain = claim.measure, claim.measure.removeprefix("late_")
    if plain not in ("train_loss", "metric"):
        return None
    if name != plain:
        return "after the last epoch alone", measured(plain, claim.epoch, arm, against)
    last = max(one.figures.get("epochs", 0) for one in arm)
    if claim.epoch not in (None, last):
        return None
    return "over the last half of the epochs", measured(f"late_{plain}", None, arm, against)


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
        more = share_more(here, there, found.in_percent)
        effects[seed] = None if more is None else _effect(claim, more, found.higher_is_better)
    return effects


def _effect(claim: Claim, more: float, higher_is_better: bool) -> float:
    if claim.test == "no-worse":
        assert claim.value is not None
        return claim.value + (more if higher_is_better else -more)
    return -more if claim.test in ("less", "at-most") else more


def paper_effect(
    claim: Claim, in_percent: bool = False, higher_is_better: bool = False
) -> float | None:
    """Return the paper's effect, if it gives numbers.

    >>> claim = Claim(id="a", text="", source="", paper="9 of 36", paper_values=(9, 36),
    ...               measure="epochs_share", test="less", arm="a", against="b")
    >>> paper_effect(claim)
    0.75
    """
    if claim.paper_values is None:
        return None
    more = share_more(*claim.paper_values, in_percent)
    return None if more is None else _effect(claim, more, higher_is_better)


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


def _short(result: RunResult, epoch: int | None) -> bool:
    """Return whether a run ended in peace before the epoch that is asked for."""
    there = result.figures.get("epochs")
    return epoch is not None and there is not None and result.status == "done" and there < epoch
