"""Measure gradient exchanges on slow networks: real ranks, real TCP, links of a given speed.

Creates one network namespace per rank, joined by a bridge, with a token bucket (tc tbf) on what
each one sends and receives, and starts a gloo rank in each. Then it measures DDP steps with torch's
own exchanges (fp32, the fp16, bf16 and PowerSGD hooks) and with gradherd's (topk, exdyna, values of
2 bits, 4 local steps; orders d-rr and cd-grab) and reads the kernel's byte counters; predicts the
same steps with `gradherd.advise` from measured links, latency, compute and overheads; and trains a
small task at the slowest rate until its loss reaches a target. Needs root and Linux; removes
everything it created, also after Ctrl-C.

    sudo python benchmarks/slow_network.py                     # all of it, some minutes
    sudo python benchmarks/slow_network.py --rates 1G --cases dense,exdyna,dense+cd-grab
    sudo python benchmarks/slow_network.py --page benchmarks/results/2026-11-15-slow-network.md

The model is six wide linear layers with a batch of four: many parameters and little arithmetic, so
that a few cores do not dominate the time. Communication time is a step less the same step without
any exchange (torch's noop_hook), with all ranks computing.
"""

import argparse
import json
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from netns import NetworkError, missing
from slow_measure import measure_all, progress, running, train_all
from slow_page import page

from gradherd.advise.choices import OVERHEADS, Choice, NetworkLink, Setting, num_buckets, predict
from gradherd.advise.units import parse_rate
from gradherd.lab.train.measurements import hardware, versions

CASES = (
    *("dense", "fp16", "bf16", "powersgd", "topk", "exdyna", "exdyna-int2", "local-4"),
    *("dense+cd-grab", "exdyna+cd-grab", "fp16+cd-grab", "powersgd+cd-grab", "topk+cd-grab"),
)
# The last three take minutes each and add little: they gather rows every 32 steps.
_DEFAULT_CASES = CASES[:-3]


def _setting(record: dict[str, Any], row: dict[str, Any], overheads: dict[str, float]) -> Setting:
    link = next(one for one in record["links"] if one["rate"] == row["rate"])
    # The step without exchange that was measured in turn with this row: the load may change.
    compute, config = row.get("compute", record["compute"]), record["config"]
    backward = min(compute["backward_seconds"], compute["step_seconds"])
    return Setting(
        params=record["model"]["parameters"],
        workers=config["workers"],
        link=NetworkLink(
            bandwidth=link["goodput"],
            latency=link["latency"],
            goodput=1.0,
            all_to_all_share=link["deal"],
        ),
        backward=backward,
        forward=compute["step_seconds"] - backward,
        overheads=overheads,
        density=min(1.0, config["density"]),
        rank=config["rank"],
        side=record["model"]["side"],
        overlap=0.0,  # the same cores exchange and compute
    )


def _overhead_name(exchange: str, order: str) -> str:
    """Return the name in `OVERHEADS`; few bits may be followed by their own: exdyna-int2."""
    if not order:
        return "local" if exchange == "local-4" else exchange
    return "order" if exchange == "dense" else "sketch"


def computed_overheads(record: dict[str, Any]) -> dict[str, float]:
    """Return the seconds that each method computes: its unlimited step less the predicted rest.

    Predictions of the limited rates use these and the measured links, but not their own rows.
    """
    own: dict[str, float] = {}
    for row in record["rows"]:
        exchange, _, order = row["case"].partition("+")
        if row["rate"] is None:
            none = _predicted(record, row, own | {_overhead_name(exchange, order): 0.0})
            more = max(0.0, row["step_seconds"] - none.step_seconds)
            if more and (exchange == "dense" or (exchange in ("fp16", "bf16") and not order)):
                # It overlaps with sending, bucket by bucket: `predict`, solved for the overhead.
                buckets = num_buckets(_setting(record, row, {}))
                alone = none.exchange_seconds / buckets
                more = min(more * buckets, more + none.exchange_seconds - alone)
            if exchange.startswith("local"):
                more *= int(exchange.split("-")[1])  # of an exchange, not of a step
            own[_overhead_name(exchange, order)] = more
    return {name: value for name, value in own.items() if value}


def _predicted(record: dict[str, Any], row: dict[str, Any], own: dict[str, float]) -> Choice:
    exchange, _, order = row["case"].partition("+")
    given = {name: value for name, value in own.items() if name in ("dense", *OVERHEADS)}
    name = _overhead_name(exchange, order)
    if name.endswith("-int2"):
        # Fewer bytes to pack and add up than with fp32: what it computes is its own.
        given[name.removesuffix("-int2")] = own.get(name, 0.0)
    if exchange == "bf16":
        # The same bytes as fp16, whose place it takes, but another speed of adding up.
        exchange, given = "fp16", given | {"fp16": own.get("bf16", 0.0)}
    setting = _setting(record, row, given)
    return predict(setting, exchange, order or "d-rr")


def prediction(record: dict[str, Any], row: dict[str, Any]) -> dict[str, float]:
    """Return what `gradherd advise` predicts for a row, and the relative error."""
    choice = _predicted(record, row, record["overheads"])
    return {
        "predicted_seconds": choice.step_seconds,
        "predicted_bytes": choice.bytes,
        "prediction_error": choice.step_seconds / row["step_seconds"] - 1,
    }


