"""`gradherd train` and `gradherd compare`: train a task once, or with several arms over seeds.

What trains is imported by the functions that need it: it imports torch, and --help must not wait.
"""

from __future__ import annotations

import math
import signal
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from gradherd.cli.options import (
    MAX_SEEDS,
    DensityOption,
    TaskArgument,
    TrainingOptions,
    check_data,
    density_for,
    exchanges,
    named_task,
    warn_of_divergence,
)
from gradherd.cli.parser import Arg, CommandFailed, UsageError, separated, usage_errors, whole
from gradherd.cli.terminal import print_json, print_table, torchrun_rank
from gradherd.lab.train import exchange_names
from gradherd.lab.train.config import (
    Exchange,
    RunConfig,
    plan_runs,
    run_settings,
)
from gradherd.ordering.registry import POLICIES

if TYPE_CHECKING:
    from gradherd.lab.train.record import RunRecord

TUNING_FOLDER = "tuning"
"""Below --out: the runs of --tune, which no report takes for those that are compared."""


@dataclass(frozen=True, kw_only=True)
class TrainCommand:
    """Train a task once, on local worker processes, and record how it went.

    TASK is a name (`gradherd data list` shows which data each task needs; digits and digits-mlp
    need none) or a task of your own, path/to/file.py:ClassName. The output folder then holds
    record.json (settings, hardware, versions, a row for each epoch) and metrics.jsonl; `gradherd
    report` turns it into a page. On several machines or GPUs, start it with torchrun, as in
    torchrun --nproc-per-node 4 -m gradherd train digits.

    Example: gradherd train digits --order cd-grab --epochs 10
    """

    task: TaskArgument
    """Name of a task, or path/to/file.py:ClassName."""
    order: Annotated[str, Arg(known=POLICIES)] = "d-rr"
    """Order of examples, one of: {known}."""
    sparsify: Annotated[str, Arg(known=exchange_names())] = "dense"
    """How gradients are exchanged, one of: {known}."""
    density: DensityOption = None
    """Share of the gradient that a sparsifier should send, in (0, 1]."""
    local_steps: Annotated[int | None, Arg(metavar="H", default="none")] = None
    """Let workers take H steps on their own, then exchange what these have changed."""
    seed: int = 0
    """Seed of the model and the order."""
    checkpoint_every: Annotated[
        int | None, Arg(metavar="STEPS", default="once a minute", parse=whole(1))
    ] = None
    """Save a checkpoint every so many steps; the last two are kept."""
    resume: bool = False
    """Continue from the newest intact checkpoint in --out; start from scratch if there is none."""
    json: bool = False
    """Print {"task", "order", "sparsify", "density", "seed", "status", "epochs", "final_loss",
    "final_metric", "seconds", "bytes", "out"}."""
    training: TrainingOptions = field(default_factory=TrainingOptions)
    """How the run is trained. What you leave out comes from the task."""

    def run(self) -> None:
        """Train."""
        density = density_for([self.sparsify], self.density)
        task, settings = named_task(self.task), self.training.checked()
        with usage_errors(run_settings()):
            (config,) = plan_runs(
                self.task,
                task.defaults,
                orders=[self.order],
                sparsifiers=[Exchange(self.sparsify, density, self.local_steps)],
                density=density,
                seeds=[self.seed],
                **settings,
            )
        check_data(task, self.training.data_dir, [config])
        if config.virtual and (self.resume or self.checkpoint_every is not None):
            raise UsageError("--virtual runs are not saved: drop --resume and --checkpoint-every")
        from gradherd.cli.folders import finished_record, output_folder, telling_survivors
        from gradherd.cli.launch import train_runs
        from gradherd.lab.train.runner import CheckpointOptions

        saving = CheckpointOptions(every=self.checkpoint_every, resume=self.resume)
        with output_folder(self.training.out, f"train-{task.name}", resume=self.resume) as out:
            # A finished run is reported again, not trained again: scripts can repeat the same
            # command.
            record = finished_record(out, config) if self.resume else None
            if record is None:
                with telling_survivors(out):
                    (record,) = train_runs([config], out, self.training, saving=saving)
        if torchrun_rank() == 0:
            self._print(record, str(out))
            warn_of_divergence([record])
        if record.status == "stopped":
            # What a shell reports for a process that SIGTERM has ended: a scheduler then knows that
            # the run is not complete.
            raise SystemExit(128 + signal.SIGTERM)

    def _print(self, record: RunRecord, out: str) -> None:
        last = record.epochs[-1] if record.epochs else None
        result: dict[str, Any] = {
            "task": record.task,
            "order": record.order,
            "sparsify": record.sparsify,
            "density": record.density,
            "seed": record.seed,
            "status": record.status,
            "epochs": len(record.epochs),
            "final_loss": last.train_loss if last else None,
            "final_metric": last.metric if last else None,
            "seconds": sum(row.seconds for row in record.epochs),
            "bytes": sum(row.bytes for row in record.epochs),
            "out": out,
        }
        if self.json:
            print_json(result)
            return
        rows = [
            ("status", record.status),
            ("epochs", str(len(record.epochs))),
            ("train loss", _change(record.start_loss, result["final_loss"])),
            (record.metric_name, _change(record.start_metric, result["final_metric"])),
            ("seconds of training", f"{result['seconds']:.1f}"),
            ("bytes sent per worker", f"{result['bytes']:,}"),
            ("written to", out),
        ]
        print_table(rows, title=f"{record.task}: {record.description}")


