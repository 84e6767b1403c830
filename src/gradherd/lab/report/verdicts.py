"""One sentence for each pair of arms, from its figures alone: loss and metric together.

Words that claim a difference are used only where the 95 % interval excludes zero, the p value stays
below 5 % when it is corrected for the number of tests, and there are at least three seeds. The
number of seeds is always given.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from gradherd.lab.report.arms import values_at
from gradherd.lab.report.comparison import ArmPair, Comparison, Question, compare_pair
from gradherd.lab.report.phrases import (
    decimal_places,
    distance,
    headline,
    late_period,
    price,
    reached,
    read_after,
    which_loss,
    with_density,
)
from gradherd.lab.report.stats import PairedDifference, finite, holm
from gradherd.lab.text import counted, decimals, fixed, p_value

CONTROL = "always-plus"
"""The order that moves examples as a balancing order does, but ignores gradients."""
MIN_SEEDS = 3
"""Fewer seeds show no difference: with two, the interval rests on a single degree of freedom."""
Direction = Literal["gain", "cost", "mixed", "open"]
Corrected = Mapping[PairedDifference, float]
"""p values, corrected for the number of tests in a comparison."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a pair of arms shows."""

    kind: str
    """The question it answers: order, sparsify or both; control for the check of a gain."""
    arm: str
    tone: Literal["gain", "cost", "mixed", "open"]
    """What is shown: a gain, a cost, both, or nothing."""
    text: str
    headline: str = ""
    """The answer in a few words, with its price; empty where the text is as short."""


def all_verdicts(comparison: Comparison) -> list[Verdict]:
    """Return all sentences of a comparison, question by question."""
    return [
        verdict for question in comparison.questions for verdict in answer(question, comparison)
    ]


def answer(question: Question, comparison: Comparison) -> list[Verdict]:
    """Return a sentence for each pair of a question, and for orders the check by the control.

    Args:
        question: One of the comparison's.
        comparison: All arms, whose number of tests p values are corrected for.
    """
    corrected = dict(_tests(comparison))
    metric, higher = comparison.metric_name, comparison.higher_is_better
    if question.kind == "order":
        sentences = [_order_verdict(pair, metric, higher, corrected) for pair in question.pairs]
        return [*sentences, *_control_verdicts(question.pairs, corrected)]
    return [
        _sparsify_verdict(pair, metric, higher, corrected, kind=question.kind)
        for pair in question.pairs
    ]


def _tests(comparison: Comparison) -> list[tuple[PairedDifference, float]]:
    """Return all tested differences of a comparison, with p values corrected for their number.

    Each pair of arms has two tests: of the loss that decides, and of the metric.
    """
    # By arms, since a pair may answer two questions, and two pairs may have equal differences.
    tests = {
        (pair.arm.key, pair.reference.key, kind): difference
        for question in comparison.questions
        for pair in question.pairs
        for kind, difference in (("loss", pair.late_loss or pair.loss), ("metric", pair.metric))
        if difference is not None and difference.p is not None
    }
    p_values = [one.p for one in tests.values() if one.p is not None]
    return list(zip(tests.values(), holm(p_values), strict=True))


def multiple_testing_note(comparison: Comparison) -> str | None:
    """Return what was done about several tests; None if there is at most one."""
    tests = len(_tests(comparison))
    if tests < 2:
        return None
    return (
        f"{tests} differences were tested (losses and metrics). One counts only if its p value, "
        "corrected by Holm's method, is below 0.05; intervals are not corrected."
    )


def _order_verdict(
    pair: ArmPair, metric: str, higher_is_better: bool, corrected: Corrected
) -> Verdict:
    """Say whether an order needs fewer epochs, and at what price."""
    # Balancing promises faster optimisation, so the train loss comes first.
    problem = _not_comparable(pair, by_loss=True)
    if problem is not None:
        return _without_means("order", pair, problem, diverged=pair.arm.final_loss.mean is None)
    when, sooner = reached(pair)
    mean, late = _mean(pair, by_loss=True), pair.late_loss
    places = decimal_places(mean, pair.loss)
    text = f"{when}; {which_loss(pair)} {distance(mean, places)}"
    if late is not None:  # One epoch may be luck: the verdict rests on the mean of many.
        places = decimal_places(late.mean, late)
        text += f"; {late_period(pair)} the loss is {distance(late.mean, places)} on average"
    basis, by_loss = _basis(pair, late or pair.loss, places, corrected, lower_is_better=True)
    also, by_metric = _metric_clause(pair, metric, higher_is_better, corrected)
    text += f" ({basis}){also}."
    direction = _both(by_loss, by_metric)
    # Fewer epochs that take more seconds or bytes are a trade, not a gain.
    tone = "mixed" if direction == "gain" and not sooner else direction
    return _verdict("order", pair, direction, tone, text)


