"""The point of it all: a learned order brings real training closer to the optimum."""

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradherd import OrderedSampler, attach

L2 = 1e-4


@pytest.fixture(scope="module")
def digits() -> TensorDataset:
    x, y = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(x / 16), torch.tensor(y))


def loss_of(model: nn.Module, data: TensorDataset) -> torch.Tensor:
    penalty = sum((p**2).sum() for p in model.parameters())
    return F.cross_entropy(model(data.tensors[0]), data.tensors[1]) + L2 / 2 * penalty


def zeros() -> nn.Linear:
    model = nn.Linear(64, 10).double()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


@pytest.fixture(scope="module")
def optimum(digits) -> float:
    model = zeros()
    lbfgs = torch.optim.LBFGS(
        model.parameters(), max_iter=1000, history_size=50, line_search_fn="strong_wolfe"
    )

    def closure():
        lbfgs.zero_grad()
        loss = loss_of(model, digits)
        loss.backward()
        return loss

    lbfgs.step(closure)
    return loss_of(model, digits).item()


def trained(order: str, data: TensorDataset, seed: int) -> float:
    model = zeros()
    sampler = OrderedSampler(data, order, batch_size=16, seed=seed)
    attach(model, order=sampler)
    sgd = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=L2)
    for epoch in range(12):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=16, sampler=sampler):
            sgd.zero_grad()
            F.cross_entropy(model(x), y).backward()
            sgd.step()
    return loss_of(model, data).item()


def test_a_balanced_order_comes_closer_than_a_random_one(digits, optimum):
    random, balanced = (trained(order, digits, seed=0) - optimum for order in ("d-rr", "cd-grab"))
    assert 0 < balanced < random / 2