def _change(start: float | None, end: float | None) -> str:
    return " -> ".join("not finite" if x is None else f"{x:.5g}" for x in (start, end))


def _rates(text: str) -> tuple[float, ...]:
    """Read the rates of --tune lr=0.03,0.1."""
    key, _, values = text.partition("=")
    try:
        rates = separated(float, "rate")(values)
    except ValueError:
        rates = ()
    if key.strip() != "lr" or not rates or not all(0 < rate < math.inf for rate in rates):
        raise ValueError(f"must be like lr=0.03,0.1,0.3, got {text!r}")
    return rates


@dataclass(frozen=True, kw_only=True)
class CompareCommand:
    """Train a task with several orders, sparsifiers or both, and test which is better.

    An arm is one order with one sparsifier. Every arm is trained with the same seeds on local
    worker processes; the first arm is the baseline. You get a table with means and standard
    deviations over seeds, a paired test, and how many epochs each arm takes to the baseline's final
    loss. The output folder holds the record of every run and report.html, a page with the curves.

    Example: gradherd compare digits --orders d-rr,cd-grab,always-plus --seeds 3

    Example: gradherd compare digits-mlp --sparsifiers dense,exdyna:0.01,local-4 --virtual
    """

    task: TaskArgument
    """Name of a task, or path/to/file.py:ClassName."""
    orders: Annotated[
        tuple[str, ...] | None,
        Arg(
            metavar="A,B",
            known=POLICIES,
            default="d-rr, and cd-grab if nothing else is compared",
        ),
    ] = None
    """Orders of examples, separated by commas, from: {known}."""
    sparsifiers: Annotated[
        tuple[Exchange, ...] | None,
        Arg(metavar="C,D", known=exchange_names(), default="dense", parse=exchanges),
    ] = None
    """Exchanges, separated by commas, from: {known}, and local-4: four steps alone, then all
    coordinates in one bit. exdyna-int4:0.035 has values of 4 bits and a density of its own."""
    density: DensityOption = None
    """Share of the gradient that a sparsifier should send, in (0, 1]."""
    tune: Annotated[tuple[float, ...], Arg(metavar="lr=A,B", default="none", parse=_rates)] = ()
    """First give each arm the best of these learning rates, on examples that are held out."""
    seeds: Annotated[int | None, Arg(default="the task's", parse=whole(1, MAX_SEEDS))] = None
    """Number of seeds: 3 means seeds 0, 1 and 2."""
    resume: bool = False
    """Keep the finished runs in --out and train only the others; the settings must be the same."""
    json: bool = False
    """Print {"task", "baseline", "arms": [{"order", "sparsify", "final_loss", "final_metric",
    "loss_by_epoch", "epochs_to_baseline", "bytes", "seconds", ...}], "report"}."""
    training: TrainingOptions = field(default_factory=TrainingOptions)
    """How each run is trained. What you leave out comes from the task."""

    def run(self) -> None:
        """Train all arms and compare them."""
        # Before the folder: a wrong call must not create one.
        if self.tune and self.training.lr is not None:
            raise UsageError("--lr and --tune lr=... both choose the learning rate: drop one")
        configs = self._configs()
        # All before any training, so that a missing package is reported at once.
        from gradherd.cli.folders import PAGE_FILE, output_folder, telling_survivors
        from gradherd.cli.launch import torchrun_group, train_missing
        from gradherd.lab.report import page as _  # noqa: F401

        name = f"compare-{named_task(self.task).name}"
        # One group for the runs that tune and those that are compared.
        with (
            output_folder(self.training.out, name, resume=self.resume, many=True) as out,
            torchrun_group(self.training.device),
        ):
            if self.tune:
                configs = self._tuned(configs, out)
            with telling_survivors(out):
                records = train_missing(configs, out, self.training, resume=self.resume)
            # All ranks have the records, one prints them.
            if torchrun_rank() == 0:
                self._print(records, out / PAGE_FILE)

    def _tuned(self, configs: list[RunConfig], out: Path) -> list[RunConfig]:
        """Return the runs with the best rate of each arm."""
        from gradherd.cli.launch import train_missing
        from gradherd.lab.train.tuning import best_rates, tuning_runs

        runs = tuning_runs(configs, self.tune)
        records = train_missing(runs, out / TUNING_FOLDER, self.training, resume=self.resume)
        try:
            best = best_rates(runs, records)
        except ValueError as error:
            raise CommandFailed(str(error)) from None
        for (order, exchange, _), rate in best.items() if torchrun_rank() == 0 else ():
            at_edge = rate in (min(self.tune), max(self.tune))
            hint = " (at the edge of the grid: a wider one may be better)" if at_edge else ""
            print(f"gradherd: {order} with {exchange}: lr {rate:g}{hint}", file=sys.stderr)
        return [replace(config, lr=best[config.arm]) for config in configs]

    def _print(self, records: list[RunRecord], page: Path) -> None:
        from gradherd.cli.report import print_comparison
        from gradherd.lab.report.comparison import compare
        from gradherd.lab.report.comparison_table import comparison_json
        from gradherd.lab.report.page import write_report

        comparison = compare(records)
        warn_of_divergence(records)
        write_report(records, page)
        if self.json:
            print_json(comparison_json(comparison, str(page)))
        else:
            print_comparison(comparison, page)

    def _configs(self) -> list[RunConfig]:
        only_task = self.orders is None and self.sparsifiers is None
        # Whoever names sparsifiers compares those: a second order would double the runs.
        orders = self.orders or (("d-rr", "cd-grab") if only_task else ("d-rr",))
        arms = self.sparsifiers or (Exchange("dense"),)
        density = density_for([one.sparsify for one in arms if one.density is None], self.density)
        # With the density filled in: topk and topk:0.01 may be the same arm, which counts once.
        named = [
            one if one.sparsify == "dense" else one._replace(density=one.density or density)
            for one in arms
        ]
        arms = tuple(dict.fromkeys(named))
        if len(orders) * len(arms) < 2:
            raise UsageError(
                f"only one arm ({orders[0]}, {arms[0].sparsify}): name at least two --orders or "
                "--sparsifiers, or use gradherd train"
            )
        task, settings = named_task(self.task), self.training.checked()
        with usage_errors(run_settings()):
            configs = plan_runs(
                self.task,
                task.defaults,
                orders=orders,
                sparsifiers=arms,
                density=density,
                seeds=range(self.seeds or task.defaults.seeds),
                **settings,
            )
        # Last, since it reads folders; wrong options are reported first.
        check_data(task, self.training.data_dir, configs)
        return configs
