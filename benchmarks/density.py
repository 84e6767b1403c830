"""Check how well sparsifiers keep their density and balance their load.

Without a file, on synthetic gradients of four workers: half shared and half private noise, in
twenty layers whose scales span two decades. With a file (see record_gradients.py), on the gradients
of that training, as recorded or changed.

    python benchmarks/density.py --dim 10000000 --steps 90
    python benchmarks/density.py gradients.npy --change drop
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import gradherd as gh
from gradherd.sparsify.virtual_workers import VirtualWorkers

LAYERS, DECADES, SETTLED = 20, 2, 50


def synthetic(dim: int, workers: int) -> Iterator[Tensor]:
    """Yield endless gradients of shape (workers, dim)."""
    draw = torch.Generator().manual_seed(0)
    scale = 10 ** (DECADES * torch.rand(LAYERS, generator=draw))
    scale = scale.repeat_interleave(-(-dim // LAYERS))[:dim]
    # A slice of a pool at a random offset, with a random sign: ten times as fast as new noise.
    offsets = 4_000_000
    pool = torch.randn(dim + offsets, generator=draw)

    def noise() -> Tensor:
        offset, sign = torch.randint(offsets, (2,), generator=draw).tolist()
        return pool[offset : offset + dim] * (1 if sign % 2 else -1)

    while True:
        shared = noise()
        yield torch.stack([scale * (shared + noise()) / 2 for _ in range(workers)])


def recorded(path: Path, change: str) -> Iterator[Tensor]:
    """Yield recorded gradients of shape (workers, dim), changed as asked."""
    file = np.load(path, mmap_mode="r")
    for step, row in enumerate(file):
        grads = torch.from_numpy(np.array(row))
        if change == "large":
            grads *= 20
        if change == "small":
            grads /= 20
        if change == "drop" and step >= len(file) // 2:
            grads /= 10
        if change == "layer":  # a third of the vector gets 90 % of the squared norm
            part = grads[:, : grads.shape[1] // 3]
            rest = (grads.norm() ** 2 - part.norm() ** 2).clamp(min=0).sqrt()
            part *= 3 * rest / part.norm().clamp(min=1e-30)
        yield grads


def main() -> None:
    """Replay the gradients with each method and print one line per method."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--change", choices=["none", "large", "small", "drop", "layer"])
    parser.add_argument("--dim", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--density", type=float, default=1e-3)
    parser.add_argument("--methods", default="exdyna;exdyna, online;topk", help="split by ;")
    args = parser.parse_args()
    torch.set_num_threads(1)
    methods = {
        "exdyna": gh.ExDyna(args.density),
        "exdyna, online": gh.ExDyna(args.density, threshold="online"),
        "topk": gh.TopK(args.density),
    }
    for name in args.methods.split(";"):
        method = methods[name]
        grads = recorded(args.file, args.change or "none") if args.file else synthetic(args.dim, 4)
        workers, ratios, pads = None, [], []
        for _, rows in zip(range(args.steps), grads, strict=False):
            workers = workers or VirtualWorkers(
                gh.Sparsify(method=method), rows.shape[1], len(rows)
            )
            workers.step(rows)
            ratios.append(workers.metrics["density"] / args.density)
            pads.append(workers.metrics["padding"] - 1)
        off = np.abs(np.array(ratios) - 1)
        print(
            f"{name:15} {len(off)} steps: density error {off.mean():.4f} on average, at most "
            f"{off.max():.4f}; within 10 %: {np.mean(off <= 0.1):.1%}; density / target first "
            f"{ratios[0]:.3f}, last {ratios[-1]:.3f}; padding f - 1 after {SETTLED} steps: "
            f"{np.mean(pads[SETTLED:]) if len(pads) > SETTLED else float('nan'):.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
