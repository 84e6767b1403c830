"""`gradherd train`: train a task once."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from gradherd.cli.options import (
    DensityOption,
    TaskArgument,
    TrainingOptions,
    check_data,
    density_for,
    named_task,
    warn_of_divergence,
)
from gradherd.cli.parser import Arg, UsageError, usage_errors, whole
from gradherd.cli.terminal import print_json, print_table, torchrun_rank
from gradherd.lab.train import exchange_names
from gradherd.lab.train.config import RunConfig, run_settings, sparse_recipe
from gradherd.ordering.registry import POLICIES

# Imported by the functions that need them: these import torch, and --help must not wait for it.
if TYPE_CHECKING:
    from gradherd.lab.train.record import RunRecord


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
            config = RunConfig.of(
                self.task,
                task.defaults,
                order=self.order,
                sparsify=self.sparsify,
                density=density,
                seed=self.seed,
                local_steps=self.local_steps,
                **settings,
            )
        if self.training.lr is None and self.training.momentum is None:
            config = sparse_recipe(config)
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
