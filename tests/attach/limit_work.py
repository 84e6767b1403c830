"""What ranks do in test_local_limits."""

import warnings

import torch
import torch.distributed as dist
from torch import nn

import gradherd as gh
from gradherd.hooks.state import pack, unpack


class Scaled(nn.Module):
    """Has a parameter without dimensions, as CLIP has."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.logit_scale = nn.Linear(30, 20), nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.layer(x) * self.logit_scale.exp()


def made():
    net = Scaled()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    local = gh.LocalSteps(every=3, dense_below=8)
    return net, optimizer, gh.attach(net, optimizer=optimizer, local=local)


def resumed(rank):
    """Train straight, and stopped within a phase with rank 0's state alone; and the state."""
    ends = []
    for cut in (None, 4):
        net, optimizer, herd = made()
        for at in range(8):
            if at == cut:
                kept = [net.state_dict(), optimizer.state_dict(), herd.state_dict()]
                packed = [pack(kept)]
                dist.broadcast_object_list(packed, src=0)
                herd.detach()
                kept, (net, optimizer, herd) = unpack(packed[0]), made()
                for one, state in zip((net, optimizer, herd), kept, strict=True):
                    one.load_state_dict(state)
            x = torch.randn(4, 30, generator=torch.Generator().manual_seed(100 * rank + at))
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
        ends.append(nn.utils.parameters_to_vector(net.parameters()).detach())
        steps = [float(state["step"]) for state in optimizer.state.values()]
        moments = herd.state_dict(gather=False)["local"]["optimizer"]
        herd.detach()
    return ends, steps, {name: tuple(moment.shape) for name, moment in moments.items()}


def refused():
    """Return what is said of an optimizer that steps each parameter on one rank only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        from torch.distributed.optim import ZeroRedundancyOptimizer
    net = Scaled()
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    try:
        gh.attach(net, optimizer=optimizer, local=gh.LocalSteps())
    except ValueError as error:
        return str(error)
    return ""


def tensors_within(*roots):
    """Return the storages that objects hold, by their address: their sizes in bytes."""
    found, seen, waiting = {}, set(), list(roots)
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, type):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            found[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list | tuple | set):
            waiting += one
        elif isinstance(getattr(one, "__dict__", None), dict):
            waiting += vars(one).values()
    return found


def memory(rank):
    """Return how many tensors of the model's size a herd holds, and elements of fingerprints."""
    torch.manual_seed(0)
    net = nn.Linear(1000, 600)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    own = sum(p.numel() for p in net.parameters()) * 4
    x = torch.randn(4, 1000, generator=torch.Generator().manual_seed(rank))

    def held(exchange):
        kept = tensors_within(exchange)
        for p in net.parameters():
            kept.pop(p.untyped_storage().data_ptr(), None)
        for state in optimizer.state.values():
            for moment in tensors_within(state):
                kept.pop(moment, None)
        large = sum(size >= 0.9 * own for size in kept.values())
        return large, sum(kept.values()) / own, sum(t.numel() for t in exchange._set.values())

    herd = gh.attach(net, optimizer=optimizer, local=gh.LocalSteps(every=4))
    found = [held(herd._exchange)]
    for _ in range(4):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
    state = herd.state_dict(gather=False)
    herd.detach()
    herd = gh.attach(net, optimizer=optimizer, local=gh.LocalSteps(every=4))
    herd.load_state_dict(state)
    del state
    found.append(held(herd._exchange))
    herd.detach()
    return found


def everything():
    rank = dist.get_rank()
    return {"resumed": resumed(rank), "refused": refused(), "memory": memory(rank)}
