"""What ranks do in test_stateful."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import gradherd as gh
from gradherd.hooks.state import pack, unpack

STEPS, SAVED = 23, 11


def made(num_workers=0, method=None, rows="auto"):
    """Return everything of a training with both halves."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(52, 20, generator=generator)
    data = TensorDataset(x, x[:, 0] > 0)
    net = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 2))
    ddp = DDP(net)
    sampler = gh.OrderedSampler(data, "cd-grab", batch_size=4)
    method = method or gh.ExDyna(density=0.1)
    herd = gh.attach(ddp, order=sampler, sparsify=method, rows=rows)
    loader = herd.batches(DataLoader(data, batch_size=4, sampler=sampler, num_workers=num_workers))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return net, ddp, herd, loader, optimizer


def go_on(ddp, loader, optimizer, done, until, save=lambda done: None):
    """Train from one step to another; epochs have seven. Tell `save` after each step."""
    while done < until:
        loader.sampler.set_epoch(done // 7)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(x), y.long()).backward()
            optimizer.step()
            done += 1
            save(done)
            if done == until:
                break


def stopped_twice(loader_workers, stops):
    """Train in a fresh process of its own after each stop, as far as state goes; the same epoch."""
    net, ddp, herd, loader, optimizer = made(loader_workers[0])
    done = 0
    for stop, workers in zip(stops, loader_workers[1:], strict=True):
        go_on(ddp, loader, optimizer, done, stop)
        done = stop
        kept = pack([net.state_dict(), optimizer.state_dict(), herd.state_dict()])
        herd.detach()
        net, ddp, herd, loader, optimizer = made(workers)
        model, optimizer_state, herd_state = unpack(kept)
        net.load_state_dict(model)
        optimizer.load_state_dict(optimizer_state)
        herd.load_state_dict(herd_state)
    go_on(ddp, loader, optimizer, done, STEPS)
    return what_counts(net, herd)


def one_bad_gradient(bad_step, value):
    """Let rank 1's gradient be worthless once; return residuals around that step, and the end."""
    net, ddp, herd, loader, optimizer = made()
    rank, around, skipped, done = herd.world.rank, [], 0, 0
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            done += 1
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp(x), y.long())
            (loss * value if done == bad_step and rank == 1 else loss).backward()
            if done in (bad_step - 1, bad_step):
                around.append(herd.state_dict()["sparsify"]["residual"])
            finite = all(p.grad.isfinite().all() for p in net.parameters())
            skipped += not finite
            if finite:
                optimizer.step()
    orders = herd.sampler.ordering.orders
    return around, skipped, herd.metrics()["skipped_steps"], what_counts(net, herd), orders


def what_counts(net, herd):
    state = herd.state_dict()
    weights = nn.utils.parameters_to_vector(net.parameters()).detach()
    return weights, state["ordering"]["orders"], state["sparsify"]["residual"]


def save_and_load(folder):
    """Return what counts at the end of a run, and of one that was loaded in its middle."""
    net, ddp, herd, loader, optimizer = made()

    def save(done):
        if done == SAVED:
            parts = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
            dcp.save({**parts, "herd": herd.stateful()}, checkpoint_id=folder)

    go_on(ddp, loader, optimizer, 0, STEPS, save)
    straight = what_counts(net, herd)

    net, ddp, herd, loader, optimizer = made()
    # Momentum buffers must be there to be loaded into.
    for parameter in net.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    parts = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load({**parts, "herd": herd.stateful()}, checkpoint_id=folder)
    net.load_state_dict(parts["model"])
    optimizer.load_state_dict(parts["optimizer"])
    go_on(ddp, loader, optimizer, SAVED, STEPS)
    return straight, what_counts(net, herd)


def load_elsewhere(folder, saved_by=None):
    """Load what another number of ranks has saved, and train on; return the residuals loaded."""
    _, ddp, herd, loader, optimizer = made()
    dcp.load({"herd": herd.stateful(saved_by)}, checkpoint_id=folder)
    loaded = herd.state_dict()
    go_on(ddp, loader, optimizer, 0, 2)
    return loaded["sparsify"]["residual"], loaded["ordering"]["orders"]


