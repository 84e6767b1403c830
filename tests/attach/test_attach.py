import copy
import gc
import time
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, TensorDataset

from gradherd import BatchRows, ExactRows, LocalSteps, OrderedSampler, SketchRows, World, attach
from gradherd.lab.ranks import run_ranks
from gradherd.replay.recorded import replay_order
from gradherd.rows.settings import choose_rows
from tests.attach import attach_work
from tests.attach.attach_work import (
    Loop,
    examples,
    learned,
    network,
    orders_from,
    resumed,
    train,
    unit_gradients,
)
from tests.ordering.helpers import lists, through_disk

LOOPS = {
    "plain": Loop(),
    "unnamed epochs": Loop(named=False),
    "accumulate": Loop(accumulate=2),
    "accumulate three": Loop(accumulate=3, named=False),
    "zeros instead of None": Loop(to_none=False),
    "clip": Loop(clip=True),
    "eval": Loop(look="eval"),
    "forward alone": Loop(look="forward"),
    "look at the loader": Loop(look="loader"),
    "two backwards": Loop(backwards=2),
    "micro-batches": Loop(parts=2),
    "micro-batches with two backwards, accumulated": Loop(parts=2, backwards=2, accumulate=2),
    "scaler": Loop(scale=64.0),
    "scaler and a skipped step": Loop(scale=64.0, bad=((0, 1, 0), (1, 2, 0))),
    "scaler and a skipped first step": Loop(scale=64.0, bad=((0, 0, 0), (2, 0, 0))),
    "scaler and a skipped last step": Loop(scale=64.0, bad=((1, 3, 0),)),
}


@pytest.mark.parametrize("policy", ["pair-grab", "cd-grab", "grab"])
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_examples_get_the_orders_of_their_own_gradients(policy, loop):
    found, want = learned(policy, 19, 5, 1, "exact", loop)
    assert found == want
    assert len({str(orders) for orders in found}) == 3


@pytest.mark.parametrize("policy", ["cd-grab", "grab"])
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_batches_get_the_orders_of_their_gradients(policy, loop):
    found, want = learned(policy, 25, 4, 4, "batch", loop)  # 7 units, the last one short
    assert found == want


@pytest.mark.parametrize("kind", ["frozen", "unused"])
@pytest.mark.parametrize(("unit", "rows"), [(1, "exact"), (4, "batch")])
def test_parameters_without_gradient(kind, unit, rows):
    found, want = learned("cd-grab", 22, 4, unit, rows, kind=kind)
    assert found == want


@pytest.mark.parametrize("policy", ["pair-grab", "grab"])
def test_units_of_a_few_examples(policy):
    found, want = learned(policy, 19, 6, 2, "exact")  # 10 units, the last has one example
    assert found == want


def test_orders_are_those_of_replay():
    dataset, net = examples(21), network()
    sampler = OrderedSampler(dataset, "pair-grab", batch_size=4, seed=0)
    vectors = torch.stack(unit_gradients(net, dataset, sampler))
    _, history = train(net, net, sampler, rows="exact")
    replayed = replay_order(vectors, sampler.ordering.policy, rounds=3, start="random", seed=0)
    assert history[-1] == replayed.orders


def test_a_loss_that_is_a_sum():
    dataset, net = examples(13), network()
    sampler = OrderedSampler(dataset, "grab", batch_size=4)
    want = orders_from(unit_gradients(net, dataset, sampler), sampler, 2)
    attach(net, order=sampler, rows=ExactRows(reduction="sum"))
    found = []
    for _ in range(2):
        for x, y in DataLoader(dataset, batch_size=4, sampler=sampler):
            F.cross_entropy(net(x), y, reduction="sum").backward()
            torch.optim.SGD(net.parameters(), lr=0.0).step()
        found.append(lists(sampler.ordering.orders))
    assert found == want


def test_a_wide_sketch_finds_the_same_orders_here():
    for unit in (1, 4):
        found, want = learned("cd-grab", 12, 4, unit, SketchRows(size=4096), Loop(epochs=1))
        assert found == want


# dynamo's own, about what it cannot trace and how it traces autograd functions
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("unit", [1, 4])
def test_a_model_that_was_compiled(unit, parts):
    loop = Loop(compiled=True, parts=parts)
    found, want = learned("cd-grab", 25, 4, unit, "auto" if unit > 1 else "exact", loop)
    assert found == want


