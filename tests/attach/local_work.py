"""What ranks do in test_local_steps."""

import logging
import os
import signal
import time
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import gradherd as gh
from gradherd.hooks import local_steps
from gradherd.hooks.bucket_hook import hook_is_free
from gradherd.hooks.state import pack, unpack
from gradherd.local.exchange import SharedWeights

CASES = {
    "diloco": gh.LocalSteps(every=3, values="fp32", outer_lr=0.7, outer_momentum=0.9),
    "overlap": gh.LocalSteps(every=6, values="fp32", outer_momentum=0.3, overlap=True),
    "two bits": gh.LocalSteps(every=2, values="int2", dense_below=20),
    # What rounding takes stays in the weights of each rank.
    "one bit": gh.LocalSteps(every=3, dense_below=10),
    "one bit, not kept": gh.LocalSteps(every=3, dense_below=10, keep_residual=False),
    "one bit, overlap": gh.LocalSteps(every=4, dense_below=10, overlap=True),
}


def model(seed=0, norm=False):
    torch.manual_seed(seed)
    middle = nn.BatchNorm1d(8) if norm else nn.Identity()
    return nn.Sequential(nn.Linear(6, 8), middle, nn.Tanh(), nn.Linear(8, 2))


def batches(rank, start=0):
    """Yield the batches of a rank for ever."""
    while True:
        generator = torch.Generator().manual_seed(1000 * rank + start)
        x = torch.randn(5, 6, generator=generator)
        yield x, x[:, :2].sin() * (rank + 1)
        start += 1


def step(net, optimizer, batch):
    optimizer.zero_grad()
    nn.functional.mse_loss(net(batch[0]), batch[1]).backward()
    optimizer.step()


def vector(net):
    return nn.utils.parameters_to_vector(net.parameters()).detach().clone()


def made(settings, *, seed=0, norm=False, lr=0.2):
    """Return a model with local steps, its optimizer and its herd."""
    net = model(seed, norm)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.5)
    return net, optimizer, gh.attach(net, optimizer=optimizer, local=settings)


def train(settings, steps, rank):
    """Return the weights after each step, then those after sync()."""
    # Another seed on each rank: attach gives all of them rank 0's weights.
    net, optimizer, herd = made(settings, seed=rank)
    path = [vector(net)]
    for _, batch in zip(range(steps), batches(rank), strict=False):
        step(net, optimizer, batch)
        path.append(vector(net))
    with herd.shared_weights():
        shared = vector(net)
    assert torch.equal(vector(net), path[-1]), "own weights again"
    herd.sync()
    path.append(vector(net))
    with herd.shared_weights():
        assert torch.equal(vector(net), path[-1])
    assert not torch.equal(shared, path[-1])
    metrics = herd.metrics()
    herd.detach()
    step(net, optimizer, batch)  # After detach, steps are the optimizer's alone.
    return torch.stack(path), metrics


def resumed(settings, steps, stop, rank):
    """Train straight, and stopped after `stop` steps with rank 0's state alone; return both."""
    ends = []
    for cut in (None, stop):
        net, optimizer, herd = made(settings, norm=True)
        for at, batch in zip(range(steps), batches(rank), strict=False):
            if at == cut:
                kept = [net.state_dict(), optimizer.state_dict(), herd.state_dict()]
                packed = [unpack(pack(kept))]  # Only rank 0's are saved.
                torch.distributed.broadcast_object_list(packed, src=0)
                herd.detach()
                net, optimizer, herd = made(settings, seed=5, norm=True)
                net.load_state_dict(packed[0][0])
                optimizer.load_state_dict(packed[0][1])
                herd.load_state_dict(packed[0][2])
            step(net, optimizer, batch)
        state = herd.state_dict(gather=False)["local"]
        herd.sync()
        buffers = [b.clone() for b in net.buffers() if b.is_floating_point()]
        herd.detach()
        ends.append((vector(net), state["residual"], state["shared"], buffers))
    return ends


