"""One sentence for each pair of arms, from its figures alone.

Words that claim a difference are used only where the 95 % interval excludes zero; the number of
seeds is always given.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gradherd.lab.report.arms import ArmSummary, late_epochs, values_at
from gradherd.lab.report.comparison import ArmPair, Comparison, Question, compare_pair
from gradherd.lab.report.stats import PairedDifference, finite
from gradherd.lab.study.kinds import uses_gradients
from gradherd.lab.text import counted, decimals, fixed, listed, p_value, significant

CONTROL = "always-plus"
"""The order that moves examples as a balancing order does, but ignores gradients."""
Direction = Literal["gain", "cost", "open"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a pair of arms shows."""

    kind: str
    """The question it answers: order, sparsify or both; control for the check of a gain."""
    arm: str
    tone: Literal["gain", "cost", "mixed", "open"]
    """What is shown: a gain, a cost, both, or nothing."""
    text: str


def all_verdicts(comparison: Comparison) -> list[Verdict]:
    """Return all sentences of a comparison, question by question."""
    return [
        verdict
        for question in comparison.questions
        for verdict in answer(question, comparison.metric_name, comparison.higher_is_better)
    ]


def answer(question: Question, metric: str, higher_is_better: bool) -> list[Verdict]:
    """Return a sentence for each pair of a question, and for orders the check by the control."""
    if question.kind == "order":
        return [*map(_order_verdict, question.pairs), *_control_verdicts(question.pairs)]
    return [
        _sparsify_verdict(pair, metric, higher_is_better, kind=question.kind)
        for pair in question.pairs
    ]


def multiple_testing_note(comparison: Comparison) -> str | None:
    """Return the warning about several tested differences; None if there is at most one."""
    pairs = {
        (pair.arm.key, pair.reference.key)
        for question in comparison.questions
        for pair in question.pairs
        if pair.loss is not None or pair.metric is not None
    }
    # A p value is about one test; the warning is for several side by side.
    if len(pairs) < 2:
        return None
    return (
        f"p values are not corrected for the number of comparisons: with {len(pairs)} of them, a "
        "small p value by chance is more likely than it suggests."
    )


def _order_verdict(pair: ArmPair) -> Verdict:
    """Say whether an order needs fewer epochs, and at what price."""
    # Balancing promises faster optimisation, so the train loss decides, not the metric.
    problem = _not_comparable(pair, by_loss=True)
    if problem is not None:
        return _without_means("order", pair, problem, diverged=pair.arm.final_loss.mean is None)
    when, sooner = _reached(pair)
    mean, late = _mean(pair, by_loss=True), pair.late_loss
    places = decimal_places(mean, pair.loss)
    text = f"{when}; {_which_loss(pair)} {_distance(mean, places)}"
    if late is not None:  # One epoch may be luck: the verdict rests on the mean of many.
        places = decimal_places(late.mean, late)
        text += f"; {_late_period(pair)} the loss is {_distance(late.mean, places)} on average"
    basis, direction = _basis(pair, late or pair.loss, places, lower_is_better=True)
    text += f" ({basis})."
    # Fewer epochs that take more seconds or bytes are a trade, not a gain.
    tone = "mixed" if direction == "gain" and not sooner else direction
    return Verdict(kind="order", arm=pair.arm.label, tone=tone, text=text)


def _sparsify_verdict(pair: ArmPair, metric: str, higher_is_better: bool, *, kind: str) -> Verdict:
    """Say whether sending less costs accuracy, and how much less it is."""
    # The question is what sending less costs in accuracy, so the metric decides, not the loss.
    arm, ref = pair.arm, pair.reference
    problem = _not_comparable(pair, by_loss=False)
    if problem is not None:
        return _without_means(kind, pair, problem, diverged=arm.final_metric.mean is None)
    own, other = arm.final_metric.mean, ref.final_metric.mean
    assert own is not None and other is not None
    mean = _mean(pair, by_loss=False)
    places = decimal_places(mean, pair.metric)
    basis, direction = _basis(pair, pair.metric, places, lower_is_better=not higher_is_better)
    digits = min(max(places, decimals(other, 3)), 6)
    name = f"{arm.label} against {ref.label}" if kind == "both" else _with_density(arm)
    text = (
        f"{name}: {metric} {fixed(own, digits)} vs {fixed(other, digits)} (difference"
        f"{_read_after(pair)} {fixed(mean, places, sign=True)}, {basis}) with {_price(pair)}."
    )
    # Less accuracy for fewer bytes is what sparsifying offers: a trade, which the reader judges.
    saves = pair.bytes_ratio is not None and pair.bytes_ratio < 1
    mixed = (direction == "cost" and saves) or (direction == "gain" and not saves)
    return Verdict(kind=kind, arm=arm.label, tone="mixed" if mixed else direction, text=text)


def _control_verdicts(pairs: Sequence[ArmPair]) -> list[Verdict]:
    """Compare the gain of each order that uses gradients with the control's."""
    return [
        verdict
        for control in pairs
        if control.arm.order == CONTROL
        for pair in pairs
        if pair.reference.key == control.reference.key and uses_gradients(pair.arm.order)
        if (verdict := _control_verdict(pair, control)) is not None
    ]


