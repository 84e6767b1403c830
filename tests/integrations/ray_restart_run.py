"""Ray Train: a worker is killed in mid-epoch; Ray restarts the job, and the order continues."""

import os
import signal
import sys
import tempfile
from pathlib import Path

import ray
import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from gradherd.integrations.ray import prepare
from tests.integrations.task import EPOCHS, EXAMPLES, STOP, make, make_loader


def work(config) -> None:
    """Train; the first attempt reports a checkpoint in mid-epoch and loses a worker after it."""
    rank, folder = ray.train.get_context().get_world_rank(), Path(config["folder"])
    model, optimizer = make()
    ddp, loader, herd = prepare(model, make_loader(), order="cd-grab")
    step = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as saved:
            state = torch.load(Path(saved) / "state.pt", weights_only=False)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        herd.load_state_dict(state["herd"])
        step = state["step"]
    resumed = step
    while herd.metrics()["epoch"] < EPOCHS:  # waits for what is learned beside the loop
        for batch in loader:
            ddp(**batch)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step == STOP and not resumed:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                state |= {"herd": herd.state_dict(), "step": step}
                torch.save(model.seen, folder / f"first-{rank}.pt")
                with tempfile.TemporaryDirectory() as own:
                    torch.save(state, Path(own) / "state.pt")
                    kept = Checkpoint.from_directory(own) if rank == 0 else None
                    ray.train.report({"step": step}, checkpoint=kept)
                ray.train.get_all_reported_checkpoints()  # waits until Ray has taken it
            if step == STOP + 1 and not resumed and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    assert resumed == STOP
    torch.save(model.seen, folder / f"second-{rank}.pt")
    herd.detach()


def main(folder: str) -> None:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    TorchTrainer(
        work,
        train_loop_config={"folder": folder},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            storage_path=os.path.join(folder, "ray"), failure_config=FailureConfig(max_failures=2)
        ),
    ).fit()
    ray.shutdown()
    parts = [torch.load(f"{folder}/{part}-{r}.pt") for r in (0, 1) for part in ("first", "second")]
    seen = [example for batches in parts for batch in batches for example in batch]
    assert sorted(seen) == sorted(list(range(EXAMPLES)) * EPOCHS)


if __name__ == "__main__":
    main(sys.argv[1])