def _sparsify_verdict(
    pair: ArmPair, metric: str, higher_is_better: bool, corrected: Corrected, *, kind: str
) -> Verdict:
    """Say whether sending less costs accuracy, and how much less it is."""
    # The question is what sending less costs in accuracy, so the metric comes first.
    arm, ref = pair.arm, pair.reference
    problem = _not_comparable(pair, by_loss=False)
    if problem is not None:
        return _without_means(kind, pair, problem, diverged=arm.final_metric.mean is None)
    own, other = arm.final_metric.mean, ref.final_metric.mean
    assert own is not None and other is not None
    # Paired where it can be: seeds differ more from each other than arms do.
    mean = _mean(pair, by_loss=False)
    places = decimal_places(mean, pair.metric)
    lower = not higher_is_better
    basis, by_metric = _basis(pair, pair.metric, places, corrected, lower_is_better=lower)
    also, by_loss = _loss_clause(pair, corrected)
    direction = _both(by_metric, by_loss)
    digits = min(max(places, decimals(other, 3)), 6)
    name = f"{arm.label} against {ref.label}" if kind == "both" else with_density(arm)
    text = (
        f"{name}: {metric} {fixed(own, digits)} vs {fixed(other, digits)} (difference"
        f"{read_after(pair)} {fixed(mean, places, sign=True)}, {basis}){also} with {price(pair)}."
    )
    # Less accuracy for fewer bytes is what sparsifying offers: a trade, which the reader judges.
    saves = pair.bytes_ratio is not None and pair.bytes_ratio < 1
    mixed = (direction == "cost" and saves) or (direction == "gain" and not saves)
    return _verdict(kind, pair, direction, "mixed" if mixed else direction, text)


def _verdict(kind: str, pair: ArmPair, shown: Direction, tone: Direction, text: str) -> Verdict:
    enough = len(pair.common_seeds) >= MIN_SEEDS
    # A gain that is only mixed has its price, and a cost has its saving.
    short = headline(pair, (shown if shown == tone else f"{shown}, but") if enough else "few")
    return Verdict(kind=kind, arm=pair.arm.label, tone=tone, text=text, headline=short)


def _both(one: Direction, other: Direction) -> Direction:
    """Return what two measures show together: what one leaves open, the other decides."""
    if one == other or other == "open":
        return one
    return other if one == "open" else "mixed"


def _metric_clause(
    pair: ArmPair, metric: str, higher_is_better: bool, corrected: Corrected
) -> tuple[str, Direction]:
    """Say what the metric shows, after a sentence about the loss."""
    difference = pair.metric
    if difference is None:
        return "", "open"
    places = decimal_places(difference.mean, difference)
    lower = not higher_is_better
    basis, direction = _basis(pair, difference, places, corrected, lower_is_better=lower)
    if direction == "open":
        return f"; {metric}: no difference shown", direction
    return f"; {metric} {fixed(difference.mean, places, sign=True)} ({basis})", direction


def _loss_clause(pair: ArmPair, corrected: Corrected) -> tuple[str, Direction]:
    """Say what the train loss shows, after a sentence about the metric."""
    difference = pair.late_loss or pair.loss
    if difference is None:
        return "", "open"
    places = decimal_places(difference.mean, difference)
    basis, direction = _basis(pair, difference, places, corrected, lower_is_better=True)
    if direction == "open":
        return ", train loss: no difference shown,", direction
    period = f" {late_period(pair)}" if pair.late_loss is not None else ""
    return f", train loss{period} {distance(difference.mean, places)} ({basis}),", direction


def _control_verdicts(pairs: Sequence[ArmPair], corrected: Corrected) -> list[Verdict]:
    """Compare the gain of each order that uses gradients with the control's."""
    controls = [pair for pair in pairs if pair.arm.order == CONTROL]
    if not controls:
        return []
    # Imported late: it loads torch, which nothing else in a report needs.
    from gradherd.lab.study.kinds import balances_gradients

    return [
        verdict
        for control in controls
        for pair in pairs
        if pair.reference.key == control.reference.key and balances_gradients(pair.arm.order)
        if (verdict := _control_verdict(pair, control, corrected)) is not None
    ]


