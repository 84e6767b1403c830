"""Decide which exchange to use and from which link speed on, and explain why."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from typing import Any

from gradherd.advise.choices import EXCHANGES, ORDERS, SPARSE, Choice, Setting, predict
from gradherd.advise.measured import (
    LOCAL_LIMITS,
    accuracy_records,
    accuracy_sentence,
    least_speedup,
)
from gradherd.advise.units import format_digits, format_rate, format_seconds
from gradherd.comm.message_sizes import MAX_COORDINATES
from gradherd.lab.text import in_bytes

# Grid of link speeds searched for the break-even, in bits per second: 20 per decade.
_SLOWEST, _FASTEST, _GRID_POINTS = 1e3, 1e16, 261
# A step must be a tenth faster to be worth a change of training: less is within the error of a
# prediction.
_WORTHWHILE = 0.9
RIVALS = ("dense", "fp16", "powersgd")
"""What torch does without gradherd."""
_MILDEST_FIRST = (
    *("dense", "fp16", "local-2", "local-4", "local-8", "local-16"),
    *("topk", "exdyna", "exdyna-int4", "exdyna-int2", "powersgd"),
)
"""Exchanges by how much they change training: by the perplexity that GPT-2 lost to them in our
records. topk sends up to R times what exdyna sends at the same density."""
_RECORD_KEYS = ("study", "task", "density", "every", "metric", "epoch", "dense", "sparse")
# How wrong inputs may be: links and passes by a quarter (the largest error of a prediction on
# bandwidth-limited links was 21 %), what a method computes by a factor of two.
_INPUT_ERROR, _OVERHEAD_ERROR = 1.25, 2.0
_IF_WRONG = "if links and passes are off by 25 % and what methods compute by a factor of 2"
_SELECTORS = {"topk": "TopK", "exdyna": "ExDyna"}
_HOOKS = "from torch.distributed.algorithms.ddp_comm_hooks import"


def break_even(setting: Setting, dense: str = "dense") -> float | None:
    """Return the link speed in bits per second below which the best sparse exchange is faster.

    Faster than `dense`, which may be "fp16", too. None if there is no such speed: sparse is slower
    on every link, or faster on every link.
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


def advise(setting: Setting) -> dict[str, Any]:
    """Return what `gradherd advise --json` prints: steps, break-even bandwidths and the advice.

    Keys are added, never renamed. "sentences" are those of "advice", the last of which says what to
    use.
    """
    choices = [predict(setting, name, order) for order in ORDERS for name in EXCHANGES]
    limit = break_even(setting)
    # Exchanges are compared under one order; what the other order adds is a sentence of its own.
    steps = {choice.exchange: choice for choice in choices if choice.order == "d-rr"}
    chosen = recommend(setting, steps)
    rival = _rival(setting, steps, chosen)
    sentences = _explain(setting, steps, chosen, rival, limit)
    return {
        "choices": [{"name": choice.name, **asdict(choice)} for choice in choices],
        "break_even_bandwidth": limit,
        "break_even_bandwidth_fp16": break_even(setting, "fp16"),
        "pays": chosen.exchange not in RIVALS,
        "recommended": chosen.exchange,
        "rival": rival.exchange,
        "speedup": rival.step_seconds / chosen.step_seconds,
        "speedup_range": list(speedup_range(setting, chosen.exchange, rival.exchange)),
        "accuracy": [
            {key: getattr(one, key) for key in _RECORD_KEYS}
            | {"points_lost": one.lost if one.metric == "accuracy" else None}
            for one in accuracy_records(chosen.exchange, setting.density)
        ],
        "code": code_for(setting, chosen.exchange) if setting.workers > 1 else None,
        "advice": " ".join(sentences),
        "sentences": sentences,
    }


def recommend(setting: Setting, steps: Mapping[str, Choice]) -> Choice:
    """Return the exchange that changes training least among those within a tenth of the fastest.

    What has lost accuracy in our records must be so much faster: `measured.least_speedup`.
    """
    # gradherd's own messages have indices of 32 bits.
    allowed = _MILDEST_FIRST if setting.params <= MAX_COORDINATES else RIVALS
    weighted = {
        name: least_speedup(name, setting.density) * steps[name].step_seconds for name in allowed
    }
    fastest = min(weighted.values())
    return steps[next(name for name in allowed if _WORTHWHILE * weighted[name] <= fastest)]


def _best(steps: Mapping[str, Choice], exchanges: Sequence[str]) -> Choice:
    return min((steps[name] for name in exchanges), key=lambda one: one.step_seconds)