def one_bit(rank, steps=11, stop=6):
    """Train straight, and stopped within a phase with rank 0's state alone, in one bit."""
    ends = []
    for cut in (None, stop):
        net, optimizer, herd = one_bit_net(rank)
        for at in range(steps):
            if at == cut:
                kept = [net.state_dict(), optimizer.state_dict(), herd.state_dict()]
                packed = [unpack(pack(kept))]
                torch.distributed.broadcast_object_list(packed, src=0)
                herd.detach()
                net, optimizer, herd = one_bit_net(rank)
                net.load_state_dict(packed[0][0])
                optimizer.load_state_dict(packed[0][1])
                herd.load_state_dict(packed[0][2])
            generator = torch.Generator().manual_seed(1000 * rank + at)
            x = torch.randn(8, 100, generator=generator)
            step(net, optimizer, (x, x.sin()))
        state = herd.state_dict(gather=False)["local"]
        metrics, weights = herd.metrics(), vector(net)
        herd.sync()
        ends.append((vector(net), state["residual"], state["owner_error"]))
        herd.detach()
    return ends, state, metrics, weights


def one_bit_net(seed=0, **settings):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(100, 100), nn.Tanh(), nn.Linear(100, 100))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    return net, optimizer, gh.attach(net, optimizer=optimizer, local=gh.LocalSteps(**settings))


def synced_between_phases(settings, rank):
    """Return the weights after a phase, after sync() there, and after more steps and sync()."""
    net, optimizer, herd = made(settings)
    feed, path = batches(rank), []
    for _ in range(2):
        for _ in range(settings.every):
            step(net, optimizer, next(feed))
        path.append(vector(net))
        herd.sync()
        path.append(vector(net))
    exchanges, residual = herd.metrics()["exchanges"], herd.state_dict(gather=False)["local"]
    herd.detach()
    return torch.stack(path), exchanges, residual["residual"]


def buffers_of(settings, rank):
    """Return the statistics of BatchNorm before and after an exchange."""
    net, optimizer, herd = made(settings, norm=True)
    for _, batch in zip(range(settings.every - 1), batches(rank), strict=False):
        step(net, optimizer, batch)
    # The last step's own update, without the exchange behind it.
    before = net[1].running_mean.clone()
    with torch.no_grad():
        net(batch[0] * 2)
        expected = net[1].running_mean.clone()
        net[1].running_mean.copy_(before)
    step(net, optimizer, (batch[0] * 2, batch[1]))
    herd.detach()
    return expected, net[1].running_mean.clone()


def broken(rank, lr_after):
    """Let rank 1's weights become NaN once; return the paths around it, and the end."""
    net, optimizer, herd = made(CASES["one bit"])
    states, error = [], ""
    try:
        for at, batch in zip(range(30), batches(rank), strict=False):
            if at in (4, 5, 8):
                states.append((vector(net), herd.state_dict(gather=False)["local"]["shared"]))
            bad = rank == 1 and (at == 4 or (lr_after and at > 4))
            step(net, optimizer, (batch[0] * (torch.nan if bad else 1.0), batch[1]))
            if rank == 1 and at == 5:  # or its momentum would break every later exchange, too
                optimizer.state.clear()
            if at == 5:
                states.append((vector(net), herd.state_dict(gather=False)["local"]["shared"]))
        herd.sync()
    except RuntimeError as raised:
        error = str(raised)
    metrics = herd.metrics()
    herd.detach()
    return states, metrics["skipped_steps"], vector(net), error


