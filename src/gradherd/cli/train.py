"""`gradherd train`: one run of a task."""

import dataclasses
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gradherd.cli.train_folder import new_folder
from gradherd.cli.train_options import (
    Density,
    Options,
    check_data,
    checked_density,
    known_task,
)
from gradherd.cli.training import execute
from gradherd.cli.usage import UsageError, at_least, name, print_json
from gradherd.comm.world import World
from gradherd.lab.train.config import RunConfig
from gradherd.lab.train.record import RECORD_FILE, RunRecord, read_record
from gradherd.lab.train.runner import CHANGEABLE_SETTINGS, CheckpointOptions
from gradherd.ordering.registry import POLICIES
from gradherd.sparsify.registry import SPARSIFIERS


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a task once, on real local workers, and write down how it went.

    TASK is a name (`gradherd data list` shows what each needs; digits and digits-mlp need nothing)
    or a task of your own, path/to/file.py:ClassName. The folder then holds record.json (settings,
    surroundings, a row for each epoch) and metrics.jsonl; `gradherd report` makes a page of it.
    Under torchrun, start it as `torchrun --nproc-per-node 4 -m gradherd train ...`.

    Example: gradherd train digits --order cd-grab --epochs 10
    """

    task: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TASK")]
    """Name of a task, or path/to/file.py:ClassName."""
    order: str = "d-rr"
    """One of: d-rr, shuffle-once, fixed, flip-flop, grab, pair-grab, id-grab, id-pair-grab,
    cd-grab, always-plus."""
    sparsify: str = "dense"
    """One of: dense, exdyna, micro, deft, topk, gtopk, cltk, randomk, threshold, sage, sidco."""
    density: Density = None
    """Share of the gradient that a sparsifier should send, in (0, 1]."""
    seed: int = 0
    """Seed of the model and the order."""
    checkpoint_every: Annotated[
        int | None, tyro.conf.arg(metavar="STEPS", help_behavior_hint="(default: once a minute)")
    ] = None
    """Save the run every so many steps; the last two checkpoints are kept."""
    resume: bool = False
    """Go on with the newest good checkpoint in --out, if there is one; else start."""
    json: bool = False
    """Print {"task", "order", "sparsify", "density", "seed", "status", "epochs", "final_loss",
    "final_metric", "seconds", "bytes", "out"}."""
    training: Options = field(default_factory=Options)
    """How each run is trained; what is not given comes from the task."""

    def run(self) -> None:
        """Train."""
        name("--order", self.order, POLICIES)
        name("--sparsify", self.sparsify, SPARSIFIERS)
        density = checked_density(self.density, [self.sparsify])
        at_least("--seed", self.seed, 0)
        if self.seed >= 2**31:
            raise UsageError(f"--seed must be below {2**31}, got {self.seed}")
        task, chosen = known_task(self.task), self.training.chosen()
        try:
            config = RunConfig.of(
                self.task,
                task.defaults,
                order=self.order,
                sparsify=self.sparsify,
                density=density,
                seed=self.seed,
                **chosen,
            )
        except ValueError as error:
            raise UsageError(str(error)) from None
        check_data(task, self.training.data_dir)
        saving = self._saving()
        with new_folder(self.training.out, f"train-{task.name}", resume=self.resume) as out:
            record = finished_before(out, config) if self.resume else None
            if record is None:
                (record,) = execute([config], out, self.training, saving=saving)
        if World.detect().rank == 0:
            self._show(record, str(out))
        if record.status == "stopped":
            raise SystemExit(128 + signal.SIGTERM)

    def _saving(self) -> CheckpointOptions:
        if self.checkpoint_every is not None:
            at_least("--checkpoint-every", self.checkpoint_every, 1)
        if self.training.virtual and (self.resume or self.checkpoint_every is not None):
            raise UsageError("--virtual runs are not saved: leave --resume, --checkpoint-every out")
        if self.resume and self.training.out is None:
            raise UsageError("--resume needs --out, the folder of the run to go on with")
        return CheckpointOptions(every=self.checkpoint_every, resume=self.resume)

    def _show(self, record: RunRecord, out: str) -> None:
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
        metric = record.metric_name
        table = Table(title=escape(f"{record.task}: {record.description}"), show_header=False)
        for label, value in (
            ("status", record.status),
            ("epochs", str(len(record.epochs))),
            ("train loss", f"{_figure(record.start_loss)} -> {_figure(result['final_loss'])}"),
            (metric, f"{_figure(record.start_metric)} -> {_figure(result['final_metric'])}"),
            ("seconds of training", f"{result['seconds']:.1f}"),
            ("bytes sent by a worker", f"{result['bytes']:,}"),
            ("written to", out),
        ):
            table.add_row(escape(label), escape(value))
        Console().print(table)


def finished_before(out: Path, config: RunConfig) -> RunRecord | None:
    """Return the record in a folder if its run went through all epochs, or diverged."""
    if not (out / RECORD_FILE).exists():
        return None
    try:
        record = read_record(out / RECORD_FILE)
    except ValueError as error:
        raise UsageError(str(error)) from None
    done = record.status == "done" and len(record.epochs) >= config.epochs
    if not done and record.status != "diverged":
        return None
    for key, ours in dataclasses.asdict(config).items():
        theirs = record.config.get(key)
        if key not in CHANGEABLE_SETTINGS and theirs != ours:
            raise UsageError(
                f"--out {str(out)!r} holds a run with {key} {theirs!r}, not {ours!r}: "
                "go on with its settings, or name a new folder"
            )
    return record


def _figure(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.5g}"
