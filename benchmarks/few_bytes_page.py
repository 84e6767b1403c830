"""Draw what few bytes cost a language model, and print the table of docs/few_bytes.md.

    python -m benchmarks.few_bytes_page [--image docs/images/few-bytes.svg]
        [--record benchmarks/results/2026-11-18-few-bytes-h200.json]

Reads what `benchmarks/few_bytes.py` wrote.
"""

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

from scipy import stats

from gradherd.lab.report.svg import ChartLine
from studies.evidence.chart_file import chart_file

NAMES = {
    "local-2": "2 local steps, 1 bit",
    "local-4": "4 local steps, 1 bit: `gh.LocalSteps()`",
    "local-8": "8 local steps, 1 bit: `gh.LocalSteps(fewer=240)`",
    "local-16": "16 local steps, 1 bit: `gh.LocalSteps(fewer=480)`",
    "powersgd": "PowerSGD, every step",
    "diloco-int4": "DiLoCo in 4 bits, 15 steps",
    "sparseloco": "SparseLoCo, 15 steps, 3 % in 2 bits",
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
        runs = arms[arm]
        cells = [name, f"{runs[0]['fewer']:.0f}"]
        for key in ("best", "last"):
            cells.append(f"{statistics.fmean(run[key] for run in runs):.1f}")
            cells.append("" if arm == "dense" else gap(runs, dense, key))
        lines.append("| " + " | ".join([*cells, str(len(runs))]) + " |")
    return "\n".join(lines)


def picture(arms: dict[str, list[dict[str, Any]]]) -> str:
    """Return the best test perplexity over the factor of bytes as SVG."""
    best = {arm: [run["best"] for run in runs] for arm, runs in arms.items()}
    fewer = {arm: runs[0]["fewer"] for arm, runs in arms.items()}
    ends = [fewer[arm] for arm in RECIPE]
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
        ChartLine(NAMES[arm], [(fewer[arm], best[arm][0])])
        for arm in ("powersgd", "diloco-int4", "sparseloco")
    ]
    return chart_file(
        "GPT-2, 11 M parameters, AdamW, 8 workers: what few bytes cost",
        "times fewer bytes than dense float32",
        "best test perplexity",
        [ours, dense, *peers],
        log_x=True,
    )


def main() -> None:
    """Write the picture, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    results = Path("benchmarks/results/2026-11-18-few-bytes-h200.json")
    parser.add_argument("--record", type=Path, default=results)
    parser.add_argument("--image", type=Path, default=Path("docs/images/few-bytes.svg"))
    options = parser.parse_args()
    arms = by_arm(json.loads(options.record.read_text())["runs"])
    options.image.write_text(picture(arms))
    print(table(arms))


if __name__ == "__main__":
    main()
