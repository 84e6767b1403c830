"""Measure what an integration adds to a step, beyond the same training with `attach` alone.

python benchmarks/integrations.py [--steps 32] [--rounds 41]

One process. Both arms use Accelerate and the same order: one is prepared by the integration, the
other leaves the loader unprepared and attaches by hand. They take turns, and CPU time is measured,
which other programs on the machine hardly change.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradherd as gh

BATCH = 64


def by_hand(accelerator: Any, data: TensorDataset) -> tuple[Any, Any, Any, gh.Herd]:
    """Attach without the integration; the loader stays unprepared."""
    model, optimizer = accelerator.prepare(*make())
    sampler = gh.OrderedSampler(data, "grab", batch_size=BATCH, unit=BATCH)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    return model, optimizer, loader, gh.attach(model, order=sampler)


def integrated(accelerator: Any, data: TensorDataset) -> tuple[Any, ...]:
    """Let the integration prepare everything."""
    from gradherd.integrations.accelerate import prepare

    return prepare(accelerator, *make(), DataLoader(data, batch_size=BATCH), order="grab")


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return an MLP of 0.5 M parameters and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def endless(loader: Any) -> Iterator[Any]:
    """Yield epoch after epoch."""
    while True:
        yield from loader


def main() -> None:
    """Print milliseconds per step, and the ratio of both arms in each round."""
    from accelerate import Accelerator

    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=41)
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = TensorDataset(torch.randn(64 * BATCH, 256), torch.randn(64 * BATCH, 256))
    accelerator = Accelerator(cpu=True)
    arms = {arm.__name__: arm(accelerator, data) for arm in (by_hand, integrated)}
    batches = {name: endless(parts[2]) for name, parts in arms.items()}
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(args.rounds):
        for name, (model, optimizer, *_) in arms.items():
            start = time.process_time()
            for x, y in islice(batches[name], args.steps):
                accelerator.backward((model(x) - y).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            times[name].append((time.process_time() - start) / args.steps * 1e3)
    for name, ms in times.items():
        print(f"{name}: median {statistics.median(ms):.3f} ms of CPU per step")
    ratios = sorted(b / a for a, b in zip(*times.values(), strict=True))
    low, high = ratios[len(ratios) // 4], ratios[-len(ratios) // 4]
    median = statistics.median(ratios)
    print(f"integrated / by_hand: median {median:.3f}, quartiles {low:.3f} to {high:.3f}")


if __name__ == "__main__":
    main()
