"""What does an exchange cost on a slow network? Real ranks, real TCP, links of a given speed.

Makes a network namespace for each rank, joined by a bridge, with a token bucket (tc tbf) on what
each one sends and receives; starts a gloo rank in each; measures steps of DDP with torch's own
exchanges (fp32, its fp16 hook, its PowerSGD hook) and with gradherd's (topk, exdyna; the orders
d-rr and cd-grab), beside the kernel's own byte counters; predicts the same with `gradherd.advise`
from link, latency, compute and overheads that it has measured; and trains a small task at the
slowest rate until its loss is low. Needs root and Linux; removes all it made, also after Ctrl-C.

    sudo python benchmarks/slow_network.py                     # all of it, some minutes
    sudo python benchmarks/slow_network.py --rates 1G --cases dense,exdyna,dense+cd-grab
    sudo python benchmarks/slow_network.py --page benchmarks/results/2026-11-15-slow-network.md

The model is six wide linear layers and a batch of four: many parameters, little arithmetic, so that
two cores are not all that is measured. Communication time is a step less the same step without any
exchange (torch's noop_hook), all ranks at work.
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
from slow_predict import overheads, predicted

from gradherd.advise import units
from gradherd.lab.train.environment import hardware, versions

CASES = (
    *("dense", "fp16", "powersgd", "topk", "exdyna"),
    *("dense+cd-grab", "exdyna+cd-grab", "fp16+cd-grab", "powersgd+cd-grab", "topk+cd-grab"),
)
# The last three gather a row every 32 steps: dull, and minutes each.
_USUAL = CASES[:7]


def judge(record: dict[str, Any]) -> None:
    """Add communication times, predictions, and what was to be shown, to a record."""
    compute = record["compute"]["step_seconds"]
    for row in record["rows"]:
        row["communication_seconds"] = row["step_seconds"] - compute
    record["overheads"] = overheads(record)
    for row in record["rows"]:
        row.update(predicted(record, row))
    found = {(row["case"], row["rate"]): row for row in record["rows"]}
    shown: dict[str, Any] = {}
    dense, sparse = found.get(("dense", 1e9)), found.get(("exdyna", 1e9))
    if dense and sparse:
        ratio = sparse["communication_seconds"] / dense["communication_seconds"]
        shown["exdyna_over_dense_communication_1G"] = ratio
    shown["counted_over_payload"] = [
        min(row["counted_over_payload"] for row in record["rows"]),
        max(row["counted_over_payload"] for row in record["rows"]),
    ]
    pairs = [(found.get(("dense", r)), found.get(("dense+cd-grab", r))) for _, r in found]
    ratios = [b["kernel_tx_bytes"] / a["kernel_tx_bytes"] for a, b in pairs if a and b]
    if ratios:
        shown["cd_grab_over_d_rr_bytes"] = max(ratios)
    limited = [row["prediction_error"] for row in record["rows"] if row["rate"] is not None]
    shown["largest_prediction_error"] = max(map(abs, limited), default=None)
    record["shown"] = shown


def listed_rates(text: str) -> list[float]:
    """Read --rates."""
    try:
        return [units.parse_rate(word) for word in text.split(",") if word.strip()]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def listed_cases(text: str) -> list[str]:
    """Read --cases."""
    found = [word.strip() for word in text.split(",") if word.strip()]
    found = list(CASES) if found == ["all"] else found
    unknown = [word for word in found if word not in CASES]
    if unknown or not found:
        known = f"known are {', '.join(CASES)}, and all"
        raise argparse.ArgumentTypeError(f"unknown {', '.join(unknown) or repr(text)}; {known}")
    return found


def positive(kind: type[int] | type[float]) -> Any:
    """Return a reader of numbers above 0; 25e6 is one."""

    def read(text: str) -> int | float:
        value = kind(float(text))
        if not value > 0:
            raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
        return value

    read.__name__ = "number"
    return read


def options() -> argparse.ArgumentParser:
    """Return what can be asked for."""
    says, how = __doc__.split("\n", 1)
    parser = argparse.ArgumentParser(
        description=says, epilog=how, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--workers", type=positive(int), default=4, help="ranks, each in a namespace (4)")
    add("--params", type=positive(int), default=25_000_000, help="of the model, about (25e6)")
    add("--batch", type=positive(int), default=4, help="examples of a rank in a step (4)")
    add("--rates", type=listed_rates, default="100M,1G,10G", help="link speeds, bits per second")
    add("--cases", type=listed_cases, default=",".join(_USUAL), help="exchanges, or all")
    add("--density", type=positive(float), default=1e-3, help="of topk and exdyna (0.001)")
    add("--rank", type=positive(int), default=1, help="of PowerSGD (1)")
    add("--delay", type=float, default=0.0, help="seconds added to what is sent; needs netem (0)")
    add("--seconds", type=positive(float), default=2.5, help="of steps for each row, or more (2.5)")
    add("--no-training", dest="training", action="store_false", help="leave the small task out")
    add("--page", type=Path, help="write a page here, and the record beside it as .json")
    add("--json", action="store_true", help="print the record on stdout")
    return parser


def main() -> int:
    """Measure, and tell."""
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
        print("slow_network: interrupted; namespaces and links are removed", file=sys.stderr)
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