def refusals(rank):
    """Return the errors of what does not fit, by name."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
    local, other = gh.LocalSteps(every=2), torch.optim.SGD(model().parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    hooked = DDP(net)
    hooked.register_comm_hook(None, allreduce_hook)
    calls = {
        "taken": lambda: gh.attach(hooked, optimizer=optimizer, local=local),
        "scaler": lambda: gh.attach(net, optimizer=optimizer, local=local, scaler=scaler),
        "both": lambda: gh.attach(net, optimizer=optimizer, local=local, sparsify="topk"),
        "no optimizer": lambda: gh.attach(net, local=local),
        "other optimizer": lambda: gh.attach(net, optimizer=other, local=local),
        "no local": lambda: gh.attach(net, optimizer=optimizer, sparsify="topk"),
        "not settings": lambda: gh.attach(net, optimizer=optimizer, local=30),
        "differ": lambda: gh.attach(net, optimizer=optimizer, local=gh.LocalSteps(every=2 + rank)),
    }
    errors = {}
    for name, call in calls.items():
        try:
            call()
        except (ValueError, RuntimeError) as error:
            errors[name] = str(error)
    herd = gh.attach(net, optimizer=optimizer, local=local)
    for name, module in {"a part": net[0], "around it": nn.Sequential(net)}.items():
        try:
            gh.attach(module, optimizer=optimizer, local=local)
        except ValueError as error:
            errors[name] = str(error)
    weights = unpack(pack(net.state_dict()))
    net.load_state_dict(model(3).state_dict())  # as of a model that was trained before
    try:
        step(net, optimizer, next(batches(rank)))
    except RuntimeError as error:
        errors["loaded after attach"] = str(error)
    net.load_state_dict(weights)
    step(net, optimizer, next(batches(rank)))
    state = herd.state_dict()
    everyone = [state]
    torch.distributed.broadcast_object_list(everyone, src=0)
    herd.load_state_dict(everyone[0])
    wrong = {
        "order of loading": lambda: net.load_state_dict(model(3).state_dict()),
        "optimizer last": lambda: [
            one["momentum_buffer"].add_(1) for one in optimizer.state.values()
        ],
    }
    for name, spoil in wrong.items():
        weights, moments = unpack(pack([net.state_dict(), optimizer.state_dict()]))
        herd.load_state_dict(everyone[0])
        spoil()
        try:
            step(net, optimizer, next(batches(rank)))
        except RuntimeError as error:
            errors[name] = str(error)
        net.load_state_dict(weights)
        optimizer.load_state_dict(moments)
    try:  # Rank 0 reaches the end of a phase, rank 1 asks for an exchange before.
        herd.sync() if rank else step(net, optimizer, next(batches(rank)))
    except RuntimeError as error:
        errors["out of step"] = str(error)
    net.add_module("late", nn.Linear(2, 2))
    try:
        herd.sync()
    except RuntimeError as error:
        errors["late parameter"] = str(error)
    herd.detach()
    return errors


class Branches(nn.Module):
    """Has a branch that not every forward uses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.branch, self.head = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x, branch):
        hidden = self.stem(x) + self.branch(x) if branch else self.stem(x)
        return self.head(hidden.tanh())


def branched(make, used_by, rank):
    """Return the weights of a straight run, and of one resumed from what rank 0 has saved."""
    ends = []
    for cut in (None, 5):
        net = Branches()
        optimizer = make(net.parameters())
        herd = gh.attach(net, optimizer=optimizer, local=CASES["one bit"])
        for at, (x, y) in zip(range(11), batches(rank), strict=False):
            if at == cut:
                kept = [unpack(pack([net.state_dict(), optimizer.state_dict(), herd.state_dict()]))]
                torch.distributed.broadcast_object_list(kept, src=0)
                herd.detach()
                net = Branches()
                optimizer = make(net.parameters())
                herd = gh.attach(net, optimizer=optimizer, local=CASES["one bit"])
                net.load_state_dict(kept[0][0])
                optimizer.load_state_dict(kept[0][1])
                herd.load_state_dict(kept[0][2])
            optimizer.zero_grad()
            # Behind the cut all use it: those that have not yet begin with moments of zero.
            nn.functional.mse_loss(net(x, rank == used_by or at > 7), y).backward()
            optimizer.step()
        ends.append(vector(net))
        herd.detach()
    return ends


OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
}


def another_optimizer(rank):
    """Let another optimizer step from the fourth step on; return weights and metrics at the end."""
    net, optimizer, herd = made(gh.LocalSteps(every=3, values="fp32", outer_momentum=0))
    feed, told = batches(rank), []
    for _ in range(3):
        step(net, optimizer, next(feed))
    before, plain = vector(net), torch.optim.SGD(net.parameters(), lr=0.2)
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("gradherd").addHandler(handler)
    for _ in range(40):
        step(net, plain, next(feed))
    logging.getLogger("gradherd").removeHandler(handler)
    own = vector(net)
    herd.sync()
    herd.detach()
    return before, own, vector(net), told


