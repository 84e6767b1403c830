"""Sentences about each pair of arms, from its figures alone: loss and metric together.

`stats` decides which differences are shown; words that claim one are used for these only. A
headline says it in a few words, the text has the figures: the number of seeds is always among them.
"""

from dataclasses import dataclass
from typing import Literal

from gradherd.lab.report.arms import late_epochs, values_over
from gradherd.lab.report.comparison import QUESTIONS, ArmPair, Comparison, compare_pair
from gradherd.lab.report.stats import LEVEL, MIN_SEEDS, Family, PairedDifference
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
_FINDINGS = {
    "gain": "better",
    "cost": "worse",
    "open": "no difference shown",
    "few": "not enough seeds",
}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a pair of arms shows."""

    tone: Direction
    """What is shown: a gain, a cost, both, or nothing."""
    text: str
    """The figures that it rests on."""
    headline: str
    """The answer in one sentence."""


def answers(comparison: Comparison) -> list[tuple[str, list[Verdict]]]:
    """Return each question of a comparison with a verdict per pair, and the checks by the control.

    All differences are one family: p values are corrected for their number.
    """
    family, found = family_of(comparison), []
    for kind, pairs in comparison.questions.items():
        is_order = kind == "order"
        verdicts = [_pair_verdict(pair, comparison, family, is_order=is_order) for pair in pairs]
        if is_order:
            checks = (_control_verdict(*check, family) for check in _control_checks(comparison))
            verdicts += [one for one in checks if one is not None]
        found.append((QUESTIONS[kind], verdicts))
    return found


def all_verdicts(comparison: Comparison) -> list[Verdict]:
    """Return all verdicts of a comparison, question by question."""
    return [verdict for _, verdicts in answers(comparison) for verdict in verdicts]


def family_of(comparison: Comparison) -> Family:
    """Return all tests of a comparison.

    Each pair of arms has two: of the loss that decides, and of the metric. An order beside the
    control has one, of its loss against the control's.
    """
    # By arms, since a pair may answer two questions. By identity: names may be cut alike.
    pairs = {
        (id(pair.arm), id(pair.reference)): pair
        for some in comparison.questions.values()
        for pair in some
    }
    tests = [one for pair in pairs.values() for one in (_deciding_loss(pair), pair.metric)]
    return Family([*tests, *(_deciding_loss(pair) for _, pair in _control_checks(comparison))])


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


def _control_checks(comparison: Comparison) -> list[tuple[ArmPair, ArmPair]]:
    """Return each order that balances gradients beside its reference, and beside the control."""
    pairs = comparison.questions.get("order", ())
    controls = [pair for pair in pairs if pair.arm.order == CONTROL]
    if not controls:
        return []
    # Imported late: it loads torch, which nothing else in a report needs.
    from gradherd.lab.study.kinds import balances_gradients

    return [
        (pair, compare_pair(pair.arm, control.arm))
        for control in controls
        for pair in pairs
        if pair.reference.key == control.reference.key and balances_gradients(pair.arm.order)
    ]


def _pair_verdict(
    pair: ArmPair, comparison: Comparison, family: Family, *, is_order: bool
) -> Verdict:
    """Say what an order or a sparsifier gains, and at what price."""
    # Balancing promises faster optimisation, sending less must not cost accuracy.
    if (problem := _not_comparable(pair, by_loss=is_order)) is not None:
        return problem
    loss, by_loss = _loss_clause(pair, family)
    metric, by_metric = _clause(
        comparison.metric_name,
        (pair.arm.final_metric.mean, pair.reference.final_metric.mean),
        pair,
        pair.metric,
        family,
        lower_is_better=not comparison.higher_is_better,
    )
    # What one of the two leaves open, the other decides.
    found = {by_loss, by_metric} - {"open"}
    shown: Direction = "mixed" if len(found) > 1 else found.pop() if found else "open"
    if is_order:
        when, sooner = _reached(pair)
        # Fewer epochs that take more seconds or bytes are a trade, not a gain.
        mixed = shown == "gain" and not sooner
        text = "; ".join(filter(None, (when, loss, metric)))
        return _verdict(pair, shown, "mixed" if mixed else shown, f"{text}.", is_order=True)
    # Less accuracy for fewer bytes is what sparsifying offers: a trade, which the reader judges.
    saves = pair.bytes_ratio is not None and pair.bytes_ratio < 1
    mixed = (shown == "cost" and saves) or (shown == "gain" and not saves)
    text = "; ".join(filter(None, (metric, loss, f"with {_price(pair)}")))
    text = f"{pair.arm.label} against {pair.reference.label}: {text}."
    return _verdict(pair, shown, "mixed" if mixed else shown, text, is_order=False)


def _verdict(
    pair: ArmPair, shown: Direction, tone: Direction, text: str, *, is_order: bool
) -> Verdict:
    words = "few"
    if len(pair.common_seeds) >= MIN_SEEDS:
        # A gain that is only mixed has its price, and a cost has its saving.
        words = shown if shown == tone else f"{shown}, but"
    answer = _HEADLINES[words].format(pair.reference.label)
    own, epochs = pair.reference_epochs_to, pair.epochs_to
    if is_order and shown == "gain" and epochs is not None and epochs < (own or 0):
        answer += f", whose final loss it reaches after {counted(epochs, 'epoch')} instead of {own}"
    takes = "" if pair.bytes_ratio is None else f"; it takes {_price(pair)}"
    headline = f"{pair.arm.label}: {answer}{takes}."
    return Verdict(tone=tone, text=text, headline=headline)


def _loss_clause(pair: ArmPair, family: Family) -> tuple[str, Direction]:
    ends = (pair.arm.final_loss.mean, pair.reference.final_loss.mean)
    return _clause("final loss", ends, pair, _deciding_loss(pair), family, lower_is_better=True)


def _clause(
    name: str,
    ends: tuple[float | None, float | None],
    pair: ArmPair,
    difference: PairedDifference | None,
    family: Family,
    *,
    lower_is_better: bool,
) -> tuple[str, Direction]:
    """Return a measure's final means and their difference in words, and what it shows."""
    own, other = ends
    if own is None or other is None:
        return "", "open"
    direction: Direction = "open"
    places = 0 if difference is None else decimal_places(difference)
    if difference is None:
        basis = f"{counted(len(pair.common_seeds), 'common seed')}: no difference can be shown"
    else:
        mean, low, high = (
            "" if value is None else fixed(value, places, sign=True)
            for value in (difference.mean, difference.low, difference.high)
        )
        basis = f"difference{_period(pair, difference)} {mean}, "
        seeds = counted(len(difference.seeds), "seed")
        if not low:
            basis += f"equal for each of {seeds}, so there is no interval: nothing is shown"
        else:
            basis += f"95 % interval {low} to {high}, {seeds}, paired {p_value(difference.p)}"
            corrected = family.corrected_p(difference)
            # What is printed alike is not printed twice.
            if corrected is not None and p_value(corrected) != p_value(difference.p):
                basis += f", corrected {p_value(corrected)}"
            found = family.finds(difference)
            if found in ("higher", "lower"):
                direction = "gain" if (found == "lower") == lower_is_better else "cost"
            basis += f": {_FINDINGS[direction if found != 'few' else found]}"
    digits = min(max(places, decimals(other, 3)), 6)
    return f"{name} {fixed(own, digits)} vs {fixed(other, digits)} ({basis})", direction