# dynamo's own, about what it cannot trace and how it traces autograd functions
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(("unit", "rows"), [(4, "batch"), (1, "exact"), (1, "two-sided")])
def test_compiled_models_learn_the_same_orders(unit, rows, before):
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    # 12 batches: a hook that is traced with each batch's numbers would reach dynamo's limit of 8.
    plain, compiled = (
        OrderedSampler(examples(48), "cd-grab", batch_size=4, unit=unit) for _ in range(2)
    )
    nets = network(), network()
    want = train(nets[0], nets[0], plain, Loop(epochs=1), rows)[1]
    options = {"backend": "aot_eager", "fullgraph": True}
    model = torch.compile(nets[1], **options) if before else nets[1]
    herd = attach(model, order=compiled, rows=rows)
    if not before:
        nets[1].compile(**options)
    assert train(model, model, compiled, Loop(epochs=1), herd=herd)[1] == want
    assert counters["stats"]["unique_graphs"] == 1
    herd.detach()


@pytest.mark.parametrize("rows", ["exact", "two-sided"])
def test_a_first_batch_that_is_short_and_has_as_many_features_as_a_whole_one(rows):
    found, want = learned("cd-grab", 3, 5, 1, rows)  # 3 examples of 5 features
    assert found == want


def test_prefetching_loader():
    dataset, net = examples(19), network()
    for unit, rows in ((1, "exact"), (4, "batch")):
        sampler = OrderedSampler(dataset, "cd-grab", batch_size=4, unit=unit)
        want = orders_from(unit_gradients(net, dataset, sampler), sampler)
        loader = DataLoader(
            dataset, batch_size=4, sampler=sampler, num_workers=2, multiprocessing_context="fork"
        )
        herd, found = train(net, net, sampler, Loop(named=False), rows, loader)
        herd.detach()
        assert found == want


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(("unit", "rows"), [(1, "exact"), (1, "sketch"), (3, "batch")])
def test_early_stop(named, unit, rows):
    dataset, net = examples(20), network()
    sampler = OrderedSampler(dataset, "cd-grab", batch_size=3, unit=unit)
    gradients = unit_gradients(net, dataset, sampler)
    want = orders_from(gradients, sampler, 3, stop=6 // unit)
    first = lists(sampler.ordering.orders)
    herd = attach(net, order=sampler, rows=rows)
    loader = DataLoader(dataset, batch_size=3, sampler=sampler)
    for epoch in range(3):
        if named:
            sampler.set_epoch(epoch)
            assert lists(sampler.ordering.orders) == [first, *want][epoch]
        for number, (x, y) in enumerate(loader):
            if number == 2:
                break
            F.cross_entropy(net(x), y).backward()
            torch.optim.SGD(net.parameters(), lr=0.0).step()
    herd.finish()
    assert sampler.ordering.epoch == (2 if named else 0)
    assert sampler.ordering.steps == 6 // unit


def test_a_loop_that_starts_over_learns_what_came_last():
    dataset, net = examples(20), network()
    sampler = OrderedSampler(dataset, "cd-grab", batch_size=4)
    want = orders_from(unit_gradients(net, dataset, sampler), sampler, 1)
    attach(net, order=sampler, rows="exact")
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    for stop in (2, 4, 5):
        for number, (x, y) in enumerate(loader):
            if number == stop:
                break
            F.cross_entropy(net(x), y).backward()
            torch.optim.SGD(net.parameters(), lr=0.0).step()
    assert [lists(sampler.ordering.orders)] == want


@pytest.mark.parametrize(("unit", "rows"), [(1, "exact"), (1, "sketch")])
def test_loader_that_drops_the_last_batch_does_not_freeze_the_order(unit, rows):
    dataset, net = examples(18), network()
    sampler = OrderedSampler(dataset, "cd-grab", batch_size=4, unit=unit)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler, drop_last=True)
    _, history = train(net, net, sampler, Loop(named=False), rows, loader)
    list(loader)
    assert sampler.ordering.epoch == 3
    assert len({str(orders) for orders in [*history, lists(sampler.ordering.orders)]}) == 4


def test_policy_without_rows_moves_on():
    found, want = learned("d-rr", 10, 4, 1, "auto", Loop(named=False))
    assert found == want
    assert len({str(orders) for orders in found}) == 3


class Letters(nn.Module):
    """LSTM over letters."""

    def __init__(self):
        super().__init__()
        self.letters, self.lstm = nn.Embedding(9, 4), nn.LSTM(4, 6, batch_first=True)
        self.out = nn.Linear(6, 3)

    def forward(self, x):
        return self.out(self.lstm(self.letters(x))[0][:, -1])