def kept_after_one_exchange():
    """Return what a rank keeps of one exchange of signs, and two refusals."""
    torch.manual_seed(0)
    net, errors = nn.Linear(200, 150), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    local = gh.LocalSteps(every=1, keep_residual=False)
    herd = gh.attach(net, optimizer=optimizer, local=local)
    rank = herd.world.rank
    x = torch.randn(4, 200, generator=torch.Generator().manual_seed(rank))
    net(x).square().mean().backward()
    optimizer.step()
    state = herd.state_dict(gather=False)
    for wrong in ({"kind": "int4"}, {"rank": (rank + 1) % 3}):
        try:
            herd.load_state_dict(state | {"local": state["local"] | wrong})
        except ValueError as error:
            errors.append(str(error))
    return {key: state["local"][key]["weight"] for key in ("residual", "owner_error")}, errors


def fails_to_attach(ddp, optimizer):
    """Attach with an error on the way: DDP must go on averaging."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(local_steps, "SharedWeights", Mock(side_effect=MemoryError))
        gh.attach(ddp, optimizer=optimizer, local=CASES["one bit"])
    assert hook_is_free(ddp) and ddp.broadcast_buffers


def in_ddp(rank):
    """Train a model with local steps in DDP and as it is; then let DDP average again."""
    found = []
    for wraps in (False, True):
        net = model(norm=True)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.5)
        called = DDP(net) if wraps else net
        if wraps:
            fails_to_attach(called, optimizer)
        herd = gh.attach(called, optimizer=optimizer, local=CASES["one bit"])
        for _, batch in zip(range(7), batches(rank), strict=False):
            step(called, optimizer, batch)
        herd.sync()
        found += [vector(net), *(b.clone() for b in net.buffers()), herd.metrics()["total_bytes"]]
        herd.detach()
    step(called, optimizer, next(batches(rank)))
    grads = torch.cat([p.grad.flatten() for p in net.parameters()])
    again = gh.attach(called, sparsify="exdyna")  # its hook is free again
    again.detach()
    return found, grads, called.broadcast_buffers


def gathered_before_the_first_step():
    """Go on from a state of an optimizer that holds nothing yet."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.5)
    herd = gh.attach(net, optimizer=optimizer, local=CASES["one bit"])
    state = [herd.state_dict(gather=True)]  # on rank 0
    torch.distributed.broadcast_object_list(state)
    herd.load_state_dict(state[0])
    herd.detach()
    return vector(net)


def ordered(rank):
    """Train with an order that learns from the gradients of all ranks."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 6, generator=generator)
    data = TensorDataset(x, x[:, :2])
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    sampler = gh.OrderedSampler(data, "cd-grab", batch_size=4)
    local = gh.LocalSteps(every=3, overlap=True)
    herd = gh.attach(net, order=sampler, optimizer=optimizer, local=local)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for batch in DataLoader(data, batch_size=4, sampler=sampler):
            step(net, optimizer, batch)
    herd.sync()
    orders, fed = sampler.ordering.orders, herd.metrics()["bytes_for_ordering"]
    herd.detach()
    return orders, fed, vector(net)


def everything():
    """Run all checks that need two ranks which both come back."""
    rank = torch.distributed.get_rank()
    return {
        "paths": {name: train(settings, 11, rank) for name, settings in CASES.items()},
        "resumed": {
            (name, stop): resumed(CASES[name], 11, stop, rank)
            for name, stops in {
                "diloco": (5,),
                "overlap": (5, 8),
                "one bit": (3, 5),
                "one bit, not kept": (4, 6),
                "one bit, overlap": (5, 8),
            }.items()
            for stop in stops
        },
        "buffers": buffers_of(CASES["one bit"], rank),
        "synced": synced_between_phases(CASES["one bit"], rank),
        "synced at once": synced_between_phases(CASES["overlap"], rank),
        "broken once": broken(rank, False),
        "broken for good": broken(rank, True),
        "refusals": refusals(rank),
        "branched": {
            (name, used_by): branched(make, used_by, rank)
            for name, make in OPTIMIZERS.items()
            for used_by in (0, 1)
        },
        "another optimizer": another_optimizer(rank),
        "ordered": ordered(rank),
        "in ddp": in_ddp(rank),
        "gathered early": gathered_before_the_first_step(),
    }


def under_way():
    """Return a rank's state within an exchange that goes on beside its steps."""
    rank = torch.distributed.get_rank()
    net, optimizer, herd = made(CASES["overlap"])
    for _, batch in zip(range(7), batches(rank), strict=False):
        step(net, optimizer, batch)
    return herd.state_dict(gather=False)["local"]


