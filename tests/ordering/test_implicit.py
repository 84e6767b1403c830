"""Orders learned from rows that are not formed are those of formed rows."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gradherd as gh
from gradherd.comm.script import Script
from gradherd.flat import FlatSpec
from gradherd.hooks import attach
from gradherd.ordering.bounds import HerdingWatch
from gradherd.ordering.coordination import RowGatherer
from gradherd.ordering.grab import GraB
from gradherd.ordering.ordering import Ordering
from gradherd.ordering.pair_grab import CDGraB, PairGraB
from gradherd.ordering.policy import SignPolicy
from gradherd.ordering.sign_rules import Greedy, Kernel, Walk
from gradherd.rows.factored_rows import FactoredRows
from gradherd.rows.outer_rows import OuterRows

UNITS = 23


def implicit(dense: Tensor) -> FactoredRows:
    """Return (b, D) rows as outer products with ones, in two parts."""
    half = dense.shape[1] // 2
    spec = FlatSpec(("one", "two"), ((half,), (dense.shape[1] - half,)))
    outer = OuterRows(dense[:, None, half:], dense.new_ones(len(dense), 1, 1))
    return FactoredRows({"one": dense[:, :half], "two": outer}, spec, len(dense), dense, 1.0)


@pytest.mark.parametrize("rule", [Greedy(), Walk(c=0.5), Kernel()])
@pytest.mark.parametrize("kind", [GraB, PairGraB, CDGraB])
@pytest.mark.parametrize("batch", [1, 3, 4, UNITS])
def test_orders_are_those_of_formed_rows(kind: type[SignPolicy], rule, batch: int) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(UNITS, 40, generator=generator, dtype=torch.float64) + 0.3
    orderings = [Ordering(kind(rule), [UNITS]) for _ in range(2)]
    for ordering in orderings:
        ordering.watch = HerdingWatch(UNITS)
    for epoch in range(4):
        for begin in range(0, UNITS, batch):
            broken = epoch == 1 and begin == batch
            missed = epoch == 2 and begin == batch
            for ordering, gives in zip(orderings, (False, True), strict=True):
                own = rows[ordering.orders[0]][begin : begin + batch].clone()
                if missed:
                    continue
                if broken:
                    own[0, 0] = torch.inf
                    seen = torch.zeros(len(own), 1, dtype=torch.bool)
                    given = implicit(own) if gives else own.unsqueeze(1)
                    ordering.observe(given, seen, first=begin)
                    continue
                ordering.observe(implicit(own) if gives else own.unsqueeze(1), first=begin)
        for ordering in orderings:
            ordering.end_epoch()
        one, two = orderings
        assert torch.equal(one.orders[0], two.orders[0]), epoch
        assert one.watch.last is None or torch.isclose(one.watch.last, two.watch.last)
    states = [ordering.state_dict()["balance"] for ordering in orderings]
    for name in states[0]:
        torch.testing.assert_close(states[0][name], states[1][name])


def train(name: str, unit: int, *, overflows: bool = False, batches: int = 6) -> tuple[list, dict]:
    """Return the orders of three epochs of an MLP, and figures of its rows."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(8 * batches + 3, 20), torch.randn(8 * batches + 3, 4))
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 4)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sampler = gh.OrderedSampler(data, name, batch_size=8, unit=unit, drop_last=unit > 1)
    herd = gh.attach(model, order=sampler, rows="exact")
    herd.scalars(rows=True)
    orders = []
    for epoch in range(3):
        orders.append(list(sampler.ordering.orders[0]))
        for at, (x, y) in enumerate(DataLoader(data, batch_size=8, sampler=sampler)):
            loss = (model(x.double()) - y).square().sum(1).mean()
            (loss * torch.inf if overflows and at == epoch else loss).backward()
            if not (overflows and at == epoch):
                optimizer.step()
            optimizer.zero_grad()
        herd.finish()
    return orders, herd.scalars(rows=True)


@pytest.mark.parametrize("name", ["grab", "pair-grab", "cd-grab"])
@pytest.mark.parametrize("unit", [1, 4])
@pytest.mark.parametrize("overflows", [False, True])
def test_training_with_them_gives_the_same_orders(
    name: str, unit: int, overflows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    formed = train(name, unit, overflows=overflows)
    monkeypatch.setattr(attach, "SMALL_MODEL", 0)
    monkeypatch.setattr(OuterRows, "is_smaller", lambda self: True)
    given = []
    add = RowGatherer.add

    def noted(self: RowGatherer, rows: object, claim: object = None) -> None:
        given.append(type(rows))
        add(self, rows, claim)

    monkeypatch.setattr(RowGatherer, "add", noted)
    orders, figures = train(name, unit, overflows=overflows)
    assert set(given) == {FactoredRows}
    assert orders == formed[0] and orders[1] != sorted(orders[0])
    assert figures.keys() == formed[1].keys()
    for key, value in figures.items():
        if "seconds" not in key:
            assert value == pytest.approx(formed[1][key], rel=1e-4), key


def test_an_order_with_an_observe_of_its_own_gets_formed_rows() -> None:
    class Own(CDGraB):
        def observe(self, state, rows, seen, random) -> Script[None]:
            return super().observe(state, rows * 1, seen, random)

    assert CDGraB.takes_implicit and not Own.takes_implicit