def _rival(setting: Setting, steps: Mapping[str, Choice], chosen: Choice) -> Choice:
    """Return the fastest of what torch has and what has lost no more than `chosen`.

    A step that is faster and learns less is no rival.
    """
    most = least_speedup(chosen.exchange, setting.density)
    return _best(steps, [one for one in RIVALS if least_speedup(one, setting.density) <= most])


def speedup_range(setting: Setting, exchange: str, rival: str) -> tuple[float, float]:
    """Return the least and the largest speedup over `rival` if what was given is somewhat wrong."""
    # All corners of what may be wrong: a ratio of step times is extreme in one of them.
    errors = (_INPUT_ERROR, _INPUT_ERROR, _OVERHEAD_ERROR)
    ratios = []
    for link, work, own in product(*((1 / error, error) for error in errors)):
        other = replace(
            setting,
            link=replace(setting.link, bandwidth=link * setting.link.bandwidth),
            backward=work * setting.backward,
            forward=work * setting.forward,
            overheads={name: own * seconds for name, seconds in setting.overheads.items()},
        )
        step = predict(other, exchange).step_seconds
        # A step that takes no time at all, with one worker, is as fast as another one.
        ratios.append(predict(other, rival).step_seconds / step if step else 1.0)
    return min(ratios), max(ratios)


def _explain(
    setting: Setting,
    steps: Mapping[str, Choice],
    chosen: Choice,
    rival: Choice,
    limit: float | None,
) -> list[str]:
    """Return the advice in words, with the numbers behind it; the last sentence is the advice."""
    if setting.workers == 1:
        return ["No: a single worker exchanges nothing, so there is nothing to save."]
    sparse, sentences = _best(steps, SPARSE), [_answer(setting, steps, chosen)]
    if setting.params <= MAX_COORDINATES:
        is_faster = sparse.step_seconds < steps["dense"].step_seconds
        where = "on every link" if limit is None else f"below {format_rate(limit)}"
        less = "less" if limit is not None or is_faster else "more"
        sentences.append(f"{sparse.exchange} takes {less} time than dense fp32 {where}.")
    ordered = predict(setting, chosen.exchange, "cd-grab").step_seconds
    more = ordered / chosen.step_seconds - 1 if chosen.step_seconds else 0.0
    sentences.append(f"The order cd-grab adds {100 * more:.1f} % to such a step.")
    if chosen.exchange not in ("dense", "fp16"):
        sentences.append(accuracy_sentence(chosen.exchange, setting.density))
    if chosen.exchange.startswith("local"):
        sentences += [LOCAL_LIMITS, _rate_sentence(setting, chosen.exchange)]
    # What would be faster and is not recommended has cost something.
    pays = chosen.exchange not in RIVALS
    tempting = steps["powersgd"] if pays else _best(steps, _MILDEST_FIRST)
    least = chosen.step_seconds * (1.0 if pays else _WORTHWHILE)
    if tempting.step_seconds < least and (pays or setting.params <= MAX_COORDINATES):
        less = format_seconds(chosen.step_seconds - tempting.step_seconds)
        sentences.append(f"{label(setting, tempting)} would take {less} less.")
        sentences.append(accuracy_sentence(tempting.exchange, setting.density))
    if pays:
        check = "check what it does to the loss with `gradherd compare`"
        sentences.append(f"These are times per step: {check}.")
    return [*sentences, _conclusion(setting, steps, chosen, rival)]


def _answer(setting: Setting, steps: Mapping[str, Choice], chosen: Choice) -> str:
    if setting.params > MAX_COORDINATES:
        return (
            f"No: gradherd sparsifies models of up to {MAX_COORDINATES:,} parameters, because it "
            "sends indices of 32 bits. Times of sparse exchanges are what they would be."
        )
    over = f"over {format_rate(setting.link.bandwidth)}, a step takes"
    took = f"{over} {format_seconds(chosen.step_seconds)} with {label(setting, chosen)}"
    if chosen.exchange in RIVALS:
        ours = _best(steps, [name for name in _MILDEST_FIRST if name not in RIVALS])
        return f"No: {took}, and {format_seconds(ours.step_seconds)} with {label(setting, ours)}."
    # Half precision is the smaller change, so a sparse exchange has to beat that one as well.
    dense = _best(steps, ("dense", "fp16"))
    return (
        f"Yes: {took}, and {format_seconds(dense.step_seconds)} with {dense.exchange}: a worker "
        f"sends {in_bytes(chosen.bytes)} a step instead of {in_bytes(dense.bytes)}."
    )


