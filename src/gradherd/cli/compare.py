"""`gradherd compare`: train a task with several orders or sparsifiers, over several seeds."""

from __future__ import annotations

import json
import math
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
from gradherd.cli.parser import Arg, CommandFailed, UsageError, usage_errors, whole
from gradherd.cli.terminal import print_json, torchrun_rank
from gradherd.lab.train import exchange_names
from gradherd.lab.train.config import Exchange, RunConfig, plan_runs, run_settings
from gradherd.ordering.registry import POLICIES

# Imported by the functions that need them: these import torch, and --help must not wait for it.
if TYPE_CHECKING:
    from gradherd.lab.train.record import RunRecord

TUNING_FILE = "tuning.json"
"""What --tune has tried and chosen."""


def _rates(text: str) -> tuple[float, ...]:
    """Read the rates of --tune lr=0.03,0.1."""
    key, _, values = text.partition("=")
    try:
        rates = [float(word) for word in values.split(",")]
    except ValueError:
        rates = []
    if key.strip() != "lr" or not rates or not all(0 < rate < math.inf for rate in rates):
        raise ValueError(f"must be like lr=0.03,0.1,0.3, got {text!r}")
    return tuple(dict.fromkeys(rates))


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
    coordinates in one bit. exdyna:0.02@30 has a density of its own, and exchanges what 30 local
    steps have changed."""
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
        if self.tune:
            self._check_tunable()
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

    def _check_tunable(self) -> None:
        """Refuse --tune beside --lr, and for a task that no examples can be held out of."""
        from gradherd.lab.train.tuning import check_can_hold_out

        if self.training.lr is not None:
            raise UsageError("--lr and --tune lr=... both choose the learning rate: drop one")
        try:
            check_can_hold_out(named_task(self.task))
        except UsageError:
            raise
        except ValueError as error:
            raise UsageError(f"--tune: {error}") from None

    def _tuned(self, configs: list[RunConfig], out: Path) -> list[RunConfig]:
        """Return the runs with the best rate of each arm."""
        from gradherd.cli.launch import train_runs
        from gradherd.lab.train.tuning import best_rates, tuning_runs, with_rates

        runs = tuning_runs(configs, self.tune)
        if self.resume and (chosen := _chosen_before(runs, out)) is not None:
            return with_rates(configs, chosen)
        # Their records are not part of the comparison.
        with tempfile.TemporaryDirectory(prefix="gradherd-tuning-") as folder:
            records = train_runs(runs, Path(folder), self.training)
        try:
            best = best_rates(runs, records)
        except ValueError as error:
            raise CommandFailed(str(error)) from None
        if torchrun_rank() == 0:
            _keep_tuning(runs, records, best, out)
        return with_rates(configs, best)

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
        if len(orders) * len(arms) < 2:
            raise UsageError(
                f"only one arm ({orders[0]}, {arms[0].sparsify}): name at least two --orders or "
                "--sparsifiers, or use gradherd train"
            )
        density = density_for([one.sparsify for one in arms if one.density is None], self.density)
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


def _chosen_before(
    runs: list[RunConfig], out: Path
) -> dict[tuple[str, str, float | None], float] | None:
    """Return the rates that a comparison which is resumed has chosen; None if it had not yet."""
    if not (out / TUNING_FILE).exists():
        return None
    try:
        tried = json.loads((out / TUNING_FILE).read_text())["tuning"]
        found = {
            (one["order"], one["sparsify"], one["density"]): float(one["lr"])
            for one in tried
            if one["chosen"]
        }
        return {run.arm: found[run.arm] for run in runs}
    except (ValueError, KeyError, TypeError):
        raise UsageError(
            f"--out {str(out)!r} holds a {TUNING_FILE} of other arms, or a damaged one: name a new "
            "folder"
        ) from None


def _keep_tuning(
    runs: list[RunConfig],
    records: list[RunRecord],
    best: dict[tuple[str, str, float | None], float],
    out: Path,
) -> None:
    """Write what was tried to tuning.json, and say what was chosen on stderr."""
    from gradherd.lab.train.record import write_atomic

    tried = [
        {
            "order": config.order,
            "sparsify": config.exchange,
            "density": config.density,
            "lr": config.lr,
            "held_out_loss": record.epochs[-1].metric if record.epochs else None,
            "chosen": best[config.arm] == config.lr,
        }
        for config, record in zip(runs, records, strict=True)
    ]
    write_atomic(out / TUNING_FILE, json.dumps({"tuning": tried}, indent=1) + "\n")
    for arm, rate in best.items():
        at_edge = rate in (min(c.lr for c in runs), max(c.lr for c in runs))
        hint = " (at the edge of the grid: a wider one may be better)" if at_edge else ""
        print(f"gradherd: {arm[0]} with {arm[1]}: lr {rate:g}{hint}", file=sys.stderr)
