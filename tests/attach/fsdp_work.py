"""What ranks do in the tests of FSDP2: models, meshes and loops, run by name."""

import copy
import functools
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from gradherd import OrderedSampler, attach
from gradherd.hooks.fsdp import fsdp_modules, sharded_groups
from tests.attach.attach_work import orders_from, unit_gradients
from tests.ordering.helpers import lists

NAMES = ("replicate", "shard")


@functools.cache  # every mesh connects all ranks anew
def mesh_of(shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=NAMES[-len(shape) :])


def examples(count, dtype=torch.float64):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(count, 5, dtype=torch.float64, generator=draw).to(dtype)
    return TensorDataset(x, torch.randint(3, (count,), generator=draw))


class Block(nn.Module):
    """A layer with a norm, that may be recomputed in the backward."""

    def __init__(self, inside, outside, recompute=False):
        super().__init__()
        self.linear, self.norm = nn.Linear(inside, outside), nn.LayerNorm(outside)
        self.recompute = recompute

    def body(self, x):
        return torch.tanh(self.norm(self.linear(x)))

    def forward(self, x):
        if self.recompute:
            return checkpoint(self.body, x, use_reentrant=False)
        return self.body(x)


class Net(nn.Module):
    """Blocks whose sizes four ranks do not divide, with a layer that may stay idle."""

    def __init__(self, kind):
        super().__init__()
        self.first = Block(5, 7, kind == "recomputed")
        self.second = Block(7, 6, kind == "recomputed")
        self.idle = nn.Linear(3, 5) if kind == "unused" else None
        self.last = nn.Linear(6, 3)
        if kind == "frozen":
            self.first.requires_grad_(False)

    def forward(self, x):
        return self.last(self.second(self.first(x)))


def network(kind="plain", dtype=torch.float64):
    torch.manual_seed(1)
    return Net(kind).to(dtype)


def shard(net, mesh, *, compiled=False, layers=False, **options):
    """Shard the blocks and the rest, as users do; compile one of the blocks, which takes long."""
    if compiled:
        net.second.compile(backend="aot_eager")
    if layers:
        for layer in (net.first.linear, net.first.norm, net.last):
            fully_shard(layer, mesh=mesh, **options)
    for block in (net.first, net.second):
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


@dataclass(frozen=True)
class Case:
    """One training: a mesh, a model, and how the loop is written."""

    mesh: tuple = (4,)
    rows: str = "batch"
    unit: int = 3
    policy: str = "cd-grab"
    kind: str = "plain"
    compiled: bool = False
    accumulate: int = 1
    parts: int = 1
    part_sync: bool = True
    clip: bool = False
    scale: float = 1.0
    dtype: torch.dtype = torch.float64
    options: dict = field(default_factory=dict)
    epochs: int = 2  # the second one has an order that was learned