def saved_by_rank_0(folder):
    """Save on rank 0 alone, as frameworks do; return what counts, and errors of other settings."""
    net, ddp, herd, loader, optimizer = made()

    def save(done):
        if done == SAVED:
            state = [net.state_dict(), optimizer.state_dict(), herd.state_dict()]
            if dist.get_rank() == 0:
                torch.save(state[:2], folder / "model.pt")
                torch.save(state[2], folder / "herd.pt")
            dist.barrier()

    go_on(ddp, loader, optimizer, 0, STEPS, save)
    straight = what_counts(net, herd)
    herd.detach()
    net, ddp, herd, loader, optimizer = made()
    model, optimizer_state = torch.load(folder / "model.pt")
    net.load_state_dict(model)
    optimizer.load_state_dict(optimizer_state)
    state = torch.load(folder / "herd.pt")
    herd.load_state_dict(state)
    go_on(ddp, loader, optimizer, SAVED, STEPS)
    return straight, what_counts(net, herd), _refused_states(state)


def _refused_states(state):
    sparse, errors = state["sparsify"], {}
    own = {key: value for key, value in sparse.items() if key != "other_ranks"}
    velocity = {
        key: part | {"velocity": part["residual"]}
        for key, part in enumerate([own, *sparse["other_ranks"]])
    }
    tries = {
        "rank": ({}, state | {"sparsify": own}),
        "momentum": ({}, state | {"sparsify": velocity[0] | {"other_ranks": [velocity[1]]}}),
        "blocks": ({"method": gh.ExDyna(density=0.1, blocks=16)}, state),
        "rows": ({"rows": gh.SketchRows(size=64)}, state),
    }
    for name, (settings, saved) in tries.items():
        _, _, herd, _, _ = made(**settings)
        if name == "rank" and dist.get_rank() == 0:
            continue
        try:
            herd.load_state_dict(saved)
        except ValueError as error:
            errors[name] = str(error)
    return errors


def continued_elsewhere(folder):
    """Load what rank 0 of two ranks has saved on another number of ranks; return residuals."""
    _, ddp, herd, loader, optimizer = made()
    herd.load_state_dict(torch.load(folder / "herd.pt"))
    residual = herd.state_dict()["sparsify"]["residual"]
    go_on(ddp, loader, optimizer, 0, 2)
    return residual


class OwnState:
    """A user's own Stateful around a herd."""

    def __init__(self, herd, packed):
        self.herd, self.packed = herd, packed

    def state_dict(self):
        herd = self.herd.stateful() if self.packed else self.herd
        return {"step": 3, "herd": herd.state_dict()}

    def load_state_dict(self, state):
        (self.herd.stateful() if self.packed else self.herd).load_state_dict(state["herd"])


def bare_herd(folder):
    """Return what DCP is told when it is given a herd itself."""
    _, _, herd, _, _ = made()
    refusals, missing = [], []
    for thing in (herd, OwnState(herd, packed=False), herd.state_dict()):
        try:
            dcp.save({"herd": thing}, checkpoint_id=folder)
        except dcp.api.CheckpointException as error:  # DCP wraps what ranks raise
            refusals.append(str(error))
    dcp.save({"herd": herd.stateful()}, checkpoint_id=folder)
    for thing in (herd, OwnState(herd, packed=False)):
        try:
            dcp.load({"herd": thing}, checkpoint_id=folder)
        except dcp.api.CheckpointException as error:
            missing.append(str(error))
    return refusals, missing


def in_an_own_stateful(folder):
    """Save in mid-epoch through a Stateful of one's own, and load into a fresh herd."""
    _, ddp, herd, loader, optimizer = made()
    go_on(ddp, loader, optimizer, 0, 5)
    dcp.save({"app": OwnState(herd, packed=True)}, checkpoint_id=folder)
    want = herd.state_dict()
    herd.detach()
    _, _, fresh, _, _ = made()
    dcp.load({"app": OwnState(fresh, packed=True)}, checkpoint_id=folder)
    return pack(want), pack(fresh.state_dict())
