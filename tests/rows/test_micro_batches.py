"""Micro-batches of one batch, with rows that are not formed: the order is that of whole batches."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradherd as gh
from gradherd.rows.settings import SMALL_MODEL


class Net(nn.Module):
    """A table, a convolution and linear layers, one of them used twice."""

    def __init__(self):
        super().__init__()
        self.table, self.conv = nn.Embedding(60, 48), nn.Conv1d(48, 48, 3, padding=1)
        self.twice, self.last = nn.Linear(48, 48), nn.Linear(48, 300)

    def forward(self, tokens):
        hidden = self.conv(self.table(tokens).transpose(1, 2)).tanh().mean(2)
        return self.last(self.twice(self.twice(hidden).tanh()).tanh())


def orders(parts, unit):
    torch.manual_seed(0)
    data = TensorDataset(torch.randint(60, (24, 5)), torch.randint(300, (24,)))
    net = Net()
    assert sum(p.numel() for p in net.parameters()) > SMALL_MODEL
    sampler = gh.OrderedSampler(data, "pair-grab", batch_size=8, unit=unit, seed=3)
    herd = gh.attach(net, order=sampler, rows="exact")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    found = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for tokens, labels in herd.batches(DataLoader(data, batch_size=8, sampler=sampler)):
            optimizer.zero_grad()
            for x, y in zip(tokens.split(parts), labels.split(parts), strict=True):
                (nn.functional.cross_entropy(net(x), y) * len(x) / len(tokens)).backward()
            optimizer.step()
        found.append(list(sampler))
    herd.detach()
    return found


@pytest.mark.parametrize("unit", [1, 2])
@pytest.mark.parametrize("parts", [[4, 4], [1, 7], [3, 3, 2]])
def test_micro_batches_give_the_order_of_whole_batches(parts, unit):
    whole = orders([8], unit)
    assert orders(parts, unit) == whole
    assert len(set(map(tuple, whole))) > 1
