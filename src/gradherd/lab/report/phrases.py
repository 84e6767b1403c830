"""Parts of the sentences about a pair of arms: how much, after which epoch, at what price."""

from gradherd.lab.report.arms import ArmSummary, late_epochs
from gradherd.lab.report.comparison import ArmPair
from gradherd.lab.report.stats import PairedDifference
from gradherd.lab.text import counted, decimals, fixed, listed, significant


def reached(pair: ArmPair) -> tuple[str, bool]:
    """Say when an arm reaches the other's final loss, and whether that takes less of everything."""
    arm, ref = pair.arm, pair.reference
    goal = f"{ref.label}'s {'final' if ref.finished else 'last'} loss"
    # Not its number of epochs: it may have been there before, and then got worse.
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
    # The largest of the three decides, so that all of them line up.
    if difference is not None:
        ends = [end for end in (difference.low, difference.high) if end is not None]
    return decimals(max(abs(value) for value in (mean, *ends)), 2)


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


def which_loss(pair: ArmPair) -> str:
    """Say which loss a difference is of: the final one, or that after an epoch."""
    return f"loss{after}" if (after := read_after(pair)) else "final loss"


def read_after(pair: ArmPair) -> str:
    """Say after which epoch a difference was read, if it was not the last one."""
    if pair.arm.finished and pair.reference.finished:
        return ""
    return f" after {counted(min(pair.arm.epochs, pair.reference.epochs), 'epoch')}"


def late_period(pair: ArmPair) -> str:
    """Say over which epochs late losses are means: the last half of those that both arms have."""
    epochs = late_epochs(min(pair.arm.epochs, pair.reference.epochs))
    if pair.late_loss is not None and pair.late_loss.epoch is None:
        return f"over the last {counted(len(epochs), 'epoch')}"
    return f"over epochs {epochs[0]} to {epochs[-1]}"


def price(pair: ArmPair) -> str:
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


# "No difference shown", never "no difference": few seeds cannot show that there is none.
_SHOWN = {
    "gain": "better than {}",
    "gain, but": "better than {}, at a price",
    "cost": "worse than {}",
    "cost, but": "worse than {}, but it saves bytes",
    "mixed": "better than {} in one measure, worse in another",
    "open": "no difference from {} shown",
    "few": "too few seeds to compare it with {}",
}


def headline(pair: ArmPair, shown: str) -> str:
    """Return the answer in a few words: what is shown, and at what price.

    Args:
        pair: The arms.
        shown: A key of `_SHOWN`; "few" is for want of seeds.
    """
    answer = _SHOWN[shown].format(pair.reference.label)
    takes = "" if pair.bytes_ratio is None else f"; it takes {price(pair)}"
    return f"{pair.arm.label}: {answer}{takes}."


def with_density(arm: ArmSummary) -> str:
    """Return "exdyna at density 0.01" for an arm called "exdyna 0.01"."""
    if arm.density is None:
        return arm.label
    return f"{arm.label.rsplit(' ', 1)[0]} at density {arm.density:.12g}"