def judge(record: dict[str, Any]) -> None:
    """Add communication times, predictions and the summary to a record."""
    for row in record["rows"]:
        compute = row.get("compute", record["compute"])
        row["communication_seconds"] = row["step_seconds"] - compute["step_seconds"]
    record["overheads"] = computed_overheads(record)
    for row in record["rows"]:
        row.update(prediction(record, row))
    rows = {(row["case"], row["rate"]): row for row in record["rows"]}
    summary: dict[str, Any] = {}
    dense, sparse = rows.get(("dense", 1e9)), rows.get(("exdyna", 1e9))
    if dense and sparse:
        ratio = sparse["communication_seconds"] / dense["communication_seconds"]
        summary["exdyna_over_dense_communication_1G"] = ratio
    summary["counted_over_payload"] = [
        min(row["counted_over_payload"] for row in record["rows"]),
        max(row["counted_over_payload"] for row in record["rows"]),
    ]
    pairs = [(rows.get(("dense", r)), rows.get(("dense+cd-grab", r))) for _, r in rows]
    ratios = [b["kernel_tx_bytes"] / a["kernel_tx_bytes"] for a, b in pairs if a and b]
    if ratios:
        summary["cd_grab_over_d_rr_bytes"] = max(ratios)
    limited = [row["prediction_error"] for row in record["rows"] if row["rate"] is not None]
    summary["largest_prediction_error"] = max(map(abs, limited), default=None)
    record["shown"] = summary


def listed_rates(text: str) -> list[float]:
    """Parse --rates."""
    try:
        return [parse_rate(word) for word in text.split(",") if word.strip()]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def listed_cases(text: str) -> list[str]:
    """Parse --cases."""
    cases = [word.strip() for word in text.split(",") if word.strip()]
    cases = list(CASES) if cases == ["all"] else cases
    unknown = [word for word in cases if word not in CASES]
    if unknown or not cases:
        known = f"choose from {', '.join(CASES)}, or all"
        raise argparse.ArgumentTypeError(f"unknown {', '.join(unknown) or repr(text)}; {known}")
    return cases


def positive(kind: type[int] | type[float]) -> Any:
    """Return a parser of numbers above 0; 25e6 is one."""

    def read(text: str) -> int | float:
        value = kind(float(text))
        if not value > 0:
            raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
        return value

    read.__name__ = "number"
    return read


def options() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    summary, details = __doc__.split("\n", 1)
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--workers", type=positive(int), default=4, help="ranks, each in a namespace (4)")
    add(
        "--params",
        type=positive(int),
        default=25_000_000,
        help="parameters of the model, about (25e6)",
    )
    add("--batch", type=positive(int), default=4, help="examples per rank and step (4)")
    add("--rates", type=listed_rates, default="100M,1G,10G", help="link speeds, bits per second")
    add("--cases", type=listed_cases, default=",".join(_DEFAULT_CASES), help="exchanges, or all")
    add("--density", type=positive(float), default=1e-3, help="density of topk and exdyna (0.001)")
    add("--rank", type=positive(int), default=1, help="rank of PowerSGD (1)")
    add("--delay", type=float, default=0.0, help="seconds of delay per packet; needs netem (0)")
    add(
        "--seconds",
        type=positive(float),
        default=2.5,
        help="seconds to measure each row, at least (2.5)",
    )
    add("--no-training", dest="training", action="store_false", help="skip the small training")
    add("--page", type=Path, help="Markdown page to write, with the record next to it as .json")
    add("--json", action="store_true", help="print the record on stdout")
    return parser


def main() -> int:
    """Measure, predict, and print the page or the record."""
    args = options().parse_args()
    if args.workers < 2:
        options().error(f"--workers must be at least 2, got {args.workers}")
    why = missing()
    if why is not None:
        print(f"slow_network: {why}", file=sys.stderr)
        return 1
    begin = time.time()
    record: dict[str, Any] = {
        "benchmark": "slow_network",
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(begin)),
        "command": "python "
        + shlex.join([Path("benchmarks", "slow_network.py").as_posix()])
        + "".join(f" {shlex.quote(word)}" for word in sys.argv[1:]),
        "hardware": hardware(),
        "versions": versions(),
        "config": {k: v for k, v in vars(args).items() if k not in ("page", "json")},
        "load_before": os.getloadavg()[0],
    }
    try:
        with running(args.workers) as (net, ranks):
            record.update(measure_all(net, ranks, args))
            record["training"] = train_all(net, ranks, args)
    except KeyboardInterrupt:
        print("slow_network: interrupted; all namespaces and links are removed", file=sys.stderr)
        return 130
    except (NetworkError, RuntimeError) as error:
        print(f"slow_network: failed: {error}", file=sys.stderr)
        return 1
    record["seconds"] = time.time() - begin
    judge(record)
    if args.page is not None:
        args.page.parent.mkdir(parents=True, exist_ok=True)
        args.page.write_text(page(record))
        args.page.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
        progress(f"wrote {args.page} and {args.page.with_suffix('.json').name}")
    print(json.dumps(record) if args.json else page(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