def _period(pair: ArmPair, difference: PairedDifference) -> str:
    """Say which epochs a difference is of, unless it is of the last one of both arms."""
    if difference is pair.late_loss:
        epochs = late_epochs(min(pair.arm.epochs, pair.reference.epochs))
        return f" over epochs {epochs[0]} to {epochs[-1]}"
    return "" if difference.epoch is None else f" after epoch {difference.epoch}"


def _control_verdict(pair: ArmPair, between: ArmPair, family: Family) -> Verdict | None:
    """Say whether the gain of an order is due to balancing; None without a gain.

    Moving examples in a fixed pattern may help by itself. Only what an order gains beyond the
    control can come from balancing gradients.
    """
    own, difference = _deciding_loss(pair), _deciding_loss(between)
    if own is None or own.mean >= 0:  # There is nothing to explain.
        return None
    clause, direction = _loss_clause(between, family)
    tone: Direction = "open"
    conclusion = "it is not shown that balancing is the reason"
    if direction == "gain":
        tone, conclusion = "gain", "balancing is what helps"
        if family.finds(own) != "lower":
            conclusion += f", but a gain over {pair.reference.label} is not shown"
    elif difference is not None and difference.mean >= 0:
        tone, conclusion = "mixed", "balancing is not the reason for the gain"
    beside = f"{pair.arm.label} beside {between.reference.label}, which ignores gradients: "
    return Verdict(
        tone=tone,
        text=f"{beside}{clause}: {conclusion}.",
        headline=f"{beside}{conclusion}.",
    )


def _not_comparable(pair: ArmPair, *, by_loss: bool) -> Verdict | None:
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
        return Verdict(tone=tone, text=text, headline=text)
    return None


def _reached(pair: ArmPair) -> tuple[str, bool]:
    """Say when an arm reaches the other's final loss, and whether that takes less of everything."""
    arm, ref = pair.arm, pair.reference
    goal = f"{ref.label}'s {'final' if ref.finished else 'last'} loss"
    # Not its number of epochs: it may have been there before, and then got worse.
    own = pair.reference_epochs_to
    if pair.epochs_to is None or own is None:
        epochs = counted(arm.epochs, "epoch")
        return f"the mean loss of {arm.label} does not reach {goal} in {epochs}", False
    spent = {"bytes": (pair.bytes_to, ref.bytes_by_epoch[own - 1])}
    # Seconds of other machines, or of virtual workers, say nothing.
    if pair.same_clock:
        spent = {"seconds": (pair.seconds_to, ref.seconds_by_epoch[own - 1]), **spent}
    # Rounded before it is judged: what is printed as 1.00 must not count as dearer.
    ratios = {
        w: round(mine / its, 2) for w, (mine, its) in spent.items() if mine is not None and its
    }
    when = f"{arm.label} reaches {goal} after {counted(pair.epochs_to, 'epoch')}, "
    when += f"{ref.label} itself after {own}"
    if ratios:
        when += f", with {listed([f'{ratio:.2f} times its {w}' for w, ratio in ratios.items()])}"
    return when, pair.epochs_to <= own and all(ratio <= 1 for ratio in ratios.values())


def decimal_places(difference: PairedDifference) -> int:
    """Return how many decimals a difference and its interval deserve."""
    # The largest of the three decides, so that all of them line up.
    ends = (difference.mean, difference.low, difference.high)
    return decimals(max(abs(value) for value in ends if value is not None), 2)


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
