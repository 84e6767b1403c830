"""Sentences about each pair of arms, from its figures alone: loss and metric together.

`rule` decides which differences are shown; words that claim one are used for these only. A headline
says it in a few words, the text has the figures: the number of seeds is always among them.
"""

from dataclasses import dataclass
from typing import Literal

from gradherd.lab.report.arms import ArmSummary, late_epochs, values_over
from gradherd.lab.report.comparison import ArmPair, Comparison, Question, compare_pair
from gradherd.lab.report.rule import LEVEL, MIN_SEEDS, Family
from gradherd.lab.report.stats import PairedDifference
from gradherd.lab.text import counted, decimals, fixed, listed, p_value, significant

CONTROL = "always-plus"
"""The order that moves examples as a balancing order does, but ignores gradients."""
Direction = Literal["gain", "cost", "mixed", "open"]
# "No difference shown", never "no difference": few seeds cannot show that there is none.
_HEADLINES = {
    "gain": "better than {}",
    "gain, but": "better than {}, at a price",
    "cost": "worse than {}",
    "cost, but": "worse than {}, but it saves bytes",
    "mixed": "better than {} in one measure, worse in another",
    "open": "no difference from {} shown",
    "few": "too few seeds to compare it with {}",
}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a pair of arms shows."""

    kind: str
    """The question it answers: order, sparsify or both; control for the check of a gain."""
    arm: str
    tone: Direction
    """What is shown: a gain, a cost, both, or nothing."""
    text: str
    """The figures that it rests on."""
    headline: str
    """The answer in one sentence."""


def answers(comparison: Comparison) -> list[tuple[Question, list[Verdict]]]:
    """Return each question of a comparison with a verdict per pair, and the checks by the control.

    All differences are one family: p values are corrected for their number.
    """
    family, found = family_of(comparison), []
    for question in comparison.questions:
        verdicts = [_pair_verdict(question.kind, p, comparison, family) for p in question.pairs]
        if question.kind == "order":
            checks = (_control_verdict(*check, family) for check in _control_checks(comparison))
            verdicts += [one for one in checks if one is not None]
        found.append((question, verdicts))
    return found


def all_verdicts(comparison: Comparison) -> list[Verdict]:
    """Return all verdicts of a comparison, question by question."""
    return [verdict for _, verdicts in answers(comparison) for verdict in verdicts]


def family_of(comparison: Comparison) -> Family:
    """Return all tests of a comparison.

    Each pair of arms has two: of the loss that decides, and of the metric. An order beside the
    control has one, of its loss against the control's.
    """
    # By arms, since a pair may answer two questions.
    pairs = {
        (pair.arm.key, pair.reference.key): pair
        for question in comparison.questions
        for pair in question.pairs
    }
    tests = [one for pair in pairs.values() for one in (_deciding_loss(pair), pair.metric)]
    return Family([*tests, *(_deciding_loss(pair) for _, _, pair in _control_checks(comparison))])


def multiple_testing_note(comparison: Comparison) -> str | None:
    """Return what was done about several tests; None if there is at most one."""
    tests = family_of(comparison).size
    if tests < 2:
        return None
    return (
        f"{tests} differences were tested (losses and metrics). One counts only if its p value, "
        f"corrected by Holm's method, is below {LEVEL}; intervals are not corrected."
    )


def _deciding_loss(pair: ArmPair) -> PairedDifference | None:
    # One epoch may be luck: the mean over many is steadier.
    return pair.late_loss or pair.loss


def _control_checks(comparison: Comparison) -> list[tuple[ArmPair, ArmPair, ArmPair]]:
    """Return each order that balances gradients, and the control, beside the same reference.

    The third pair is that order against the control.
    """
    pairs = [p for one in comparison.questions if one.kind == "order" for p in one.pairs]
    controls = [pair for pair in pairs if pair.arm.order == CONTROL]
    if not controls:
        return []
    # Imported late: it loads torch, which nothing else in a report needs.
    from gradherd.lab.study.kinds import balances_gradients

    return [
        (pair, control, compare_pair(pair.arm, control.arm))
        for control in controls
        for pair in pairs
        if pair.reference.key == control.reference.key and balances_gradients(pair.arm.order)
    ]


def _pair_verdict(kind: str, pair: ArmPair, comparison: Comparison, family: Family) -> Verdict:
    """Say what an order or a sparsifier gains, and at what price."""
    is_order = kind == "order"
    # Balancing promises faster optimisation, sending less must not cost accuracy.
    if (problem := _not_comparable(kind, pair, by_loss=is_order)) is not None:
        return problem
    loss, by_loss = _loss_clause(pair, family)
    metric, by_metric = _metric_clause(pair, comparison, family)
    shown = _both(by_loss, by_metric)
    if is_order:
        when, sooner = _reached(pair)
        # Fewer epochs that take more seconds or bytes are a trade, not a gain.
        mixed = shown == "gain" and not sooner
        text = "; ".join(filter(None, (when, loss, metric)))
        return _verdict(kind, pair, shown, "mixed" if mixed else shown, f"{text}.")
    arm, ref = pair.arm, pair.reference
    name = f"{arm.label} against {ref.label}" if kind == "both" else _with_density(arm)
    # Less accuracy for fewer bytes is what sparsifying offers: a trade, which the reader judges.
    saves = pair.bytes_ratio is not None and pair.bytes_ratio < 1
    mixed = (shown == "cost" and saves) or (shown == "gain" and not saves)
    text = "; ".join(filter(None, (metric, loss, f"with {_price(pair)}")))
    return _verdict(kind, pair, shown, "mixed" if mixed else shown, f"{name}: {text}.")


def _verdict(kind: str, pair: ArmPair, shown: Direction, tone: Direction, text: str) -> Verdict:
    words = "few"
    if len(pair.common_seeds) >= MIN_SEEDS:
        # A gain that is only mixed has its price, and a cost has its saving.
        words = shown if shown == tone else f"{shown}, but"
    answer = _HEADLINES[words].format(pair.reference.label)
    own, epochs = pair.reference_epochs_to, pair.epochs_to
    if kind == "order" and shown == "gain" and epochs is not None and epochs < (own or 0):
        answer += f", whose final loss it reaches after {counted(epochs, 'epoch')} instead of {own}"
    takes = "" if pair.bytes_ratio is None else f"; it takes {_price(pair)}"
    headline = f"{pair.arm.label}: {answer}{takes}."
    return Verdict(kind=kind, arm=pair.arm.label, tone=tone, text=text, headline=headline)


def _both(one: Direction, other: Direction) -> Direction:
    """Return what two measures show together: what one leaves open, the other decides."""
    if one == other or other == "open":
        return one
    return other if one == "open" else "mixed"


def _metric_clause(pair: ArmPair, comparison: Comparison, family: Family) -> tuple[str, Direction]:
    own, other = pair.arm.final_metric.mean, pair.reference.final_metric.mean
    if own is None or other is None:
        return "", "open"
    # Paired where it can be: seeds differ more from each other than arms do.
    mean = _mean(pair, by_loss=False)
    places = decimal_places(mean, pair.metric)
    lower = not comparison.higher_is_better
    basis, direction = _basis(pair, pair.metric, places, family, lower_is_better=lower)
    digits = min(max(places, decimals(other, 3)), 6)
    text = (
        f"{comparison.metric_name} {fixed(own, digits)} vs {fixed(other, digits)} "
        f"(difference{_read_after(pair)} {fixed(mean, places, sign=True)}, {basis})"
    )
    return text, direction


def _loss_clause(pair: ArmPair, family: Family) -> tuple[str, Direction]:
    if None in (pair.arm.final_loss.mean, pair.reference.final_loss.mean):
        return "", "open"
    mean, late = _mean(pair, by_loss=True), pair.late_loss
    places = decimal_places(mean, pair.loss)
    text = f"{_which_loss(pair)} {distance(mean, places)}"
    if late is not None:
        places = decimal_places(late.mean, late)
        text += f"; {_late_period(pair)} the loss is {distance(late.mean, places)} on average"
    basis, direction = _basis(pair, _deciding_loss(pair), places, family, lower_is_better=True)
    return f"{text} ({basis})", direction


def _control_verdict(
    pair: ArmPair, control: ArmPair, between: ArmPair, family: Family
) -> Verdict | None:
    """Say whether the gain of an order is due to balancing; None without a gain."""
    arm, other, base = pair.arm, control.arm, pair.reference
    if None in (arm.final_loss.mean, other.final_loss.mean, base.final_loss.mean):
        return None
    # Moving examples in a fixed pattern may help by itself. Only what an order gains beyond the
    # control can come from balancing gradients.
    gain, control_gain = -_mean_loss(pair), -_mean_loss(control)
    if gain <= 0:  # There is nothing to explain.
        return None
    difference, late = _deciding_loss(between), between.late_loss is not None
    places = decimal_places(gain, difference)

    def verdict(tone: Direction, conclusion: str, text: str) -> Verdict:
        return Verdict(
            kind="control",
            arm=arm.label,
            tone=tone,
            text=f"{text}: {conclusion}.",
            headline=f"{arm.label} beside {other.label}, which ignores gradients: {conclusion}.",
        )

    # Gains over different epochs are not compared: they shrink as training goes on.
    if arm.epochs == other.epochs and control_gain >= gain:
        period = f" {_late_period(pair)}" if pair.late_loss is not None else ""
        return verdict(
            "mixed",
            "balancing is not the reason for the gain",
            f"{other.label}, which ignores gradients, improves on {base.label} as much as "
            f"{arm.label} ({fixed(control_gain, places)} against {fixed(gain, places)}{period}, "
            f"{counted(len(pair.common_seeds), 'seed')})",
        )
    basis, direction = _basis(between, difference, places, family, lower_is_better=True)
    which = f"loss {_late_period(between)}" if late else _which_loss(between)
    lead = (
        f"Against {other.label}, which ignores gradients, {arm.label}'s {which} is "
        f"{distance(_mean_loss(between), places)}{' on average' if late else ''} ({basis})"
    )
    if direction != "gain":
        return verdict("open", "it is not shown that balancing is the reason", lead)
    own = _deciding_loss(pair)
    shown = own is not None and family.finds(own) == "lower"
    but = "" if shown else f", but a gain over {base.label} is not shown"
    return verdict("gain", f"balancing is what helps{but}", lead)


def _mean_loss(pair: ArmPair) -> float:
    return pair.late_loss.mean if pair.late_loss is not None else _mean(pair, by_loss=True)


def _mean(pair: ArmPair, *, by_loss: bool) -> float:
    """Return the mean difference: over paired runs where there are any, else of the two means."""
    difference = pair.loss if by_loss else pair.metric
    if difference is not None:
        return difference.mean
    curves = [
        arm.loss_by_epoch if by_loss else arm.metric_by_epoch for arm in (pair.arm, pair.reference)
    ]
    last = -1 if _finished(pair) else min(map(len, curves)) - 1
    own, other = (curve[last].mean for curve in curves)
    assert own is not None and other is not None
    return own - other


def _finished(pair: ArmPair) -> bool:
    return pair.arm.finished and pair.reference.finished


def _not_comparable(kind: str, pair: ArmPair, *, by_loss: bool) -> Verdict | None:
    """Return why there are no means to compare; None if there are."""
    for one in (pair.arm, pair.reference):
        tone: Direction = "open"
        if not one.epochs:
            problem = f"{one.label} has no finished epoch, so nothing is compared"
        elif (one.final_loss if by_loss else one.final_metric).mean is None:
            values = values_over(one.used, [one.epochs], "train_loss" if by_loss else "metric")
            problem = (
                f"{one.label} diverged with {values.count(None)} of {counted(len(values), 'seed')} "
                f"(its {'loss' if by_loss else 'metric'} is not finite), so there is no mean to "
                "compare"
            )
            tone = "cost" if one is pair.arm else "open"
        else:
            continue
        text = f"{pair.arm.label}: {problem}."
        return Verdict(kind=kind, arm=pair.arm.label, tone=tone, text=text, headline=text)
    return None


def _basis(
    pair: ArmPair,
    difference: PairedDifference | None,
    places: int,
    family: Family,
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
    found, corrected = family.finds(difference), family.corrected_p(difference)
    # What is printed alike is not printed twice.
    if corrected is not None and p_value(corrected) != p_value(difference.p):
        basis += f", corrected {p_value(corrected)}"
    if found == "few":
        return f"{basis}: not enough seeds", "open"
    if found == "open":
        return f"{basis}: no difference shown", "open"
    better = (found == "lower") == lower_is_better
    return f"{basis}: {'better' if better else 'worse'}", "gain" if better else "cost"


def _reached(pair: ArmPair) -> tuple[str, bool]:
    """Say when an arm reaches the other's final loss, and whether that takes less of everything."""
    arm, ref = pair.arm, pair.reference
    goal = f"{ref.label}'s {'final' if ref.finished else 'last'} loss"
    # Not its number of epochs: it may have been there before, and then got worse.
    own = pair.reference_epochs_to
    if pair.epochs_to is None or own is None:
        single = any(epoch is not None for epoch in pair.epochs_to_by_seed)
        lead = f"the mean loss of {arm.label}" if single and len(arm.seeds) > 1 else arm.label
        return f"{lead} does not reach {goal} in {counted(arm.epochs, 'epoch')}", False
    # A loss that oscillates may reach its final value earlier; then that epoch is the fair one.
    if own == ref.epochs:
        share = f"{pair.epochs_to / own:.2f} of them"
        when = f"{arm.label} reaches {goal} after {pair.epochs_to} of {own} epochs ({share})"
    else:
        itself = f"{ref.label} itself first gets there after {own} of {ref.epochs}"
        when = f"{arm.label} reaches {goal} after {counted(pair.epochs_to, 'epoch')} ({itself})"
    spent = {
        "seconds": (pair.seconds_to, ref.seconds_by_epoch[own - 1]),
        "bytes": (pair.bytes_to, ref.bytes_by_epoch[own - 1]),
    }
    # Seconds of other machines, or of virtual workers, say nothing.
    if not pair.same_clock:
        del spent["seconds"]
    # Rounded before it is judged: what is printed as 1.00 must not count as dearer.
    ratios = {
        w: round(mine / its, 2) for w, (mine, its) in spent.items() if mine is not None and its
    }
    if ratios:
        parts = [
            f"{ratio:.2f} {'of' if ratio <= 1 else 'times'} its {what}"
            for what, ratio in ratios.items()
        ]
        when += f", with {listed(parts)}"
    dearer = [what for what, ratio in ratios.items() if ratio > 1]
    if dearer and pair.epochs_to < own:
        costs = ["no less time" if what == "seconds" else "more bytes" for what in dearer]
        when += f": fewer epochs, but {listed(costs)}"
    return when, not dearer and pair.epochs_to <= own