def _rate_sentence(setting: Setting, exchange: str) -> str:
    """Say which learning rate local steps want."""
    # As `LocalSteps.lr_factor`, which needs torch.
    workers, every = setting.workers, int(exchange.partition("-")[2])
    factor, formula = math.sqrt(workers), f"sqrt({workers} workers)"
    less = math.sqrt(min(1.0, 2 / every))
    if every > 2:
        formula = f"{formula} x sqrt(2 / {every} steps)"
    sgd = "that of dense" if every <= 5 else f"{less:.2g} times that of dense"
    return (
        f"With AdamW, multiply the learning rate of dense training by {formula} = "
        f"{factor * less:.2g}; a larger model may want dense's own rate, or less; SGD wants {sgd}."
    )


def _conclusion(
    setting: Setting, steps: Mapping[str, Choice], chosen: Choice, rival: Choice
) -> str:
    """Return one sentence: what to use, how much faster it is than what, and how sure that is."""
    if chosen.exchange == "dense":
        fastest = _best(steps, list(steps))
        span = _between(*speedup_range(setting, fastest.exchange, "dense"))
        reason = "nothing here is more than 10 % faster"
        if fastest.step_seconds < _WORTHWHILE * chosen.step_seconds:
            reason = "what is more than 10 % faster here has lost quality in our records"
        return f"So keep dense: {reason} ({label(setting, fastest)}: {span} as fast {_IF_WRONG})."
    best = ", the best that torch has"
    if chosen.exchange in RIVALS:
        others = [name for name in RIVALS if name != chosen.exchange]
        kept = [name for name in others if least_speedup(name, setting.density) == 1]
        rival, best = _best(steps, kept), ""
    elif rival.exchange != _best(steps, RIVALS).exchange:
        best = ", the best of torch's that has lost no more"
    gain = rival.step_seconds / chosen.step_seconds
    times = "about as fast" if abs(gain - 1) < 0.03 else f"{format_digits(gain)} times as fast"
    low, high = speedup_range(setting, chosen.exchange, rival.exchange)
    text = (
        f"So use {label(setting, chosen)}: {times} as {label(setting, rival)}{best} "
        f"({_between(low, high)} {_IF_WRONG})"
    )
    if least_speedup(chosen.exchange, setting.density) > 1:
        text += "; it has lost accuracy in our records, so compare the losses first"
    elif low < 1 and chosen.exchange not in RIVALS:
        text += "; that is too close to call, so time a few steps of both, and compare their losses"
    return f"{text}."


def _between(low: float, high: float) -> str:
    # Three digits where the range is narrow, so that its ends differ; more would claim to know it.
    digits = 2 if high > 1.2 * low else 3
    least, most = format_digits(low, digits), format_digits(high, digits)
    return f"{least} to {most} times" if least != most else f"{least} times"


def label(setting: Setting, choice: Choice) -> str:
    """Return the exchange of a choice in words, with what it sends."""
    method, _, detail = choice.exchange.partition("-")
    if method == "local":
        return f"{detail} local steps in one bit"
    if method in SPARSE:
        text = f"{method} at density {setting.density:g}"
        return f"{text} with {detail} values" if detail else text
    words = {"fp16": "fp16 or bf16", "powersgd": f"PowerSGD of rank {setting.rank}"}
    return words.get(method, method)


def code_for(setting: Setting, exchange: str) -> str | None:
    """Return the code that switches an exchange on; None for dense, which DDP does by itself."""
    method, _, detail = exchange.partition("-")
    if method == "local":
        given = "" if detail == "4" else f"every={detail}"
        return f"gh.attach(net, optimizer=optimizer, local=gh.LocalSteps({given}))"
    if method in SPARSE:
        selector = f"gh.{_SELECTORS[method]}(density={setting.density:g})"
        if detail:
            selector = f'gh.Sparsify(method={selector}, values="{detail}")'
        return f"gh.attach(ddp, sparsify={selector})"
    if method == "fp16":
        hook = "ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)"
        return f"{_HOOKS} default_hooks\n{hook}"
    if method == "powersgd":
        state = f"powerSGD_hook.PowerSGDState(None, matrix_approximation_rank={setting.rank})"
        hook = f"ddp.register_comm_hook({state}, powerSGD_hook.powerSGD_hook)"
        return f"{_HOOKS} powerSGD_hook\n{hook}"
    return None
