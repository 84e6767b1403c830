"""Loops with a mistake in them, on ranks."""

import contextlib
import logging

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

from gradherd import ExDyna, OrderedSampler, Sparsify, attach
from gradherd.comm import checks
from tests.attach.fsdp_work import mesh_of

MOST = 6
"""Batches in a row that may be not finite, in these tests."""


def log_of_this_rank():
    """Return a list that gets what gradherd says from now on."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("gradherd").addHandler(handler)
    return messages


def spoiled_run(sharded):
    """Have NaN on rank 1 in all steps but the third; return what was said, and how it ended."""
    messages, checks.MOST_BROKEN = log_of_this_rank(), MOST
    model = nn.Linear(64, 8)
    settings = {"sparsify": Sparsify(method=ExDyna(density=0.1), dense_below=1)}
    if sharded:
        settings["mesh"] = mesh = mesh_of((2, 1))
        fully_shard(model, mesh=mesh["shard"])
    else:
        model = DDP(model)
    attach(model, **settings)
    for step in range(3 * MOST):
        spoiled = dist.get_rank() == 1 and step != 2
        loss = model(torch.randn(4, 64)).square().mean()
        try:
            (loss * torch.nan if spoiled else loss).backward()
        except RuntimeError as error:
            kind = type(error).__name__
            return {"said": messages, "error": kind, "text": str(error), "step": step}
        model.zero_grad()
    return {"said": messages, "error": "none"}


def warnings_of_attaching(wrapped):
    """Return the log of attaching a plain module, or one in DDP."""
    messages = log_of_this_rank()
    data, net = TensorDataset(torch.randn(8, 3)), nn.Linear(3, 1)
    order = OrderedSampler(data, "cd-grab", batch_size=2)
    attach(DDP(net) if wrapped else net, order=order).detach()
    return messages


def said_of_an_epoch(unit):
    """Have NaN in the third of six batches of rank 1; return what was said."""
    messages, data = log_of_this_rank(), TensorDataset(torch.randn(48, 3))
    model, order = DDP(nn.Linear(3, 1)), OrderedSampler(data, "cd-grab", batch_size=4, unit=unit)
    herd = attach(model, order=order)
    for step, (x,) in enumerate(DataLoader(data, batch_size=4, sampler=order)):
        loss = model(x).square().mean()
        (loss * torch.nan if (dist.get_rank(), step) == (1, 2) else loss).backward()
        model.zero_grad()
    herd.detach()
    return messages


def zeroed_gradients(how):
    """Return what is said of three epochs of six batches whose gradients are cleared so."""
    messages, data = log_of_this_rank(), TensorDataset(torch.randn(48, 3))
    model, order = DDP(nn.Linear(3, 1)), OrderedSampler(data, "cd-grab", batch_size=4, unit=4)
    herd, step = attach(model, order=order), 0
    for _ in range(3):
        for (x,) in DataLoader(data, batch_size=4, sampler=order):
            step += 1
            quiet = how == "accumulated under no_sync" and step % 2
            with model.no_sync() if quiet else contextlib.nullcontext():
                model(x).square().mean().backward()
            if how in ("zeros", "none"):
                model.zero_grad(set_to_none=how == "none")
            elif how == "accumulated under no_sync" and not quiet:
                model.zero_grad(set_to_none=False)
    herd.detach()
    return messages


def unfrozen(unit):
    """Unfreeze a layer after the first batch of two; return what was said."""
    messages, data = log_of_this_rank(), TensorDataset(torch.randn(16, 3))
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    model, order = (
        DDP(net, find_unused_parameters=True),
        OrderedSampler(data, "cd-grab", batch_size=4, unit=unit),
    )
    net[0].requires_grad_(False)
    herd = attach(model, order=order, rows="batch" if unit > 1 else "exact")
    for (x,) in DataLoader(data, batch_size=4, sampler=order):
        model(x).square().mean().backward()
        model.zero_grad()
        net[0].requires_grad_(True)
    herd.detach()
    return messages


def joins(unit):
    """Let rank 1 run out of batches inside join(); return how it ended."""
    data, model = TensorDataset(torch.randn(48, 3)), DDP(nn.Linear(3, 1))
    order = OrderedSampler(data, "cd-grab", batch_size=4, unit=unit)
    attach(model, order=order)
    try:
        with model.join():
            for step, (x,) in enumerate(DataLoader(data, batch_size=4, sampler=order)):
                if dist.get_rank() == 1 and step == 3:
                    break
                model(x).square().mean().backward()
                model.zero_grad()
    except RuntimeError as error:
        return str(error)
    return "nothing"


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