def decimal_places(mean: float, difference: PairedDifference | None) -> int:
    """Return how many decimals a difference and its interval deserve."""
    ends = () if difference is None else (difference.low, difference.high)
    # The largest of the three decides, so that all of them line up.
    return decimals(max(abs(value) for value in (mean, *ends) if value is not None), 2)


def distance(mean: float, places: int) -> str:
    """Say by how much something is higher or lower.

    >>> distance(-0.01234, 4), distance(0.004, 1), distance(0.0, 2)
    ('0.0123 lower', '0.004 higher', 'the same')
    """
    if mean == 0:
        return "the same"
    amount = fixed(abs(mean), places)
    if not amount.strip("0."):  # Too small for the decimals that the interval deserves.
        amount = significant(abs(mean), 1)
    return f"{amount} {'higher' if mean > 0 else 'lower'}"


def _which_loss(pair: ArmPair) -> str:
    return f"loss{after}" if (after := _read_after(pair)) else "final loss"


def _read_after(pair: ArmPair) -> str:
    """Say after which epoch a difference was read, if it was not the last one."""
    if _finished(pair):
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
    # Shares in percent, multiples in times: "0.015 times" makes a reader count zeros.
    text = f"{share:.2f} times the bytes"
    if f"{share:.2f}" == "1.00":
        text = "the same number of bytes"
    elif share < 1:
        text = f"{significant(100 * share, 2)} % of the bytes"
    if pair.seconds_ratio is None or not pair.same_clock:
        return text
    return f"{text} and {pair.seconds_ratio:.2f} times the seconds"


def _with_density(arm: ArmSummary) -> str:
    """Return "exdyna at density 0.01" for an arm called "exdyna 0.01"."""
    if arm.density is None:
        return arm.label
    return f"{arm.label.rsplit(' ', 1)[0]} at density {arm.density:.12g}"
