"""The measurements of slow_network.py: give jobs to the ranks in their namespaces."""

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from netns import INTERFACE, Namespaces

from gradherd.advise import units

_ROUNDS = 4  # in which every rate of a case gets its turn
_HEADER_BYTES = 66  # Ethernet, IP and TCP with timestamps, in front of each packet's data
# The small training: its cases, target loss, most epochs and density.
_TRAINED_CASES = ("dense", "fp16", "topk", "exdyna", "dense+cd-grab", "exdyna+cd-grab")
_TARGET, _EPOCHS, _DENSITY = 0.25, 10, 0.01
_LINK_SECONDS = 1.0  # a message to measure a link takes about this long: TCP starts slowly


def progress(text: str) -> None:
    """Print progress on stderr."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


class Ranks:
    """The ranks in their namespaces; all get the same jobs and do them together."""

    def __init__(self, net: Namespaces, folder: Path) -> None:
        script = Path(__file__).with_name("slow_rank.py")
        env = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"}
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            env.pop(name, None)
        self._ranks = [
            net.start(
                rank,
                [sys.executable, str(script), str(rank), str(net.count), str(folder / "store")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=env,
            )
            for rank in range(net.count)
        ]

    def ask(self, do: str, **job: Any) -> list[dict[str, Any]]:
        """Send a job to all ranks; return the answer of each."""
        # A broken pipe means that a rank has ended: reading its answer, below, reports it.
        with contextlib.suppress(BrokenPipeError):
            for rank in self._ranks:
                assert rank.stdin is not None
                rank.stdin.write(json.dumps({"do": do, **job}) + "\n")
                rank.stdin.flush()
        answers = []
        for number, rank in enumerate(self._ranks):
            assert rank.stdout is not None
            line = rank.stdout.readline()
            if not line:
                raise RuntimeError(f"rank {number} ended during the job {do!r}; see above")
            answers.append(json.loads(line))
        return answers


def measure_all(net: Namespaces, ranks: Ranks, args: argparse.Namespace) -> dict[str, Any]:
    """Measure links, the step without exchange, and every case at every rate."""
    rates = [None, *args.rates]
    links = [measure_link(net, ranks, rate, args.delay) for rate in rates]
    names = ("params", "batch", "density", "rank")
    job = {name: getattr(args, name) for name in names}
    rows, compute, model = [], [], {}
    ranks.ask("make", exchange="none", order="d-rr", **job)
    for case in args.cases:
        exchange, _, order = case.partition("+")
        net.limit(None)  # DDP's first broadcast is not measured
        model = ranks.ask("make", exchange=exchange, order=order or "d-rr", **job)[0]
        measured, dropped = measure_in_turn(net, ranks, rates, args)
        compute.append(compute_summary(measured["none"]))
        for rate in rates:
            row = summary(
                case, rate, [merged(parts) for parts in zip(*measured[rate], strict=True)]
            )
            row["dropped_packets"], row["compute"] = dropped[rate], compute[-1]
            rows.append(row)
            result = f"{1e3 * row['step_seconds']:.0f} ms, {row['kernel_tx_bytes']:,.0f} bytes sent"
            progress(f"{case} at {rate_name(rate)}: a step takes {result}")
    middle = {name: statistics.median(one[name] for one in compute) for name in compute[0]}
    return {"links": links, "compute": middle, "model": model, "rows": rows}


def measure_in_turn(
    net: Namespaces, ranks: Ranks, rates: Sequence[float | None], args: argparse.Namespace
) -> tuple[dict[Any, list[list[dict[str, Any]]]], dict[float | None, int]]:
    """Measure the step without exchange ("none") and all rates in turn, several times.

    The load of the machine changes within minutes; what is compared must be measured together.

    Returns:
        Answers of all ranks by rate and round, and dropped packets by rate.
    """
    measured: dict[Any, list[list[dict[str, Any]]]] = {what: [] for what in ("none", *rates)}
    dropped: dict[float | None, int] = dict.fromkeys(rates, 0)
    for _ in range(_ROUNDS):
        net.limit(None)
        measured["none"].append(
            ranks.ask("measure", baseline=True, seconds=args.seconds / _ROUNDS / 2)
        )
        for rate in rates:
            net.limit(rate, args.delay)
            measured[rate].append(ranks.ask("measure", seconds=args.seconds / _ROUNDS))
            dropped[rate] += net.dropped() if rate is not None else 0
    return measured, dropped


def merged(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Combine what one rank has measured in several rounds: blocks joined, the rest averaged."""
    total = sum(part["steps"] for part in parts)
    whole: dict[str, Any] = {**parts[-1], "steps": total}
    for name in ("counted_bytes", "kernel_tx_bytes", "kernel_rx_bytes", "packets", "cpu_seconds"):
        whole[name] = sum(part[name] * part["steps"] for part in parts) / total
    for name in ("seconds", "backward"):
        whole[name] = [one for part in parts for one in part[name]]
    return whole


