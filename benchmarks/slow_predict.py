"""What `gradherd.advise` would have said of the rows that slow_network.py has measured.

Goes in: goodput and latency of each link and the step without exchange, as measured; and what each
method computes, which is its step without a limit less what the model says the rest of it takes.
Comes out: the step at each limited rate, which took no part in that.
"""

from dataclasses import replace
from typing import Any

from gradherd.advise.choices import Setting, predict
from gradherd.advise.costs import NetworkLink, Overheads


def _setting(record: dict[str, Any], rate: float | None, own: Overheads) -> Setting:
    link = next(one for one in record["links"] if one["rate"] == rate)
    compute, config = record["compute"], record["config"]
    backward = min(compute["backward_seconds"], compute["step_seconds"])
    return Setting(
        params=record["model"]["parameters"],
        workers=config["workers"],
        link=NetworkLink(
            bandwidth=link["goodput"], latency=link["latency"], goodput=1.0, deal=link["deal"]
        ),
        backward=backward,
        forward=compute["step_seconds"] - backward,
        overheads=own,
        density=min(1.0, config["density"]),
        rank=config["rank"],
        side=record["model"]["side"],
        overlap=0.0,  # the cores that exchange are those that compute
    )


def _key(exchange: str, order: str) -> str:
    if not order:
        return exchange
    return "ride" if exchange == "dense" else "sketch"


def overheads(record: dict[str, Any]) -> dict[str, float]:
    """Return the seconds that each method computes, from its step without a limit."""
    own = Overheads()
    for row in record["rows"]:
        exchange, _, order = row["case"].partition("+")
        if row["rate"] is None:
            setting = _setting(record, None, own)
            rest = predict(setting, exchange, order or "d-rr").step_seconds
            more = max(0.0, row["step_seconds"] - rest)
            if more and (exchange == "dense" or (exchange == "fp16" and not order)):
                # It hides behind what travels: what is seen is what is longer.
                more += predict(setting, exchange, order or "d-rr").exchange_seconds
            own = replace(own, **{_key(exchange, order): more})
    return {name: value for name, value in vars(own).items() if value}


def predicted(record: dict[str, Any], row: dict[str, Any]) -> dict[str, float]:
    """Return what the model says of a row, and how far off it is."""
    exchange, _, order = row["case"].partition("+")
    setting = _setting(record, row["rate"], Overheads(**record["overheads"]))
    choice = predict(setting, exchange, order or "d-rr")
    return {
        "predicted_seconds": choice.step_seconds,
        "predicted_bytes": choice.bytes,
        "prediction_error": choice.step_seconds / row["step_seconds"] - 1,
    }
