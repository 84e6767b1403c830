"""What ranks do in the tests of the sparse exchange between replicas of a sharded model."""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

import gradherd as gh
from gradherd.hooks.fsdp import sharded_groups
from gradherd.hooks.state import pack
from tests.attach.fsdp_work import Net, mesh_of

DENSITY = 0.2


def model_of(mesh, kind="plain", **options):
    torch.manual_seed(1)
    net = Net(kind)
    for block in (net.first, net.second):
        fully_shard(block, mesh=mesh["shard"], **options)
    return fully_shard(net, mesh=mesh["shard"], **options)


def settings(name, **more):
    method = gh.SPARSIFIERS[name]
    return gh.Sparsify(method=method() if name == "dense" else method(DENSITY), dense_below=8,
                       **more)  # fmt: skip


def batch(step, rank=None, size=4):
    draw = torch.Generator().manual_seed(100 * step + (dist.get_rank() if rank is None else rank))
    return torch.randn(size, 5, generator=draw), torch.randint(3, (size,), generator=draw)


def backward(model, step, sparse=None):
    x, y = batch(step)
    F.cross_entropy(model(x), y).backward()


def grads(model):
    """Return this rank's shards of p.grad, flat; zero where there is none."""
    parts = [
        torch.zeros(p.to_local().numel()) if p.grad is None else p.grad.to_local().flatten()
        for p in model.parameters()
    ]
    return torch.cat(parts).clone()


def flat(vectors):
    return torch.cat([tensor.flatten() for tensor in vectors.values()])


def conserved(shape, name, kind="plain", steps=6, **more):
    """Return the sum of all gradients over replicas, and what was applied or is still waiting."""
    mesh = mesh_of(shape)
    plain, model = model_of(mesh, kind), model_of(mesh, kind)
    herd = gh.attach(model, sparsify=settings(name, **more), mesh=mesh)
    total, applied = 0.0, 0.0
    for step in range(steps):
        for one in (plain, model):
            one.zero_grad()
            backward(one, step)
        own = grads(plain)
        if clip := more.get("clip"):  # the gradient of a replica, of which this is a shard
            squares = own.square().sum()
            dist.all_reduce(squares, group=mesh["shard"].get_group())
            own *= min(1.0, clip / float(squares.sqrt()))
        total, applied = total + own, applied + grads(model)
    waiting = flat(herd._exchange.vectors()["residual"])
    replicas = mesh["replicate"].get_group()
    for tensor in (total, waiting):
        dist.all_reduce(tensor, group=replicas)
    return total, applied * shape[0] + waiting, herd.metrics()


def replicas_after(shape, name, steps, lr=0.1):
    """Train, and return whether all replicas hold the same bits, and how far the model came."""
    mesh = mesh_of(shape)
    model = model_of(mesh)
    herd = gh.attach(model, sparsify=settings(name), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    before = torch.cat([p.to_local().detach().flatten().clone() for p in model.parameters()])
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    after = torch.cat([p.to_local().detach().flatten() for p in model.parameters()])
    peers = [torch.empty_like(after) for _ in range(shape[0])]
    dist.all_gather(peers, after.contiguous(), group=mesh["replicate"].get_group())
    herd.detach()
    return all(torch.equal(peer, after) for peer in peers), float((after - before).norm())


def all_in_children(shape=(2, 2)):
    """Return gradients of a model whose root holds no parameter, here and without an exchange."""
    mesh, found = mesh_of(shape), []
    for ours in (True, False):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh["shard"] if ours else mesh)
        fully_shard(model, mesh=mesh["shard"] if ours else mesh)
        if ours:
            gh.attach(model, sparsify=settings("dense"), mesh=mesh)
        for step in range(2):
            if step == 0:
                model.set_is_last_backward(False)
            backward(model, step)
            model.set_is_last_backward(True)
        found.append(torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()]))
    return found