def _control_verdict(pair: ArmPair, control: ArmPair, corrected: Corrected) -> Verdict | None:
    arm, other = pair.arm, control.arm
    if None in (arm.final_loss.mean, other.final_loss.mean, pair.reference.final_loss.mean):
        return None
    # Moving examples in a fixed pattern may help by itself. Only what an order gains beyond the
    # control can come from balancing gradients.
    between = compare_pair(arm, other)
    late = None not in (pair.late_loss, control.late_loss, between.late_loss)
    gain, control_gain = -_mean_loss(pair, late), -_mean_loss(control, late)
    # There is no gain to explain.
    if gain <= 0:
        return None
    difference = between.late_loss if late else between.loss
    places = decimal_places(gain, difference)
    basis, direction = _basis(between, difference, places, corrected, lower_is_better=True)
    base = pair.reference.label
    # Gains over different epochs are not compared: they shrink as training goes on.
    if arm.epochs == other.epochs and control_gain >= gain:
        seeds = counted(len(pair.common_seeds), "seed")
        period = f" {late_period(pair)}" if late else ""
        text = (
            f"{other.label}, which ignores gradients, improves on {base} as much as {arm.label} "
            f"({fixed(control_gain, places)} against {fixed(gain, places)}{period}, {seeds}): "
            "balancing is not the reason for the gain."
        )
        return Verdict(kind="control", arm=arm.label, tone="mixed", text=text)
    amount = distance(_mean_loss(between, late), places)
    which = f"loss {late_period(between)}" if late else which_loss(between)
    lead = (
        f"Against {other.label}, which ignores gradients, {arm.label}'s {which} is {amount}"
        f"{' on average' if late else ''} ({basis})"
    )
    if direction == "gain":
        own = pair.late_loss if late else pair.loss
        shown = own is not None and _is_shown(own, corrected)
        but = "" if shown else f", but a gain over {base} is not shown"
        text = f"{lead}: balancing is what helps{but}."
        return Verdict(kind="control", arm=arm.label, tone="gain", text=text)
    text = f"{lead}: it is not shown that balancing is the reason."
    return Verdict(kind="control", arm=arm.label, tone="open", text=text)


def _mean_loss(pair: ArmPair, late: bool) -> float:
    if late and pair.late_loss is not None:
        return pair.late_loss.mean
    return _mean(pair, by_loss=True)


def _mean(pair: ArmPair, *, by_loss: bool) -> float:
    """Return the mean difference: over paired runs where there are any, else of the two means."""
    difference = pair.loss if by_loss else pair.metric
    if difference is not None:
        return difference.mean
    finished = pair.arm.finished and pair.reference.finished
    common = min(pair.arm.epochs, pair.reference.epochs)
    own, other = (
        (arm.loss_by_epoch if by_loss else arm.metric_by_epoch)[-1 if finished else common - 1].mean
        for arm in (pair.arm, pair.reference)
    )
    assert own is not None and other is not None
    return own - other


def _without_means(kind: str, pair: ArmPair, text: str, *, diverged: bool) -> Verdict:
    lost = diverged and pair.arm.epochs > 0
    return Verdict(kind=kind, arm=pair.arm.label, tone="cost" if lost else "open", text=text)


def _not_comparable(pair: ArmPair, *, by_loss: bool) -> str | None:
    """Return why there are no means to compare; None if there are."""
    for one in (pair.arm, pair.reference):
        if not one.epochs:
            return f"{pair.arm.label}: {one.label} has no finished epoch, so nothing is compared."
    for one in (pair.arm, pair.reference):
        mean = (one.final_loss if by_loss else one.final_metric).mean
        if mean is None:
            values = values_at(
                one.used, one.epochs, lambda row: row.train_loss if by_loss else row.metric
            )
            lost = sum(finite(value) is None for value in values)
            seeds = counted(len(values), "seed")
            what = "loss" if by_loss else "metric"
            return (
                f"{pair.arm.label}: {one.label} diverged with {lost} of {seeds} (its {what} is not "
                "finite), so there is no mean to compare."
            )
    return None


def _is_shown(difference: PairedDifference, corrected: Corrected) -> bool:
    """Return whether a difference may be called one."""
    p = corrected.get(difference, difference.p)
    return (
        difference.excludes_zero
        and p is not None
        and p < 0.05
        and len(difference.seeds) >= MIN_SEEDS
    )


def _basis(
    pair: ArmPair,
    difference: PairedDifference | None,
    places: int,
    corrected: Corrected,
    *,
    lower_is_better: bool,
) -> tuple[str, Direction]:
    """Say what a difference rests on, and what it shows."""
    if difference is None:
        common = len(pair.common_seeds)
        return f"{counted(common, 'common seed')}: no difference can be shown", "open"
    seeds = counted(len(difference.seeds), "seed")
    if difference.low is None or difference.high is None:
        return f"equal for each of {seeds}, so there is no interval: nothing is shown", "open"
    low, high = (fixed(end, places, sign=True) for end in (difference.low, difference.high))
    basis = f"95 % interval {low} to {high}, {seeds}, paired {p_value(difference.p)}"
    several = corrected.get(difference, difference.p)
    # What is printed alike is not printed twice.
    if p_value(several) != p_value(difference.p):
        basis += f", corrected {p_value(several)}"
    if len(difference.seeds) < MIN_SEEDS:
        return f"{basis}: not enough seeds", "open"
    if not _is_shown(difference, corrected):
        return f"{basis}: no difference shown", "open"
    # The interval excludes zero here, so its upper end decides the direction.
    better = (difference.high < 0) == lower_is_better
    return f"{basis}: {'better' if better else 'worse'}", "gain" if better else "cost"
