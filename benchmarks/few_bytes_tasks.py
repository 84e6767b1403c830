"""What few bytes cost the tasks of a study: ResNet-18 and LeNet with SGD, SST-2.

Takes the settings of a study, such as studies/resnet18-long.toml, and trains its task on simulated
workers (`VirtualTrainer`), which send what ranks would send. Usage:

    python benchmarks/few_bytes_tasks.py --out tasks.jsonl --study studies/resnet18-long.toml
        --arms dense,local-4:lr=0.1,powersgd:density=0.008 [--seeds 0,1,2]
        [--epochs 60] [--evaluate-every 5] [--limit 1000] [--device cuda] [--part 0/4] [--eager]

An arm is local-H, or the name of what exchanges gradients at every step (dense, powersgd, exdyna),
with settings of a run or of `LocalSteps` after a colon. Writes a line of JSON for each evaluation:
epoch, metric, bytes sent by a worker, and how many times fewer that is than the float32 all-reduce
of every step.
"""

import argparse
import json
import time
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradherd.comm.sliced_mean import mean_bytes
from gradherd.lab.study.kinds import task_path
from gradherd.lab.tasks.registry import find_task
from gradherd.lab.tasks.task import Task
from gradherd.lab.train.config import RunConfig, run_settings
from gradherd.lab.train.record import finite
from gradherd.lab.train.trainer import passes
from gradherd.lab.train.virtual_trainer import VirtualTrainer


def compiled(task: Task, **how: Any) -> Task:
    """Return a classifier whose training passes are compiled, once for all workers.

    Workers take turns, so the host is what they wait for: each model has CUDA graphs of its own.
    """
    made: dict[nn.Module, Callable[[Tensor], Tensor]] = {}
    how = how or {"mode": "reduce-overhead"}
    compile = partial(torch.compile, dynamic=False, fullgraph=True, **how)

    class Compiled(type(task)):  # type: ignore[misc]
        def loss(self, model: nn.Module, *tensors: Tensor) -> Tensor:
            inputs, labels = tensors
            forward: Callable[[Tensor], Tensor] = model
            if model.training:
                forward = made.get(model) or made.setdefault(model, compile(model))
            return F.cross_entropy(forward(self.prepare(inputs)), labels)

    return Compiled()


def warm_up(task: Task, config: RunConfig, examples: tuple[Tensor, ...]) -> None:
    """Compile before a step is captured: a compiler draws random numbers."""
    model = task.model().to(config.device)
    few = tuple(tensor[: config.batch_size].to(config.device) for tensor in examples)
    with passes(config):
        task.loss(model, *few).backward()


def config_of(arm: str, study: dict[str, Any], task: Task, **chosen: Any) -> RunConfig:
    """Return the run of an arm: what the arm says, then what was chosen, then the study."""
    name, *changes = arm.split(":")
    given: dict[str, Any] = study["settings"] | {k: v for k, v in chosen.items() if v is not None}
    if given.get("device") == "cpu":
        given.pop("autocast", None)
    local: dict[str, Any] = {}
    for change in changes:
        key, text = change.split("=")
        own = given if key in run_settings() else local
        own[key] = text if key == "values" else float(text)
    if name.startswith("local-"):
        given |= {"local_steps": int(name.removeprefix("local-")), "method": local or None}
    elif name != "dense":
        given |= {"sparsify": name}
    return RunConfig.of(task.name, task.defaults, virtual=True, **given)


def main() -> None:
    """Run all arms with all seeds."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--study", type=Path, required=True)
    parser.add_argument("--arms", required=True)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--evaluate-every", type=int, default=1)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--part", default="0/1", help="which runs of how many shares")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    study = tomllib.loads(options.study.read_text())
    task = find_task(task_path(study["task"], options.study.parent))
    split = None
    runs = [
        (arm, int(seed)) for seed in options.seeds.split(",") for arm in options.arms.split(",")
    ]
    part, parts = map(int, options.part.split("/"))
    for arm, seed in runs[part::parts]:
        config = config_of(
            arm, study, task,
            seed=seed, epochs=options.epochs, limit=options.limit, device=options.device,
        )  # fmt: skip
        split = split or task.load(None, config.limit)
        own = task
        if config.autocast is not None and not options.eager:
            own = compiled(task)
            warm_up(own, config, split.train)
        trainer = VirtualTrainer(config, own, split)
        dense = mean_bytes(sum(p.numel() for p in trainer.model.parameters()), config.workers)
        sent = steps = skipped = 0
        begin, best = time.perf_counter(), None
        for epoch in range(1, config.epochs + 1):
            (counters,) = trainer.train_epoch(epoch, lambda _steps=1: None)
            sent, steps = sent + counters.bytes, steps + counters.steps
            skipped += counters.skipped_steps
            if trainer.exchange.diverged:
                break
            if epoch % options.evaluate_every and epoch != config.epochs:
                continue
            with trainer.exchange.evaluated(), passes(config):
                test = tuple(tensor.to(config.device) for tensor in split.test)
                metric = finite(float(task.metric(trainer.model, *test)))
            best = metric if best is None else max(best, metric or best)
            record = {
                "task": task.name, "arm": arm, "seed": seed, "epoch": epoch,
                "epochs": config.epochs, "metric": metric, "best": best, "lr": config.lr,
                "momentum": config.momentum, "steps": steps, "skipped": skipped, "bytes": sent,
                "fewer": round(dense * steps / max(1, sent), 1),
                "seconds": round(time.perf_counter() - begin, 1),
            }  # fmt: skip
            line = json.dumps(record)
            print(line, flush=True)
            with options.out.open("a") as file:
                file.write(line + "\n")
        if trainer.exchange.diverged:
            print(json.dumps({"arm": arm, "seed": seed, "diverged": epoch}), flush=True)
        trainer.close()


if __name__ == "__main__":
    main()
