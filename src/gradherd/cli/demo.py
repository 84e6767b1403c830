"""`gradherd demo`: both halves at work, on data that comes with scikit-learn."""

import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from gradherd.cli.compare import report_so_far
from gradherd.cli.compare_show import as_json, compare, show, write_report
from gradherd.cli.train_folder import new_folder
from gradherd.cli.train_options import AnyPath, Options
from gradherd.cli.training import execute
from gradherd.cli.usage import at_least, print_json
from gradherd.lab.tasks.registry import find_task
from gradherd.lab.train.config import RunConfig, plan_runs
from gradherd.lab.train.record import RunRecord


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Compare orders on one small task and sparsifiers on another, with real local workers.

    First: logistic regression on small digits with random reshuffling (d-rr), with CD-GraB, where
    workers balance their gradients together (cd-grab), and with a control that orders without
    looking (always-plus). Then: a network with 300,000 parameters that exchanges all of its
    gradients (dense), or one number in a hundred of them (exdyna). Needs scikit-learn, no
    network, and two to three minutes on two cores.

    Example: gradherd demo --out my-demo
    """

    workers: int = 4
    """Number of worker processes."""
    seeds: int = 3
    """Number of seeds of every arm."""
    out: AnyPath = None
    """Folder to write to; by default a new one in gradherd-runs."""
    json: bool = False
    """Print {"comparisons": [as `gradherd compare --json` does], "report"}."""

    def run(self) -> None:
        """Train, tell, write the page."""
        at_least("--workers", self.workers, 1)
        at_least("--seeds", self.seeds, 1)
        with new_folder(self.out, "demo") as out:
            self._compare(out)

    def _compare(self, out: Path) -> None:
        console = Console(quiet=self.json)
        begin, comparisons = time.monotonic(), []
        records: list[RunRecord] = []
        page = out / "report.html"
        for part in _PARTS:
            console.print(f"[bold]{part.title}[/bold] ({self.workers} worker processes)")
            configs = part.configs(self.workers, self.seeds)
            try:
                found = execute(configs, out / part.task, Options())
            except KeyboardInterrupt:
                report_so_far(out, len(_PARTS) * len(configs))
                raise
            comparisons.append(compare(found))
            records += found
            if not self.json:
                show(comparisons[-1], None)
                console.print()
        write_report(records, page, title="gradherd demo: fewer epochs, fewer bytes")
        if self.json:
            told = [as_json(one, str(page)) for one in comparisons]
            print_json({"comparisons": told, "report": str(page)})
        console.print(
            f"{time.monotonic() - begin:.0f} seconds. The page with all curves: "
            f"[bold]{escape(str(page))}[/bold]",
            soft_wrap=True,
        )


@dataclass(frozen=True, kw_only=True)
class _Part:
    """One comparison of the demo."""

    title: str
    task: str
    orders: tuple[str, ...] = ("d-rr",)
    sparsifiers: tuple[str, ...] = ("dense",)
    density: float | None = None
    epochs: int

    def configs(self, workers: int, seeds: int) -> list[RunConfig]:
        """Return its runs."""
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


_PARTS = (
    _Part(
        title="Does a better order need fewer epochs?",
        task="digits",
        orders=("d-rr", "cd-grab", "always-plus"),
        epochs=10,
    ),
    _Part(
        title="Does sending less cost accuracy?",
        task="digits-mlp",
        sparsifiers=("dense", "exdyna"),
        density=0.01,
        epochs=9,
    ),
)
