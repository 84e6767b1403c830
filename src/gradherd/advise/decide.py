"""Decide which exchange to use and from which link speed on, and explain why."""

import math
from collections.abc import Sequence
from dataclasses import replace

from gradherd.advise.choices import SPARSE, Choice, Setting, all_choices, predict
from gradherd.advise.units import format_bytes, format_rate, format_seconds
from gradherd.sparsify.packing import MAX_COORDINATES

# Grid of link speeds searched for the break-even, in bits per second: 20 per decade.
_SLOWEST, _FASTEST, _GRID_POINTS = 1e3, 1e16, 261
# A step must be at least 5 % faster to be worth a change.
_WORTHWHILE = 0.95


def break_even(setting: Setting, dense: str = "dense") -> float | None:
    """Return the link speed in bits per second below which the best sparse exchange is faster.

    Args:
        setting: Model, workers and network; the bandwidth does not matter.
        dense: The exchange to compare with, "dense" or "fp16".

    Returns:
        None if there is no such speed: sparse is slower on every link, or faster on every link.
    """

    def gain(bandwidth: float) -> float:
        at = replace(setting, link=replace(setting.link, bandwidth=bandwidth))
        best = min(predict(at, name).step_seconds for name in SPARSE)
        return predict(at, dense).step_seconds - best

    # A grid first: collectives switch algorithms with the bandwidth, so the gain need not fall
    # steadily. The fastest link on which sparse still pays is the answer.
    decades = math.log10(_FASTEST / _SLOWEST)
    exponents = [decades * point / (_GRID_POINTS - 1) for point in range(_GRID_POINTS)]
    speeds = [_SLOWEST * math.pow(10, exponent) for exponent in exponents]
    paying = [point for point, speed in enumerate(speeds) if gain(speed) > 0]
    if not paying or paying[-1] == _GRID_POINTS - 1:
        return None
    low, high = speeds[paying[-1]], speeds[paying[-1] + 1]
    for _ in range(60):  # bisect on a logarithmic scale, to the last bit
        middle = math.sqrt(low * high)
        low, high = (middle, high) if gain(middle) > 0 else (low, middle)
    return low


def advise(setting: Setting) -> dict[str, object]:
    """Return all predicted steps, the break-even bandwidths and the advice, ready for JSON.

    Args:
        setting: Model, workers and network.

    Returns:
        What `gradherd advise --json` prints; keys are added, never renamed.
    """
    choices = all_choices(setting)
    limit = break_even(setting)
    # Half precision is the smaller change, so a sparse exchange has to beat that one as well.
    sparse, dense = _best(choices, SPARSE), _best(choices, ("dense", "fp16"))
    return {
        "choices": [
            {
                "name": choice.name,
                "step_seconds": choice.step_seconds,
                "bytes": choice.bytes,
                "exchange": choice.exchange,
                "order": choice.order,
                "exchange_seconds": choice.exchange_seconds,
                "overhead_seconds": choice.overhead_seconds,
            }
            for choice in choices
        ],
        "break_even_bandwidth": limit,
        "break_even_bandwidth_fp16": break_even(setting, "fp16"),
        "pays": setting.params <= MAX_COORDINATES and pays(sparse, dense),
        "advice": explain(setting, choices, limit),
    }


def pays(sparse: Choice, dense: Choice) -> bool:
    """Return whether sparse is faster by enough to be worth a change.

    Args:
        sparse: The fastest sparse exchange.
        dense: The fastest dense one, fp16 included.
    """
    return sparse.step_seconds < _WORTHWHILE * dense.step_seconds


def explain(setting: Setting, choices: Sequence[Choice], limit: float | None) -> str:
    """Return the advice in words, with the numbers behind it.

    Args:
        setting: Model, workers and network.
        choices: The predicted steps.
        limit: The break-even bandwidth, if there is one.
    """
    if setting.workers == 1:
        return "No: a single worker exchanges nothing, so there is nothing to save."
    if setting.params > MAX_COORDINATES:
        return (
            f"No: gradherd sparsifies models of up to {MAX_COORDINATES:,} parameters, because it "
            "sends indices of 32 bits. Times of sparse exchanges are what they would be."
        )
    sparse, dense = _best(choices, SPARSE), _best(choices, ("dense", "fp16"))
    speed = format_rate(setting.link.bandwidth)
    if pays(sparse, dense):
        sentences = [_yes(setting, sparse, dense, speed)]
    else:
        sentences = [_no(sparse, dense, speed)]
    sentences.append(_break_even_sentence(sparse, choices, limit, pays(sparse, dense)))
    # Mentioned, not recommended: the prediction says nothing about what a low rank loses.
    low_rank = _best(choices, ("powersgd",))
    if low_rank.step_seconds < _WORTHWHILE * min(sparse.step_seconds, dense.step_seconds):
        sentences.append(
            f"PowerSGD of rank {setting.rank} may be even faster: "
            f"{format_seconds(low_rank.step_seconds)}."
        )
    best = sparse if pays(sparse, dense) else dense
    sentences.append(_order_sentence(choices, best))
    sentences.append(
        "This predicts time per step only. A step that sends less may also learn less, although "
        "exdyna keeps what it does not send in a residual and sends it later: "
        "run `gradherd compare` to see the effect on the loss."
    )
    return " ".join(sentences)


def _yes(setting: Setting, sparse: Choice, dense: Choice, speed: str) -> str:
    times = dense.step_seconds / sparse.step_seconds
    return (
        f"Yes: over {speed}, {sparse.name} at density {setting.density:g} takes "
        f"{format_seconds(sparse.step_seconds)} a step where {dense.name} takes "
        f"{format_seconds(dense.step_seconds)}, {times:.3g} times as fast: a worker sends "
        f"{format_bytes(sparse.bytes)} instead of {format_bytes(dense.bytes)}."
    )


def _no(sparse: Choice, dense: Choice, speed: str) -> str:
    extra = sparse.overhead_seconds + sparse.exchange_seconds
    waits = dense.overhead_seconds + dense.exchange_seconds
    return (
        f"No: over {speed}, {dense.name} takes {format_seconds(dense.step_seconds)} a step, of "
        f"which {format_seconds(waits)} does not overlap with the backward pass; {sparse.name} "
        f"takes {format_seconds(sparse.step_seconds)}, because selecting and exchanging take "
        f"{format_seconds(extra)} and cannot overlap with it."
    )


def _break_even_sentence(
    sparse: Choice, choices: Sequence[Choice], limit: float | None, yes: bool
) -> str:
    if limit is not None:
        return f"{sparse.name} beats dense fp32 below {format_rate(limit)}."
    plain = _best(choices, ("dense",))
    if yes or sparse.step_seconds < plain.step_seconds:
        return f"{sparse.name} beats dense fp32 on every link."
    return f"{sparse.name} does not beat dense fp32 on any link."


def _order_sentence(choices: Sequence[Choice], best: Choice) -> str:
    ordered = next(c for c in choices if c.exchange == best.exchange and c.order == "cd-grab")
    more = ordered.step_seconds / best.step_seconds - 1
    return f"The order cd-grab adds {100 * more:.1f} % to a step with {best.name}."


def _best(choices: Sequence[Choice], exchanges: Sequence[str]) -> Choice:
    # Exchanges are compared under one order; what the other order adds is a sentence of its own.
    matches = [c for c in choices if c.exchange in exchanges and c.order == "d-rr"]
    return min(matches, key=lambda choice: choice.step_seconds)