def train_all(net: Namespaces, ranks: Ranks, args: argparse.Namespace) -> dict[str, Any] | None:
    """Train a small task with several exchanges at the slowest rate."""
    if not args.training or not args.rates or importlib.util.find_spec("sklearn") is None:
        return None
    rate, rows = min(args.rates), []
    job = {"target": _TARGET, "epochs": _EPOCHS, "density": _DENSITY, "seed": 0}
    net.limit(rate, args.delay)
    for case in _TRAINED_CASES:
        exchange, _, order = case.partition("+")
        answers = ranks.ask("train", exchange=exchange, order=order or "d-rr", **job)
        row = {"case": case, **answers[0]}
        row["kernel_tx_bytes"] = statistics.mean(one["kernel_tx_bytes"] for one in answers)
        rows.append(row)
        progress(f"digits by {case}: {row['seconds']:.1f} s, {row['epochs']} epochs")
    return {"rate": rate, **job, "rows": rows}


def measure_link(net: Namespaces, ranks: Ranks, rate: float | None, delay: float) -> dict[str, Any]:
    """Measure goodput and latency of the links."""
    net.limit(rate, delay)
    size = int(min(32e6, max(1e5, (rate or 4e9) / 8 * _LINK_SECONDS)))
    link = ranks.ask("link", repeats=40, bytes=size)[0]
    arrives = units.format_rate(link["goodput"])
    progress(f"link of {rate_name(rate)}: {arrives} arrive, {1e3 * link['latency']:.2f} ms a hop")
    return {"rate": rate, **link}


def compute_summary(rounds: Sequence[Sequence[dict[str, Any]]]) -> dict[str, float]:
    """Return what a step without any exchange takes."""
    answers = [merged(parts) for parts in zip(*rounds, strict=True)]
    return {
        "step_seconds": statistics.median(answers[0]["seconds"]),
        "backward_seconds": statistics.median(answers[0]["backward"]),
        "cpu_seconds": statistics.mean(answer["cpu_seconds"] for answer in answers),
    }


def summary(case: str, rate: float | None, answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Combine the answers of all ranks about one case at one rate; bytes are means over ranks."""
    row: dict[str, Any] = {"case": case, "rate": rate, "steps": answers[0]["steps"]}
    row["step_seconds"] = statistics.median(answers[0]["seconds"])
    row["step_seconds_all"] = answers[0]["seconds"]
    for name in ("counted_bytes", "kernel_tx_bytes", "kernel_rx_bytes", "packets", "cpu_seconds"):
        row[name] = statistics.mean(answer[name] for answer in answers)
    row["payload_bytes"] = row["kernel_tx_bytes"] - _HEADER_BYTES * row["packets"]
    row["counted_over_payload"] = row["counted_bytes"] / row["payload_bytes"]
    row["selected"] = answers[0]["selected"]
    return row


def rate_name(rate: float | None) -> str:
    """Format a rate; None is no limit."""
    return "no limit" if rate is None else units.format_rate(rate)


@contextlib.contextmanager
def running(workers: int) -> Iterator[tuple[Namespaces, Ranks]]:
    """Create the network and start the ranks; remove both afterwards."""
    with (
        tempfile.TemporaryDirectory(prefix="gradherd-slow-") as folder,
        Namespaces(workers) as net,
    ):
        yield net, Ranks(net, Path(folder))