def images():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(4 * 16, 3),
    )


@pytest.mark.parametrize("rows", ["exact", "sketch"])
@pytest.mark.parametrize("kind", ["letters", "images"])
def test_other_models_train(kind, rows):
    x = torch.randint(9, (22, 5)) if kind == "letters" else torch.randn(22, 1, 6, 6)
    dataset = TensorDataset(x, torch.randint(3, (22,)))
    net = Letters() if kind == "letters" else images()
    sampler = OrderedSampler(dataset, "cd-grab", batch_size=4)
    first = lists(sampler.ordering.orders)
    herd, history = train(net, net, sampler, Loop(epochs=2, named=False), rows)
    assert sampler.ordering.epoch == 2
    assert first != history[0] != history[1]
    assert herd.metrics()["bytes_for_ordering"] == 0


# Feedback that does not fit.


def one_step(net, dataset, count=4):
    x, y = dataset[:count]
    F.cross_entropy(net(x), y).backward()
    torch.optim.SGD(net.parameters(), lr=0.0).step()


@pytest.mark.parametrize(("unit", "rows"), [(1, "exact"), (4, "batch")])
def test_backward_before_any_batch(unit, rows):
    dataset, net = examples(12), network()
    attach(net, order=OrderedSampler(dataset, "cd-grab", batch_size=4, unit=unit), rows=rows)
    with pytest.raises(RuntimeError, match="before the sampler handed out any example: iterate"):
        one_step(net, dataset)
    torch.optim.SGD(net.parameters(), lr=0.0).step()  # the complaint comes once


@pytest.mark.parametrize(("unit", "rows"), [(1, "exact"), (4, "batch")])
def test_two_batches_for_one(unit, rows):
    dataset, net = examples(12), network()
    sampler = OrderedSampler(dataset, "cd-grab", batch_size=4, unit=unit)
    herd = attach(net, order=sampler, rows=rows)
    batches = iter(DataLoader(dataset, batch_size=4, sampler=sampler))
    next(batches)
    one_step(net, dataset)
    one_step(net, dataset)  # the same batch again: its first gradient counts
    herd.finish()
    assert sampler.ordering.steps == 4 // unit
    next(batches)
    one_step(net, dataset)
    herd.finish()
    assert sampler.ordering.steps == 8 // unit


@pytest.mark.parametrize(("unit", "rows"), [(1, "exact"), (4, "batch")])
def test_nobody_waits_for_the_loss_scale(unit, rows, monkeypatch):
    """`get_scale` copies it from the GPU, behind all that was launched."""
    asked, get_scale = [], torch.amp.GradScaler.get_scale

    def noted(scaler):
        asked.append(scaler._get_scale_async() is not None)
        return get_scale(scaler)

    monkeypatch.setattr(torch.amp.GradScaler, "get_scale", noted)
    found, want = learned("cd-grab", 25, 4, unit, rows, Loop(scale=64.0, parts=2))
    assert found == want
    assert not any(asked)


@pytest.mark.parametrize(("unit", "rows"), [(1, "exact"), (4, "batch")])
def test_a_parameter_that_is_unfrozen_later_is_named_once(unit, rows, caplog):
    dataset, net = examples(12), network("frozen")
    sampler = OrderedSampler(dataset, "cd-grab", batch_size=4, unit=unit)
    attach(net, order=sampler, rows=rows)
    for number, (x, y) in enumerate(DataLoader(dataset, batch_size=4, sampler=sampler)):
        if number == 1:
            net[0].weight.requires_grad_(True)
        F.cross_entropy(net(x), y).backward()
    sampler.set_epoch(1)
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "0.weight was unfrozen after attach(), so rows leave it out: attach again to include it"
    ]


@pytest.mark.parametrize(("unit", "rows"), [(1, "exact"), (4, "batch")])
def test_a_head_that_is_swapped_after_attach_is_named_once(unit, rows, caplog):
    dataset, net = examples(12), network()
    sampler = OrderedSampler(dataset, "cd-grab", batch_size=4, unit=unit)
    herd = attach(net, order=sampler, rows=rows)
    net[4] = nn.Linear(6, 3, bias=False).double()
    for _ in range(2):
        for x, y in DataLoader(dataset, batch_size=4, sampler=sampler):
            F.cross_entropy(net(x), y).backward()
            net.zero_grad()
        herd.finish()
    said = [record.getMessage() for record in caplog.records if "put into" in record.getMessage()]
    assert [one.split(",")[0] for one in said] == ["4.weight was put into the model after attach()"]


