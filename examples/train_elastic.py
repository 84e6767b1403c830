"""Train while ranks leave and join; the order and the residuals go on.

torchrun --nnodes 1:4 --max-restarts 10 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \
    --nproc-per-node 1 examples/train_elastic.py --folder /shared/run

Start that on one to four machines. When one joins or is lost, torchrun starts the program again on
those that are there, and it continues from the last checkpoint, also in mid-epoch.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import gradherd as gh


def main() -> None:
    """Train, and save every few steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("elastic"), help="for checkpoints")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--save-every", type=int, default=4, help="steps between checkpoints")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of work in a step")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(480, 20)
    data = TensorDataset(x, (x[:, :5].sum(1) > 0).long(), torch.arange(480))
    model = DDP(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = gh.OrderedSampler(data, "cd-grab", batch_size=8)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    # Named, since "auto" depends on the number of ranks, and rows of one kind are saved.
    herd = gh.attach(model, order=sampler, sparsify=gh.ExDyna(density=0.05), rows="sketch")

    file, step = args.folder / "state.pt", 0
    if file.exists():  # torchrun has started the program again
        saved = torch.load(file, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        herd.load_state_dict(saved["herd"])  # the number of ranks may be another one now
        step = saved["step"]
    while herd.metrics()["epoch"] < args.epochs:
        for features, labels, _ in loader:
            nn.functional.cross_entropy(model(features), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            time.sleep(args.pause)
            if step % args.save_every == 0:
                save(file, step, model, optimizer, herd)
    if dist.get_rank() == 0:
        loss = nn.functional.cross_entropy(model.module(x), data.tensors[1])
        print(f"{dist.get_world_size()} ranks, {step} steps, loss on all data {loss:.4f}")
    herd.detach()
    dist.destroy_process_group()


def save(
    file: Path, step: int, model: DDP, optimizer: torch.optim.Optimizer, herd: gh.Herd
) -> None:
    """Write a checkpoint on rank 0; a kill in mid-write leaves the one before."""
    state = {
        "model": model.module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "herd": herd.state_dict(),  # on all ranks: rank 0 gets everyone's residuals
        "step": step,
    }
    if dist.get_rank() == 0:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, file.with_suffix(".draft"))
        os.replace(file.with_suffix(".draft"), file)
        print(f"step {step}, epoch {herd.sampler.epoch}, {dist.get_world_size()} ranks", flush=True)


if __name__ == "__main__":
    main()
