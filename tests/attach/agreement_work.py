"""What the ranks of test_agreement.py do."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

import gradherd as gh
from gradherd.hooks.agreement import RankAgreement, _readable
from tests.attach.attach_work import examples, network

SAME = {"policy": "cd-grab", "examples": 24, "batch": 4, "unit": 4, "seed": 0}
SPARSE = gh.Sparsify(method=gh.ExDyna(density=0.05), dense_below=8)


def attach_with(ddp, change, sparsify=None):
    """Attach; rank 1 has other settings."""
    own = {**SAME, "rows": "auto", "sparsify": sparsify}
    if dist.get_rank() == 1:
        own |= change
    sampler = gh.OrderedSampler(
        examples(own["examples"]),
        own["policy"],
        batch_size=own["batch"],
        unit=own["unit"],
        seed=own["seed"],
    )
    return gh.attach(ddp, order=sampler, sparsify=own["sparsify"], rows=own["rows"])


def differing(changes, sparsify=None):
    """Return the error of each change on rank 1."""
    found = []
    for change in changes:
        ddp = DDP(network())
        try:
            attach_with(ddp, change, sparsify).detach()
            error = ""
        except (ValueError, RuntimeError) as caught:
            error = f"{type(caught).__name__}: {caught}"
        found.append(error)
    return found


def other_parameters():
    ddp = DDP(nn.Linear(5, 3).double())
    if dist.get_rank() == 1:
        ddp.module.bias.requires_grad_(False)
    sampler = gh.OrderedSampler(examples(8), "cd-grab", batch_size=4)
    try:
        gh.attach(ddp, order=sampler)
    except ValueError as error:
        return str(error)


def alone():
    """Rank 0 attaches, rank 1 does not; return the error."""
    ddp = DDP(network())
    try:
        if dist.get_rank() == 0:
            attach_with(ddp, {})
        time.sleep(4)  # run_ranks lets ranks meet at the end, within the same timeout
    except RuntimeError as error:
        return str(error)
    return ""


def stale_entries():
    """Entries of an earlier life of the store lie there; ranks meet all the same."""
    store = dist.group.WORLD.get_group_store()
    rank = dist.get_rank()
    if rank == 0:
        for old in (0, 1):
            store.set(
                f"gradherd/attach/0/{old}",
                '{"nonce": "old", "seen": ["old", "old"], "settings": {"seed": "9"}}',
            )
    dist.barrier()
    time.sleep(0.3 * rank)
    RankAgreement(gh.World.detect()).compare({"seed": 1})
    return True


def subgroup_gradients(own_world):
    """DDP on two groups of two: return how the gradient differs from plain DDP's, or the error."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rank = dist.get_rank()
    group = groups[rank // 2]
    plain, ddp = (DDP(network(), process_group=group) for _ in range(2))
    world = gh.World(dist.get_rank(group), 2, group) if own_world else None
    data = examples(48)
    errors, orders = [], []
    for _ in range(2):
        sampler = gh.OrderedSampler(data, "cd-grab", batch_size=4, unit=4, world=world)
        try:
            herd = gh.attach(ddp, order=sampler)
        except ValueError as error:
            return str(error)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for x, y in DataLoader(data, batch_size=4, sampler=sampler):
                for model in (plain, ddp):
                    model.zero_grad()
                    F.cross_entropy(model(x), y).backward()
                for one, other in zip(plain.parameters(), ddp.parameters(), strict=True):
                    errors.append(float((one.grad - other.grad).abs().max() / one.grad.abs().max()))
        herd.finish()
        orders.append([order.tolist() for order in sampler.ordering.orders])
        herd.detach()
        ddp = DDP(network(), process_group=group)
    return max(errors), orders


def other_group_of_the_same_ranks():
    group = dist.new_group([0, 1])
    sampler = gh.OrderedSampler(
        examples(24), "cd-grab", batch_size=4, unit=4, world=gh.World(dist.get_rank(), 2, group)
    )
    ddp = DDP(network())
    gh.attach(ddp, order=sampler).detach()
    return sampler.world.group is ddp.process_group


@dataclass
class OwnSettings:
    score: Callable[[], float]


def readable():
    return _readable(SPARSE), _readable(OwnSettings(lambda: 0.1))


def sharded(kind):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    if kind == "both":
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
        parallelize_module(net, mesh["tensor"], {"0": ColwiseParallel()})
        fully_shard(net, mesh=mesh["data"])
    elif kind == "part":
        fully_shard(net[0], mesh=init_device_mesh("cpu", (2,)))
    elif kind == "fsdp1":
        net = FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)
    elif kind == "dtensor":
        parallelize_module(net, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel()})
    elif kind == "zero3":
        for parameter in net.parameters():
            parameter.data = torch.empty(0)
    elif kind == "zero3 in part":
        net[2].weight.data, net[2].weight.ds_id = torch.empty(0), 3
    elif kind == "lazy":
        net = nn.LazyLinear(3)
    found = []
    for sparsify in (None, "exdyna"):
        sampler = gh.OrderedSampler(examples(24), "cd-grab", batch_size=4, unit=4)
        try:
            gh.attach(net, order=sampler, sparsify=sparsify)
        except ValueError as error:
            found.append(str(error))
    return found