@pytest.mark.parametrize(("unit", "rows"), [(1, "exact"), (4, "batch")])
def test_a_model_on_two_devices_is_refused(unit, rows):
    net, dataset = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 3, device="meta")), examples(12)
    sampler = OrderedSampler(dataset, "cd-grab", batch_size=4, unit=unit)
    with pytest.raises(ValueError, match="trained on cpu and meta, and a row is on one device"):
        attach(net, order=sampler, rows=rows)
    attach(net, order=OrderedSampler(dataset, "d-rr", batch_size=4)).detach()


@pytest.mark.parametrize(("unit", "rows"), [(1, "exact"), (1, "sketch"), (4, "batch")])
def test_complex_parameters_are_refused(unit, rows):
    net, dataset = nn.Linear(5, 3, dtype=torch.complex128), examples(12)
    sampler = OrderedSampler(dataset, "cd-grab", batch_size=4, unit=unit)
    with pytest.raises(ValueError, match="parameter 'weight' is complex, and rows have real"):
        attach(net, order=sampler, rows=rows)
    attach(net, order=OrderedSampler(dataset, "d-rr", batch_size=4)).detach()


@pytest.mark.parametrize("size", [2, 8])
def test_loader_with_another_batch_size(size):
    dataset, net = examples(16), network()
    sampler = OrderedSampler(dataset, "cd-grab", batch_size=4)
    with pytest.raises((RuntimeError, ValueError), match="4"):
        loader = DataLoader(dataset, batch_size=size, sampler=sampler)
        train(net, net, sampler, rows="exact", loader=loader)


def test_pause():
    dataset, net = examples(13), network()
    sampler = OrderedSampler(dataset, "cd-grab", batch_size=4)
    want = orders_from(unit_gradients(net, dataset, sampler), sampler, 1)
    herd = attach(net, order=sampler, rows="exact")
    with herd.pause():
        one_step(net, dataset)
    for x, y in DataLoader(dataset, batch_size=4, sampler=sampler):
        F.cross_entropy(net(x), y).backward()  # fed back when the pause begins
        with herd.pause():
            net.zero_grad()
            one_step(net, dataset, 7)
            F.cross_entropy(net(x), y).backward()
    assert [lists(sampler.ordering.orders)] == want


def test_wrong_arguments():
    net, sampler = network(), OrderedSampler(examples(8), "cd-grab", batch_size=4)
    with pytest.raises(ValueError, match="nothing to attach"):
        attach(net)
    with pytest.raises(ValueError, match="wrap the model in DDP first"):
        attach(net, order=sampler, sparsify="exdyna")
    with pytest.raises(
        ValueError, match="one of auto, batch, exact, sketch, two-sided, got 'fast'"
    ):
        attach(net, order=sampler, rows="fast")
    for rows in ("batch", BatchRows()):
        with pytest.raises(ValueError, match="one row for a batch of 4, but units have 1"):
            attach(net, order=sampler, rows=rows)
    with pytest.raises(ValueError, match="no trainable parameter"):
        attach(network().requires_grad_(False), order=sampler)
    far = OrderedSampler(examples(8), "cd-grab", batch_size=4, world=World(1, 4))
    with pytest.raises(ValueError, match=r"made for World\(rank=1, size=4.*, but this process is"):
        attach(net, order=far)


# State, metrics, detach.


@pytest.mark.parametrize("at", [(0, 0), (0, 2), (1, 1), (1, 3)])
@pytest.mark.parametrize(
    ("policy", "batch", "unit", "rows"),
    [("cd-grab", 5, 1, "exact"), ("grab", 5, 1, "exact"), ("grab", 5, 1, "sketch"),
     ("cd-grab", 3, 3, "batch")],
)  # fmt: skip
def test_state_in_mid_epoch(policy, batch, unit, rows, at):
    straight, elsewhere, back = resumed(policy, 23, batch, unit, rows, at)
    assert elsewhere == straight
    assert back == straight


