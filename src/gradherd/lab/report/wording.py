"""Parts of sentences about a pair of arms."""

from typing import Literal

from gradherd.lab.report.arms import late_epochs, values_at
from gradherd.lab.report.model import Difference, Pair
from gradherd.lab.report.stats import number
from gradherd.lab.text import counted, decimals, fixed, listed, p_value, significant

Direction = Literal["gain", "cost", "open"]


def reached(pair: Pair) -> tuple[str, bool]:
    """Say when an arm reaches the other's final loss, and whether that takes less of everything."""
    arm, ref = pair.arm, pair.reference
    goal = f"{ref.label}'s {'final' if ref.finished else 'last'} loss"
    own = pair.reference_epochs_to
    if pair.epochs_to is None or own is None:
        return f"{arm.label} does not reach {goal} in {counted(arm.epochs, 'epoch')}", False
    if own == ref.epochs:
        share = f"{pair.epochs_to / own:.2f} of them"
        when = f"{arm.label} reaches {goal} after {pair.epochs_to} of {own} epochs ({share})"
    else:
        itself = f"{ref.label} itself first after {own} of {ref.epochs}"
        when = f"{arm.label} reaches {goal} after {counted(pair.epochs_to, 'epoch')} ({itself})"
    ratios = {
        "seconds": _ratio(pair.seconds_to, ref.seconds_by_epoch[own - 1]),
        "bytes": _ratio(pair.bytes_to, ref.bytes_by_epoch[own - 1]),
    }
    if not same_clock(pair):
        del ratios["seconds"]
    known = {what: ratio for what, ratio in ratios.items() if ratio is not None}
    if known:
        when += f", with {listed([_of_its(ratio, what) for what, ratio in known.items()])}"
    dear = [what for what, ratio in known.items() if ratio > 1]
    if dear and pair.epochs_to < own:
        costs = ["no less time" if what == "seconds" else "more bytes" for what in dear]
        when += f": fewer epochs, but {listed(costs)}"
    return when, not dear and pair.epochs_to <= own


def same_clock(pair: Pair) -> bool:
    """Return whether seconds of both arms can be compared."""
    runs = [*pair.arm.used, *pair.reference.used]
    alike = all(run.hardware == runs[0].hardware for run in runs)
    return alike and not any(run.config.get("virtual") is True for run in runs)


def _ratio(here: float | None, there: float) -> float | None:
    return None if here is None or not there else round(here / there, 2)


def _of_its(ratio: float, what: str) -> str:
    return f"{ratio:.2f} of its {what}" if ratio <= 1 else f"{ratio:.2f} times its {what}"


def places_for(mean: float, found: Difference | None) -> int:
    """Return how many decimals a difference and its interval are worth."""
    ends = [e for e in (found.low, found.high) if e is not None] if found is not None else []
    return decimals(max(abs(value) for value in (mean, *ends)), 2)


def apart(mean: float, places: int) -> str:
    """Say by how much something is higher or lower.

    >>> apart(-0.01234, 4), apart(0.004, 1), apart(0.0, 2)
    ('0.0123 lower', '0.004 higher', 'the same')
    """
    if mean == 0:
        return "the same"
    amount = fixed(abs(mean), places)
    if not amount.strip("0."):  # Too small for the decimals that the interval is worth.
        amount = significant(abs(mean), 1)
    return f"{amount} {'higher' if mean > 0 else 'lower'}"


def evidence(
    pair: Pair, found: Difference | None, places: int, *, lower_is_better: bool
) -> tuple[str, Direction]:
    """Say what a difference rests on, and what it shows."""
    if found is None:
        common = len(pair.common_seeds)
        return (f"{counted(common, 'common seed')}: no difference can be shown"), "open"
    seeds = counted(len(found.seeds), "seed")
    if found.low is None or found.high is None:
        return f"the same with each of {seeds}, so there is no interval: nothing is shown", "open"
    ends = f"{fixed(found.low, places, sign=True)} to {fixed(found.high, places, sign=True)}"
    told = f"95 % interval {ends}, {seeds}, paired {p_value(found.p)}"
    if not found.shown:
        return f"{told}: no difference shown", "open"
    better = (found.high < 0) == lower_is_better
    return f"{told}: {'better' if better else 'worse'}", "gain" if better else "cost"


def when_read(pair: Pair) -> str:
    """Say after which epoch a difference was read, if it was not the last one."""
    if pair.arm.finished and pair.reference.finished:
        return ""
    return f" after {counted(min(pair.arm.epochs, pair.reference.epochs), 'epoch')}"


def when_late(pair: Pair) -> str:
    """Say over which epochs mean losses were taken: the last half of those that both arms have."""
    epochs = late_epochs(min(pair.arm.epochs, pair.reference.epochs))
    if pair.late_loss is not None and pair.late_loss.epoch is None:
        return f"over the last {counted(len(epochs), 'epoch')}"
    return f"over epochs {epochs[0]} to {epochs[-1]}"


def price(pair: Pair) -> str:
    """Say what part of the bytes and of the seconds an arm takes."""
    if pair.bytes_ratio is None:
        return "bytes not known"
    share = pair.bytes_ratio
    sent = (
        f"{significant(100 * share, 2)} % of the bytes"
        if share < 1
        else f"{share:.2f} times the bytes"
    )
    if pair.seconds_ratio is None or not same_clock(pair):
        return sent
    return f"{sent} and {pair.seconds_ratio:.2f} times the seconds"


def nothing_to_compare(pair: Pair, *, by_loss: bool) -> str | None:
    """Return the sentence for a pair without means, or None if there are some."""
    for one in (pair.arm, pair.reference):
        if not one.epochs:
            return f"{pair.arm.label}: {one.label} has no finished epoch, so nothing is compared."
    for one in (pair.arm, pair.reference):
        mean = (one.final_loss if by_loss else one.final_metric).mean
        if mean is None:
            found = values_at(
                one.used, one.epochs, lambda row: row.train_loss if by_loss else row.metric
            )
            lost = sum(number(value) is None for value in found)
            of = counted(len(found), "seed")
            what = "loss" if by_loss else "metric"
            return (
                f"{pair.arm.label}: with {lost} of {of} {one.label} diverged (its {what} is not "
                "finite), so there is no mean to compare."
            )
    return None
