"""What rows tell beside an order: measured if asked for, and without a change of the order."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import gradherd as gh
from gradherd.lab.ranks import run_ranks
from gradherd.ordering.bounds import parallel_herding_bound
from tests.rows.reference import loop_over_examples

NORMS = {f"herd/row_norm_{level}" for level in ("p10", "p50", "p90")}


def network():
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


def loss_of(output, y):
    return nn.functional.mse_loss(output, y)


def setup(rows, unit=1, batch=4, wrap=lambda model: model, order="grab"):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(24, 3), torch.randn(24, 2))
    model = wrap(network())
    sampler = gh.OrderedSampler(data, order, batch_size=batch, unit=unit)
    herd = gh.attach(model, order=sampler, rows=rows)
    loader = DataLoader(data, batch_size=batch, sampler=sampler)
    return model, herd, loader, torch.optim.SGD(model.parameters(), lr=0.05)


def epoch(model, loader, optimizer, look=lambda x, y: None):
    for x, y in loader:
        look(x, y)
        loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("rows, unit", [("exact", 1), ("exact", 2), ("sketch", 1), ("auto", 4)])
def test_norms_are_those_of_single_gradients(rows, unit):
    model, herd, loader, optimizer = setup(rows, unit)
    assert not herd.scalars(rows=True).keys() & NORMS
    expected = []

    def look(x, y):
        twin = network()  # the model itself would feed these gradients back
        twin.load_state_dict(model.state_dict())
        single = loop_over_examples(twin, lambda i: loss_of(twin(x[i]), y[i]), len(x))
        expected.append(single.view(len(x) // unit, unit, -1).mean(1).norm(dim=1))

    epoch(model, loader, optimizer, look)
    found = herd.scalars(rows=True)
    # 512 columns hold the 50 parameters with few collisions.
    tolerance = 0.3 if rows == "sketch" else 1e-4
    for level in (10, 50, 90):
        norm = float(expected[-1].quantile(level / 100))
        assert found[f"herd/row_norm_p{level}"] == pytest.approx(norm, rel=tolerance)
    assert ("herd/noise_scale" in found) == (unit < 4)
    herd.detach()


@pytest.mark.parametrize("rows", ["exact", "sketch"])
def test_the_herding_bound_is_that_of_the_rows_of_the_epoch(rows, monkeypatch):
    model, herd, loader, optimizer = setup(rows)
    seen = []
    learn = herd.sampler.ordering.observe

    def observe(rows, *args, **kwargs):
        seen.append(rows[:, 0].clone())
        return learn(rows, *args, **kwargs)

    monkeypatch.setattr(herd.sampler.ordering, "observe", observe)
    assert "herd/herding_bound" not in herd.scalars(rows=True)
    for _ in range(2):
        seen.clear()
        epoch(model, loader, optimizer)
    rows_of_epoch = torch.cat(seen)
    assert len(rows_of_epoch) == 24
    bound = herd.scalars(rows=True)["herd/herding_bound"]
    assert bound == pytest.approx(
        parallel_herding_bound([rows_of_epoch], [torch.arange(24)]), rel=1e-5
    )
    herd.detach()


def test_an_epoch_that_was_begun_before_has_no_bound():
    model, herd, loader, optimizer = setup("sketch")
    asked = []
    epoch(model, loader, optimizer, lambda x, y: asked.append(herd.scalars(rows=True)))
    assert "herd/herding_bound" in herd.scalars(rows=True)  # asked before the first step
    herd.detach()
    model, herd, loader, optimizer = setup("sketch")
    for number, (x, y) in enumerate(loader):
        loss_of(model(x), y).backward()
        optimizer.step()
        if number == 2:
            herd.finish()
            herd.scalars(rows=True)
    assert "herd/herding_bound" not in herd.scalars(rows=True)
    herd.detach()


def test_watching_changes_neither_orders_nor_states():
    states = []
    for watched in (False, True):
        model, herd, loader, optimizer = setup("exact")
        if watched:
            herd.scalars(rows=True)
        epoch(model, loader, optimizer)
        states.append((herd.state_dict(), herd.sampler.indices()))
        herd.detach()
        assert type(herd.sampler.ordering.policy) is gh.GraB
    (plain, order), (state, watched_order) = states
    assert order == watched_order and plain["ordering"]["policy"] == state["ordering"]["policy"]
    model, herd, loader, optimizer = setup("exact")
    herd.scalars(rows=True)
    herd.load_state_dict(plain)  # into a herd that is watched, from one that was not
    assert herd.sampler.indices() == order
    herd.detach()


def test_prefix_sums_of_long_epochs_and_rows_are_a_lower_bound(monkeypatch):
    from gradherd.ordering import bounds

    monkeypatch.setattr(bounds, "_PREFIXES", 5)
    monkeypatch.setattr(bounds, "_COLUMNS", 7)
    rows = torch.randn(23, 20, generator=torch.Generator().manual_seed(3))
    sums = bounds.HerdingWatch(23)
    for first in range(0, 23, 4):
        part = rows[first : first + 4].unsqueeze(1)
        sums.add(first, part, torch.ones(len(part), 1, dtype=torch.bool))
    centred = (rows.double() - rows.double().mean(0)).cumsum(0)
    kept = centred[4::5][:, torch.arange(7) * 20 // 7]
    sums.end(complete=True)
    assert float(sums.last) == pytest.approx(float(kept.abs().max()))
    assert float(sums.last) <= parallel_herding_bound([rows], [torch.arange(23)]) + 1e-9


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits_for_the_gpu():
    from gradherd.hooks.transports import RowFigures
    from gradherd.ordering.bounds import HerdingWatch

    rows, seen = torch.randn(8, 1, 5000, device="cuda"), torch.ones(8, 1, dtype=torch.bool)
    figures, sums = RowFigures(unit=1), HerdingWatch(16)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in (0, 8):
            figures.add(rows[:, 0])
            sums.add(step, rows, seen)
        sums.end(complete=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert figures.scalars().keys() >= {"row_norm_p50"} and float(sums.last) > 0


def test_rows_that_nobody_reads_have_no_figures():
    model, herd, loader, optimizer = setup("auto", order="d-rr")
    herd.scalars(rows=True)
    epoch(model, loader, optimizer)
    assert not {*NORMS, "herd/herding_bound"} & herd.scalars(rows=True).keys()
    herd.detach()


def ranks_work():
    found = []
    for unit in (4, 1):
        model, herd, loader, optimizer = setup("auto", unit, wrap=DDP, order="cd-grab")
        herd.scalars(rows=True)
        epoch(model, loader, optimizer)
        herd.finish()
        found.append({key.removeprefix("herd/") for key in herd.scalars(rows=True)})
        herd.detach()
    return found


def test_two_ranks():
    for whole, single in run_ranks(ranks_work, 2):
        # DDP's hook deals out slices of whole batches: no rank holds a row of its own.
        assert "herding_bound" in whole and not {"noise_scale", "row_norm_p50"} & whole
        assert {"herding_bound", "noise_scale", "row_norm_p50"} <= single