def _control_verdict(pair: ArmPair, control: ArmPair) -> Verdict | None:
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
    basis, direction = _basis(between, difference, places, lower_is_better=True)
    base = pair.reference.label
    # Gains over different epochs are not compared: they shrink as training goes on.
    if arm.epochs == other.epochs and control_gain >= gain:
        seeds = counted(len(pair.common_seeds), "seed")
        period = f" {_late_period(pair)}" if late else ""
        text = (
            f"{other.label}, which ignores gradients, improves on {base} as much as {arm.label} "
            f"({fixed(control_gain, places)} against {fixed(gain, places)}{period}, {seeds}): "
            "balancing is not the reason for the gain."
        )
        return Verdict(kind="control", arm=arm.label, tone="mixed", text=text)
    distance = _distance(_mean_loss(between, late), places)
    which = f"loss {_late_period(between)}" if late else _which_loss(between)
    lead = (
        f"Against {other.label}, which ignores gradients, {arm.label}'s {which} is {distance}"
        f"{' on average' if late else ''} ({basis})"
    )
    if direction == "gain":
        own = pair.late_loss if late else pair.loss
        shown = own is not None and own.excludes_zero
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


def _reached(pair: ArmPair) -> tuple[str, bool]:
    """Say when an arm reaches the other's final loss, and whether that takes less of everything."""
    arm, ref = pair.arm, pair.reference
    goal = f"{ref.label}'s {'final' if ref.finished else 'last'} loss"
    own = pair.reference_epochs_to
    if pair.epochs_to is None or own is None:
        return f"{arm.label} does not reach {goal} in {counted(arm.epochs, 'epoch')}", False
    # A loss that oscillates may reach its final value earlier; then that epoch is the fair one.
    if own == ref.epochs:
        share = f"{pair.epochs_to / own:.2f} of them"
        when = f"{arm.label} reaches {goal} after {pair.epochs_to} of {own} epochs ({share})"
    else:
        itself = f"{ref.label} itself first gets there after {own} of {ref.epochs}"
        when = f"{arm.label} reaches {goal} after {counted(pair.epochs_to, 'epoch')} ({itself})"
    ratios = {
        "seconds": _ratio(pair.seconds_to, ref.seconds_by_epoch[own - 1]),
        "bytes": _ratio(pair.bytes_to, ref.bytes_by_epoch[own - 1]),
    }
    # Seconds of other machines, or of virtual workers, say nothing.
    if not pair.same_clock:
        del ratios["seconds"]
    known = {what: ratio for what, ratio in ratios.items() if ratio is not None}
    if known:
        when += f", with {listed([_of_its(ratio, what) for what, ratio in known.items()])}"
    dearer = [what for what, ratio in known.items() if ratio > 1]
    if dearer and pair.epochs_to < own:
        costs = ["no less time" if what == "seconds" else "more bytes" for what in dearer]
        when += f": fewer epochs, but {listed(costs)}"
    return when, not dearer and pair.epochs_to <= own


def _ratio(own: float | None, other: float) -> float | None:
    # Rounded before it is judged: what is printed as 1.00 must not count as dearer.
    return None if own is None or not other else round(own / other, 2)


def _of_its(ratio: float, what: str) -> str:
    return f"{ratio:.2f} of its {what}" if ratio <= 1 else f"{ratio:.2f} times its {what}"


def decimal_places(mean: float, difference: PairedDifference | None) -> int:
    """Return how many decimals a difference and its interval deserve."""
    ends = []
    if difference is not None:
        ends = [end for end in (difference.low, difference.high) if end is not None]
    return decimals(max(abs(value) for value in (mean, *ends)), 2)


def _distance(mean: float, places: int) -> str:
    """Say by how much something is higher or lower.

    >>> _distance(-0.01234, 4), _distance(0.004, 1), _distance(0.0, 2)
    ('0.0123 lower', '0.004 higher', 'the same')
    """
    if mean == 0:
        return "the same"
    amount = fixed(abs(mean), places)
    if not amount.strip("0."):  # Too small for the decimals that the interval deserves.
        amount = significant(abs(mean), 1)
    return f"{amount} {'higher' if mean > 0 else 'lower'}"


def _basis(
    pair: ArmPair, difference: PairedDifference | None, places: int, *, lower_is_better: bool
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
    if not difference.excludes_zero:
        return f"{basis}: no difference shown", "open"
    # The interval excludes zero here, so its upper end decides the direction.
    better = (difference.high < 0) == lower_is_better
    return f"{basis}: {'better' if better else 'worse'}", "gain" if better else "cost"


def _which_loss(pair: ArmPair) -> str:
    return f"loss{after}" if (after := _read_after(pair)) else "final loss"


def _read_after(pair: ArmPair) -> str:
    """Say after which epoch a difference was read, if it was not the last one."""
    if pair.arm.finished and pair.reference.finished:
        return ""
    return f" after {counted(min(pair.arm.epochs, pair.reference.epochs), 'epoch')}"


def _late_period(pair: ArmPair) -> str:
    """Say over which epochs late losses are means: the last half of those that both arms have."""
    epochs = late_epochs(min(pair.arm.epochs, pair.reference.epochs))
    if pair.late_loss is not None and pair.late_loss.epoch is None:
        return f"over the last {counted(len(epochs), 'epoch')}"
    return f"over epochs {epochs[0]} to {epochs[-1]}"


def _price(pair: ArmPair) -> str:
    """Say what share of the bytes and of the seconds an arm takes."""
    share = pair.bytes_ratio
    if share is None:
        return "bytes not known"
    text = f"{share:.2f} times the bytes"
    if share < 1:
        text = f"{significant(100 * share, 2)} % of the bytes"
    if pair.seconds_ratio is None or not pair.same_clock:
        return text
    return f"{text} and {pair.seconds_ratio:.2f} times the seconds"


def _with_density(arm: ArmSummary) -> str:
    """Return "exdyna at density 0.01" for an arm called "exdyna 0.01"."""
    if arm.density is None:
        return arm.label
    return f"{arm.label.rsplit(' ', 1)[0]} at density {arm.density:.12g}"
