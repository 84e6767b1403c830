"""Training loops for the tests of attach: run alone, or by name on ranks.

Weights stay as they are (the learning rate is 0), so a unit has the same gradient in every epoch
and the orders that must come out follow from gradients computed one unit at a time.
"""

import contextlib
import copy
import itertools
import logging
import threading
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

from gradherd import OrderedSampler, World, attach
from gradherd.comm.script import RankRunner
from gradherd.comm.sliced_mean import BucketSpan, ColumnLayout, SlicedMean
from gradherd.hooks import coordinated_hook
from gradherd.ordering import coordination
from gradherd.ordering.batches import BatchClaim
from gradherd.ordering.coordination import RowGatherer
from gradherd.ordering.ordering import Ordering
from tests.ordering.helpers import lists, through_disk


def examples(count, seed=0):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 5, dtype=torch.float64, generator=draw)
    return TensorDataset(x, torch.randint(3, (count,), generator=draw))


class Unused(nn.Module):
    """Half of it is never called."""

    def __init__(self):
        super().__init__()
        self.used, self.idle = nn.Linear(5, 3), nn.Linear(4, 4)

    def forward(self, x):
        return self.used(x)


def network(kind="mlp"):
    torch.manual_seed(1)
    if kind == "unused":
        return Unused().double()
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3))
    if kind == "frozen":
        net[0].requires_grad_(False)
    if kind == "ignored":  # DDP does not average it
        DDP._set_params_and_buffers_to_ignore_for_model(net, ["2.weight"])
    return net.double()


def unit_gradients(net, dataset, sampler):
    """Return each worker's (n_i, D) gradients, one backward for each unit."""
    sharding, net = sampler.sharding, copy.deepcopy(net)
    parameters = [p for p in net.parameters() if p.requires_grad]
    rows = [[] for _ in range(sharding.workers)]
    for number in range(sharding.units):
        # A short unit repeats examples, as the loader will.
        within = torch.arange(sharding.unit) % (sharding.examples - number * sharding.unit)
        x, y = dataset[number * sharding.unit + within]
        loss = F.cross_entropy(net(x), y)
        grads = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        rows[number % sharding.workers].append(torch.cat([grad.flatten() for grad in grads]))
    return [torch.stack(own) for own in rows]


def orders_from(gradients, sampler, epochs=3, unseen=(), stop=None):
    """Return the orders after each epoch; `unseen` are (epoch, step) not fed back.

    Epochs end before step `stop`, if it is given.
    """
    sharding = sampler.sharding
    ordering = Ordering(
        sampler.ordering.policy,
        sharding.sizes,
        seed=sampler.ordering.random.seed,
        length=sharding.length,
    )
    history = []
    for epoch in range(epochs):
        for step in range(sharding.length if stop is None else stop):
            rows = torch.zeros(1, sharding.workers, gradients[0].shape[1], dtype=torch.float64)
            for worker, order in enumerate(ordering.orders):
                if step < len(order):
                    rows[0, worker] = gradients[worker][order[step]]
            seen = torch.full((1, sharding.workers), (epoch, step) not in unseen)
            ordering.observe(rows, seen)
        ordering.end_epoch()
        history.append(lists(ordering.orders))
    return history


@dataclass(frozen=True)
class Loop:
    """How a user may write the loop."""

    epochs: int = 3
    named: bool = True
    """set_epoch is called."""
    accumulate: int = 1
    """Batches of an optimizer step."""
    no_sync: bool = False
    parts: int = 1
    """Micro-batches of a batch, each with a forward and a backward of its own."""
    to_none: bool = True
    clip: bool = False
    look: str = ""
    """What happens between steps."""
    backwards: int = 1
    """Of one forward."""
    scale: float = 0.0
    """First scale of a GradScaler."""
    tell_scaler: bool = True
    bad: tuple = ()
    """(epoch, batch, rank) whose loss is infinite."""
    options: tuple = ()
    """Pairs for DDP()."""
    compiled: bool = False
    together: bool = True
    """Buckets of DDP travel as one, as those of small models do."""