CASES = {
    "mesh 4": Case(epochs=3),
    "mesh 2 2": Case(mesh=(2, 2), epochs=3),
    "mesh 4 1": Case(mesh=(4, 1)),
    "examples on 2 2": Case(mesh=(2, 2), rows="sketch", unit=1),
    "two-sided examples": Case(rows="two-sided", unit=1),
    "two-sided examples on 2 2": Case(mesh=(2, 2), rows="two-sided", unit=1),
    "two-sided examples compiled": Case(rows="two-sided", unit=1, compiled=True),
    "exact examples": Case(rows="exact", unit=1),
    "exact examples, layer by layer": Case(rows="exact", unit=1, options={"layers": True}),
    "examples, layer by layer": Case(rows="two-sided", unit=1, options={"layers": True}),
    "sketched batches": Case(rows="sketch"),
    "no rows": Case(policy="d-rr", rows="auto"),
    "accumulate": Case(accumulate=2),
    "accumulate on 2 2": Case(mesh=(2, 2), accumulate=2),
    "micro-batches": Case(parts=2),
    "micro-batches that sync once": Case(parts=2, part_sync=False),
    "micro-batches on 2 2": Case(mesh=(2, 2), parts=2),
    "micro-batches of examples": Case(rows="exact", unit=1, parts=2),
    "scaled loss, clipped": Case(clip=True, scale=64.0),
    "frozen": Case(kind="frozen"),
    "unused, half gathered": Case(kind="unused", options={"reshard_after_forward": 2}),
    "recomputed": Case(kind="recomputed"),
    "examples recomputed": Case(kind="recomputed", rows="sketch", unit=1),
    "compiled": Case(compiled=True),
    "float32, kept gathered": Case(dtype=torch.float32, options={"reshard_after_forward": False}),
    "reduced in float64": Case(
        dtype=torch.float32,
        options={"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)},
    ),
}


def train(model, sampler, herd, case, *, lr=0.0, epochs=None, before_step=None):
    """Run the loop and return the orders after each epoch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    loader = DataLoader(sampler.dataset, batch_size=sampler.batch_size, sampler=sampler)
    history = []
    for epoch in range(sampler.ordering.epoch, epochs or case.epochs):
        sampler.set_epoch(epoch)
        last = len(loader) - 1
        for number, (x, y) in enumerate(loader):
            steps = (number + 1) % case.accumulate == 0 or number == last
            for part, (inputs, labels) in enumerate(
                zip(x.chunk(case.parts), y.chunk(case.parts), strict=True), 1
            ):
                averages = steps and (case.part_sync or part == case.parts)
                if not isinstance(model, DDP):
                    model.set_requires_gradient_sync(averages)
                else:
                    model.require_backward_grad_sync = averages
                loss = F.cross_entropy(model(inputs), labels) * len(inputs) / len(x)
                (loss * case.scale).backward()
            if steps:
                if case.clip:
                    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
                if before_step is not None:
                    before_step()
                optimizer.step()
                optimizer.zero_grad()
        herd.finish()
        history.append(lists(sampler.ordering.orders))
    return history


class Scale:
    """Stands in for a GradScaler with a fixed scale."""

    def __init__(self, scale):
        self.scale = scale

    def get_scale(self):
        return self.scale


def learned(case):
    """Return the orders of a loop, and those of gradients computed one unit at a time."""
    dataset = examples(44, case.dtype)
    sampler = OrderedSampler(dataset, case.policy, batch_size=3, unit=case.unit, seed=3)
    model = shard(network(case.kind, case.dtype), mesh_of(case.mesh), compiled=case.compiled,
                  **case.options)  # fmt: skip
    scaler = Scale(case.scale) if case.scale != 1 else None
    herd = attach(model, order=sampler, rows=case.rows, scaler=scaler)
    found = train(model, sampler, herd, case)
    metrics = herd.metrics()
    herd.detach()
    if case.rows in ("sketch", "two-sided"):  # not the inner products of gradients
        net = network(case.kind, case.dtype)
        alike = OrderedSampler(dataset, case.policy, batch_size=3, unit=case.unit, seed=3)
        ddp = DDP(net)
        herd = attach(ddp, order=alike, rows=case.rows, scaler=scaler)
        return found, train(ddp, alike, herd, case), metrics
    gradients = unit_gradients(network(case.kind, torch.float64), examples(44), sampler)
    return found, orders_from(gradients, sampler, case.epochs), metrics


def learned_each(names):
    return {name: learned(CASES[name]) for name in names}


def trained(mesh):
    """Return orders and parameters of trainings under FSDP and DDP whose weights change."""
    results = []
    for sharded in (True, False):
        net = network()
        model = shard(net, mesh_of(mesh)) if sharded else DDP(net)
        sampler = OrderedSampler(examples(44), "cd-grab", batch_size=3, unit=3, seed=3)
        herd = attach(model, order=sampler, rows="batch")
        orders = train(model, sampler, herd, Case(), lr=0.1)
        whole = [p.full_tensor() if sharded else p for p in net.parameters()]
        results.append((orders, torch.cat([p.detach().flatten() for p in whole])))
        herd.detach()
    return results


GRADIENTS = {
    "plain": ({}, lambda module: None),
    "bf16 inside": (
        {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)},
        lambda module: None,
    ),
    "forced sum": ({}, lambda module: module.set_force_sum_reduction_for_comms(True)),
    "fp64 sums": (
        {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)},
        lambda module: None,
    ),
    "columns": ({"shard_placement_fn": lambda p: _columns(p)}, lambda module: None),
}


def _columns(parameter):
    from torch.distributed.tensor import Shard

    even = parameter.dim() == 2 and parameter.shape[1] % 4 == 0
    return Shard(1) if even else None


class Even(nn.Module):
    """Sizes that four ranks divide, so that shards along columns are possible."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(5, 8), nn.Linear(8, 12), nn.Linear(12, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


def whole_gradients(model):
    return torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()])


