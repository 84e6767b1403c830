"""Which choice to take, from which link speed on, and why, in words."""

import math
from collections.abc import Sequence
from dataclasses import replace

from gradherd.advise.choices import SPARSE, Choice, Setting, all_choices, predict
from gradherd.advise.units import show_bytes, show_rate, show_seconds

# Link speeds looked at, in bits per second, and how many of them.
_SLOWEST, _FASTEST, _PLACES = 1e3, 1e16, 261
# A gain of less is not worth a change.
_WORTH = 0.95


def break_even(setting: Setting, dense: str = "dense") -> float | None:
    """Return the link speed, bits per second, below which the best sparse exchange is faster.

    None if there is no such speed: it is slower on any link, or faster on any.
    """

    def gain(bandwidth: float) -> float:
        at = replace(setting, link=replace(setting.link, bandwidth=bandwidth))
        best = min(predict(at, name).step_seconds for name in SPARSE)
        return predict(at, dense).step_seconds - best

    decades = math.log10(_FASTEST / _SLOWEST)
    speeds = [_SLOWEST * math.pow(10, decades * p / (_PLACES - 1)) for p in range(_PLACES)]
    paying = [place for place, speed in enumerate(speeds) if gain(speed) > 0]
    if not paying or paying[-1] == _PLACES - 1:
        return None
    low, high = speeds[paying[-1]], speeds[paying[-1] + 1]
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if gain(middle) > 0 else (low, middle)
    return low


def advise(setting: Setting) -> dict[str, object]:
    """Return choices, break-even bandwidths and the advice."""
    choices = all_choices(setting)
    limit = break_even(setting)
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
        "pays": pays(sparse, dense),
        "advice": words(setting, choices, limit),
    }


def pays(sparse: Choice, dense: Choice) -> bool:
    """Tell whether the gain is worth a change."""
    return sparse.step_seconds < _WORTH * dense.step_seconds


def words(setting: Setting, choices: Sequence[Choice], limit: float | None) -> str:
    """Return the advice and the figures that it rests on."""
    if setting.workers == 1:
        return "No: one worker exchanges nothing, so there is nothing to save."
    sparse, dense = _best(choices, SPARSE), _best(choices, ("dense", "fp16"))
    speed = show_rate(setting.link.bandwidth)
    if pays(sparse, dense):
        said = [_yes(setting, sparse, dense, speed)]
    else:
        said = [_no(sparse, dense, speed)]
    said.append(_border(sparse, choices, limit, pays(sparse, dense)))
    low_rank = _best(choices, ("powersgd",))
    if low_rank.step_seconds < _WORTH * min(sparse.step_seconds, dense.step_seconds):
        said.append(
            f"PowerSGD of rank {setting.rank} may be faster still: "
            f"{show_seconds(low_rank.step_seconds)}."
        )
    taken = sparse if pays(sparse, dense) else dense
    said.append(_order(choices, taken))
    said.append(
        "All this is time per step only, predicted: a step that sends less may also learn less, "
        "though exdyna keeps what it does not send as a residual and sends it later. "
        "`gradherd compare` shows what becomes of the loss."
    )
    return " ".join(said)


def _yes(setting: Setting, sparse: Choice, dense: Choice, speed: str) -> str:
    times = dense.step_seconds / sparse.step_seconds
    return (
        f"Yes: over {speed}, {sparse.name} at density {setting.density:g} takes "
        f"{show_seconds(sparse.step_seconds)} a step where {dense.name} takes "
        f"{show_seconds(dense.step_seconds)}, {times:.3g} times as fast: a worker sends "
        f"{show_bytes(sparse.bytes)} instead of {show_bytes(dense.bytes)}."
    )


def _no(sparse: Choice, dense: Choice, speed: str) -> str:
    extra = sparse.overhead_seconds + sparse.exchange_seconds
    waits = dense.overhead_seconds + dense.exchange_seconds
    return (
        f"No: over {speed}, {dense.name} takes {show_seconds(dense.step_seconds)} a step, of which "
        f"{show_seconds(waits)} does not hide behind the backward pass; {sparse.name} takes "
        f"{show_seconds(sparse.step_seconds)}, as picking and exchanging take "
        f"{show_seconds(extra)} and can hide behind nothing."
    )


def _border(sparse: Choice, choices: Sequence[Choice], limit: float | None, yes: bool) -> str:
    if limit is not None:
        return f"{sparse.name} beats dense fp32 below {show_rate(limit)}."
    plain = _best(choices, ("dense",))
    if yes or sparse.step_seconds < plain.step_seconds:
        return f"{sparse.name} beats dense fp32 on any link."
    return f"{sparse.name} beats dense fp32 on no link."


def _order(choices: Sequence[Choice], taken: Choice) -> str:
    ordered = next(c for c in choices if c.exchange == taken.exchange and c.order == "cd-grab")
    more = ordered.step_seconds / taken.step_seconds - 1
    return f"The order cd-grab adds {100 * more:.1f} % to a step with {taken.name}."


def _best(choices: Sequence[Choice], exchanges: Sequence[str]) -> Choice:
    among = [c for c in choices if c.exchange in exchanges and c.order == "d-rr"]
    return min(among, key=lambda choice: choice.step_seconds)