def test_metrics():
    dataset, net = examples(12), network()
    sampler = OrderedSampler(dataset, "cd-grab", batch_size=4)
    herd = attach(net, order=sampler)
    told = herd.metrics()
    assert told.pop("ordering_seconds") >= 0
    assert told == {
        "epoch": 0,
        "examples_fed_back": 0,
        "examples": 12,
        "total_examples_fed_back": 0,
        "rows": repr(ExactRows()),
        "bytes_for_ordering": 0,
        "bytes_for_comparing": 0,
        "bytes_in_all": 0,
    }
    batches = iter(DataLoader(dataset, batch_size=4, sampler=sampler))
    next(batches)
    one_step(net, dataset)
    assert herd.metrics()["examples_fed_back"] == 4


@pytest.mark.parametrize(("unit", "rows"), [(1, "exact"), (4, "batch"), (4, "sketch")])
@pytest.mark.parametrize("policy", ["cd-grab", "d-rr"])
def test_detach_leaves_the_model_as_it_was(policy, unit, rows):
    dataset, net = examples(12), network()
    sampler = OrderedSampler(dataset, policy, batch_size=4, unit=unit)
    herd = attach(net, order=sampler, rows=rows)
    batches = iter(DataLoader(dataset, batch_size=4, sampler=sampler))
    next(batches)
    one_step(net, dataset)
    herd.detach()
    state = through_disk(sampler.ordering.state_dict())
    for _ in range(5):  # more than the sampler has
        one_step(net, dataset)
    assert sampler.ordering.steps == state["balance"]["steps"] == 4 // unit
    assert not any(module._forward_hooks for module in net.modules())
    assert not any(module._forward_pre_hooks for module in net.modules())
    assert not any(p._backward_hooks for p in net.parameters())
    copy.deepcopy(net)


def test_choice_is_logged(caplog):
    dataset = examples(8)
    with caplog.at_level("INFO", logger="gradherd"):
        for unit in (1, 4):
            attach(network(), order=OrderedSampler(dataset, "cd-grab", batch_size=4, unit=unit))
        attach(network(), order=OrderedSampler(dataset, "d-rr", batch_size=4))
        big = nn.Linear(300, 100)
        attach(big, order=OrderedSampler(dataset, "cd-grab", batch_size=4))
    exact, batch, none, sketch = [record.getMessage() for record in caplog.records]
    assert "ExactRows" in exact and "111 parameters are few" in exact
    assert "BatchRows" in batch and "whole batches" in batch
    assert "needs no gradients" in none
    assert "SketchRows" in sketch and "30,100 parameters are many" in sketch


def test_whole_batches_are_sketched_on_one_gpu():
    settings = {"needs_rows": True, "whole_batches": True, "free": True}
    for size, on_gpu, workers, wanted in (
        (25_000_000, True, 1, SketchRows(size=65536)),
        (25_000_000, False, 1, BatchRows()),  # a sketch takes longer on a CPU
        (65_536, True, 1, BatchRows()),  # no longer than a sketch
        (25_000_000, True, 8, BatchRows()),  # slices come with the mean
    ):
        chosen, why = choose_rows(size=size, on_gpu=on_gpu, workers=workers, **settings)
        assert chosen == wanted and "whole batches" in why and f"{size:,}" in why


def test_ranks_with_other_orders_are_named():
    for said in run_ranks(attach_work.other_orders, 3):
        assert "ranks [2] hold another order of epoch 0 than the other 2" in said


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("peek", [1, 9])
def test_a_look_at_the_loader_before_a_short_last_batch(peek, workers):
    dataset, net = examples(18), network()
    sampler = OrderedSampler(dataset, "cd-grab", batch_size=4)
    want = orders_from(unit_gradients(net, dataset, sampler), sampler, 1)
    herd = attach(net, order=sampler, rows="exact")
    context = "fork" if workers else None
    loader = DataLoader(
        dataset, batch_size=4, sampler=sampler, num_workers=workers, multiprocessing_context=context
    )
    for number, (x, y) in enumerate(herd.batches(loader) if workers else loader):
        F.cross_entropy(net(x), y).backward()
        torch.optim.SGD(net.parameters(), lr=0.0).step()
        if number in (1, 3):
            for seen, _ in enumerate(loader):
                if seen == peek:
                    break
    assert [lists(sampler.ordering.orders)] == want


def test_early_stop_of_a_loader_that_has_handed_out_everything():
    dataset, net = examples(20), network()
    sampler = OrderedSampler(dataset, "cd-grab", batch_size=4)
    want = orders_from(unit_gradients(net, dataset, sampler), sampler, 1)
    herd = attach(net, order=sampler, rows="exact")
    loader = DataLoader(
        dataset, batch_size=4, sampler=sampler, num_workers=2, prefetch_factor=4,
        multiprocessing_context="fork",
    )  # fmt: skip
    for stop in (2, 9):
        for number, (x, y) in enumerate(herd.batches(loader)):
            if number == stop:
                break
            F.cross_entropy(net(x), y).backward()
            torch.optim.SGD(net.parameters(), lr=0.0).step()
    assert [lists(sampler.ordering.orders)] == want


