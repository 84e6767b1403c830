"""Mistakes in methods of one's own: a sentence names the method, or the mistake does no harm."""

import re
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from gradherd import ExDyna, Sparsify, attach
from gradherd.cli.main import main
from gradherd.comm.script import run_together
from gradherd.lab.ranks import run_ranks
from gradherd.ordering.ordering import Ordering
from gradherd.ordering.policy import Policy
from gradherd.ordering.registry import POLICIES
from gradherd.sparsify.registry import SPARSIFIERS
from gradherd.sparsify.selecting import gather_indices, gather_union
from gradherd.sparsify.selector import Selection, Selector, StepContext
from gradherd.sparsify.settings import make_settings
from gradherd.sparsify.virtual_workers import VirtualWorkers

SIZES = [4, 3]
RETURNED = {
    "all zeros": [torch.zeros(4, dtype=torch.int64), torch.arange(3)],
    "too short": [torch.arange(4), torch.arange(2)],
    "too few workers": [torch.arange(4)],
    "too many workers": [torch.arange(4), torch.arange(3), torch.arange(3)],
    "a unit of nobody": [torch.tensor([0, 1, 2, 4]), torch.arange(3)],
    "no integers": [torch.arange(4.0), torch.arange(3)],
    "lists": [[3, 2, 1, 0], [2, 1, 0]],
    "nothing": None,
}


@dataclass(frozen=True)
class Returning(Policy):
    """Return one of the above, as the first order or as the second."""

    case: str = ""
    start: str | None = None
    needs_rows: ClassVar[bool] = False

    def observe(self, state, rows, seen, random):
        state.steps += len(seen)
        yield from ()

    def reorder(self, orders, state, epoch, random):
        return RETURNED[self.case]


