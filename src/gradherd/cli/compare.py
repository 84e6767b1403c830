"""`gradherd compare`: several orders or sparsifiers on one task, over several seeds."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from gradherd.cli.compare_show import as_json, compare, find_records, show, write_report
from gradherd.cli.train_folder import new_folder
from gradherd.cli.train_options import (
    Density,
    OfTaskInt,
    Options,
    check_data,
    checked_density,
    known_task,
)
from gradherd.cli.training import execute
from gradherd.cli.usage import UsageError, at_least, names, print_json
from gradherd.comm.world import World
from gradherd.lab.train.config import RunConfig, plan_runs
from gradherd.lab.train.record import RunRecord
from gradherd.ordering.registry import POLICIES
from gradherd.sparsify.registry import SPARSIFIERS

_ORDERS = "(default: d-rr, and cd-grab if nothing else is compared)"


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Train a task with several orders, or sparsifiers, or both, on real local workers.

    Every arm is trained with the same seeds; the first arm is the baseline. You get a table with
    mean and deviation over seeds, a paired test, and what each arm took to reach the baseline's
    final loss; the folder holds every run's record and report.html, a page with the curves.

    Example: gradherd compare digits --orders d-rr,cd-grab,always-plus --seeds 3

    Example: gradherd compare digits-mlp --sparsifiers dense,exdyna --density 0.01
    """

    task: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TASK")]
    """Name of a task, or path/to/file.py:ClassName."""
    orders: Annotated[str | None, tyro.conf.arg(metavar="A,B", help_behavior_hint=_ORDERS)] = None
    """Orders, separated by commas, of: d-rr, shuffle-once, fixed, flip-flop, grab, pair-grab,
    id-grab, id-pair-grab, cd-grab, always-plus."""
    sparsifiers: Annotated[
        str | None, tyro.conf.arg(metavar="C,D", help_behavior_hint="(default: dense)")
    ] = None
    """Sparsifiers, separated by commas, of: dense, exdyna, micro, deft, topk, gtopk, cltk,
    randomk, threshold, sage, sidco."""
    density: Density = None
    """Share of the gradient that a sparsifier should send, in (0, 1]."""
    seeds: OfTaskInt = None
    """Number of seeds: 0, 1, 2 ..."""
    json: bool = False
    """Print {"task", "baseline", "arms": [{"order", "sparsify", "final_loss", "final_metric",
    "loss_by_epoch", "epochs_to_baseline", "bytes", "seconds", ...}], "report"}."""
    training: Options = field(default_factory=Options)
    """How each run is trained; what is not given comes from the task."""

    def run(self) -> None:
        """Train all arms and compare them."""
        configs = self._configs()
        with new_folder(self.training.out, f"compare-{known_task(self.task).name}") as out:
            try:
                records = execute(configs, out, self.training)
            except KeyboardInterrupt:
                report_so_far(out, len(configs))
                raise
            if World.detect().rank == 0:
                self._tell(records, out / "report.html")

    def _tell(self, records: list[RunRecord], page: Path) -> None:
        comparison = compare(records)
        write_report(records, page)
        if self.json:
            print_json(as_json(comparison, str(page)))
        else:
            show(comparison, page)

    def _configs(self) -> list[RunConfig]:
        given = self.orders is None and self.sparsifiers is None
        orders = names("--orders", self.orders or ("d-rr,cd-grab" if given else "d-rr"), POLICIES)
        sparsifiers = names("--sparsifiers", self.sparsifiers or "dense", SPARSIFIERS)
        if len(orders) * len(sparsifiers) < 2:
            raise UsageError(
                f"only one arm ({orders[0]}, {sparsifiers[0]}): name at least two --orders or "
                "--sparsifiers, or use gradherd train"
            )
        density = checked_density(self.density, sparsifiers)
        task, chosen = known_task(self.task), self.training.chosen()
        seeds = task.defaults.seeds if self.seeds is None else self.seeds
        at_least("--seeds", seeds, 1)
        try:
            configs = plan_runs(
                self.task,
                task.defaults,
                orders=orders,
                sparsifiers=sparsifiers,
                density=density,
                seeds=range(seeds),
                **chosen,
            )
        except ValueError as error:
            raise UsageError(str(error)) from None
        check_data(task, self.training.data_dir)
        return configs


def report_so_far(out: Path, planned: int) -> None:
    """Write a page of the runs that have at least one epoch, if there are any."""
    if not out.is_dir() or World.detect().rank > 0:
        return
    records = [record for _, record in find_records([out]) if record.epochs]
    done = sum(record.status == "done" for record in records)
    if not records:
        return
    page = out / "report.html"
    write_report(records, page)
    print(f"gradherd: {done} of {planned} runs were done; so far: {page}", file=sys.stderr)