def saved(folder):
    """Train 4 steps with exchanges every 3, and let rank 0 save; return what was saved."""
    rank = torch.distributed.get_rank()
    net, optimizer, herd = made(CASES["one bit"], norm=True)
    for _, batch in zip(range(4), batches(rank), strict=False):
        step(net, optimizer, batch)
    state, own = herd.state_dict(), herd.state_dict(gather=False)
    (folder / f"own-{rank}").write_bytes(pack(own))
    if rank == 0:
        (folder / "state").write_bytes(pack(state))
    return vector(net), own["local"]


def continued(folder, merged):
    """Go on from what `saved` has left, on any number of ranks."""
    rank = torch.distributed.get_rank()
    net, optimizer, herd = made(CASES["one bit"], norm=True, seed=7)
    if merged:
        parts = sorted(folder.glob("own-*"))
        herd.load_state_dict(gh.merge_states(unpack(part.read_bytes()) for part in parts))
    else:
        herd.load_state_dict(unpack((folder / "state").read_bytes()))
    state, weights = herd.state_dict(gather=False)["local"], vector(net)
    for _, batch in zip(range(3), batches(rank, start=4), strict=False):
        step(net, optimizer, batch)
    herd.sync()
    return weights, state, vector(net)


def trains_until_killed(folder, how, die_at):
    """Save after steps 4 and 5; let rank 1 die in a phase, or die or sleep in an exchange.

    Goes on from the last step that all ranks have saved. What rank 0 sees is written.
    """
    rank = torch.distributed.get_rank()
    net, optimizer, herd = made(CASES["one bit"])
    start = last_common_step(folder)
    if start:
        model_state, optimizer_state, herd_state = read_saved(folder, rank, start)
        net.load_state_dict(model_state)
        optimizer.load_state_dict(optimizer_state)
        herd.load_state_dict(herd_state)
    for at, batch in zip(range(start, 8), batches(rank, start=start), strict=False):
        if at == die_at and rank == 1:
            if how == "phase":
                os.kill(os.getpid(), signal.SIGKILL)
            _fail_in_the_second_collective(how)
        try:
            step(net, optimizer, batch)
        except RuntimeError as error:
            (folder / "error").write_text(str(error))
            raise
        if how and at in (3, 4):
            kept = [net.state_dict(), optimizer.state_dict(), herd.state_dict(gather=False)]
            (folder / f"step-{at + 1}-{rank}").write_bytes(pack(kept))
    herd.sync()
    return vector(net)


def last_common_step(folder):
    """The last step of which both ranks have left a state; 0 if there is none."""
    both = (step for step in (5, 4) if len(list(folder.glob(f"step-{step}-*"))) == 2)
    return next(both, 0)


def read_saved(folder, rank, step):
    return unpack((folder / f"step-{step}-{rank}").read_bytes())


def goes_on_alone(folder):
    """Go on with one rank instead of two; the vectors before and after, and the residuals."""
    net, optimizer, herd = made(CASES["one bit"], seed=7)
    start = last_common_step(folder)
    herd.load_state_dict(gh.merge_states(read_saved(folder, rank, start)[2] for rank in (0, 1)))
    weights, state = vector(net), herd.state_dict()["local"]
    for _, batch in zip(range(start, 8), batches(0, start=start), strict=False):
        step(net, optimizer, batch)
    return weights, state, vector(net)


def _fail_in_the_second_collective(how):
    """Let this rank's next exchange stop between its messages."""

    def failing(shared):
        if how == "die":
            os._exit(1)
        time.sleep(120)

    SharedWeights._send_to_all = failing
