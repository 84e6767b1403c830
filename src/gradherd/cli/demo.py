"""`gradherd demo`: both halves at work, on data that comes with scikit-learn."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from gradherd.cli.arguments import (
    MAX_PROCESSES,
    MAX_SEEDS,
    Flag,
    FolderOption,
    check_at_least,
    json_help,
    print_json,
)
from gradherd.cli.errors import UsageError
from gradherd.cli.options import TrainingOptions

# Imported by the functions that need them: these import torch, and --help must not wait for it.
if TYPE_CHECKING:
    from gradherd.lab.train.config import RunConfig
    from gradherd.lab.train.record import RunRecord


@dataclass(frozen=True, kw_only=True)
class DemoCommand:
    """Compare orders on one small task and sparsifiers on another, on local worker processes.

    First, logistic regression on small images of digits with three orders: d-rr reshuffles at
    random, cd-grab (CD-GraB) balances the gradients of all workers, and always-plus is a control
    that reorders without looking at gradients. Then a network with 300,000 parameters that
    exchanges its whole gradient (dense), or one element in a hundred of it (exdyna). Needs
    scikit-learn, no network, and two to three minutes on two cores.

    Example: gradherd demo --out my-demo
    """

    workers: int = 4
    """Number of worker processes."""
    seeds: int = 3
    """Number of seeds of every arm."""
    out: FolderOption = None
    """Folder to write to; by default a new one in gradherd-runs."""
    quiet: Flag = False
    """Show no progress; so does the environment variable GRADHERD_QUIET=1."""
    resume: Flag = False
    """Keep the finished runs in --out and train only the others."""
    json: Annotated[
        bool,
        json_help(
            'Print {"comparisons": [each as `gradherd compare --json` prints it], "report"}.'
        ),
    ] = False

    def run(self) -> None:
        """Train both parts, print the comparisons, and write the page."""
        check_at_least("--workers", self.workers, 1, MAX_PROCESSES)
        check_at_least("--seeds", self.seeds, 1, MAX_SEEDS)
        if self.resume and self.out is None:
            raise UsageError("--resume needs --out, the folder of the demo to continue")
        from gradherd.cli.folders import output_folder

        with output_folder(self.out, "demo", resume=self.resume, many=True) as out:
            self._compare(out)

    def _compare(self, out: Path) -> None:
        # All before any training, so that a missing package is reported at once.
        from rich.console import Console
        from rich.markup import escape

        from gradherd.cli.folders import PAGE_FILE, telling_survivors
        from gradherd.cli.launch import train_missing
        from gradherd.cli.tables import print_comparison
        from gradherd.lab.report.comparison import compare
        from gradherd.lab.report.comparison_table import comparison_json
        from gradherd.lab.report.page import write_report

        # stdout must hold nothing but the JSON then.
        console = Console(quiet=self.json)
        begin, comparisons = time.monotonic(), []
        records: list[RunRecord] = []
        page = out / PAGE_FILE
        for part in _PARTS:
            console.print(f"[bold]{part.title}[/bold] ({self.workers} worker processes)")
            configs = part.configs(self.workers, self.seeds)
            with telling_survivors(out, len(_PARTS) * len(configs)):
                # Each part in a folder of its own: both parts have an arm of d-rr and dense.
                part_records = train_missing(
                    configs, out / part.task, TrainingOptions(quiet=self.quiet), resume=self.resume
                )
            comparisons.append(compare(part_records))
            records += part_records
            if not self.json:
                print_comparison(comparisons[-1], None)
                console.print()
        write_report(records, page, title="gradherd demo: fewer epochs, fewer bytes")
        if self.json:
            results = [comparison_json(comparison, str(page)) for comparison in comparisons]
            print_json({"comparisons": results, "report": str(page)})
        console.print(
            f"Took {time.monotonic() - begin:.0f} seconds. See all curves in "
            f"[bold]{escape(str(page))}[/bold]",
            soft_wrap=True,
        )


@dataclass(frozen=True, kw_only=True)
class _DemoPart:
    """One comparison of the demo."""

    title: str
    task: str
    orders: tuple[str, ...] = ("d-rr",)
    sparsifiers: tuple[str, ...] = ("dense",)
    density: float | None = None
    epochs: int

    def configs(self, workers: int, seeds: int) -> list[RunConfig]:
        """Return the settings of its runs."""
        from gradherd.lab.tasks.registry import find_task
        from gradherd.lab.train.config import plan_runs

        return plan_runs(
            self.task,
            find_task(self.task).defaults,
            orders=self.orders,
            sparsifiers=self.sparsifiers,
            density=self.density,
            seeds=range(seeds),
            workers=workers,
            epochs=self.epochs,
        )


# Few epochs: both parts together should take no more than three minutes on two cores.
_PARTS = (
    _DemoPart(
        title="Does a better order need fewer epochs?",
        task="digits",
        # The control reorders as much as cd-grab does: a gain that it lacks comes from balancing.
        orders=("d-rr", "cd-grab", "always-plus"),
        epochs=10,
    ),
    _DemoPart(
        title="Does sending less cost accuracy?",
        task="digits-mlp",
        sparsifiers=("dense", "exdyna"),
        density=0.01,
        epochs=9,
    ),
)
