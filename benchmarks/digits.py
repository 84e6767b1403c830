"""Compare orders: logistic regression on scikit-learn's digits with four local ranks.

Prints, for each order, the loss above the optimum after the last epoch, mean over seeds:

    python benchmarks/digits.py [--orders d-rr,cd-grab] [--seeds 3] [--epochs 40] [--batch 4]

Learning rate 0.2, momentum 0.9, L2 penalty 1e-4; `--batch` is the batch size of each rank.
"""

import argparse
import statistics

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import gradherd as gh
from gradherd.lab.ranks import run_ranks

L2, RANKS = 1e-4, 4


def digits() -> TensorDataset:
    """Return the 1,797 images and their labels."""
    x, y = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y))


def full_loss(model: nn.Module, data: TensorDataset) -> Tensor:
    """Return the regularised loss on all data, in float64."""
    weights = [p.double() for p in model.parameters()]
    logits = data.tensors[0].double() @ weights[0].T + weights[1]
    penalty = sum((w**2).sum() for w in weights)
    return nn.functional.cross_entropy(logits, data.tensors[1]) + 0.5 * L2 * penalty


def zeros() -> nn.Linear:
    """Return the model with all parameters zero."""
    model = nn.Linear(64, 10)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def optimum(data: TensorDataset) -> float:
    """Return the minimum of the loss."""
    model = zeros().double()
    lbfgs = torch.optim.LBFGS(
        model.parameters(), max_iter=3000, tolerance_grad=1e-11, tolerance_change=0,
        history_size=50, line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure() -> Tensor:
        lbfgs.zero_grad()
        loss = full_loss(model, data)
        loss.backward()
        return loss

    lbfgs.step(closure)
    return float(full_loss(model, data).detach())


def train(order: str, seed: int, epochs: int, batch: int) -> float:
    """Train on this rank together with the others; return the final loss on all data."""
    data, net = digits(), zeros()
    model = DDP(net)
    sampler = gh.OrderedSampler(data, order, batch_size=batch, seed=seed)
    gh.attach(model, order=sampler)
    loader = DataLoader(data, batch_size=batch, sampler=sampler)
    sgd = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=L2)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            sgd.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            sgd.step()
    return float(full_loss(net, data).detach())


def main() -> None:
    """Compare the orders."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--orders", default="d-rr,cd-grab")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch", type=int, default=4)
    args = parser.parse_args()
    best = optimum(digits())
    print(f"optimum {best:.10f}")
    for order in args.orders.split(","):
        above = [
            run_ranks(train, RANKS, order, seed, args.epochs, args.batch, timeout=1800)[0] - best
            for seed in range(args.seeds)
        ]
        each = " ".join(f"{value:.2e}" for value in above)
        print(f"{order:<14} mean {statistics.mean(above):.2e}   seeds {each}", flush=True)


if __name__ == "__main__":
    main()
