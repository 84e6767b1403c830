"""What the ranks of test_failing.py do."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

import gradherd as gh
from gradherd.comm.collectives import all_gather
from tests.attach.attach_work import examples, network
from tests.attach.fsdp_sparse_work import settings
from tests.attach.fsdp_work import mesh_of


class Scale(nn.Module):
    """A module of the user's own, for which rows have no rule."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, size))

    def forward(self, x):
        return x @ self.weight


def hooks(net):
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, kind)) for module in net.modules() for kind in kinds)


def attach_after_an_error(rows):
    """Attach what is refused after ranks have compared their settings, then what is not."""
    mesh = mesh_of((2, 1))
    net = fully_shard(nn.Sequential(Scale(6), Scale(6), nn.Linear(6, 3)), mesh=mesh["shard"])
    data = [(torch.full((6,), float(i)), i % 3) for i in range(16)]
    sampler = gh.OrderedSampler(data, "cd-grab", batch_size=4, unit=1)
    before, said = hooks(net), []
    for _ in range(2):
        try:
            gh.attach(net, order=sampler, rows=rows, sparsify=settings("topk"), mesh=mesh)
        except RuntimeError as error:
            said.append(str(error))
    left = hooks(net) - before
    batches = gh.OrderedSampler(data, "cd-grab", batch_size=4, unit=4)
    herd = gh.attach(net, order=batches, rows="sketch", sparsify=settings("topk"), mesh=mesh)
    for x, y in DataLoader(data, batch_size=4, sampler=batches):
        F.cross_entropy(net(x), y).backward()
        net.zero_grad()
    return said, left, herd.metrics()["steps"]


def cleared_on_some_ranks(folder):
    """Clear gradients on rank 0 only, which then exchanges its batch and the other one does not."""
    ddp, data = DDP(network()), examples(48)
    sampler = gh.OrderedSampler(data, "cd-grab", batch_size=4, unit=4)
    gh.attach(ddp, order=sampler)
    try:
        for x, y in DataLoader(data, batch_size=4, sampler=sampler):
            if dist.get_rank() == 0:
                ddp.zero_grad()
            F.cross_entropy(ddp(x), y).backward()
    except RuntimeError as error:
        (folder / f"{dist.get_rank()}").write_text(str(error))


class Branches(nn.Module):
    """Takes one of two ways."""

    def __init__(self):
        super().__init__()
        self.ways = nn.ModuleList([nn.Linear(5, 4), nn.Linear(5, 4), nn.Linear(5, 4)])
        self.last = nn.Linear(4, 3)

    def forward(self, x, way):
        return self.last(self.ways[way](x).tanh())


def replicas_on_other_branches(name):
    """Train two replicas that use different branches; return their weights and how they moved."""
    mesh = mesh_of((2, 1))
    torch.manual_seed(1)
    net = fully_shard(Branches(), mesh=mesh["shard"])
    herd = gh.attach(net, sparsify=settings(name), mesh=mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    own = [p.to_local() for p in net.parameters()]
    before = torch.cat([p.detach().flatten().clone() for p in own])
    draw = torch.Generator().manual_seed(dist.get_rank())
    for step in range(4):
        optimizer.zero_grad()
        x = torch.randn(4, 5, generator=draw)
        way = dist.get_rank() if step < 3 else 1  # the third is used by nobody
        net(x, way).square().sum().backward()
        optimizer.step()
    after = torch.cat([p.detach().flatten() for p in own])
    unused = net.ways[2].weight.grad is None
    return before, after, unused, herd.metrics()["steps"]


def without_a_backend():
    """Return bytes of gathered tensors in a group that chose its backends by itself."""
    rank, size = dist.get_rank(), dist.get_world_size()
    port = [os.path.join(tempfile.mkdtemp(), "store")] if rank == 0 else [None]
    dist.broadcast_object_list(port)
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group(init_method=f"file://{port[0]}", rank=rank, world_size=size)
    world = gh.World.detect()
    return dist.get_backend(), all_gather(torch.full((2,), float(rank)), world)


def attach_without_sockets():
    """Attach where no group can be made for the order; train, and attach again."""
    ddp, data = DDP(network()), examples(16)
    sampler = gh.OrderedSampler(data, "cd-grab", batch_size=4, unit=4)
    make = gh.World.side_channel

    def fails(world):
        raise RuntimeError("no sockets left")

    gh.World.side_channel = fails
    try:
        gh.attach(ddp, order=sampler)
        said = ""
    except RuntimeError as error:
        said = str(error)
    gh.World.side_channel = make
    x, y = next(iter(DataLoader(data, batch_size=4, sampler=sampler)))
    (own,) = torch.autograd.grad(F.cross_entropy(ddp.module(x), y), [next(ddp.parameters())])
    F.cross_entropy(ddp(x), y).backward()
    averaged = next(ddp.parameters()).grad.clone()
    herd = gh.attach(ddp, order=sampler)
    for x, y in DataLoader(data, batch_size=4, sampler=sampler):
        ddp.zero_grad()
        F.cross_entropy(ddp(x), y).backward()
    herd.finish()
    learned = herd.metrics()["total_examples_fed_back"]
    herd.detach()
    return said, own, averaged, learned


def metrics_after_a_failed_exchange():
    """Return the metrics of a rank whose last signs failed, and what the next call says."""
    ddp, data = DDP(network()), examples(16)
    sampler = gh.OrderedSampler(data, "cd-grab", batch_size=4, unit=4)
    herd, optimizer = gh.attach(ddp, order=sampler), torch.optim.SGD(ddp.parameters(), lr=0.1)

    def has_left(slices, claim, release):
        release(None)
        raise RuntimeError("connection closed by peer")

    for number, (x, y) in enumerate(herd.batches(DataLoader(data, batch_size=4, sampler=sampler))):
        if number == 1:
            herd._feedback._transport.wait()
            herd._feedback._transport._sign = has_left
        F.cross_entropy(ddp(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    metrics = herd.metrics()
    try:
        sampler.set_epoch(1)
    except RuntimeError as error:
        return metrics, str(error)
