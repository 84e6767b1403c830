"""The suite's training in Ray Train."""

import tempfile
from itertools import islice
from pathlib import Path

import ray
import ray.train
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch.utils.data import DistributedSampler

from gradherd.integrations.ray import prepare
from tests.integrations.task import (
    EPOCHS,
    STEPS,
    Plan,
    Points,
    Trace,
    checkpoint_file,
    make,
    make_loader,
    record_credits,
    use_forkserver,
)

NAME, PACKAGE, TORCHRUN = "Ray Train", "ray", False


def work(config) -> None:
    """Run one worker through all plans, and through what must be refused."""
    torch.set_num_threads(1)
    use_forkserver()
    rank = ray.train.get_context().get_world_rank()
    for plan in config["plans"]:
        trace = train_one(plan, rank)
        torch.save(vars(trace), Path(plan.folder) / f"ray-{plan.name}-{rank}.pt")
    sentences = {}
    for what, loader, options in config["wrong"]:
        try:
            attempt(loader, options)
            sentences[what] = None
        except Exception as error:
            sentences[what] = str(error)
    torch.save(sentences, Path(plan.folder) / f"ray-refused-{rank}.pt")


def train_one(plan: Plan, rank: int) -> Trace:
    model, optimizer = make()
    trace = Trace()
    record_credits(trace, model)
    options = plan.options | ({"optimizer": optimizer} if "local" in plan.options else {})
    ddp, loader, herd = prepare(model, make_loader(num_workers=plan.workers), **options)
    herd.scalars(rows=True)  # has rows measured from now on
    step, epoch, folder = 0, 0, checkpoint_file(plan).with_suffix("")
    if plan.resume:
        loaded = torch.load(folder / "state.pt", weights_only=False)
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        herd.load_state_dict(loaded["herd"])
        step = loaded["step"]
        epoch = step // STEPS
    for current in range(epoch, EPOCHS):
        loader.sampler.set_epoch(current)
        for number, batch in enumerate(islice(loader, plan.limit)):
            if (number + 1) % plan.accumulate:
                with ddp.no_sync():
                    (ddp(**batch)["loss"] / plan.accumulate).backward()
                continue
            (ddp(**batch)["loss"] / plan.accumulate).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step == plan.stop:
                save(plan.name, folder, model, optimizer, herd, step)
                herd.detach()
                return trace.finish(model, herd)
        ray.train.report({"plan": plan.name, **herd.scalars(rows=True)})
    herd.detach()
    return trace.finish(model, herd)


def save(name, folder, model, optimizer, herd, step) -> None:
    """Report a checkpoint, as Ray expects it: rank 0 writes it, all report."""
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "herd": herd.state_dict(),
        "step": step,
    }
    with tempfile.TemporaryDirectory() as own:
        checkpoint = None
        if herd.world.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(state, folder / "state.pt")
            torch.save(state, Path(own) / "state.pt")
            checkpoint = Checkpoint.from_directory(own)
        ray.train.report({"plan": name, **herd.scalars(rows=True)}, checkpoint=checkpoint)


def attempt(kind: str, options: dict) -> None:
    loaders = {
        "shuffle": lambda: make_loader(shuffle=True),
        "sharded": lambda: make_loader(sampler=DistributedSampler(Points())),
        "prepared": lambda: ray.train.torch.prepare_data_loader(make_loader()),
        "plain": make_loader,
    }
    prepare(make()[0], loaders[kind](), **options)


ORDER = {"order": "cd-grab"}
ATTEMPTS = [
    ("shuffle=True", "shuffle", ORDER),
    ("a DistributedSampler", "sharded", ORDER),
    ("a prepared loader", "prepared", ORDER),
    ("FSDP", "plain", ORDER | {"parallel_strategy": "fsdp"}),
    ("nothing to do", "plain", {}),
]


def train_all(plans: list[Plan]) -> dict[str, dict[int, Trace]]:
    """Run all plans in one job: starting workers takes longer than all the rest."""
    folder = Path(plans[0].folder)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    result = TorchTrainer(
        work,
        train_loop_config={"plans": plans, "wrong": ATTEMPTS},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
        run_config=RunConfig(storage_path=str(folder / "ray")),
    ).fit()
    ray.shutdown()
    # Ray keeps what was reported with a checkpoint. Not its data frame: that has a column for every
    # number of any plan.
    logged = {metrics["plan"]: metrics for _, metrics in result.best_checkpoints}
    traces: dict[str, dict[int, Trace]] = {}
    for plan in plans:
        for rank in range(2):
            file = folder / f"ray-{plan.name}-{rank}.pt"
            trace = Trace(**torch.load(file, weights_only=False))
            trace.logged = dict(logged.get(f"{plan.name}-first", {}))
            traces.setdefault(plan.name, {})[rank] = trace
    return traces


def refusals(folder: str) -> dict[str, str | None]:
    """Return what the workers were told."""
    return torch.load(Path(folder) / "ray-refused-0.pt")
