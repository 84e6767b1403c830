"""Train a digit classifier with DDP, in an order that the workers learn together.

torchrun --nproc-per-node 2 examples/train_ddp.py [--order d-rr] [--epochs 20]
torchrun --nproc-per-node 2 examples/train_ddp.py --sparsify exdyna --density 0.05
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import gradherd as gh


def main() -> None:
    """Train and print the loss after each epoch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--order", default="cd-grab", choices=list(gh.POLICIES))
    parser.add_argument(
        "--sparsify", choices=list(gh.SPARSIFIERS), help="exchange gradients sparsely"
    )
    parser.add_argument("--density", type=float, default=0.05, help="share of the gradient to send")
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)

    x, y = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y))
    model = DDP(nn.Linear(64, 10))
    # Beside a sparse exchange SGD does better without momentum, at lr / (1 - momentum).
    lr, momentum = (2.0, 0.0) if args.sparsify else (0.2, 0.9)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, weight_decay=1e-4)

    # gradherd needs the sampler and attach; everything else is an ordinary training loop.
    sampler = gh.OrderedSampler(data, args.order, batch_size=8, seed=0)
    method = gh.SPARSIFIERS[args.sparsify](density=args.density) if args.sparsify else None
    herd = gh.attach(model, order=sampler, sparsify=method)

    loader = DataLoader(data, batch_size=8, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for features, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(features), labels).backward()
            optimizer.step()
        with torch.no_grad():
            loss = nn.functional.cross_entropy(model(data.tensors[0]), data.tensors[1])
        if dist.get_rank() == 0:
            print(f"epoch {epoch}  loss on all data {loss:.5f}")

    if dist.get_rank() == 0:
        print(f"{args.order}: final loss {loss:.5f}, {herd.metrics()}")
    herd.detach()  # on all ranks, before the process group is destroyed
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
