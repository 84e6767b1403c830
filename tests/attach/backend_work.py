"""What ranks do in test_backends, on the device of their backend."""

import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import gradherd as gh
from gradherd.hooks.state import pack, unpack
from tests.attach.fsdp_local_work import whole
from tests.attach.fsdp_sparse_work import batch, model_of
from tests.nccl import device

STEPS = 11
CASES = {
    "at once": gh.LocalSteps(every=3),
    "overlap": gh.LocalSteps(every=4, overlap=True),
    "overlap, next step": gh.LocalSteps(every=2, outer_momentum=0.5, overlap=True),
    "overlap, two bits": gh.LocalSteps(every=3, values="int2", overlap=True),
}


# --- Local steps ------------------------------------------------------------------------------


def model(seed=0):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 90))
    net.register_buffer("seen", torch.zeros(5))
    return net


def vector(net):
    return nn.utils.parameters_to_vector(net.parameters()).detach().clone()


def targets_of(net, rank):
    """Return weights that each step of a rank goes towards."""
    generator = torch.Generator().manual_seed(rank)
    parameters = list(net.parameters())
    return [
        [torch.randn(p.shape, generator=generator).to(p.device) for p in parameters]
        for _ in range(STEPS)
    ]


def take_step(net, optimizer, rank, targets):
    """Step towards the targets, in operations that round alike on every device."""
    for p, target in zip(net.parameters(), targets, strict=True):
        p.grad = (p.detach() - target) * 0.25
    net.seen.add_(rank + 1)
    optimizer.step()


def optimizer_of(net):
    return torch.optim.SGD(net.parameters(), lr=2**-6, momentum=0.5)


def made(settings, seed):
    net = model(seed).to(device())
    optimizer = optimizer_of(net)
    return net, optimizer, gh.attach(net, optimizer=optimizer, local=settings)


def drift(settings, stop=None):
    """Return the weights after each step and after sync(), the state before, and where it was.

    Args:
        settings: Those of local steps.
        stop: Where to begin anew with a state that rank 0 has saved.
    """
    rank = dist.get_rank()
    net, optimizer, herd = made(settings, rank)
    path, targets = [], targets_of(net, rank)
    for at in range(STEPS):
        if at == stop:
            kept = [net.state_dict(), optimizer.state_dict(), herd.state_dict()]
            packed = [pack(kept)]
            dist.broadcast_object_list(packed, src=0)
            herd.detach()
            net, optimizer, herd = made(settings, 7)
            for one, state in zip((net, optimizer, herd), unpack(packed[0]), strict=True):
                one.load_state_dict(state)
        if device().type == "cuda":
            # The device lags behind the host: what does not wait for it, comes too early.
            torch.cuda._sleep(20_000_000)
        take_step(net, optimizer, rank, targets[at])
        path.append(vector(net))
    state = herd.state_dict(gather=False)["local"]
    places = {key: state[key]["0.weight"].device.type for key in ("residual", "shared")}
    herd.sync()
    path.append(vector(net))
    metrics, buffer = herd.metrics(), net.seen.clone()
    herd.detach()
    vectors = {key: flat(state[key]) for key in ("residual", "shared")}
    return {
        "path": torch.stack(path), "places": places, "buffer": buffer,
        "bytes": metrics["total_bytes"], **vectors,
    }  # fmt: skip


def flat(parts):
    return torch.cat([part.flatten() for part in parts.values()])


def not_finite():
    """Break rank 1's weights before an exchange that goes on beside the steps."""
    rank = dist.get_rank()
    net, optimizer, herd = made(CASES["overlap"], rank)
    for at, targets in enumerate(targets_of(net, rank)):
        if rank == 1 and at == 3:
            with torch.no_grad():
                net[0].weight[0, 0] = torch.nan
        take_step(net, optimizer, rank, targets)
        if rank == 1 and 3 <= at <= 6:  # until the exchange is over, its weights stay NaN
            optimizer.state.clear()
    herd.sync()
    skipped, end = herd.metrics()["skipped_steps"], vector(net)
    herd.detach()
    return skipped, end


