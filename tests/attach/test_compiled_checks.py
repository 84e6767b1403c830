"""Checks of rows that find something wrong in a compiled model."""

import logging

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradherd import OrderedSampler, attach


class UsedTwice(nn.Module):
    """A weight that is used outside of its module as well."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.wide = nn.Linear(6, 40)

    def forward(self, x):
        hidden = self.body(x).tanh() @ self.body.weight
        return self.head(hidden) + self.wide(hidden).sum(-1, keepdim=True)


# dynamo's own, about how it traces autograd functions
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_a_parameter_whose_rows_are_wrong_is_left_out(caplog):
    torch._dynamo.reset()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(48, 6))
    order = OrderedSampler(data, "cd-grab", batch_size=4)
    model = torch.compile(UsedTwice(), backend="aot_eager")
    herd = attach(model, order=order, rows="two-sided")
    with caplog.at_level(logging.WARNING):
        for (x,) in DataLoader(data, batch_size=4, sampler=order):
            model(x).square().mean().backward()
            herd.finish()
            model.zero_grad()
    assert herd.metrics()["rows_left_out"] == ["body.weight"]
    assert "body.weight (they do not add up to its gradient" in caplog.text
    herd.detach()
