"""One honest sentence for each pair of arms, from its figures alone.

Words that claim a difference are used only where the 95 % interval excludes zero; the number of
seeds is always named.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gradherd.lab.report.model import Arm, Comparison, Pair, Question
from gradherd.lab.report.pairs import pair_of
from gradherd.lab.report.wording import (
    apart,
    evidence,
    nothing_to_compare,
    places_for,
    price,
    reached,
    when_late,
    when_read,
)
from gradherd.lab.text import counted, decimals, fixed

CONTROL = "always-plus"
"""The order that moves examples as a balancing one does, but looks at no gradient."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a pair of arms shows."""

    kind: str
    """Which question it answers: order, sparsify or both; control for the check of a gain."""
    arm: str
    tone: Literal["gain", "cost", "mixed", "open"]
    """What is shown: a gain, a cost, both, or nothing."""
    text: str


def verdicts_of(comparison: Comparison) -> list[Verdict]:
    """Return all sentences of a comparison, question by question."""
    return [
        verdict
        for question in comparison.questions
        for verdict in answers(question, comparison.metric_name, comparison.higher_is_better)
    ]


def answers(question: Question, metric: str, higher_is_better: bool) -> list[Verdict]:
    """Return a sentence for each pair of a question, and what the control arm says to them."""
    if question.kind == "order":
        return [*map(order_verdict, question.pairs), *control_verdicts(question.pairs)]
    return [
        sparsify_verdict(pair, metric, higher_is_better, kind=question.kind)
        for pair in question.pairs
    ]


def caution(comparison: Comparison) -> str | None:
    """Return what has to be said where several differences are tested, or None."""
    pairs = {
        (pair.arm.key, pair.reference.key)
        for question in comparison.questions
        for pair in question.pairs
        if pair.loss is not None or pair.metric is not None
    }
    if len(pairs) < 2:
        return None
    return (
        f"p values are not corrected for the number of comparisons: with {len(pairs)} of them, "
        "one that is small by luck is more likely than it says."
    )


def order_verdict(pair: Pair) -> Verdict:
    """Say whether an order needs fewer epochs, and at what price."""
    stop = nothing_to_compare(pair, by_loss=True)
    if stop is not None:
        return _without_means("order", pair, stop, diverged=pair.arm.final_loss.mean is None)
    when, sooner = reached(pair)
    mean, late = _mean(pair, by_loss=True), pair.late_loss
    places = places_for(mean, pair.loss)
    text = f"{when}; {_which_loss(pair)} {apart(mean, places)}"
    if late is not None:  # One epoch may be luck: many of them are what the claim rests on.
        places = places_for(late.mean, late)
        text += f"; {when_late(pair)} the loss is {apart(late.mean, places)} on average"
    basis, shows = evidence(pair, late or pair.loss, places, lower_is_better=True)
    text += f" ({basis})."
    mixed = shows == "gain" and not sooner
    return Verdict(kind="order", arm=pair.arm.label, tone="mixed" if mixed else shows, text=text)


def sparsify_verdict(pair: Pair, metric: str, higher_is_better: bool, *, kind: str) -> Verdict:
    """Say whether sending less costs accuracy, and how much less it is."""
    arm, ref = pair.arm, pair.reference
    stop = nothing_to_compare(pair, by_loss=False)
    if stop is not None:
        return _without_means(kind, pair, stop, diverged=arm.final_metric.mean is None)
    here, there = arm.final_metric.mean, ref.final_metric.mean
    assert here is not None and there is not None
    mean = _mean(pair, by_loss=False)
    places = places_for(mean, pair.metric)
    basis, shows = evidence(pair, pair.metric, places, lower_is_better=not higher_is_better)
    digits = min(max(places, decimals(there, 3)), 6)
    name = f"{arm.label} against {ref.label}" if kind == "both" else _name(arm)
    text = (
        f"{name}: {metric} {fixed(here, digits)} vs {fixed(there, digits)} (difference"
        f"{when_read(pair)} {fixed(mean, places, sign=True)}, {basis}) with {price(pair)}."
    )
    saves = pair.bytes_ratio is not None and pair.bytes_ratio < 1
    mixed = (shows == "cost" and saves) or (shows == "gain" and not saves)
    return Verdict(kind=kind, arm=arm.label, tone="mixed" if mixed else shows, text=text)


