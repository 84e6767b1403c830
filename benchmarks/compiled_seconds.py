"""Does ordering single examples pay in seconds, where both loops are compiled?

    python benchmarks/compiled_seconds.py --data DIR --out FILE.json [--epochs 10] [--seeds 3]
        [--batches data_batch_1,data_batch_2] [--mode reduce-overhead]

Trains ResNet-18 on CIFAR-10 with crops and flips on a GPU, one worker, in a random order and in the
orders given, with the same seeds. Seconds count training alone, from the first step after
compilation on; the loss is that of all training images without crops, measured after each epoch.
Prints, for each order, the seconds until the random order's final loss and final accuracy.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import gradherd as gh
from gradherd.lab.tasks.data_files import find_dataset
from gradherd.lab.tasks.images import Cifar10LeNet, _to_tensors, crop_and_flip, read_batches
from gradherd.lab.tasks.registry import import_file

_TASKS = Path(__file__).parents[1] / "studies" / "tasks"
resnet18 = import_file(_TASKS / "resnet18.py", "benchmark").resnet18
BATCH = 128
normalize = Cifar10LeNet().prepare


def load(folder: Path, names: list[str]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return training and test images with their labels, on the GPU."""
    import numpy as np

    rows = read_batches(find_dataset("cifar10", folder), (*names, "test_batch"))
    train = _to_tensors(np.concatenate([rows[name] for name in names]))
    return tuple(t.cuda() for t in train), tuple(t.cuda() for t in _to_tensors(rows["test_batch"]))


@torch.no_grad()
def measure(net: torch.nn.Module, data: tuple[Tensor, ...]) -> tuple[float, float]:
    """Return mean loss and accuracy in percent, in evaluation mode."""
    net.eval()
    total, right = 0.0, 0
    for x, y in zip(data[0].split(1000), data[1].split(1000), strict=True):
        out = net(normalize(x))
        total += float(F.cross_entropy(out, y, reduction="sum"))
        right += int((out.argmax(1) == y).sum())
    net.train()
    return total / len(data[0]), 100 * right / len(data[0])


def train(order: str, seed: int, data: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Train once; return losses, accuracies and seconds after each epoch."""
    torch.manual_seed(seed)
    (images, labels), test = data
    net = resnet18().cuda()
    model = torch.compile(net, fullgraph=True, mode=options.mode)
    optimizer = torch.optim.SGD(net.parameters(), options.lr, 0.9, weight_decay=5e-4)
    dataset = TensorDataset(torch.arange(len(images)))
    sampler = gh.OrderedSampler(dataset, order, batch_size=BATCH, seed=seed, drop_last=True)
    herd = gh.attach(model, order=sampler)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler, drop_last=True)
    generator = torch.Generator().manual_seed(seed)

    def step(indices: Tensor) -> None:
        x = crop_and_flip(normalize(images[indices.cuda()]), generator)
        F.cross_entropy(model(x), labels[indices.cuda()]).backward()
        optimizer.step()
        optimizer.zero_grad()

    # Compiled before the clock starts, on a batch that changes nothing.
    state = {name: t.clone() for name, t in net.state_dict().items()}
    with herd.pause():
        for _ in range(6):
            x = crop_and_flip(normalize(images[:BATCH]), generator)
            F.cross_entropy(model(x), labels[:BATCH]).backward()
            optimizer.zero_grad()
    net.load_state_dict(state)
    seconds, found = 0.0, []
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for (indices,) in loader:
            step(indices)
        torch.cuda.synchronize()
        seconds += time.perf_counter() - begin
        loss, _ = measure(net, (images, labels))
        found.append({"seconds": seconds, "loss": loss, "accuracy": measure(net, test)[1]})
        print(order, seed, epoch, found[-1], flush=True)
    left_out = herd.metrics().get("rows_left_out", [])
    herd.detach()
    return {"order": order, "seed": seed, "epochs": found, "rows_left_out": left_out}


def reached(run: dict[str, Any], key: str, wanted: float, sign: int) -> float | None:
    """Return the seconds after which a run has reached a value; None if never."""
    good = (one["seconds"] for one in run["epochs"] if sign * one[key] <= sign * wanted)
    return next(good, None)


def main() -> None:
    """Train every order with every seed, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--orders", default="pair-grab")
    parser.add_argument("--batches", default="data_batch_1,data_batch_2")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--mode", default="reduce-overhead")
    options = parser.parse_args()
    data = load(options.data, options.batches.split(","))
    runs = []
    for seed in range(options.seeds):
        runs += [
            train(order, seed, data, options) for order in ("d-rr", *options.orders.split(","))
        ]
        settings = {k: v for k, v in vars(options).items() if k not in ("data", "out")}
        device = torch.cuda.get_device_name()
        record = {"settings": settings, "device": device, "torch": torch.__version__, "runs": runs}
        options.out.write_text(json.dumps(record))
    for order in options.orders.split(","):
        for key, sign in (("loss", 1), ("accuracy", -1)):
            pairs = []
            for seed in range(options.seeds):
                plain, own = (
                    next(r for r in runs if r["seed"] == seed and r["order"] == one)
                    for one in ("d-rr", order)
                )
                wanted = plain["epochs"][-1][key]
                pairs.append((reached(own, key, wanted, sign), plain["epochs"][-1]["seconds"]))
            ratios = [own / plain for own, plain in pairs if own is not None]
            print(f"{order}: seconds to d-rr's final {key}: {pairs}; ratio", end=" ")
            print(
                f"{statistics.mean(ratios):.2f} of {len(ratios)} that reach it" if ratios else "-"
            )


if __name__ == "__main__":
    main()
