"""What ranks do in the tests of local steps between replicas of a sharded model."""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import gradherd as gh
from gradherd.hooks.local_steps import LocalExchange
from tests.attach.fsdp_sparse_work import batch, model_of
from tests.attach.fsdp_work import Net, mesh_of

EVERY = 3


def settings(values="int2", **more):
    return gh.LocalSteps(every=EVERY, values=values, **{"dense_below": 8} | more)


SAVED = {
    "momentum": settings(outer_momentum=0.5),
    "not kept": settings(keep_residual=False),
    "one bit": settings("int1"),
}


def attached(mesh, local, lr=0.1):
    model = model_of(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    herd = gh.attach(model, optimizer=optimizer, local=local, mesh=mesh)
    return model, optimizer, herd


def loss_of(model, step, rank):
    x, y = batch(step, rank)
    return F.cross_entropy(model(x), y)


def train(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step, dist.get_rank()).backward()
        optimizer.step()


def shards(model):
    return torch.cat([p.detach().to_local().flatten() for p in model.parameters()])


def whole(model):
    return torch.cat([p.detach().full_tensor().flatten() for p in model.parameters()])


def like_plain_modules(shape, **more):
    """Return the weights of a sharded run, and of plain modules, one for each replica."""
    mesh, steps = mesh_of(shape), range(2 * EVERY + 2)
    model, optimizer, herd = attached(mesh, settings("fp32", **more))
    train(model, optimizer, steps)
    torch.manual_seed(1)
    net = Net("plain")
    plain = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    group = mesh["replicate"].get_group()
    world = gh.World(dist.get_rank(group), dist.get_world_size(group), group)
    exchange = LocalExchange(net, plain, settings("fp32", **more), world, None)
    first = dist.get_rank() // shape[1] * shape[1]
    for step in steps:
        plain.zero_grad()
        # What the shards of one replica compute together.
        losses = [loss_of(net, step, first + shard) for shard in range(shape[1])]
        (sum(losses) / shape[1]).backward()
        plain.step()
    flat = nn.utils.parameters_to_vector(net.parameters()).detach()
    with herd.shared_weights():
        shared = whole(model)
    with exchange.shared_weights():
        shared_plain = nn.utils.parameters_to_vector(net.parameters()).detach()
    herd.detach()
    exchange.close()
    return whole(model), flat, shared, shared_plain


def equal_after_sync(values):
    """Return whether replicas differ within a phase, and are the same bits after sync()."""
    mesh = mesh_of((2, 2))
    model, optimizer, herd = attached(mesh, settings(values))
    train(model, optimizer, range(2 * EVERY + 1))
    found, group = [], mesh["replicate"].get_group()
    for sync in (False, True):
        if sync:
            herd.sync()
        own = shards(model)
        peers = [torch.empty_like(own) for _ in range(2)]
        dist.all_gather(peers, own, group=group)
        found.append(torch.equal(*peers))
    metrics = herd.metrics()
    herd.detach()
    return (*found, metrics["exchanges"], metrics["residual_norm"])


def evaluated():
    """Return outputs before and after an evaluation of the shared weights, and those inside."""
    mesh, (x, _) = mesh_of((2, 2)), batch(0, 0)
    model, optimizer, herd = attached(mesh, settings())
    train(model, optimizer, range(EVERY + 1))
    with torch.no_grad():
        before = model(x)
        with herd.shared_weights():
            inside = model(x)
        after = model(x)
    herd.detach()
    return before, inside, after


def not_finite():
    """Break one shard of replica 1; return what each rank goes on from, and the log of skips."""
    mesh = mesh_of((2, 2))
    model, optimizer, herd = attached(mesh, settings("fp32"))
    train(model, optimizer, range(EVERY))
    before = shards(model)  # equal to the shared weights
    train(model, optimizer, range(EVERY, 2 * EVERY - 1))
    own = shards(model)
    if dist.get_rank() == 3:
        with torch.no_grad():
            model.last.weight.to_local().fill_(torch.nan)
    # Only this rank's shard may be broken, so the last step must not spread it by a forward.
    for parameter in model.parameters():
        parameter.grad = None
    optimizer.step()
    found = shards(model)
    skipped = herd.metrics()["skipped_steps"]
    herd.detach()
    return torch.equal(found, before), torch.equal(found, own), skipped


def continued(folder, stop, local):
    """Return weights of a run that went through, and of one that was saved and loaded."""
    mesh, weights = mesh_of((2, 2)), []
    for resumes in (False, True):
        model, optimizer, herd = attached(mesh, local, lr=0.05)
        optimizer.param_groups[0]["momentum"] = 0.0
        train(model, optimizer, range(stop))
        if resumes:
            dcp.save({"herd": herd.stateful()}, checkpoint_id=folder)
            herd.detach()
            model, optimizer, herd = attached(mesh, local, lr=0.05)
            optimizer.param_groups[0]["momentum"] = 0.0
            dcp.load({"herd": herd.stateful()}, checkpoint_id=folder)
        train(model, optimizer, range(stop, 9))
        weights.append(shards(model))
        herd.detach()
    return weights


def vectors_of(herd):
    """Return whole shared weights, and means over replicas of weights and of what waits."""
    state, found = herd.stateful().state_dict(), {}
    exchange = herd._exchange
    replica, count = exchange.place[0], exchange.mesh[0]
    for key in ("shared", "residual", "weights"):
        for name in exchange.parameters:
            own = state[f"{key}.{replica}-of-{count}.{name}"].full_tensor()
            if key == "residual":  # what owners have lost is sent by all on another mesh
                own += state[f"owner_error.{replica}-of-{count}.{name}"].full_tensor()
            dist.all_reduce(own, group=exchange.peers.group)
            found[f"{key} {name}"] = own / count
    return found


def moved(folder):
    """Save in mid-phase on (2, 2), load on (4, 1); return what there was and what there is."""
    model, optimizer, herd = attached(mesh_of((2, 2)), settings(keep_residual=False))
    train(model, optimizer, range(EVERY + 2))
    dcp.save({"herd": herd.stateful()}, checkpoint_id=folder)
    before = vectors_of(herd)
    herd.detach()
    model, optimizer, herd = attached(mesh_of((4, 1)), settings(keep_residual=False))
    dcp.load({"herd": herd.stateful(saved_by=(2, 2))}, checkpoint_id=folder)
    after = vectors_of(herd)
    train(model, optimizer, [EVERY + 2])
    metrics = herd.metrics()
    herd.detach()
    return before, after, metrics["local_steps"], metrics["exchanges"]


def ordered():
    """Return epochs learned by a sharded model that takes local steps, and the orders' versions."""
    mesh = mesh_of((2, 2))
    data = torch.utils.data.TensorDataset(*batch(0, 0, 32))
    sampler = gh.OrderedSampler(data, "cd-grab", batch_size=4, unit=4)
    model = model_of(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    herd = gh.attach(model, order=sampler, optimizer=optimizer, local=settings(), mesh=mesh)
    for _ in range(2):
        for x, y in torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    versions = [None] * 4
    dist.all_gather_object(versions, sampler.ordering.version)
    herd.detach()
    return sampler.epoch, len(set(versions))


def refused():
    """Return what attach says to models and settings that do not fit."""
    mesh, said = mesh_of((2, 2)), {}

    def attempt(name, shard_mesh, local=None, given=mesh, **options):
        model = fully_shard(Net("plain"), mesh=shard_mesh, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            gh.attach(model, optimizer=optimizer, local=local or settings(), mesh=given)
            said[name] = "accepted"
        except ValueError as error:
            said[name] = str(error)

    attempt("native", mesh)
    attempt("no mesh", mesh["shard"], given=None)
    attempt("overlap", mesh["shard"], settings(overlap=True))
    attempt("offload", mesh["shard"], offload_policy=CPUOffloadPolicy(pin_memory=False))
    return said


def everything(folder):
    folder = Path(folder)
    return {
        "plain": {shape: like_plain_modules(shape) for shape in ((2, 2), (4, 1))}
        | {"momentum": like_plain_modules((2, 2), outer_momentum=0.9, outer_lr=0.7)},
        "sync": {values: equal_after_sync(values) for values in ("fp32", "int4", "int1")},
        "evaluated": evaluated(),
        "not finite": not_finite(),
        "continued": {
            (stop, name): continued(folder / f"{name}-{stop}", stop, local)
            for stop in (3, 5)  # at an exchange, and within a phase
            for name, local in SAVED.items()
        },
        "moved": moved(folder / "moved"),
        "ordered": ordered(),
        "refused": refused(),
    }