def busy_device():
    """Return seconds that steps took while the device was busy, and whether it still was."""
    rank, settings = dist.get_rank(), CASES["overlap"]
    net, optimizer, herd = made(settings, rank)
    for targets in targets_of(net, rank):  # kernels are compiled, peers connected
        take_step(net, optimizer, rank, targets)
    assert STEPS % settings.every == settings.every - 1
    grads = [p.grad.clone() for p in net.parameters()]
    herd.metrics()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    end, took = torch.cuda.Event(), []
    end.record()
    for _ in range(
        settings.steps_until_applied
    ):  # it begins in the first, and is applied after the last
        for p, grad in zip(net.parameters(), grads, strict=True):
            p.grad = grad
        begin = time.perf_counter()
        optimizer.step()
        took.append(time.perf_counter() - begin)
    still_busy = not end.query()
    herd.sync()
    path = vector(net)
    herd.detach()
    return took, still_busy, path


def local_steps():
    """All of the above."""
    return {
        "paths": {name: drift(settings) for name, settings in CASES.items()},
        "resumed": {
            (name, stop): drift(CASES[name], stop)
            for name in ("at once", "overlap", "overlap, two bits")
            for stop in (5, 9)
        },
        "not finite": not_finite(),
        "busy": busy_device() if device().type == "cuda" else None,
    }


# --- DDP --------------------------------------------------------------------------------------


def sparse_steps():
    """Train with ExDyna in DDP; return what was computed, given and kept, and the weights."""
    torch.manual_seed(0)
    layers = [nn.Linear(60, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10)]
    ddp = DDP(nn.Sequential(*layers).to(device()), bucket_cap_mb=0.05)
    herd = gh.attach(ddp, sparsify=gh.ExDyna(density=0.02))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    own = given = torch.zeros((), dtype=torch.float64, device=device())
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(16):
        x = torch.randn(8, 60, generator=generator).to(device())
        grads = torch.autograd.grad(ddp.module(x).square().mean(), list(ddp.parameters()))
        own = own + torch.cat([grad.flatten() for grad in grads]).double()
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        given = given + torch.cat([p.grad.flatten() for p in ddp.parameters()]).double()
        optimizer.step()
    state = herd.state_dict(gather=False)["sparsify"]
    kept = torch.cat(
        [state["residual"][name].flatten() for name, _ in ddp.module.named_parameters()]
    )
    metrics = herd.metrics()
    herd.detach()
    return own, given, kept.double(), vector(ddp.module), metrics["steps"]


def ordered(unit):
    """Train with CD-GraB in DDP; return the orders and the weights."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(96, 20, generator=generator)
    data = TensorDataset(x, x[:, :3].abs().argmax(1))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 3))
    ddp = DDP(net.to(device()))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    sampler = gh.OrderedSampler(data, "cd-grab", batch_size=4, unit=unit)
    herd = gh.attach(ddp, order=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for images, labels in DataLoader(data, batch_size=4, sampler=sampler):
            optimizer.zero_grad()
            F.cross_entropy(ddp(images.to(device())), labels.to(device())).backward()
            optimizer.step()
    herd.finish()
    orders = sampler.ordering.orders
    herd.detach()
    return orders, vector(net)


def local_in_ddp():
    """Take local steps with a model in DDP and with the model alone; the weights and bytes."""
    found, generator = [], torch.Generator().manual_seed(dist.get_rank())
    inputs = [torch.randn(8, 100, generator=generator).to(device()) for _ in range(STEPS)]
    for wraps in (False, True):
        net = model().to(device())
        called = DDP(net) if wraps else net
        optimizer = optimizer_of(net)
        herd = gh.attach(called, optimizer=optimizer, local=CASES["overlap"])
        for x in inputs:
            optimizer.zero_grad()
            called(x).square().mean().backward()
            optimizer.step()
        within = vector(net)
        herd.sync()
        found.append((within, vector(net), herd.metrics()["total_bytes"]))
        herd.detach()
    return found


def in_ddp():
    """Train in DDP in all ways."""
    return {
        "sparse": sparse_steps(),
        "ordered": {unit: ordered(unit) for unit in (1, 4)},
        "local": local_in_ddp(),
    }


# --- FSDP2 ------------------------------------------------------------------------------------


def sharded(settings):
    """Take local steps with two replicas of two shards; weights within a phase and at its end."""
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("replicate", "shard"))
    net = model_of(mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
    herd = gh.attach(net, optimizer=optimizer, local=settings, mesh=mesh)
    for step in range(7):
        x, y = (one.to(device()) for one in batch(step))
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    within = whole(net)
    herd.sync()
    found = within, whole(net), herd.metrics()["exchanges"]
    herd.detach()
    return found


def replicas():
    """Shard with several settings."""
    one_bit = gh.LocalSteps(every=3, dense_below=8)
    exact = gh.LocalSteps(every=3, values="fp32", dense_below=8)
    return {"one bit": sharded(one_bit), "exact": sharded(exact)}
