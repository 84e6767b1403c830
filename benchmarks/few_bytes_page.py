"""Draw what few bytes cost a language model, and print the tables of docs/few_bytes.md.

    python -m benchmarks.few_bytes_page [--image docs/images/few-bytes.svg]
        [--results benchmarks/results]

Reads what `benchmarks/few_bytes.py` and `benchmarks/few_bytes_tasks.py` wrote.
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scipy import stats

from gradherd.lab.report.svg import ChartLine
from studies.evidence.chart_file import chart_file

NAMES = {
    "local-2": "2 local steps, 1 bit",
    "local-4": "4 local steps, 1 bit: `gh.LocalSteps()`",
    "local-8": "8 local steps, 1 bit: `gh.LocalSteps(every=8)`",
    "local-16": "16 local steps, 1 bit: `gh.LocalSteps(every=16)`",
    "powersgd": "PowerSGD, every step",
    "diloco": "DiLoCo, 15 steps",
    "diloco-int4": "DiLoCo in 4 bits, 15 steps",
    "sparseloco": "SparseLoCo, 15 steps, 3 % in 2 bits",
    "sparseloco-senders": "the same, mean over senders",
    "topk": "top-k of each worker, every step",
    "demo": "DeMo, every step",
    "onebit-adam": "1-bit Adam, dense for 15 % of the steps",
    "exdyna-few-bits": "ExDyna at 0.025 in 2 bits, every step",
    "exdyna-0.01": "ExDyna at 0.01 in float32, every step",
    "exdyna-0.05-int4": "ExDyna at 0.05 in 4 bits, every step",
}
PEERS = {
    "powersgd": "PowerSGD",
    "diloco": "DiLoCo",
    "diloco-int4": "DiLoCo in 4 bits",
    "sparseloco": "SparseLoCo",
    "sparseloco-senders": "SparseLoCo over senders",
    "topk": "top-k",
    "demo": "DeMo",
    "onebit-adam": "1-bit Adam",
    "exdyna-few-bits": "ExDyna in 2 bits",
    "exdyna-0.01": "ExDyna",
    "exdyna-0.05-int4": "ExDyna in 4 bits",
}
RECIPE = ("local-2", "local-4", "local-8", "local-16")


def by_arm(runs: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the runs of each arm."""
    arms: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        arms.setdefault(run["arm"], []).append(run)
    return arms


def gap(runs: list[dict[str, Any]], dense: list[dict[str, Any]], key: str) -> str:
    """Return how much higher a perplexity is than dense, in percent, with its 95 % interval."""
    base = {run["seed"]: run[key] for run in dense}
    # By seed: runs of one seed start with the same weights and see the same batches.
    ratios = [100 * (run[key] / base[run["seed"]] - 1) for run in runs]
    mean = statistics.fmean(ratios)
    if len(ratios) < 3:
        return f"{mean:+.1f} %"
    half = stats.t.ppf(0.975, len(ratios) - 1) * statistics.stdev(ratios) / math.sqrt(len(ratios))
    return f"{mean:+.1f} % ({mean - half:+.1f} to {mean + half:+.1f})"