def native(shape):
    """Return gradients with the dense method, and those of torch's own HSDP."""
    found = []
    for ours in (True, False):
        mesh = mesh_of(shape)
        if ours:
            model = model_of(mesh)
            gh.attach(model, sparsify=settings("dense"), mesh=mesh)
        else:
            torch.manual_seed(1)
            model = Net("plain")
            for block in (model.first, model.second):
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        for step in range(2):  # not cleared: they add up
            backward(model, step)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        found.append(torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()]))
    return found


def delayed(how):
    """Return gradients of four backwards that are exchanged together, and one by one."""
    mesh = mesh_of((2, 2))
    found = []
    for together in (True, False):
        model = model_of(mesh)
        gh.attach(model, sparsify=settings("dense"), mesh=mesh)
        for step in range(4):
            if together and how == "sync":
                model.set_requires_gradient_sync(step == 3)
            elif together:
                for group in sharded_groups(model):
                    group._group.all_reduce_grads = step == 3
            backward(model, step)
        found.append(torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()]))
    return found


def not_finite():
    """Return whether one rank's NaN reaches all gradients, and residuals stay."""
    mesh = mesh_of((2, 2))
    model = model_of(mesh)
    herd = gh.attach(model, sparsify=settings("exdyna"), mesh=mesh)
    for step in range(3):
        model.zero_grad()
        backward(model, step)
    before = flat(herd._exchange.vectors()["residual"])
    model.zero_grad()
    x, y = batch(3)
    loss = F.cross_entropy(model(x), y)
    (loss * float("nan") if dist.get_rank() == 1 else loss).backward()
    unchanged = torch.equal(flat(herd._exchange.vectors()["residual"]), before)
    return bool(grads(model).isnan().all()), unchanged, herd.metrics()["skipped_steps"]