class Slow(torch.utils.data.Dataset):
    """Examples of which some take their time, so that loader workers overtake each other."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        if index % 5 == 0:
            time.sleep(0.02)
        return *self.dataset[index], index


@pytest.mark.parametrize("rows", ["exact", SketchRows(size=4096)])
def test_batches_out_of_order_are_told_by_index(rows):
    dataset, net = examples(22), network()
    plain = OrderedSampler(dataset, "cd-grab", batch_size=4)
    told = OrderedSampler(dataset, "cd-grab", batch_size=4)
    step = torch.optim.SGD(net.parameters(), lr=0.0).step
    herd = attach(net, order=plain, rows=rows)
    for _ in range(2):
        for x, y in DataLoader(dataset, batch_size=4, sampler=plain):
            F.cross_entropy(net(x), y).backward()
            step()
    herd.detach()
    herd = attach(net, order=told, rows=rows)
    loader = DataLoader(
        Slow(dataset), batch_size=4, sampler=told, num_workers=2, in_order=False,
        multiprocessing_context="fork",
    )  # fmt: skip
    delivered = []
    for _ in range(2):
        for x, y, indices in loader:
            delivered += indices.tolist()
            herd.observe(indices)
            F.cross_entropy(net(x), y).backward()
            step()
    assert told.epoch == plain.epoch == 2
    assert lists(told.ordering.orders) == lists(plain.ordering.orders)
    assert sorted(delivered) == sorted([*range(22)] * 2)


@pytest.mark.parametrize(("unit", "rows"), [(1, "exact"), (4, "batch")])
def test_accumulated_batches_are_given_by_index_before_their_forward(unit, rows):
    orders = []
    for accumulate in (1, 2):
        dataset, net = examples(24), network()
        sampler = OrderedSampler(dataset, "cd-grab", batch_size=4, unit=unit)
        herd = attach(net, order=sampler, rows=rows)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        indices = sampler.indices()
        for number, (x, y) in enumerate(DataLoader(dataset, batch_size=4, sampler=sampler)):
            herd.observe(indices[4 * number : 4 * number + 4])
            F.cross_entropy(net(x), y).backward()
            if number % accumulate == accumulate - 1:
                optimizer.step()
                optimizer.zero_grad()
        herd.finish()
        orders.append(lists(sampler.ordering.orders))
    assert orders[0] == orders[1]


@pytest.mark.parametrize(("unit", "rows"), [(1, "exact"), (4, "batch")])
def test_a_batch_that_is_given_by_index_is_one_forward(unit, rows):
    dataset, net = examples(12), network()
    sampler = OrderedSampler(dataset, "cd-grab", batch_size=4, unit=unit)
    herd = attach(net, order=sampler, rows=rows)
    indices = sampler.indices()[:4]
    next(iter(DataLoader(dataset, batch_size=4, sampler=sampler)))
    herd.observe(indices)
    one_step(net, dataset)
    with pytest.raises(
        RuntimeError, match=r"not named: call herd.observe\(indices\) once for each"
    ):
        one_step(net, dataset)


def test_batches_out_of_order_without_their_indices_are_refused():
    dataset, net = examples(8), network()
    sampler = OrderedSampler(dataset, "cd-grab", batch_size=4)
    herd = attach(net, order=sampler)
    loader = DataLoader(
        Slow(dataset), batch_size=4, sampler=sampler, num_workers=1, in_order=False,
        multiprocessing_context="fork",
    )  # fmt: skip
    step = torch.optim.SGD(net.parameters(), lr=0.0).step
    with pytest.raises(ValueError, match=r"herd.observe\(indices\)"):
        herd.batches(loader)
    walk = iter(loader)
    x, y, indices = next(walk)
    with pytest.raises(RuntimeError, match=r"herd.batches\(loader\)"):
        net(x)
    herd.observe(indices.flip(0))
    F.cross_entropy(net(x), y).backward()
    with pytest.raises(ValueError, match="are not consecutive in this rank's order"):
        step()
    herd.observe(indices)
    F.cross_entropy(net(x), y).backward()
    step()
    with pytest.raises(RuntimeError, match="save the state there"):
        herd.state_dict()
    sampler.set_epoch(1)
    assert herd.state_dict()["ordering"]["balance"]["epoch"] == 1


@pytest.mark.parametrize("stop", [None, 2])
def test_persistent_workers_begin_anew(stop):
    dataset, net = examples(22), network()
    sampler = OrderedSampler(dataset, "cd-grab", batch_size=4)
    herd = attach(net, order=sampler, rows="exact")
    loader = DataLoader(
        dataset, batch_size=4, sampler=sampler, num_workers=2, persistent_workers=True,
        drop_last=True, prefetch_factor=4, multiprocessing_context="fork",
    )  # fmt: skip
    step = torch.optim.SGD(net.parameters(), lr=0.0).step
    epochs = []
    for _ in range(3):
        for number, (x, y) in enumerate(herd.batches(loader)):
            F.cross_entropy(net(x), y).backward()
            step()
            if number + 1 == stop:
                break
        epochs.append((sampler.epoch, herd.metrics()["examples_fed_back"]))
    if stop is None:  # a loader that drops its last two examples does not freeze the order
        assert epochs == [(0, 20), (1, 20), (2, 20)]
    else:  # a loop that starts over feeds its first examples, not those that come next
        assert epochs == [(0, 8), (0, 8), (0, 8)]


def test_a_second_attach_waits_for_the_first_to_let_go():
    dataset, net = examples(8), network()
    sampler = OrderedSampler(dataset, "cd-grab", batch_size=4)
    other = OrderedSampler(dataset, "cd-grab", batch_size=4)
    herd = attach(net, order=sampler)
    with pytest.raises(ValueError, match=r"order is attached already: call detach\(\) of the herd"):
        attach(network(), order=sampler)
    # Also with another order, or none.
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    refused = r"model is attached already: call detach\(\) of the herd"
    with pytest.raises(ValueError, match=refused):
        attach(net, order=other)
    with pytest.raises(ValueError, match=refused):
        attach(net, optimizer=optimizer, local=LocalSteps(every=2))
    attach(copy.deepcopy(net), order=other)  # a copy is another model
    herd.detach()
    attach(net, order=sampler)


@pytest.mark.parametrize("rows", [("sketch", "batch"), ("batch", "sketch")])
def test_rows_of_another_kind_within_an_epoch_are_refused(rows):
    dataset, net = examples(16), network()
    sampler = OrderedSampler(dataset, "grab", batch_size=4, unit=4)
    herd = attach(net, order=sampler, rows=rows[0])
    batches = iter(DataLoader(dataset, batch_size=4, sampler=sampler))
    next(batches)
    one_step(net, dataset)
    herd.detach()
    with pytest.raises(
        ValueError, match=r"elements, expected .* rows of another kind .*rows='batch'"
    ):
        attach(net, order=sampler, rows=rows[1])
    herd = attach(net, order=sampler, rows=rows[0])
    next(batches)
    one_step(net, dataset)
    assert herd.metrics()["examples_fed_back"] == 8


def test_a_model_that_was_dropped_lets_its_sampler_go():
    dataset, net = examples(8), network()
    sampler = OrderedSampler(dataset, "cd-grab", batch_size=4)
    herd = attach(net, order=sampler)
    del net, herd
    herd = attach(network(), order=sampler)
    with pytest.raises(ValueError, match="order is attached already"):
        attach(network(), order=sampler)
    herd.detach()


def test_a_model_that_is_dropped_during_a_step_does_not_disturb_it():
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    dropped = [attach(network(), order=OrderedSampler(examples(8), "grab", batch_size=4))]

    def collect(*args):
        dropped.clear()
        gc.collect()

    handle = register_optimizer_step_pre_hook(collect)
    herd = attach(net, order=OrderedSampler(examples(8), "grab", batch_size=4))
    optimizer.step()
    handle.remove()
    herd.detach()


def test_observe_takes_indices_only():
    herd = attach(network(), order=OrderedSampler(examples(8), "cd-grab", batch_size=4))
    for wrong, value in (
        ("a", "'a'"),
        ([0, 8], "8"),
        ([-1], "-1"),
        ([0.5], "0.5"),
        ([True], "True"),
    ):
        with pytest.raises(ValueError, match=rf"whole numbers in \[0, 8\), got {value}$"):
            herd.observe(wrong)
    herd.observe(torch.tensor([3, 1]))
    herd.detach()


def test_a_herd_that_was_detached_says_so():
    dataset, net = examples(8), network()
    herd = attach(net, order=OrderedSampler(dataset, "cd-grab", batch_size=4))
    state = herd.state_dict()
    herd.detach()
    herd.detach()  # does nothing
    uses = {
        "observe": lambda: herd.observe([0, 1, 2, 3]),
        "finish": herd.finish,
        "pause": lambda: herd.pause().__enter__(),
        "sync": herd.sync,
        "shared_weights": lambda: herd.shared_weights().__enter__(),
        "load_state_dict": lambda: herd.load_state_dict(state),
    }
    for name, use in uses.items():
        with pytest.raises(RuntimeError, match=rf"^{name}\(\) needs a herd .* was detached$"):
            use()
    assert herd.metrics()["epoch"] == 0  # figures stay, and frameworks save after training
    assert herd.state_dict()["sampler"] == state["sampler"]


def test_a_pause_inside_a_pause_does_not_end_it():
    dataset, net = examples(8), network()
    herd = attach(net, order=OrderedSampler(dataset, "cd-grab", batch_size=4))
    step = torch.optim.SGD(net.parameters(), lr=0.0).step
    with herd.pause():
        with herd.pause():
            pass
        net(dataset.tensors[0]).sum().backward()
        step()
    assert herd.metrics()["examples_fed_back"] == 0


def test_steps_of_another_model_do_not_count():
    dataset, net, other = examples(8), network(), network()
    sampler = OrderedSampler(dataset, "cd-grab", batch_size=4)
    herd = attach(net, order=sampler, rows="exact")
    x, y = next(iter(DataLoader(dataset, batch_size=4, sampler=sampler)))
    loss = F.cross_entropy(net(x), y)
    loss.backward(retain_graph=True)
    torch.optim.SGD(other.parameters(), lr=0.0).step()
    assert herd.metrics()["examples_fed_back"] == 0
    torch.optim.SGD(net.parameters(), lr=0.0).step()
    assert herd.metrics()["examples_fed_back"] == 4


@pytest.mark.parametrize("rows", [3, "exactly", None])
def test_unknown_rows_are_named(rows):
    sampler = OrderedSampler(examples(8), "cd-grab", batch_size=4)
    with pytest.raises(
        ValueError, match="rows must be one of auto, batch, exact, sketch, two-sided, got"
    ):
        attach(network(), order=sampler, rows=rows)


@pytest.mark.parametrize("rows", ["exact", "sketch"])
def test_rows_keep_their_precision_where_autocast_asks_for_them(rows):
    """A step that is skipped leaves its rows to the next forward, which may be in autocast."""

    def learned(settle):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 3))
        x = torch.randn(24, 20)
        data = TensorDataset(x, torch.arange(24) % 3)
        sampler = OrderedSampler(data, "pair-grab", batch_size=4, world=World.single())
        herd = attach(net, order=sampler, rows=rows)
        for batch, (inputs, labels) in enumerate(DataLoader(data, batch_size=4, sampler=sampler)):
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.cross_entropy(net(inputs), labels)
            loss.backward()
            if settle:
                herd.finish()
            if batch == 3:
                with torch.autocast("cpu", torch.bfloat16):
                    return herd.state_dict()["ordering"]["balance"]["running"]

    torch.testing.assert_close(learned(settle=False), learned(settle=True))


@pytest.mark.parametrize("order", ["grab", 3, object])
def test_an_order_that_is_no_sampler_is_named(order):
    with pytest.raises(
        ValueError, match=r"order must be the OrderedSampler of the .* got .*: make"
    ):
        attach(nn.Linear(2, 2), order=order)


def test_a_state_saved_behind_the_last_batch():
    """A loop that begins at `sampler.epoch` goes on; one that names the epoch again is told."""
    dataset = examples(20)
    states = []
    for _ in range(2):
        net, sampler = network(), OrderedSampler(dataset, "grab", batch_size=4)
        herd = attach(net, order=sampler, rows="exact")
        if states:
            break
        sampler.set_epoch(0)
        for x, y in DataLoader(dataset, batch_size=4, sampler=sampler):
            F.cross_entropy(net(x), y).backward()
            torch.optim.SGD(net.parameters(), lr=0.0).step()
        states.append(herd.state_dict())
    herd.load_state_dict(states[0])
    assert sampler.epoch == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampler.set_epoch(1)
    herd.load_state_dict(states[0])
    with pytest.warns(UserWarning, match="begin at sampler.epoch"):
        sampler.set_epoch(0)
