"""Compare the accuracy of a small CNN with dense and with sparsified gradients.

Four local ranks train on Fashion-MNIST under DDP, once per method and seed. The data is read from
the folder that GRADHERD_DATA names (fashion-mnist/ with the four idx files); without it,
scikit-learn's digits are used.

    GRADHERD_DATA=... python benchmarks/fashion.py --methods exdyna,topk --density 0.01
"""

import argparse
import gzip
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import gradherd as gh
from gradherd.lab.ranks import run_ranks
from gradherd.sparsify.settings import make_settings


def fashion(folder: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return train and test images (N, 1, 28, 28) and labels (N,)."""

    def read(name: str, header: int) -> Tensor:
        raw = gzip.decompress((folder / name).read_bytes())[header:]
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8)

    columns = []
    for part in ("train", "t10k"):
        images = read(f"{part}-images-idx3-ubyte.gz", 16).view(-1, 1, 28, 28)
        columns += [(images.float() / 255 - 0.286) / 0.353]
        columns += [read(f"{part}-labels-idx1-ubyte.gz", 8).long()]
    return columns[0], columns[1], columns[2], columns[3]


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return scikit-learn's digits, resized to 28 x 28."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16).float().view(-1, 1, 8, 8)
    images = nn.functional.interpolate(images, size=28)
    y = torch.tensor(labels)
    return images[:1500], y[:1500], images[1500:], y[1500:]


def cnn(seed: int) -> nn.Module:
    """Return a CNN of 105,866 parameters."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def train(method: str, density: float, args: argparse.Namespace, seed: int) -> dict[str, float]:
    """Train with one method on this rank, together with the others."""
    folder = Path(os.environ.get("GRADHERD_DATA", "")) / "fashion-mnist"
    x, y, test_x, test_y = fashion(folder) if folder.is_dir() else digits()
    data = TensorDataset(x[: args.examples], y[: args.examples])
    model = cnn(seed)
    ddp = DDP(model)
    herd = None
    if method != "dense":
        herd = gh.attach(ddp, sparsify=make_settings(method, density))
    sampler = DistributedSampler(data, seed=seed)
    loader = DataLoader(data, batch_size=args.batch, sampler=sampler, drop_last=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    rates = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.lr, total_steps=args.epochs * len(loader)
    )
    begin, steps, densities = time.perf_counter(), 0, []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            cross_entropy(ddp(images), labels).backward()
            optimizer.step()
            rates.step()
            steps += 1
            if herd is not None:
                densities.append(herd.metrics()["density"])
    seconds = time.perf_counter() - begin
    with torch.no_grad():
        accuracy = (model(test_x).argmax(1) == test_y).float().mean()
    size = dist.get_world_size()
    dim = sum(p.numel() for p in model.parameters())
    dense = 8 * dim * (size - 1) // size * steps
    return {
        "accuracy": 100 * float(accuracy),
        "bytes": herd.metrics()["total_bytes"] if herd is not None else dense,
        "dense_bytes": dense,
        "density": statistics.fmean(densities) if densities else 1.0,
        "seconds": seconds,
    }


def main() -> None:
    """Train with all methods and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", default="exdyna")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--examples", type=int, default=60_000)
    parser.add_argument("--batch", type=int, default=32, help="examples per rank and step")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {args}")
    for method in ["dense", *args.methods.split(",")]:
        runs = [
            run_ranks(train, args.workers, method, args.density, args, seed, timeout=3600)[0]
            for seed in range(args.seeds)
        ]
        accuracy = [run["accuracy"] for run in runs]
        share = statistics.fmean(run["bytes"] / run["dense_bytes"] for run in runs)
        deviation = statistics.stdev(accuracy) if len(runs) > 1 else 0.0
        print(
            f"{method:10} accuracy {statistics.fmean(accuracy):6.2f} +- {deviation:.2f} "
            f"({', '.join(f'{one:.2f}' for one in accuracy)})  bytes {share:8.3%} of dense  "
            f"density {statistics.fmean(run['density'] for run in runs):.5f}  "
            f"{statistics.fmean(run['seconds'] for run in runs):.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