def control_verdicts(pairs: Sequence[Pair]) -> list[Verdict]:
    """Hold the gain of each balancing order against that of the control arm."""
    return [
        verdict
        for control in pairs
        if control.arm.order == CONTROL
        for pair in pairs
        if pair.reference.key == control.reference.key and "grab" in pair.arm.order
        if (verdict := _control_verdict(pair, control)) is not None
    ]


def _control_verdict(pair: Pair, control: Pair) -> Verdict | None:
    arm, other = pair.arm, control.arm
    if None in (arm.final_loss.mean, other.final_loss.mean, pair.reference.final_loss.mean):
        return None
    between = pair_of(arm, other)
    late = None not in (pair.late_loss, control.late_loss, between.late_loss)
    gain, gain_without = -_mean_loss(pair, late), -_mean_loss(control, late)
    if gain <= 0:
        return None
    found = between.late_loss if late else between.loss
    places = places_for(gain, found)
    basis, shows = evidence(between, found, places, lower_is_better=True)
    base = pair.reference.label
    # Gains over different epochs are not held against each other: they shrink as training goes on.
    alike = arm.epochs == other.epochs
    if alike and gain_without >= gain:
        seeds = counted(len(pair.common_seeds), "seed")
        over = f" {when_late(pair)}" if late else ""
        text = (
            f"{other.label}, which looks at no gradient, gains as much on {base} as {arm.label} "
            f"({fixed(gain_without, places)} against {fixed(gain, places)}{over}, {seeds}): "
            "balancing is not the reason for the gain."
        )
        return Verdict(kind="control", arm=arm.label, tone="mixed", text=text)
    less = apart(_mean_loss(between, late), places)
    what = f"loss {when_late(between)}" if late else _which_loss(between)
    lead = (
        f"Against {other.label}, which looks at no gradient, {arm.label}'s {what} is {less}"
        f"{' on average' if late else ''} ({basis})"
    )
    if shows == "gain":
        own = pair.late_loss if late else pair.loss
        but = "" if own is not None and own.shown else f", but a gain on {base} is not shown"
        text = f"{lead}: balancing is what helps{but}."
        return Verdict(kind="control", arm=arm.label, tone="gain", text=text)
    text = f"{lead}: that balancing is the reason is not shown."
    return Verdict(kind="control", arm=arm.label, tone="open", text=text)


def _which_loss(pair: Pair) -> str:
    return f"loss{then}" if (then := when_read(pair)) else "final loss"


def _mean_loss(pair: Pair, late: bool) -> float:
    if late and pair.late_loss is not None:
        return pair.late_loss.mean
    return _mean(pair, by_loss=True)


def _mean(pair: Pair, *, by_loss: bool) -> float:
    """Return the mean difference: over pairs where there are some, else of the two means."""
    found = pair.loss if by_loss else pair.metric
    if found is not None:
        return found.mean
    whole = pair.arm.finished and pair.reference.finished
    common = min(pair.arm.epochs, pair.reference.epochs)
    here, there = (
        (arm.loss_by_epoch if by_loss else arm.metric_by_epoch)[-1 if whole else common - 1].mean
        for arm in (pair.arm, pair.reference)
    )
    assert here is not None and there is not None
    return here - there


def _name(arm: Arm) -> str:
    """Return "exdyna at density 0.01" for an arm called "exdyna 0.01"."""
    if arm.density is None:
        return arm.label
    return f"{arm.label.rsplit(' ', 1)[0]} at density {arm.density:.12g}"


def _without_means(kind: str, pair: Pair, text: str, *, diverged: bool) -> Verdict:
    lost = diverged and pair.arm.epochs > 0
    return Verdict(kind=kind, arm=pair.arm.label, tone="cost" if lost else "open", text=text)
