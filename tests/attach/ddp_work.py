"""What the ranks of test_ddp.py do. Ledgers hold what a rank computed, was given and kept."""

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

import gradherd as gh

SPARSE = gh.Sparsify(method=gh.ExDyna(density=0.05), dense_below=20)


def net(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 4)]
    return nn.Sequential(*layers).to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float64, size: int = 5) -> Tensor:
    seed = 1000 * step + dist.get_rank()
    return torch.randn(size, 8, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Ledger:
    """Adds up, in float64, what the books of a model should balance."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = dict(model.named_parameters())
        self.own = {n: torch.zeros(p.shape).double() for n, p in self._parameters.items()}
        self.given = copy.deepcopy(self.own)
        self.last: dict[str, Tensor | None] = {}

    def compute(self, loss: Tensor, weight: float = 1.0) -> None:
        """Book the gradient of a loss, which is left alone."""
        grads = torch.autograd.grad(loss, list(self._parameters.values()), allow_unused=True)
        for name, grad in zip(self._parameters, grads, strict=True):
            if grad is not None:
                self.own[name] += weight * grad.double()

    def receive(self, unit: float = 1.0) -> None:
        """Book what arrived in .grad."""
        self.last = {n: None if p.grad is None else p.grad.clone() for n, p in self.items()}
        for name, grad in self.last.items():
            if grad is not None:
                self.given[name] += unit * grad.double()

    def items(self) -> Iterable[tuple[str, nn.Parameter]]:
        return self._parameters.items()

    def close(self, herd: gh.Herd) -> dict[str, dict[str, Tensor]]:
        kept = herd.state_dict()["sparsify"]["residual"]
        return {"own": self.own, "given": self.given, "kept": kept, "last": self.last}


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def take_steps(ddp: DDP, ledger: Ledger, batches: Iterable[Tensor]) -> None:
    """Book each batch's own gradient, walk back through DDP, and book what arrives."""
    for x in batches:
        ledger.compute(loss_of(ddp.module, x))
        ddp.zero_grad()
        loss_of(ddp, x).backward()
        ledger.receive()


def plain_steps(
    steps: int,
    dtype: torch.dtype,
    settings: gh.Sparsify = SPARSE,
    views: bool = False,
    static: bool = False,
):
    """Steps without an update; buckets so small that DDP rebuilds them."""
    model = net(dtype)
    ddp = DDP(model, bucket_cap_mb=1e-3, gradient_as_bucket_view=views, static_graph=static)
    herd = gh.attach(ddp, sparsify=settings)
    ledger = Ledger(model)
    take_steps(ddp, ledger, [batch(step, dtype) for step in range(steps)])
    return ledger.close(herd) | {"metrics": herd.metrics()}


def dense_steps(steps: int, dtype: torch.dtype):
    """The mean gradient of plain DDP, summed over steps."""
    model = net(dtype)
    ddp = DDP(model)
    ledger = Ledger(model)
    for step in range(steps):
        ddp.zero_grad()
        loss_of(ddp, batch(step, dtype)).backward()
        ledger.receive()
    return ledger.given


def accumulating():
    """Three micro-batches before each exchange, two of them under no_sync."""
    model = net()
    ddp = DDP(model, bucket_cap_mb=1e-3)
    herd = gh.attach(ddp, sparsify=SPARSE)
    ledger = Ledger(model)
    for step in range(4):
        ddp.zero_grad()
        for micro in range(3):
            x = batch(10 * step + micro)
            ledger.compute(loss_of(model, x))
            with ddp.no_sync() if micro < 2 else contextlib.nullcontext():
                loss_of(ddp, x).backward()
        ledger.receive()
    return ledger.close(herd) | {"steps": herd.metrics()["steps"]}


def joining():
    """Rank r has 3 + r batches; the ranks that are done shadow the others."""
    model = net()
    ddp = DDP(model, bucket_cap_mb=1e-3)
    herd = gh.attach(ddp, sparsify=SPARSE)
    ledger = Ledger(model)
    with ddp.join(divide_by_initial_world_size=True):
        take_steps(ddp, ledger, [batch(step) for step in range(3 + dist.get_rank())])
    return ledger.close(herd)


class Branches(nn.Module):
    """Two branches; a call uses those it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 6), nn.Linear(8, 6)

    def forward(self, x: Tensor, use: str) -> Tensor:
        out = sum(getattr(self, name)(x) for name in use.split("+"))
        assert isinstance(out, Tensor)
        return out


def branching():
    """Branches that all ranks use, some, or none."""
    torch.manual_seed(0)
    model = Branches().double()
    ddp = DDP(model, find_unused_parameters=True)
    herd = gh.attach(ddp, sparsify=gh.Sparsify(method=gh.ExDyna(density=0.1), dense_below=0))
    ledger = Ledger(model)
    seen = []
    rank = dist.get_rank()
    plan = ["left+right", "left", "left", "right", ["left", "right"][rank % 2], "left"]
    for step, use in enumerate(plan):
        x = batch(step)
        ledger.compute(model(x, use).square().mean())
        ddp.zero_grad(set_to_none=True)
        ddp(x, use).square().mean().backward()
        ledger.receive()
        seen.append({name: grad is not None for name, grad in ledger.last.items()})
    return ledger.close(herd) | {"seen": seen}


def scaled():
    """A loss scale that changes, and a step with an infinity on rank 1."""
    model = net(torch.float32)
    ddp = DDP(model, bucket_cap_mb=1e-3)
    scaler = GradScaler("cpu", init_scale=64.0, growth_interval=2)
    herd = gh.attach(ddp, sparsify=SPARSE, scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    ledger = Ledger(model)
    scales, skipped = [], []
    for step in range(7):
        x = batch(step, torch.float32)
        bad = step == 3
        scale = scaler.get_scale()
        before = herd.state_dict()["sparsify"]
        if bad and dist.get_rank() == 1:
            x[0, 0] = torch.inf
        if not bad:
            ledger.compute(loss_of(model, x))
        optimizer.zero_grad()
        scaler.scale(loss_of(ddp, x)).backward()
        if bad:
            after = herd.state_dict()["sparsify"]
            assert all(
                torch.equal(before["residual"][n], after["residual"][n]) for n in after["residual"]
            )
            assert before["step"] == after["step"]
            assert all(not bool(p.grad.isfinite().any()) for p in model.parameters())
        else:
            ledger.receive(1 / scale)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scale)
        skipped.append(scaler.get_scale() < scale)
    return ledger.close(herd) | {"scales": scales, "skipped": skipped, "metrics": herd.metrics()}


def two_models():
    """Two models with a hook each, stepped in turn; each alone must do the same."""

    def alone(which: tuple[int, ...]) -> dict[int, dict[str, dict[str, Tensor]]]:
        models, herds, ledgers, ddps = {}, {}, {}, {}
        for number in which:
            models[number] = net()
            with torch.no_grad():
                for p in models[number].parameters():
                    p.add_(0.1 * number)
            ddps[number] = DDP(models[number], bucket_cap_mb=1e-3)
            herds[number] = gh.attach(ddps[number], sparsify=SPARSE)
            ledgers[number] = Ledger(models[number])
        for step in range(4):
            for number in which:
                ddps[number].zero_grad()
                loss_of(ddps[number], batch(step)).backward()
                ledgers[number].receive()
        return {number: ledgers[number].close(herds[number]) for number in which}

    return alone((0, 1)), alone((0,)) | alone((1,))


def images(channels_last: bool):
    """A convolution whose weights may lie in memory in another order."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 4, 3)).double()
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    ddp = DDP(model, gradient_as_bucket_view=True)
    herd = gh.attach(ddp, sparsify=SPARSE)
    ledger = Ledger(model)
    seeds = [torch.Generator().manual_seed(10 * step + dist.get_rank()) for step in range(4)]
    images = [torch.randn(2, 3, 8, 8, generator=seed).double() for seed in seeds]
    take_steps(ddp, ledger, images)
    return ledger.close(herd)


def interrupted(settings: gh.Sparsify, stop: int, steps: int):
    """Training that is stopped, saved and built anew; the last gradients and weights."""
    model = net(torch.float32)
    ddp = DDP(model, bucket_cap_mb=1e-3)
    herd = gh.attach(ddp, sparsify=settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        if step == stop:
            weights, saved = copy.deepcopy(model.state_dict()), herd.state_dict()
            herd.detach()
            model = net(torch.float32)
            model.load_state_dict(weights)
            ddp = DDP(model, bucket_cap_mb=1e-3)
            herd = gh.attach(ddp, sparsify=settings)
            herd.load_state_dict(saved)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.zero_grad()
        loss_of(ddp, batch(step, torch.float32)).backward()
        optimizer.step()
    return {n: p.detach() for n, p in model.named_parameters()}, herd.state_dict()["sparsify"]


def flat_steps(settings: gh.Sparsify, steps: int):
    """Every step's own gradient and mean as flat vectors, in the order of parameters."""
    model = net(torch.float32)
    ddp = DDP(model, bucket_cap_mb=1e-3)
    herd = gh.attach(ddp, sparsify=settings)
    own, given = [], []
    for step in range(steps):
        x = batch(step, torch.float32)
        grads = torch.autograd.grad(loss_of(model, x), list(model.parameters()))
        own.append(torch.cat([grad.flatten() for grad in grads]))
        ddp.zero_grad()
        loss_of(ddp, x).backward()
        given.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    kept = herd.state_dict()["sparsify"]["residual"]
    return own, given, torch.cat([kept[n].flatten() for n, _ in model.named_parameters()])


def subgroup():
    """Two groups of two ranks, each with a model of its own."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = net()
    ddp = DDP(model, process_group=groups[dist.get_rank() // 2])
    herd = gh.attach(ddp, sparsify=SPARSE)
    ledger = Ledger(model)
    take_steps(ddp, ledger, [batch(step) for step in range(3)])
    return ledger.close(herd)


def detached():
    """After detach() the hook averages, and residuals are not added."""
    model = net()
    ddp = DDP(model)
    herd = gh.attach(ddp, sparsify=SPARSE)
    loss_of(ddp, batch(0)).backward()
    herd.detach()
    ddp.zero_grad()
    x = batch(1)
    ledger = Ledger(model)
    ledger.compute(loss_of(model, x))
    loss_of(ddp, x).backward()
    ledger.receive()
    return {"own": ledger.own, "given": ledger.given}


def both_halves(sparsify: bool):
    """Orders that cd-grab finds from sketches, with and without a sparsifier beside it."""
    data = torch.randn(64, 8, generator=torch.Generator().manual_seed(5)).float()
    sampler = gh.OrderedSampler(range(64), "cd-grab", batch_size=4, unit=4, seed=3)
    model = net(torch.float32)
    ddp = DDP(model)
    herd = gh.attach(
        ddp, order=sampler, rows="sketch", sparsify=gh.ExDyna(0.05) if sparsify else None
    )
    orders = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        listed = list(sampler)
        orders.append(listed)
        loader = torch.utils.data.DataLoader(range(64), batch_size=4, sampler=sampler)
        for index in loader:
            ddp.zero_grad()
            loss_of(ddp, data[index]).backward()
    metrics = herd.metrics()
    herd.detach()
    return orders, metrics


def refused(make: Callable[[], object]) -> str:
    try:
        make()
    except ValueError as error:
        return str(error)
    return ""


def complaints():
    """The sentences one gets for what cannot work."""
    found = {}
    found["bare"] = refused(lambda: gh.attach(net(), sparsify="exdyna"))
    found["nothing"] = refused(lambda: gh.attach(DDP(net())))
    found["name"] = refused(lambda: gh.attach(DDP(net()), sparsify="best"))
    found["object"] = refused(lambda: gh.attach(DDP(net()), sparsify=3.0))
    taken = DDP(net())
    gh.attach(taken, sparsify=SPARSE)
    found["taken"] = refused(lambda: gh.attach(taken, sparsify=SPARSE))
    hooked = DDP(net())
    hooked.register_comm_hook(None, default_hooks.allreduce_hook)
    found["hooked"] = refused(lambda: gh.attach(hooked, sparsify=SPARSE))
    embedding = DDP(nn.Embedding(10, 3, sparse=True))
    found["sparse"] = refused(lambda: gh.attach(embedding, sparsify="exdyna"))
    other = gh.attach(DDP(nn.Linear(8, 50)), sparsify=SPARSE)
    state = gh.attach(DDP(net()), sparsify=SPARSE).state_dict()
    found["model"] = refused(lambda: other.load_state_dict(state))
    sampler = gh.OrderedSampler(range(8), "cd-grab", batch_size=4, unit=4)
    free = DDP(net())
    found["rows"] = refused(lambda: gh.attach(free, order=sampler, sparsify=SPARSE, rows="batch"))
    gh.attach(free, sparsify=SPARSE)  # nothing was half attached
    return found


def small_only():
    """A model of which nothing is worth sparsifying."""
    model = DDP(nn.Linear(3, 2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        herd = gh.attach(model, sparsify="exdyna")
    model(torch.ones(1, 3) + dist.get_rank()).sum().backward()
    return [str(one.message) for one in caught], model.module.weight.grad, herd.metrics()


def side_backwards(plan: list[str]):
    """Branches, with a look at gradients between steps."""
    torch.manual_seed(0)
    model = Branches().double()
    ddp = DDP(model, find_unused_parameters=True)
    herd = gh.attach(ddp, sparsify=gh.Sparsify(method=gh.ExDyna(density=0.1), dense_below=0))
    ledger = Ledger(model)
    for step, use in enumerate(plan):
        x = batch(step)
        torch.autograd.grad(model(x, "left").sum(), list(model.left.parameters()))
        with torch.random.fork_rng():
            grads = copy.deepcopy(model)
            loss = grads(x, use).square().mean()
            found = torch.autograd.grad(loss, list(grads.parameters()), allow_unused=True)
        for (name, _), grad in zip(model.named_parameters(), found, strict=True):
            if grad is not None:
                ledger.own[name] += grad
        ddp.zero_grad(set_to_none=True)
        ddp(x, use).square().mean().backward()
        ledger.receive()
    return ledger.close(herd)


def unfrozen():
    """A parameter that was frozen when the sparsifier came, and is not any more."""
    torch.manual_seed(0)
    model = Branches().double()
    ddp = DDP(model, find_unused_parameters=True)
    model.left.weight.requires_grad_(False)
    gh.attach(ddp, sparsify=gh.Sparsify(method=gh.ExDyna(density=0.1), dense_below=0))
    model.left.weight.requires_grad_(True)
    x = batch(0)
    (own,) = torch.autograd.grad(model(x, "left+right").square().mean(), [model.left.weight])
    ddp(x, "left+right").square().mean().backward()
    return own, model.left.weight.grad


def unfrozen_too_late():
    """Parameters that were frozen when DDP was made, but not at `attach`; return what is raised."""
    model = net()
    model[0].requires_grad_(False)
    ddp = DDP(model)
    model[0].requires_grad_(True)
    herd = gh.attach(ddp, sparsify=SPARSE)
    try:
        ddp(batch(0)).square().mean().backward()
    except RuntimeError as error:
        return str(error), herd.metrics()["steps"]
    return "nothing", herd.metrics()["steps"]


class WithEmpty(nn.Module):
    """A parameter of no numbers between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 40)
        self.none = nn.Parameter(torch.zeros(0))
        self.last = nn.Linear(40, 30)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x)) + self.none.sum()
        return out


def with_empty():
    torch.manual_seed(0)
    model = WithEmpty().double()
    ddp = DDP(model, bucket_cap_mb=1e-3)
    herd = gh.attach(ddp, sparsify=gh.Sparsify(method=gh.ExDyna(density=0.1), dense_below=0))
    ledger = Ledger(model)
    take_steps(ddp, ledger, [batch(step) for step in range(3)])
    return ledger.close(herd)


def foreign_states():
    """What one is told about states that are not of this rank, world or method."""
    herd = gh.attach(DDP(net()), sparsify=SPARSE)
    state = herd.state_dict(gather=False)
    before = state["sparsify"]["residual"]
    found = {}
    for key, value in {"rank": 7, "workers": 9, "kind": "TopK", "dim": 3}.items():
        other = {"sparsify": state["sparsify"] | {key: value}}
        other["sparsify"]["residual"] = {n: r + 1 for n, r in before.items()}
        found[key] = refused(lambda other=other: herd.load_state_dict(other))
    after = herd.state_dict()["sparsify"]["residual"]
    assert all(torch.equal(before[name], after[name]) for name in before)
    return found
