"""What ranks do to test the exchange without a host: on the CPU, where it is forced."""

import importlib
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradherd as gh
from gradherd.comm import script
from gradherd.comm.world import World

# By name: the package has a function `attach`, too.
sparse_hook = importlib.import_module("gradherd.hooks.sparse_hook")
gpu_worker = importlib.import_module("gradherd.sparsify.gpu_worker")


@contextmanager
def fixed_shapes(forced):
    """Let methods that can exchange in fixed shapes do so on a CPU."""
    before = sparse_hook.runs_on_device
    sparse_hook.runs_on_device = gpu_worker.has_fixed_shapes if forced else lambda *_: False
    try:
        yield
    finally:
        sparse_hook.runs_on_device = before


class WithTable(nn.Module):
    """A table with row-sparse gradients, before layers of several buckets."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 40, sparse=True)
        layers = [nn.Linear(40, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10)]
        self.layers = nn.Sequential(*layers)

    def forward(self, rows, x):
        return self.layers(x + self.table(rows))


def train(forced, resume_at=None):
    """Gradients of every step, metrics and residuals; optionally saved and loaded on the way."""
    world = World.detect()

    def make():
        torch.manual_seed(0)
        model = DDP(WithTable(), bucket_cap_mb=0.02)
        herd = gh.attach(model, sparsify=gh.Sparsify(method=gh.ExDyna(density=0.03)))
        return model, herd, torch.optim.SGD(model.parameters(), lr=0.05)

    generator = torch.Generator().manual_seed(world.rank)
    seen, raw = [], []
    with fixed_shapes(forced):
        model, herd, optimizer = make()
        for step in range(8):
            if step == resume_at:
                state, weights = herd.state_dict(), model.state_dict()
                model, herd, optimizer = make()
                model.load_state_dict(weights)
                herd.load_state_dict(state)
            rows = torch.randint(50, (8,), generator=generator)
            x = torch.randn(8, 40, generator=generator)
            with model.no_sync():
                loss = model(rows, x).square().mean()
            own = torch.autograd.grad(loss, list(model.parameters()))
            raw.append([grad.to_dense() for grad in own])
            optimizer.zero_grad()
            model(rows, x).square().mean().backward()
            seen.append([p.grad.to_dense().clone() for p in model.parameters()])
            if step != 4:  # a step that no optimizer sees, either
                optimizer.step()
        residual = herd.state_dict(gather=False)["sparsify"]["residual"]
    return {"raw": raw, "seen": seen, "metrics": herd.metrics(), "residual": residual}


def spoilt(forced):
    """One rank has a gradient that is not finite."""
    world = World.detect()
    torch.manual_seed(0)
    with fixed_shapes(forced):
        model = DDP(nn.Linear(40, 100))
        herd = gh.attach(model, sparsify=gh.ExDyna(density=0.03))
        grads = []
        for step in range(3):
            model.zero_grad()
            x = torch.ones(2, 40) * (torch.nan if step == 1 and world.rank else 1.0)
            model(x).square().mean().backward()
            grads.append(bool(model.module.weight.grad.isnan().all()))
    return grads, herd.metrics()["steps"], herd.metrics()["skipped_steps"]


def clipped(forced, clip=0.1):
    """What was sent, what waits, and the sum of the gradients as each rank should clip its own."""
    world = World.detect()
    torch.manual_seed(0)
    with fixed_shapes(forced):
        model = DDP(nn.Sequential(nn.Linear(40, 60), nn.Linear(60, 20)), bucket_cap_mb=0.005)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        settings = gh.Sparsify(method=gh.ExDyna(density=0.05), clip=clip)
        herd = gh.attach(model, sparsify=settings, scaler=scaler)
        sent, own, norms = 0.0, 0.0, []
        for step in range(5):
            x = torch.randn(4, 40, generator=torch.Generator().manual_seed(9 * step + world.rank))
            x *= 10.0 ** (step - 3)  # some are large, some are not
            with model.no_sync():
                loss = model(x).square().mean()
            grads = torch.autograd.grad(loss, list(model.parameters()))
            flat = torch.cat([grad.flatten() for grad in grads])
            norms.append(float(flat.norm()))
            own = own + flat * min(1.0, clip / norms[-1])
            model.zero_grad()
            scaler.scale(model(x).square().mean()).backward()
            sent = sent + torch.cat([p.grad.flatten() / 8 for p in model.parameters()])
        residual = herd.state_dict(gather=False)["sparsify"]["residual"]
    left = torch.cat([residual[name].flatten() for name, _ in model.module.named_parameters()])
    return sent, left, own, norms


def small_sum():
    """A sum among more ranks than an all-gather is meant for."""
    world, before = World.detect(), script.SMALL_WORLD
    script.SMALL_WORLD = 1
    try:
        own = torch.arange(3.0) + world.rank
        total = script.AllReduceSmall(own).start(world).finished().value
        return own.tolist(), total.tolist()
    finally:
        script.SMALL_WORLD = before


def both_momenta():
    """What optimizers get to hear that have momentum, besides that of the sparsifier."""
    heard = []
    for make in (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p),
        lambda p: torch.optim.SGD(p, lr=0.1),
    ):
        model = DDP(nn.Linear(40, 100))
        gh.attach(model, sparsify=gh.Sparsify(method=gh.ExDyna(density=0.03), momentum=0.9))
        model(torch.ones(2, 40)).sum().backward()
        torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9).step()  # not its own
        try:
            make(model.parameters()).step()
            heard.append("")
        except ValueError as error:
            heard.append(str(error))
    return heard


def everything():
    return {
        "momenta": both_momenta(),
        "host": train(False),
        "device": train(True),
        "resumed": train(True, resume_at=5),
        "spoilt": [spoilt(False), spoilt(True)],
        "clipped": [clipped(False), clipped(True)],
        "small": small_sum(),
    }