def gradients(name, factor=None):
    """Return gradients of two backwards, attached and plain, and the metrics."""
    options, prepare = GRADIENTS[name]
    torch.manual_seed(1)
    net, mesh = Even(), mesh_of((4,))
    found, herd = [], None
    for attached in (True, False):
        model = copy.deepcopy(net)
        for block in (model.first, model.second):
            fully_shard(block, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
        for _, module in fsdp_modules(model):
            prepare(module)
            if factor is not None:
                module.set_gradient_divide_factor(factor)
        sampler = OrderedSampler(examples(48, torch.float32), "cd-grab", batch_size=3, unit=3)
        if attached:
            herd = attach(model, order=sampler, rows="batch")
        elif factor is not None:  # gloo has no scaled sum: what torch would do with nccl
            for _, module in fsdp_modules(model):
                module.set_gradient_divide_factor(4.0)
        loader = DataLoader(sampler.dataset, batch_size=3, sampler=sampler)
        for (x, y), _ in zip(loader, range(2), strict=False):
            F.cross_entropy(model(x), y).backward()  # not cleared: they add up, as in torch
        found.append(whole_gradients(model))
    metrics = herd.metrics()
    herd.detach()
    scatters = [type(g._group._reduce_scatter_comm) for g in sharded_groups(model)]
    restored = all(kind.__name__.startswith("Default") for kind in scatters)
    return found, metrics, restored


def gradients_each(names):
    results = {name: gradients(name) for name in names}
    results["divided by 8"] = gradients("plain", 8.0)
    return results


def resumed(saved_on, loaded_on):
    """Return the orders of a run that went through, and of one that was loaded elsewhere."""

    def fresh(mesh):
        sampler = OrderedSampler(examples(44), "cd-grab", batch_size=3, unit=3, seed=3)
        model = DDP(network()) if mesh is None else shard(network(), mesh_of(mesh))
        return model, sampler, attach(model, order=sampler, rows="batch")

    model, sampler, herd = fresh(saved_on)
    train(model, sampler, herd, Case(), epochs=1)
    loader = iter(DataLoader(sampler.dataset, batch_size=3, sampler=sampler))
    for _ in range(2):  # into the second epoch, with a gradient that waits for its pair
        x, y = next(loader)
        F.cross_entropy(model(x), y).backward()
    state = herd.state_dict()
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
    herd.finish()
    straight = lists(sampler.ordering.orders)
    other = fresh(loaded_on)
    other[2].load_state_dict(state)
    return straight, train(other[0], other[1], other[2], Case(), epochs=2)[-1]


def everything():
    """Run all of the above on one set of ranks."""
    return {
        "learned": learned_each(CASES),
        "trained": {mesh: trained(mesh) for mesh in ((4,), (2, 2), (4, 1))},
        "gradients": gradients_each(GRADIENTS),
        "resumed": {
            pair: resumed(*pair) for pair in (((4,), (2, 2)), ((2, 2), None), (None, (4,)))
        },
    }
