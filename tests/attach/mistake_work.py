"""Loops with a mistake in them, on ranks."""

import logging

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

from gradherd import OrderedSampler, attach


def warnings_of_attaching(wrapped):
    """Return the log of attaching a plain module, or one in DDP."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("gradherd").addHandler(handler)
    data, net = TensorDataset(torch.randn(8, 3)), nn.Linear(3, 1)
    order = OrderedSampler(data, "cd-grab", batch_size=2)
    attach(DDP(net) if wrapped else net, order=order).detach()
    return messages


def metrics_of_an_epoch(unit):
    """Return the metrics after a whole epoch of two batches of each rank."""
    torch.manual_seed(0)
    data, model = TensorDataset(torch.randn(16, 3), torch.randint(2, (16,))), DDP(nn.Linear(3, 2))
    order = OrderedSampler(data, "cd-grab", batch_size=4, unit=unit)
    herd = attach(model, order=order)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in DataLoader(data, batch_size=4, sampler=order):
        F.cross_entropy(model(x), y).backward()
        sgd.step()
        sgd.zero_grad()
    herd.finish()
    return herd.metrics()