@pytest.mark.parametrize("case", RETURNED)
def test_orders_that_are_no_permutations_are_refused(case):
    ordering = Ordering(Returning(case), SIZES)
    before = ordering.orders
    ordering.observe(None, torch.ones(4, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match=rf"Returning\(case='{case}'.*reorder must return"):
        ordering.end_epoch()
    assert ordering.epoch == 0 and all(map(torch.equal, ordering.orders, before))
    with pytest.raises(ValueError, match="reorder must return"):
        Ordering(Returning(case, start="computed"), SIZES)


@dataclass(frozen=True)
class Turned(Policy):
    """Visit units in the opposite order, as a tuple."""

    advances: bool = True

    def observe(self, state, rows, seen, random):
        yield from ()
        state.steps += len(seen) if self.advances else 0

    def reorder(self, orders, state, epoch, random):
        return tuple(order.flip(0) for order in orders)


def test_orders_may_be_a_tuple():
    ordering = Ordering(Turned(), SIZES, start="identity")
    for _ in range(2):
        ordering.observe(torch.ones(4, 2, 1))
        ordering.end_epoch()
    assert [order.tolist() for order in ordering.orders] == [[0, 1, 2, 3], [0, 1, 2]]


def test_an_order_that_does_not_count_its_steps_is_refused():
    ordering = Ordering(Turned(advances=False), SIZES)
    with pytest.raises(ValueError, match=r"Turned.* must add len.seen. = 2 to state.steps"):
        ordering.observe(torch.ones(2, 2, 1))


@dataclass(frozen=True)
class Immediate(Policy):
    """Learn without a yield, so not in a generator."""

    def observe(self, state, rows, seen, random):
        state.steps += len(seen)

    def reorder(self, orders, state, epoch, random):
        return orders


def test_an_order_that_is_no_generator_is_refused():
    with pytest.raises(ValueError, match=r"^Immediate.observe must be a generator: add `yield"):
        Ordering(Immediate(), SIZES).observe(torch.ones(2, 2, 1))


@dataclass(frozen=True)
class Told:
    """A state."""

    steps: int = 0


@dataclass(frozen=True)
class Unfinished(Selector):
    """Send the first coordinates, with states before and after a step as told."""

    density: float = 0.5
    before: Told | None = None
    after: Told | None = None

    def begin(self, dim, workers, layers):
        return self.before

    def agree(self, step, own, headers):
        yield from ()
        return Selection(torch.arange(step.k), [step.k] * step.size, self.after)


@dataclass(frozen=True)
class Hasty(Unfinished):
    """Agree without a yield, so not in a generator."""

    def agree(self, step, own, headers):
        return Selection(torch.arange(step.k), [step.k] * step.size, None)


def step(method):
    """Take a step of two workers."""
    VirtualWorkers(Sparsify(method=method), 4, 2).step(torch.ones(2, 4))


def test_a_sparsifier_that_is_no_generator_is_refused():
    with pytest.raises(ValueError, match=r"^Hasty.agree must be a generator: add `yield"):
        step(Hasty())


@pytest.mark.parametrize("states", [(None, Told()), (Told(), None)], ids=["begin", "agree"])
def test_a_state_that_only_begin_or_only_agree_returns_is_refused(states):
    with pytest.raises(ValueError, match=r"^Unfinished.begin returned .*, but agree "):
        step(Unfinished(before=states[0], after=states[1]))
    step(Unfinished())
    step(Unfinished(before=Told(), after=Told(1)))


def test_indices_need_not_ascend():
    dim = 400_000
    values = torch.randn(2, dim, generator=torch.Generator().manual_seed(0)).abs()
    own = list(values.topk(500).indices)  # the largest first
    contexts = [StepContext(0, rank, 2) for rank in range(2)]
    scripts = [gather_union(one, [500, 500], dim, c) for one, c in zip(own, contexts, strict=True)]
    union = torch.cat(own).unique()
    assert all(torch.equal(found.value, union) for found in run_together(scripts))
    spans = [(0, dim)] * 2
    scripts = [
        gather_indices(one, [500, 500], spans, c) for one, c in zip(own, contexts, strict=True)
    ]
    joined = torch.cat([one.sort().values for one in own])
    assert all(torch.equal(found.value, joined) for found in run_together(scripts))
    alone = run_together([gather_union(own[0], [500], dim, StepContext(0, 0, 1))])
    assert torch.equal(alone[0].value, own[0].sort().values)


def _apart(step):
    draw = torch.Generator().manual_seed(step.rank)
    return torch.randperm(step.dim, generator=draw)[: step.k].sort().values


WRONG = {
    "other ranks": (_apart, "selected other coordinates on different workers"),
    "another order": (lambda step: step.everything()[: step.k].roll(step.rank), "other coord"),
    "other lengths": (lambda step: step.everything()[: step.k + step.rank], "other coord"),
    "one worker": (lambda step: step.everything()[: step.k] * (-1) ** step.rank, "on worker 1"),
    "repeats": (lambda step: torch.zeros(step.k, dtype=torch.int64), "repeat"),
    "mask": (lambda step: step.everything() < step.k, "1-D int64 tensor, got torch.bool (40,)"),
    "table": (lambda step: step.everything().view(2, -1), "got torch.int64 (2, 20)"),
    "list": (lambda step: list(range(step.k)), "int64 tensor, got list"),
    "too large": (lambda step: step.everything()[: step.k] + 35, "[0, 40)"),
    "from the end": (lambda step: -1 - step.everything()[: step.k], "[0, 40)"),
    "nothing": (lambda step: step.everything()[:0], None),
    "descending": (lambda step: step.everything()[: step.k].flip(0), None),
    "all": (lambda step: None, None),
}


@dataclass(frozen=True)
class Wrong(Selector):
    """Select one of the above."""

    case: str
    density: float = 0.25
    counts: int = 2
    first: int = 0

    def agree(self, step, own, headers):
        yield from ()
        case = self.case if step.number >= self.first else "all"
        return Selection(WRONG[case][0](step), [step.k] * self.counts, None)


@pytest.mark.parametrize("case", WRONG)
def test_coordinates_that_cannot_be_sent_are_refused(case):
    workers = VirtualWorkers(Sparsify(method=Wrong(case)), 40, 2)
    if WRONG[case][1] is None:
        workers.step(torch.ones(2, 40))
        return
    with pytest.raises(ValueError, match=rf"^Wrong\.agree .*{re.escape(WRONG[case][1])}"):
        workers.step(torch.ones(2, 40))
    assert not workers.residuals().any() and workers.workers[0].step == 0


def test_as_many_counts_as_workers_are_demanded():
    with pytest.raises(ValueError, match=r"^Wrong\.agree returned 3 counts for 2 workers"):
        VirtualWorkers(Sparsify(method=Wrong("all", counts=3)), 40, 2).step(torch.ones(2, 40))


def test_coordinates_that_differ_later_are_found():
    workers = VirtualWorkers(Sparsify(method=Wrong("other ranks", first=30)), 40, 2)
    with pytest.raises(ValueError, match="on different workers"):
        for _ in range(131):
            workers.step(torch.ones(2, 40))


def test_ranks_that_select_apart_all_stop():
    for message in run_ranks(_drift, 2):
        assert message.startswith("Wrong.agree selected other coordinates on different workers")


def _drift():
    torch.manual_seed(0)
    ddp = DDP(nn.Linear(40, 40))
    attach(ddp, sparsify=Wrong("other ranks"))
    try:
        ddp(torch.randn(2, 40)).sum().backward()
    except ValueError as error:
        return str(error)
    return "nothing"


class Undeclared(Selector):
    """No dataclass."""

    density = 0.5
    agree = Unfinished.agree


@dataclass(frozen=True)
class Demanding(Selector):
    """Its field has no default."""

    density: float
    agree = Unfinished.agree


@dataclass(frozen=True)
class DemandingOrder(Policy):
    """Its field has no default."""

    epochs: int
    observe, reorder = Turned.observe, Turned.reorder


@pytest.mark.parametrize(
    ("registry", "method", "says"),
    [
        (SPARSIFIERS, Undeclared, "must be a dataclass with a field density, got "),
        (SPARSIFIERS, Demanding, "must be a class whose fields all have defaults: "),
        (SPARSIFIERS, Unfinished(), "must be a class whose fields all have defaults: "),
        (POLICIES, DemandingOrder, "must be a class whose fields all have defaults: "),
        (POLICIES, Turned(), "must be a class whose fields all have defaults: "),
    ],
    ids=["undeclared", "demanding", "made", "demanding order", "made order"],
)
def test_what_cannot_be_built_is_refused(monkeypatch, capsys, tmp_path, registry, method, says):
    monkeypatch.setitem(registry, "mine", method)
    np.save(tmp_path / "a.npy", np.ones((2, 3, 4), "float32"))
    replay, train = ("order", "--order") if registry is POLICIES else ("sparsify", "--sparsify")
    option = "--order" if registry is POLICIES else "--method"
    for words in (
        ["train", "digits", train, "mine", "--workers", 2, "--out", tmp_path / "out"],
        ["replay", replay, tmp_path / "a.npy", option, "mine"],
    ):
        with pytest.raises(SystemExit) as stop:
            main([str(word) for word in words])
        (line,) = capsys.readouterr().err.splitlines()
        assert stop.value.code == 2 and f"'mine' {says}" in line, line


def test_a_second_name_brings_other_settings(monkeypatch):
    monkeypatch.setitem(SPARSIFIERS, "mine", partial(ExDyna, blocks=16))
    assert make_settings("mine", 0.1).method == ExDyna(density=0.1, blocks=16)
