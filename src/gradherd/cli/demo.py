"""`gradherd demo`: both halves at work in a minute, on data that comes with scikit-learn."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradherd.cli.arguments import (
    MAX_PROCESSES,
    MAX_SEEDS,
    FolderOption,
    check_at_least,
    print_json,
)
from gradherd.cli.errors import CommandFailed, UsageError
from gradherd.cli.options import TrainingOptions

# Imported by the functions that need them: these import torch, and --help must not wait for it.
if TYPE_CHECKING:
    from rich.console import Console

    from gradherd.lab.report.arms import ArmSummary
    from gradherd.lab.report.comparison import ArmPair, Comparison
    from gradherd.lab.train.config import RunConfig
    from gradherd.lab.train.record import RunRecord

# The control reorders as much as cd-grab does: a gain that it lacks comes from balancing.
ORDERS = ("d-rr", "cd-grab", "always-plus")
FEW_BYTES: dict[str, Any] = {"local_steps": 4, "method": {"values": "int1"}}
"""The exchange that is shown beside the dense one and PowerSGD: settings of RunConfig."""
_NAMES = {"dense every 4": "4 steps, 1 bit"}
"""What bars call an arm, where its label says less."""
EXCHANGES: tuple[dict[str, Any], ...] = ({}, {"sparsify": "powersgd", "density": 0.01}, FEW_BYTES)
# Orders train side by side, so their seeds are cheap; exchanges train one run after the other.
_EXCHANGE_SEEDS = 5
RATES = {"1 Gb/s": 1e9, "10 Gb/s": 10e9}
"""Networks for which steps are predicted, in bits per second."""


@dataclass(frozen=True, kw_only=True)
class DemoCommand:
    """See what an order and a small exchange gain, on one small task each. Takes about a minute.

    First, logistic regression on images of digits with three orders: d-rr reshuffles at random,
    cd-grab (CD-GraB) balances the gradients of all workers, and always-plus is a control that moves
    examples as much without looking at gradients. Then a network with 300,000 parameters whose
    workers exchange their whole gradients (dense), torch's PowerSGD, or after every four steps one
    bit for each parameter, with the time of a step predicted for two networks. These workers are
    simulated, so that there are enough seeds to tell a gain from luck. Last, real worker processes
    train an epoch of each, and must arrive where simulated ones do. Needs scikit-learn, no network.

    Example: gradherd demo --out my-demo
    """

    workers: int = 4
    """Number of workers."""
    seeds: int = 8
    """Number of seeds of every order; exchanges take the first five of them."""
    out: FolderOption = None
    """Folder to write to; by default a new one in gradherd-runs."""
    quiet: bool = False
    """Show no progress; so does the environment variable GRADHERD_QUIET=1."""
    resume: bool = False
    """Keep the finished runs in --out and train only the others."""
    json: bool = False
    """Print {"comparisons": [each as `gradherd compare --json` prints it], "report", "predicted":
    [{"exchange", "bytes", "step_seconds": {network: seconds}}], "ranks": {"workers", "equal",
    "largest_difference"}}."""

    def run(self) -> None:
        """Train all parts, print what they show, and write the page."""
        check_at_least("--workers", self.workers, 1, MAX_PROCESSES)
        check_at_least("--seeds", self.seeds, 1, MAX_SEEDS)
        if self.resume and self.out is None:
            raise UsageError("--resume needs --out, the folder of the demo to continue")
        from gradherd.cli.folders import output_folder

        with output_folder(self.out, "demo", resume=self.resume, many=True) as out:
            self._show(out)

    def _show(self, out: Path) -> None:
        # All before any training, so that a missing package is reported at once.
        from rich.console import Console

        from gradherd.cli.folders import PAGE_FILE, telling_survivors
        from gradherd.cli.launch import train_missing
        from gradherd.lab.report.comparison import compare
        from gradherd.lab.report.comparison_table import comparison_json
        from gradherd.lab.report.page import write_report
        from gradherd.lab.train.process_runs import usable_cores

        begin, page = time.monotonic(), out / PAGE_FILE
        console = Console(quiet=self.json, highlight=False)  # stdout holds nothing but the JSON
        parts = {
            "digits": order_runs(self.workers, self.seeds),
            "digits-mlp": exchange_runs(self.workers, min(self.seeds, _EXCHANGE_SEEDS)),
        }
        planned = sum(map(len, parts.values()))
        options = TrainingOptions(quiet=self.quiet)
        records: list[RunRecord] = []
        comparisons: list[Comparison] = []
        for task, configs in parts.items():
            with telling_survivors(out, planned):
                cores = 1 if task == "digits" else usable_cores()  # orders are one stack
                trained = train_missing(
                    configs, out / task, options, resume=self.resume, processes=cores
                )
            records += trained
            comparisons.append(compare(trained))
            (print_orders if task == "digits" else print_exchanges)(comparisons[-1], console)
        write_report(records, page, title="gradherd demo: fewer epochs or fewer bytes")
        ranks = check_ranks(self.workers, self.quiet)
        print_ranks(ranks, console)
        if self.json:
            results = [comparison_json(comparison, str(page)) for comparison in comparisons]
            predicted = predicted_steps(comparisons[1])
            print_json(
                {
                    "comparisons": results,
                    "report": str(page),
                    "predicted": predicted,
                    "ranks": ranks,
                }
            )
            return
        print_end(comparisons, time.monotonic() - begin, page, console)
        if not ranks["equal"]:
            raise CommandFailed("real workers did not arrive where the simulated ones did")


def order_runs(workers: int, seeds: int) -> list[RunConfig]:
    """Return the runs that compare orders of whole batches: all of them train side by side."""
    from gradherd.lab.tasks.registry import find_task
    from gradherd.lab.train.config import plan_runs

    return plan_runs(
        "digits",
        find_task("digits").defaults,
        orders=ORDERS,
        sparsifiers=["dense"],
        density=None,
        seeds=range(seeds),
        workers=workers,
        unit=4,  # the batch: what workers average anyway is what the order learns from
        virtual=True,
    )


def exchange_runs(workers: int, seeds: int) -> list[RunConfig]:
    """Return the runs that compare exchanges; few epochs, since they train one by one."""
    from gradherd.lab.tasks.registry import find_task
    from gradherd.lab.train.config import RunConfig, sparse_recipe

    # Of 0.1, 0.2 and 0.4 this rate gave dense the lowest train loss with seeds 0 and 1; the others
    # take it as it is. It falls to zero: what is left is the exchange, not the last steps' noise.
    shared = {
        "workers": workers, "epochs": 6, "batch_size": 16, "lr": 0.2, "lr_schedule": "cosine",
        "virtual": True,
    }  # fmt: skip
    defaults = find_task("digits-mlp").defaults
    return [
        sparse_recipe(RunConfig.of("digits-mlp", defaults, seed=seed, **shared, **exchange))
        for seed in range(seeds)
        for exchange in EXCHANGES
    ]


def print_orders(comparison: Comparison, console: Console) -> None:
    """Print how many epochs each order takes, and what that shows."""
    _print_heading("1  Does a better order need fewer epochs?", comparison, console)
    base = comparison.baseline
    goal = f"the loss that {base.label} ends with after {base.epochs} epochs"
    _print(f"   epochs until {goal}:", console)
    bars = []
    for pair in comparison.pairs:
        text = f"not within {base.epochs}" if pair.epochs_to is None else f"{pair.epochs_to}"
        bars.append((pair.arm.label, pair.epochs_to or base.epochs, f"{text} epochs"))
    print_bars(bars, console)
    _print_findings(comparison, console)


def print_exchanges(comparison: Comparison, console: Console) -> None:
    """Print the predicted step of each exchange, and what its bytes cost in quality."""
    from gradherd.lab.text import fixed, in_bytes

    _print_heading("2  How few bytes train as well?", comparison, console)
    predicted = predicted_steps(comparison)
    for rate in RATES:
        _print(f"   a step over {rate}, predicted:", console)
        bars = []
        for one in predicted:
            seconds = one["step_seconds"][rate]
            text = f"{1e3 * seconds:.1f} ms, {in_bytes(one['bytes'])} sent"
            bars.append((one["exchange"], seconds, text))
        print_bars(bars, console)
    _print(
        "   [dim]computing as measured here, plus the bytes at that rate; no overlap[/]", console
    )
    _print(
        "   [dim]all trained at the rate chosen for dense; others may have better ones[/]", console
    )
    for pair in comparison.pairs[1:]:
        found = pair.metric
        if found is not None and found.low is not None and found.high is not None:
            mean, low, high = (fixed(x, 1, sign=True) for x in (found.mean, found.low, found.high))
            interval = f"95 % interval {low} to {high}"
            text = f"{_name(pair.arm.label)}: {comparison.metric_name} {mean} ({interval})"
            _print(f"   {text}", console)
    _print_findings(comparison, console)


def predicted_steps(comparison: Comparison) -> list[dict[str, Any]]:
    """Predict the step of each exchange: what it computes, measured here, and its bytes.

    Returns:
        For each arm its name, the bytes that a worker sends in a step, and the seconds of a step
        on each network of `RATES`.
    """

    def median(arm: ArmSummary, part: str) -> float:
        # The simulation takes workers in turn.
        return statistics.median(
            float(getattr(row, part)) / (row.steps * int(run.config["workers"]))
            for run in arm.used
            for row in run.epochs
        )

    base, predicted = comparison.baseline, []
    for arm in comparison.arms:
        sent = statistics.fmean(row.bytes / row.steps for run in arm.used for row in run.epochs)
        # A dense exchange computes nothing but sums, while it sends.
        own = 0.0 if arm is base else median(arm, "exchange_seconds")
        compute = median(base, "compute_seconds") + own  # the same model for all
        seconds = {name: compute + 8 * sent / rate for name, rate in RATES.items()}
        predicted.append({"exchange": _name(arm.label), "bytes": sent, "step_seconds": seconds})
    return predicted


def check_ranks(workers: int, quiet: bool) -> dict[str, Any]:
    """Train an epoch of an order and of an exchange on real processes and on simulated workers.

    Returns:
        Whether losses and bytes are the same, and how far losses differ at most, as a share.
    """
    from gradherd.cli.launch import train_runs

    differences, same_bytes = [], True
    for config in (order_runs(workers, 1)[1], exchange_runs(workers, 1)[-1]):
        rows = []
        for virtual in (True, False):
            one = dataclasses.replace(config, epochs=1, virtual=virtual)
            with tempfile.TemporaryDirectory(prefix="gradherd-demo-") as folder:
                (record,) = train_runs([one], Path(folder), TrainingOptions(quiet=quiet))
            rows.append(record.epochs[0])
        simulated, real = rows
        assert simulated.train_loss is not None and real.train_loss is not None
        differences.append(abs(real.train_loss / simulated.train_loss - 1))
        same_bytes &= real.bytes == simulated.bytes
    equal = same_bytes and max(differences) < 1e-4
    return {"workers": workers, "equal": equal, "largest_difference": max(differences)}


def print_ranks(ranks: dict[str, Any], console: Console) -> None:
    """Print whether real processes did what the simulated workers did."""
    _print("[bold]3  Do real worker processes do the same?[/]", console)
    trained = f"{ranks['workers']} processes trained an epoch of cd-grab and of few bytes:"
    difference = f"losses differ by {ranks['largest_difference']:.1e} of their value"
    if ranks["equal"]:
        _print(f"[bold green]+[/] {trained} as simulated; {difference}, bytes by 0.", console)
    else:
        _print(f"[bold red]-[/] {trained} not as simulated; {difference}, or bytes do.", console)
    console.print()


def print_end(
    comparisons: Sequence[Comparison], seconds: float, page: Path, console: Console
) -> None:
    """Print what was shown, and what to try next."""
    from rich.markup import escape

    from gradherd.lab.report.verdicts import all_verdicts

    orders, exchanges = comparisons
    tones = {(verdict.kind, verdict.arm): verdict.tone for verdict in all_verdicts(orders)}
    pair = next(one for one in orders.pairs if one.arm.order == "cd-grab")
    _print(f"[bold]{_shown_of_order(pair, tones)}[/]", console)
    _print(f"[bold]{_shown_of_exchange(exchanges.pairs[-1])}[/]", console)
    curves = f"Curves, intervals and tests: {escape(str(page))}"
    console.print(f"Took {seconds:.0f} seconds. {curves}", soft_wrap=True)
    console.print("Next, on your own model:")
    for line in (
        "gradherd compare my_task.py:MyTask --orders d-rr,cd-grab --virtual --seeds 5",
        "gradherd advise --params 25M --workers 8 --bandwidth 10G --backward 60ms",
        "or attach() to your own training loop: README.md shows the lines",
    ):
        console.print(f"  {line}", soft_wrap=True)


def _shown_of_order(pair: ArmPair, tones: Mapping[tuple[str, str], str]) -> str:
    gains = tones.get(("order", pair.arm.label)) in ("gain", "mixed")
    if not gains or pair.epochs_to is None:
        return "Not shown with these seeds: that the order gains anything here."
    by_balancing = any(kind == "control" and tone == "gain" for (kind, _), tone in tones.items())
    control = (
        ", and a control that ignores gradients does not gain"
        if by_balancing
        else "; that balancing is the reason is not shown"
    )
    arm, base = pair.arm.label, pair.reference.label
    reached = f"{arm} reaches {base}'s final loss after {pair.epochs_to} epochs"
    return f"Shown: {reached}, {base} itself after {pair.reference_epochs_to}{control}."


def _shown_of_exchange(pair: ArmPair) -> str:
    found = pair.metric
    if found is None or found.low is None or not pair.bytes_ratio:
        return "Not shown with these seeds: what fewer bytes cost."
    fewer = f"{_name(pair.arm.label)} sends {1 / pair.bytes_ratio:.0f} times fewer bytes"
    most = f"at most {max(0.0, -found.low):.1f} points of accuracy (end of the 95 % interval)"
    return f"Shown: {fewer} and costs {most}."


def print_bars(rows: Sequence[tuple[str, float, str]], console: Console) -> None:
    """Print a bar for each row: its name, a length, and what it says."""
    block = "█" if console.encoding.startswith("utf") else "#"
    left = max(len(name) for name, _, _ in rows)
    room = max(8, min(40, console.width - left - 6 - max(len(text) for _, _, text in rows)))
    longest = max(value for _, value, _ in rows)
    for name, value, text in rows:
        length = max(1, round(room * value / longest))
        console.print(f"   {name:{left}}  [cyan]{block * length}[/] {text}", soft_wrap=True)


def _print_heading(title: str, comparison: Comparison, console: Console) -> None:
    from gradherd.lab.text import counted

    _print(f"[bold]{title}[/]", console)
    seeds = counted(len(comparison.baseline.seeds), "seed")
    _print(f"   {comparison.description}; {seeds}", console)


def _print_findings(comparison: Comparison, console: Console) -> None:
    """Print the verdicts of a comparison in a few words each; the page has all figures."""
    from rich.markup import escape

    from gradherd.cli.tables import MARKS
    from gradherd.lab.report.verdicts import all_verdicts

    for verdict in all_verdicts(comparison):
        colour, mark = MARKS[verdict.tone]
        _print(f"[bold {colour}]{mark}[/] {escape(_name(verdict.headline))}", console)
    console.print()


def _name(text: str) -> str:
    """Return a label, or a text that begins with one, with the name that bars have."""
    for label, name in _NAMES.items():
        text = text.replace(label, name)
    return text


def _print(markup: str, console: Console) -> None:
    from gradherd.cli.tables import print_sentence

    print_sentence(markup, console)