def continued(folder, momentum=0.0):
    """Return weights of a run that went through, and of one that was saved and loaded."""
    mesh, weights = mesh_of((2, 2)), []
    for resumes in (False, True):
        model = model_of(mesh)
        herd = gh.attach(model, sparsify=settings("exdyna", momentum=momentum), mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(8):
            if resumes and step == 4:
                dcp.save({"model": model.state_dict(), "herd": herd.stateful()},
                         checkpoint_id=folder)  # fmt: skip
                herd.detach()
                model = model_of(mesh)
                with torch.no_grad():
                    model.last.weight.mul_(0)
                herd = gh.attach(model, sparsify=settings("exdyna", momentum=momentum), mesh=mesh)
                state = model.state_dict()
                dcp.load({"model": state, "herd": herd.stateful()}, checkpoint_id=folder)
                model.load_state_dict(state)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
        weights.append(torch.cat([p.to_local().detach().flatten() for p in model.parameters()]))
    return weights


def own_states(local):
    """Load what each rank has saved; return both states, and what another place's state is told."""
    mesh, states = mesh_of((2, 2)), []

    def attached():
        model = model_of(mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        how = {"optimizer": optimizer, "local": local} if local else {"sparsify": settings("topk")}
        return model, optimizer, gh.attach(model, mesh=mesh, **how)

    model, optimizer, herd = attached()
    for step in range(4):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    states.append(herd.state_dict(gather=False))
    herd.detach()
    *_, herd = attached()
    every = [None] * 4
    dist.all_gather_object(every, states[0])
    said = []
    for other in {0, 1, 2, 3} - {dist.get_rank()}:
        try:
            herd.load_state_dict(every[other])
        except ValueError as error:
            said.append(str(error))
    herd.load_state_dict(states[0])
    states.append(herd.state_dict(gather=False))
    herd.detach()
    return [pack(state) for state in states], said


def whole_residual(herd):
    """Return the mean over replicas of the whole residual, by parameter."""
    state = herd.stateful().state_dict()
    group = herd._exchange.peers.group
    mean = {}
    for name in herd._exchange.parameters:
        replica, count = herd._exchange.place[0], herd._exchange.mesh[0]
        own = state[f"residual.{replica}-of-{count}.{name}"].full_tensor()
        dist.all_reduce(own, group=group)
        mean[name] = own / count
    return mean


def saved(folder):
    """Train with both halves on a mesh of (2, 2), save, and return what waits."""
    mesh = mesh_of((2, 2))
    model = model_of(mesh)
    herd = gh.attach(model, sparsify=settings("exdyna"), mesh=mesh)
    for step in range(6):
        model.zero_grad()
        backward(model, step)
    dcp.save({"herd": herd.stateful()}, checkpoint_id=folder)
    return whole_residual(herd)


def loaded(folder, shape):
    """Load on another mesh; return what waits there, and whether it trains on."""
    mesh = mesh_of(shape)
    model = model_of(mesh)
    herd = gh.attach(model, sparsify=settings("exdyna"), mesh=mesh)
    dcp.load({"herd": herd.stateful(saved_by=(2, 2))}, checkpoint_id=folder)
    waits = whole_residual(herd)
    model.zero_grad()
    backward(model, 6)
    return waits, bool(grads(model).isfinite().all()), herd.metrics()["steps"]


def refused():
    """Return what attach says to models and meshes that do not fit."""
    mesh, said = mesh_of((2, 2)), {}
    torch.manual_seed(1)

    def attempt(name, make, **arguments):
        try:
            gh.attach(make(), **arguments)
            said[name] = "accepted"
        except ValueError as error:
            said[name] = str(error)

    whole = lambda mesh: fully_shard(Net("plain"), mesh=mesh)  # noqa: E731
    attempt("native", lambda: whole(mesh), sparsify="topk", mesh=mesh)
    attempt("no mesh", lambda: whole(mesh["shard"]), sparsify="topk")
    attempt("other mesh", lambda: whole(mesh["shard"]), sparsify="topk", mesh=mesh_of((1, 4)))
    order = gh.OrderedSampler(range(16), "cd-grab", batch_size=2, unit=2)
    attempt("mesh alone", lambda: whole(mesh["shard"]), order=order, mesh=mesh)
    attempt("ranks", lambda: whole(mesh["shard"]), order=order)
    attempt("batches", lambda: whole(mesh["shard"]), order=order, sparsify="topk", mesh=mesh,
            rows="batch")  # fmt: skip
    attempt("ddp", lambda: nn.parallel.DistributedDataParallel(Net("plain")), sparsify="topk",
            mesh=mesh)  # fmt: skip
    model = whole(mesh["shard"])
    herd = gh.attach(model, sparsify=settings("topk", momentum=0.9), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    try:
        optimizer.step()
    except ValueError as error:
        said["two momenta"] = str(error)
    herd.detach()
    optimizer.step()
    return said


METHODS = tuple(gh.SPARSIFIERS)


def everything(folder):
    folder = Path(folder)
    meshes = ((2, 2), (4, 1), (1, 4))
    results = {
        "conserved": {
            (shape, name): conserved(shape, name)
            for shape in meshes
            for name in ("exdyna", "topk", "dense")
        },
        "unused": conserved((2, 2), "exdyna", "unused"),
        "bf16": conserved((2, 2), "topk", values="bf16"),
        "clipped": conserved((2, 2), "exdyna", steps=4, clip=0.3),
        "replicas": {name: replicas_after((2, 2), name, 5) for name in METHODS},
        "native": {shape: native(shape) for shape in meshes} | {"children": all_in_children()},
        "delayed": {how: delayed(how) for how in ("sync", "all-reduce")},
        "not finite": not_finite(),
        "continued": continued(folder / "same"),
        "with momentum": continued(folder / "momentum", 0.9),
        "own states": [
            own_states(None),
            own_states(gh.LocalSteps(every=3)),
        ],
        "saved": saved(folder / "moved"),
        "refused": refused(),
    }
    dist.barrier()
    return results | {"loaded": loaded(folder / "moved", (4, 1))}