def look_away(kind, net, model, loader):
    if kind == "eval":
        model.eval()
        with torch.no_grad():
            model(torch.zeros(9, 5, dtype=torch.float64))
        model.train()
    elif kind == "forward":  # with gradients, but without a backward
        model(torch.zeros(2, 5, dtype=torch.float64))
        net(torch.zeros(2, 5, dtype=torch.float64))
    elif kind == "loader":
        with torch.inference_mode():
            for x, _ in loader:
                model(x)


def train(net, model, sampler, loop=None, rows="auto", loader=None, herd=None, at=None, save=True):
    """Run the loop and return its herd and the orders after each epoch."""
    loop = loop or Loop()
    if loader is None:
        loader = DataLoader(sampler.dataset, batch_size=sampler.batch_size, sampler=sampler)
    scaler = None
    if loop.scale:
        scaler = torch.amp.GradScaler("cpu", init_scale=loop.scale, growth_interval=2)
    if herd is None:
        herd = attach(model, order=sampler, rows=rows, scaler=scaler if loop.tell_scaler else None)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    history = []
    for epoch in range(sampler.ordering.epoch, loop.epochs):
        if loop.named:
            sampler.set_epoch(epoch)
        last = -(-(len(sampler) - sampler.start) // sampler.batch_size) - 1
        for number, (x, y) in enumerate(herd.batches(loader) if loader.num_workers else loader):
            steps = (number + 1) % loop.accumulate == 0 or number == last
            for at_part, (inputs, labels) in enumerate(
                zip(x.chunk(loop.parts), y.chunk(loop.parts), strict=True), 1
            ):
                averages = steps and at_part == loop.parts
                quiet = loop.no_sync and isinstance(model, DDP) and not averages
                with model.no_sync() if quiet else contextlib.nullcontext():
                    loss = F.cross_entropy(model(inputs), labels) * len(inputs) / len(x)
                    if (epoch, number, sampler.world.rank) in loop.bad:
                        loss = loss * float("inf")
                    for count in range(loop.backwards):
                        part = loss / loop.backwards
                        part = part if scaler is None else scaler.scale(part)
                        part.backward(retain_graph=count + 1 < loop.backwards)
            if steps:
                if loop.clip:
                    nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
                if scaler is None:
                    optimizer.step()
                else:
                    scaler.step(optimizer)
                    scaler.update()
                optimizer.zero_grad(set_to_none=loop.to_none)
            if number % 2:
                look_away(loop.look, net, model, loader)
            if at == (epoch, number):
                return herd, through_disk(herd.state_dict()) if save else None
        herd.finish()
        history.append(lists(sampler.ordering.orders))
    return herd, history


def learned(policy, count, batch, unit, rows, loop=None, kind="mlp", seed=3):
    """Return the orders that this rank's loop learned, and those that it should have."""
    loop = loop or Loop()
    _travel(loop.together)
    dataset, net = examples(count), network(kind)
    sampler = OrderedSampler(dataset, policy, batch_size=batch, unit=unit, seed=seed)
    apart = network(kind.split()[0])
    if kind == "ignored":
        apart[2].weight.requires_grad_(False)
    gradients = unit_gradients(apart, dataset, sampler)
    model = DDP(net, **dict(loop.options)) if dist.is_initialized() else net
    if kind == "frozen late":
        net[0].requires_grad_(False)
    if loop.compiled:
        model = torch.compile(model, backend="eager")
    _, history = train(net, model, sampler, loop, rows)
    bad = [(epoch, number * batch // unit + k) for epoch, number, _ in loop.bad for k in
           range(batch // unit)]  # fmt: skip
    return history, orders_from(gradients, sampler, loop.epochs, bad)


def _travel(together):
    coordinated_hook.ONE_BUCKET_ELEMENTS = 2_000_000 if together else 0


def learned_each(*calls):
    """Run `learned` for each of the arguments, on the same ranks."""
    return [learned(*call) for call in calls]


def averages(batch, unit, rows, steps, options=(), together=True):
    """Return what p.grad holds after each backward, here and under plain DDP."""
    _travel(together)
    dataset, net = examples(16 * batch), network()
    plain = DDP(copy.deepcopy(net), **dict(options))
    model = DDP(net, **dict(options))
    sampler = OrderedSampler(dataset, "cd-grab", batch_size=batch, unit=unit)
    herd = attach(model, order=sampler, rows=rows)
    ours, theirs, layouts = [], [], set()
    loader = DataLoader(dataset, batch_size=batch, sampler=sampler)
    for x, y in itertools.islice(loader, steps):
        for found, one in ((ours, model), (theirs, plain)):
            one.zero_grad()
            F.cross_entropy(one(x), y).backward()
            found.append(torch.cat([p.grad.flatten() for p in one.parameters()]))
        layouts.add(getattr(herd._feedback._transport, "layout", None))
    return ours, theirs, layouts, herd.metrics()


def resumed(policy, count, batch, unit, rows, at, together=True, kind="mlp"):
    """Return orders of a run that went through, and of two that were loaded from a state.

    One goes on in new objects, the other in those that were saved, some batches later.
    """
    _travel(together)
    dataset, options = examples(count), {"bucket_cap_mb": 1e-4}

    def fresh():
        net = network(kind)
        model = DDP(net, **options) if dist.is_initialized() else net
        return net, model, OrderedSampler(dataset, policy, batch_size=batch, unit=unit)

    straight = train(*fresh(), rows=rows)[1]
    first = fresh()
    herd, state = train(*first, rows=rows, at=at)
    other = fresh()
    new = attach(other[1], order=other[2], rows=rows)
    new.load_state_dict(state)
    elsewhere = train(*other, herd=new)[1]
    # The same objects, a few batches later, go back to the state.
    train(*first, herd=herd, at=(at[0], 1), save=False)
    herd.load_state_dict(state)
    back = train(*first, herd=herd)[1]
    return straight[at[0] :], elsewhere, back


def scattered(calls, at):
    """Return what loops learn whose rows are scattered to ranks, and a state of both ways.

    The rows of these small models would be gathered otherwise.
    """
    policy, *rest = calls[0]
    states = [_stopped(policy, *rest, at)]
    coordination._SCATTERED_COLUMNS = 1
    states.append(_stopped(policy, *rest, at))
    histories = [learned(*call) for call in calls]
    again = [resumed(*call[:5], at) for call in calls[:2]]
    return histories, again, states, by_index()


def _stopped(policy, count, batch, unit, rows, at):
    """Return the state of a loop in mid-epoch, and the bytes sent for its order."""
    net = network()
    sampler = OrderedSampler(examples(count), policy, batch_size=batch, unit=unit)
    herd, state = train(net, DDP(net), sampler, rows=rows, at=at)
    return state, herd.metrics()["bytes_for_ordering"]


def by_index(count=31, batch=4):
    """Return the orders of an epoch whose batches come backwards, and those they should be."""
    dataset, net = examples(count), network()
    sampler = OrderedSampler(dataset, "cd-grab", batch_size=batch, seed=3)
    model = DDP(net)
    herd = attach(model, order=sampler, rows="exact")
    step = torch.optim.SGD(net.parameters(), lr=0.0).step
    for indices in reversed(torch.tensor(list(sampler)).split(batch)):
        x, y = dataset[indices]
        herd.observe(indices)
        F.cross_entropy(model(x), y).backward()
        step()
    herd.finish()
    gradients = unit_gradients(network(), dataset, sampler)
    return lists(sampler.ordering.orders), orders_from(gradients, sampler, 1)[0]


def gathered_every(everys):
    return [_gathered(every) for every in everys]


def _gathered(every, count=7):
    """Return the orders after three epochs of gathered rows, and the bytes they took."""
    world = World.detect()
    sampler = OrderedSampler(examples(world.size * count), "cd-grab", batch_size=2, seed=5)
    runner = RankRunner(world)
    gather = RowGatherer(sampler, runner, every=every)
    draw = torch.Generator().manual_seed(0)
    vectors = torch.randn(world.size, count, 6, generator=draw)
    history = []
    for epoch in range(3):
        order = sampler.ordering.orders[world.rank]
        for step in range(0, count, 2):
            units = order[step : step + 2]
            claim = BatchClaim(epoch, step, len(units), len(units))
            gather.add(vectors[world.rank, units], claim)
        gather.flush()
        history.append(lists(sampler.ordering.orders))
    return history, runner.bytes


def other_orders():
    """Every rank but the last holds the same order."""
    sampler = OrderedSampler(examples(24), "cd-grab", batch_size=2, unit=2)
    net = network()
    model = DDP(net)
    herd = attach(model, order=sampler)
    if dist.get_rank() == dist.get_world_size() - 1:
        sampler.ordering.end_epoch(0)
        sampler.ordering._orders = [order.flip(0) for order in sampler.ordering.orders]
        sampler._begin_epoch()
    try:
        train(net, model, sampler, herd=herd)
    except RuntimeError as error:
        return str(error)
    return None


def log_line(rows, unit, hooked):
    """Return what attach says it chose, or why it refuses."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("gradherd").addHandler(handler)
    logging.getLogger("gradherd").setLevel(logging.INFO)
    model = DDP(network())
    if hooked:
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    sampler = OrderedSampler(examples(24), "cd-grab", batch_size=2, unit=unit)
    try:
        attach(model, order=sampler, rows=rows)
    except ValueError as error:
        return [str(error)]
    return said


def detached():
    """Return the mean gradient after detach, and whether the order still moves."""
    dataset, net = examples(24), network()
    model = DDP(net)
    sampler = OrderedSampler(dataset, "cd-grab", batch_size=2, unit=2)
    herd, _ = train(net, model, sampler, Loop(epochs=1))
    herd.detach()
    before = lists(sampler.ordering.orders)
    x, y = dataset[4 * dist.get_rank() : 4 * dist.get_rank() + 4]
    for _ in range(2):
        net.zero_grad()
        F.cross_entropy(model(x), y).backward()
        torch.optim.SGD(net.parameters(), lr=0.0).step()
    grad = torch.cat([p.grad.flatten() for p in net.parameters()])
    single = copy.deepcopy(net)
    single.zero_grad()
    F.cross_entropy(single(dataset[:8][0]), dataset[:8][1]).backward()
    want = torch.cat([p.grad.flatten() for p in single.parameters()])
    return grad, want, before == lists(sampler.ordering.orders), len(net._forward_pre_hooks)


def pause_on_ranks():
    """Backwards of other data, in mid-epoch, leave the orders alone."""
    dataset, net = examples(22), network()
    sampler = OrderedSampler(dataset, "cd-grab", batch_size=2, unit=2)
    want = orders_from(unit_gradients(net, dataset, sampler), sampler, 1)
    model = DDP(net)
    herd = attach(model, order=sampler)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    for x, y in DataLoader(dataset, batch_size=2, sampler=sampler):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        with herd.pause():
            F.cross_entropy(model(x * 3), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    herd.finish()
    return [lists(sampler.ordering.orders)], want


def shards(*settings):
    return [_shards(*one) for one in settings]


def _shards(lengths, dtype):
    """Send buckets once around; return all that came of it."""
    world = World.detect()
    draw = torch.Generator().manual_seed(world.rank)
    flats = [torch.randn(length, generator=draw).to(dtype) for length in lengths]
    own = [flat.clone() for flat in flats]
    mean = SlicedMean(world)
    for flat in flats:
        mean.start(flat)
    rows = torch.cat(mean.finish(), 1)
    layout = ColumnLayout(tuple(BucketSpan(_named(*one)) for one in enumerate(lengths)))
    # Each worker's vector by parameter, from the columns of all ranks.
    whole = [layout.gather(row, world) for row in rows]
    columns = torch.stack([layout.columns(one, world) for one in whole])
    return {
        "own": torch.cat(own),
        "mean": torch.cat(flats),
        "rows": rows,
        "whole": torch.stack([_flat(layout, one) for one in whole]),
        "columns": columns,
        "bytes": mean.bytes,
    }


def _named(bucket, length):
    """Two parameters a bucket, if there is enough for two."""
    if length < 2:
        return ((f"{bucket}.a", length),)
    return ((f"{bucket}.b", length // 2), (f"{bucket}.a", length - length // 2))


def _flat(layout, by_name):
    return torch.cat([by_name[name] for span in layout.spans for name, _ in span.parameters])


def mixed_precision():
    """Return gradients of a model with parameters of two kinds, here and under plain DDP."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5).bfloat16(), Widen(), nn.Linear(5, 2))
    plain, model = DDP(copy.deepcopy(net)), DDP(net)
    data = TensorDataset(torch.randn(16, 3).bfloat16(), torch.randint(2, (16,)))
    sampler = OrderedSampler(data, "cd-grab", batch_size=2, unit=2)
    attach(model, order=sampler)
    x, y = next(iter(DataLoader(data, batch_size=2, sampler=sampler)))
    for one in (model, plain):
        F.cross_entropy(one(x), y).backward()
    return [[p.grad for p in one.parameters()] for one in (model, plain)]


class Widen(nn.Module):
    def forward(self, x):
        return x.float()


def bytes_for_ordering(where):
    """Return what eight steps send for ordering, with zero_grad() at one place or another."""
    dataset, net = examples(64), network()
    model = DDP(net)
    sampler = OrderedSampler(dataset, "cd-grab", batch_size=4, unit=4)
    herd = attach(model, order=sampler)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in DataLoader(dataset, batch_size=4, sampler=sampler):
        if where == "before the forward":
            sgd.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if where == "before the backward":
            sgd.zero_grad()
        loss.backward()
        sgd.step()
        if where == "after the step":
            sgd.zero_grad()
    herd.finish()
    return herd.metrics()["bytes_for_ordering"]


class Branches(nn.Module):
    """A body in half precision, and a head that only rank 0 uses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(6, 4), nn.Linear(4, 4)
        self.to(torch.bfloat16)

    def forward(self, x):
        out = self.body(x)
        return self.head(out) if dist.get_rank() == 0 else out


def half_precision_without_some_gradients(together):
    """Return the orders of a loop that never clears its gradients, so they are sent separately."""
    _travel(together)
    dataset = TensorDataset(torch.randn(24, 6, generator=torch.Generator().manual_seed(1)))
    model = DDP(Branches(), find_unused_parameters=True)
    sampler = OrderedSampler(dataset, "cd-grab", batch_size=3, unit=3)
    herd = attach(model, order=sampler, rows="batch")
    for _ in range(2):
        for (x,) in DataLoader(dataset, batch_size=3, sampler=sampler):
            model(x.bfloat16()).square().mean().backward()
    herd.finish()
    orders = [order.tolist() for order in sampler.ordering.orders]
    herd.detach()
    return sampler.ordering.epoch, orders


def where_batches_are_signed():
    """Return in which threads a stream was asked for and used, and what was learned in it."""
    found, learn = [], coordinated_hook.observe_slices

    def fake_stream(device):
        asked = threading.current_thread().name

        @contextlib.contextmanager
        def on_stream():
            found.append((asked, threading.current_thread().name))
            yield
            found.append("left")

        return on_stream

    def watched(*args, **kwargs):
        found.append("learned")
        return learn(*args, **kwargs)

    coordinated_hook.this_stream, coordinated_hook.observe_slices = fake_stream, watched
    dataset = TensorDataset(torch.randn(8, 6))
    model, sampler = DDP(nn.Linear(6, 1)), OrderedSampler(dataset, "cd-grab", batch_size=2, unit=2)
    herd = attach(model, order=sampler)
    for (x,) in DataLoader(dataset, batch_size=2, sampler=sampler):
        model(x).mean().backward()
        model.zero_grad()
    herd.detach()
    return found


class Words(nn.Module):
    """Averages the embeddings of an example's words."""

    def __init__(self, sparse):
        super().__init__()
        torch.manual_seed(1)
        self.words, self.last = nn.Embedding(20, 6, sparse=sparse), nn.Linear(6, 3)

    def forward(self, x):
        return self.last(self.words(x).mean(1))


def row_sparse_embedding(rows):
    """Return what DDP learns with row-sparse gradients and with whole ones, or the refusal."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(20, (24, 4), generator=draw)
    dataset, histories = TensorDataset(x, torch.randint(3, (24,), generator=draw)), []
    for sparse in (True, False):
        net = Words(sparse).double()
        sampler = OrderedSampler(dataset, "cd-grab", batch_size=2, unit=2)
        settings = rows if sparse or rows != "auto" else "sketch"
        try:
            histories.append(train(net, DDP(net), sampler, rows=settings)[1])
        except ValueError as error:
            return str(error)
    return histories
