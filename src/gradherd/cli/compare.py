"""`gradherd compare`: train a task with several orders or sparsifiers, over several seeds."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from gradherd.cli.arguments import Flag, check_at_least, json_help, parse_names, print_json
from gradherd.cli.errors import UsageError
from gradherd.cli.folders import PAGE_FILE, output_folder, telling_survivors
from gradherd.cli.launch import train_missing
from gradherd.cli.options import (
    METHODS,
    ORDERS,
    DensityOption,
    IntByTask,
    TaskArgument,
    TrainingOptions,
    check_data,
    density_for,
    named_task,
)
from gradherd.cli.tables import print_comparison
from gradherd.comm.world import World
from gradherd.lab.report.arms import find_records
from gradherd.lab.report.comparison import compare
from gradherd.lab.report.comparison_table import comparison_json
from gradherd.lab.report.page import write_report
from gradherd.lab.train.config import RunConfig, plan_runs
from gradherd.lab.train.record import RunRecord
from gradherd.ordering.registry import POLICIES
from gradherd.sparsify.registry import SPARSIFIERS

_DEFAULT_ORDERS = "(default: d-rr, and cd-grab if nothing else is compared)"


@dataclass(frozen=True, kw_only=True)
class CompareCommand:
    """Train a task with several orders, sparsifiers or both, and test which is better.

    An arm is one order with one sparsifier. Every arm is trained with the same seeds on local
    worker processes; the first arm is the baseline. You get a table with means and standard
    deviations over seeds, a paired test, and how many epochs each arm takes to the baseline's final
    loss. The output folder holds the record of every run and report.html, a page with the curves.

    Example: gradherd compare digits --orders d-rr,cd-grab,always-plus --seeds 3

    Example: gradherd compare digits-mlp --sparsifiers dense,exdyna --density 0.01
    """

    task: TaskArgument
    """Name of a task, or path/to/file.py:ClassName."""
    orders: Annotated[
        str | None,
        tyro.conf.arg(
            metavar="A,B",
            help=f"Orders of examples, separated by commas, from: {ORDERS}.",
            help_behavior_hint=_DEFAULT_ORDERS,
        ),
    ] = None
    sparsifiers: Annotated[
        str | None,
        tyro.conf.arg(
            metavar="C,D",
            help=f"Sparsifiers, separated by commas, from: {METHODS}.",
            help_behavior_hint="(default: dense)",
        ),
    ] = None
    density: DensityOption = None
    """Share of the gradient that a sparsifier should send, in (0, 1]."""
    seeds: IntByTask = None
    """Number of seeds: 3 means seeds 0, 1 and 2."""
    resume: Flag = False
    """Keep the finished runs in --out and train only the others; the settings must be the same."""
    json: Annotated[
        bool,
        json_help(
            'Print {"task", "baseline", "arms": [{"order", "sparsify", "final_loss", '
            '"final_metric", "loss_by_epoch", "epochs_to_baseline", "bytes", "seconds", '
            '...}], "report"}.'
        ),
    ] = False
    training: TrainingOptions = field(default_factory=TrainingOptions)
    """How each run is trained. What you leave out comes from the task."""

    def run(self) -> None:
        """Train all arms and compare them."""
        # Before the folder: a wrong call must not create one.
        configs = self._configs()
        if self.resume and self.training.out is None:
            raise UsageError("--resume needs --out, the folder of the comparison to continue")
        name = f"compare-{named_task(self.task).name}"
        with output_folder(self.training.out, name, resume=self.resume, many=True) as out:
            with reporting_what_is_left(out, len(configs)):
                records = train_missing(configs, out, self.training, resume=self.resume)
            # All ranks have the records, one prints them.
            if World.detect().rank == 0:
                self._print(records, out / PAGE_FILE)

    def _print(self, records: list[RunRecord], page: Path) -> None:
        comparison = compare(records)
        write_report(records, page)
        if self.json:
            print_json(comparison_json(comparison, str(page)))
        else:
            print_comparison(comparison, page)

    def _configs(self) -> list[RunConfig]:
        only_task = self.orders is None and self.sparsifiers is None
        # Whoever names sparsifiers compares those: a second order would double the runs.
        default = "d-rr,cd-grab" if only_task else "d-rr"
        orders = parse_names("--orders", self.orders or default, POLICIES)
        sparsifiers = parse_names("--sparsifiers", self.sparsifiers or "dense", SPARSIFIERS)
        if len(orders) * len(sparsifiers) < 2:
            raise UsageError(
                f"only one arm ({orders[0]}, {sparsifiers[0]}): name at least two --orders or "
                "--sparsifiers, or use gradherd train"
            )
        density = density_for(sparsifiers, self.density)
        task, settings = named_task(self.task), self.training.checked()
        seeds = task.defaults.seeds if self.seeds is None else self.seeds
        check_at_least("--seeds", seeds, 1)
        try:
            configs = plan_runs(
                self.task,
                task.defaults,
                orders=orders,
                sparsifiers=sparsifiers,
                density=density,
                seeds=range(seeds),
                **settings,
            )
        except ValueError as error:
            raise UsageError(str(error)) from None
        # Last, since it reads folders; wrong options are reported first.
        check_data(task, self.training.data_dir)
        return configs


@contextlib.contextmanager
def reporting_what_is_left(out: Path, planned: int) -> Iterator[None]:
    """If training is interrupted or fails, write a page about what there is, and say so.

    Args:
        out: Folder with the records.
        planned: Number of runs there would have been.
    """
    with telling_survivors(out, planned):
        try:
            yield
        except KeyboardInterrupt:
            # The arms of a seed run next to each other, so the finished runs can be compared. A run
            # that was stopped within its first epoch has no point on any curve.
            if out.is_dir() and World.detect().rank == 0:
                records = [record for _, record in find_records([out]) if record.epochs]
                if records:
                    write_report(records, out / PAGE_FILE)
            raise
