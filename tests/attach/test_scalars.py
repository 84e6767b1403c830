"""Numbers for loggers, and closures, whose gradients must be in them."""

import json
import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradherd as gh


@pytest.fixture
def trained():
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(16, 3), torch.randn(16, 1))
    model = nn.Linear(3, 1)
    sampler = gh.OrderedSampler(data, "grab", batch_size=4)
    herd = gh.attach(model, order=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    yield model, herd, optimizer, loader
    herd.detach()


def step_by_closure(model, optimizer, x, y):
    def closure():
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


def test_gradients_of_a_closure_are_fed_back_within_the_step(trained):
    model, herd, optimizer, loader = trained
    for number, (x, y) in enumerate(loader):
        step_by_closure(model, optimizer, x, y)
        fed = herd.metrics()["examples_fed_back"]
        assert fed == (4 * (number + 1)) % 16  # after the last batch the next epoch begins
    assert herd.metrics()["epoch"] == 1


def test_scalars_are_numbers_with_a_prefix(trained):
    model, herd, optimizer, loader = trained
    for x, y in loader:
        step_by_closure(model, optimizer, x, y)
        break
    scalars = herd.scalars()
    assert scalars["herd/examples_fed_back"] == 4 and "herd/rows" not in scalars
    assert all(name.startswith("herd/") and math.isfinite(v) for name, v in scalars.items())
    assert json.loads(json.dumps(scalars)) == scalars