def table(arms: dict[str, list[dict[str, Any]]]) -> str:
    """Return the table in Markdown."""
    lines = [
        "| method | times fewer bytes | best epoch | against dense | last epoch | against dense "
        "| seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    dense = arms["dense"]
    for arm, name in ({"dense": "dense"} | NAMES).items():
        if arm not in arms:
            continue
        runs = arms[arm]
        cells = [name, f"{runs[0]['fewer']:.0f}"]
        for key in ("best", "last"):
            cells.append(f"{statistics.fmean(run[key] for run in runs):.1f}")
            cells.append("" if arm == "dense" else gap(runs, dense, key))
        lines.append("| " + " | ".join([*cells, str(len(runs))]) + " |")
    return "\n".join(lines)


def growth_table(read: Callable[[str], list[dict[str, Any]]]) -> str:
    """Return in Markdown how the price of 4 local steps moves with workers and with the model."""
    lines = [
        "| model | workers | steps | dense, at rate | 4 local steps, at rate | against dense "
        "| seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    runs = [{"lr": 1e-3} | run for run in read("few-bytes")]
    runs += read("few-bytes-workers")
    groups = [
        (
            f"11 M, tokens: perplexity | {workers}",
            [run for run in runs if (run["workers"], run["epochs"]) == (workers, epochs)],
        )
        for workers, epochs in ((2, 10), (4, 10), (8, 10), (16, 10), (16, 20))
    ]
    # Bits of a byte; its perplexity would look like a small loss.
    of_bytes = [run | {"best": math.log2(run["best"])} for run in read("few-bytes-bytes")]
    groups.append(("32 M, bytes: bits | 8", of_bytes))
    for name, group in groups:
        dense, local = (_best_rate(group, arm) for arm in ("dense", "local-4"))
        digits = ".1f" if "perplexity" in name else ".3f"
        cells = [name, f"{dense[0]['steps']:,}"]
        for best in (dense, local):
            mean = statistics.fmean(run["best"] for run in best)
            cells.append(f"{mean:{digits}}, {1e3 * best[0]['lr']:.2g}e-3")
        cells += [gap(local, dense, "best"), str(len(local))]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _best_rate(runs: list[dict[str, Any]], arm: str) -> list[dict[str, Any]]:
    """Return the runs of an arm at the rate that ended lowest."""
    own = [run for run in runs if run["arm"].split(":")[0] == arm]
    rates = {run["lr"]: [one for one in own if one["lr"] == run["lr"]] for run in own}
    return min(rates.values(), key=lambda some: statistics.fmean(run["best"] for run in some))


def task_table(runs: list[dict[str, Any]], results: Path) -> str:
    """Return in Markdown what local steps cost classifiers."""

    def recorded(study: str, epoch: int) -> dict[int, float]:
        """Return the accuracy of a study's dense runs after an epoch, by seed."""
        dense = json.loads((results / study / "dense.json").read_text())["runs"]
        return {run["seed"]: run["figures"]["metric"][epoch - 1] for run in dense}

    lines = [
        "| task | steps | times fewer bytes | dense | local steps | seeds |",
        "|---|---|---|---|---|---|",
    ]
    for name, task, study, epochs in (
        ("LeNet, SGD, 6 epochs", "cifar10-lenet", "scarce", 6),
        ("SST-2 transformer, AdamW, 3 epochs", "sst2-transformer", "sst2", 3),
        ("ResNet-18, SGD, 60 epochs", "cifar10-resnet18", "resnet18-long", 60),
    ):
        local: dict[int, list[dict[str, Any]]] = {}
        for run in runs:
            kind, _, every = run["arm"].split(":")[0].partition("-")
            if (run["task"], run["epochs"], kind) == (task, epochs, "local"):
                local.setdefault(int(every), []).append(run)
        ended = {every: own for every, own in local.items() if own[0]["finished"]}
        for every, own in sorted((ended or local).items()):
            last = own[0]["epoch"][-1]
            until = "" if last == epochs else f", cut off after {last}"
            dense = statistics.fmean(recorded(study, last).values())
            accuracy = statistics.fmean(run["accuracy"][-1] for run in own)
            cells = [f"{name}{until}", str(every), f"{own[0]['fewer']:.0f}"]
            cells += [f"{dense:.1f} %", f"{accuracy:.1f} %", str(len(own))]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def picture(arms: dict[str, list[dict[str, Any]]]) -> str:
    """Return the best test perplexity over the factor of bytes as SVG."""
    best = {arm: [run["best"] for run in runs] for arm, runs in arms.items()}
    fewer = {arm: runs[0]["fewer"] for arm, runs in arms.items()}
    ends = [fewer[arm] for arm in arms if arm != "dense"]
    ours = ChartLine(
        "local steps in one bit: 2, 4, 8, 16",
        [(fewer[arm], statistics.fmean(best[arm])) for arm in RECIPE],
        [(fewer[arm], min(best[arm]), max(best[arm])) for arm in RECIPE],
    )
    level = statistics.fmean(best["dense"])
    every = [min(ends) * (max(ends) / min(ends)) ** (step / 20) for step in range(21)]
    dense = ChartLine(
        "dense, with all its bytes",
        [(at, level) for at in every],
        [(at, min(best["dense"]), max(best["dense"])) for at in every],
    )
    peers = [
        ChartLine(name, [(fewer[arm], statistics.fmean(best[arm]))])
        for arm, name in PEERS.items()
        if arm in arms
    ]
    return chart_file(
        "GPT-2, 11 M parameters, AdamW, 8 workers: what few bytes cost",
        "times fewer bytes than dense float32",
        "best test perplexity",
        [dense, ours, *peers],
        log_x=True,
        name_points=True,
    )


def reader(results: Path) -> Callable[[str], list[dict[str, Any]]]:
    """Return what reads the runs of a record by its name."""

    def read(name: str) -> list[dict[str, Any]]:
        record = json.loads((results / f"2026-11-18-{name}-h200.json").read_text())
        runs: list[dict[str, Any]] = record["runs"]
        return runs

    return read


def main() -> None:
    """Write the picture, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--image", type=Path, default=Path("docs/images/few-bytes.svg"))
    options = parser.parse_args()
    read = reader(options.results)
    arms = by_arm(read("few-bytes"))
    options.image.write_text(picture(arms))
    print(table(arms))
    print(growth_table(read))
    print(task_table(read("few-bytes-tasks"), options.results))


if __name__ == "__main__":
    main()
