"""Record every worker's gradient at every step of a training, for `gradherd replay sparsify`.

A multi-layer perceptron of about 300,000 parameters learns scikit-learn's digits with plain
averaging. The file holds (steps, workers, dim) float32: 4.8 MB per step with four workers.

    python benchmarks/record_gradients.py gradients.npy --steps 400
    gradherd replay sparsify gradients.npy --method exdyna --density 0.001
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

WIDTH = 512


def main() -> None:
    """Train and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="the .npy file to write")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16, help="examples per worker and step")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16).float(), torch.tensor(labels)
    layers = [nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 10))
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    dim = sum(p.numel() for p in parameters)
    shape = (args.steps, args.workers, dim)
    file = np.lib.format.open_memmap(args.out, mode="w+", dtype=np.float32, shape=shape)
    for step in range(args.steps):
        for worker in range(args.workers):
            picks = torch.randint(len(x), (args.batch,))
            loss = nn.functional.cross_entropy(model(x[picks]), y[picks])
            grads = torch.autograd.grad(loss, parameters)
            file[step, worker] = torch.cat([grad.flatten() for grad in grads]).numpy()
        mean = torch.from_numpy(file[step].mean(0))
        for p, grad in zip(parameters, mean.split([p.numel() for p in parameters]), strict=True):
            p.grad = grad.view_as(p)
        optimizer.step()
        if step % 100 == 0 or step == args.steps - 1:
            print(f"step {step}: loss {float(loss):.4f}")
    file.flush()
    print(f"{args.out}: {args.steps} steps, {args.workers} workers, {dim:,} elements")


if __name__ == "__main__":
    main()
