"""One hook instead of all of them: every backward is noticed, or its batch is left out."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradherd.hooks import parameter_hooks, row_sources
from gradherd.hooks.row_sources import BatchGradientSource
from gradherd.rows.settings import SketchRows


class Heads(nn.Module):
    """A body and two heads, which may be used alone or together."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 2)
        self.own = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, heads: str) -> Tensor:
        if heads == "own":  # not a single layer
            return (self.own * x[:, :2]).square().mean()
        out = self.body(x)
        return torch.stack([getattr(self, head)(out).square().mean() for head in heads]).sum()


@pytest.fixture
def sources(monkeypatch):
    """A model, and two sources of its rows: as gradients arrive, and when a backward is over."""
    torch.manual_seed(0)
    model = Heads()
    arriving = BatchGradientSource(model, None)
    monkeypatch.setattr(row_sources, "AT_END_DEVICES", {"cpu"})
    monkeypatch.setattr(parameter_hooks, "_BACKWARDS_BEFORE_ONE_HOOK", 3)
    return model, arriving, BatchGradientSource(model, None)


def hooks(model: nn.Module) -> int:
    """Hooks on all parameters; the source of arriving gradients has one on each."""
    found = sum(len(p._backward_hooks or {}) for p in model.parameters())
    return found - len(list(model.parameters()))


def compare(arriving: BatchGradientSource, at_end: BatchGradientSource) -> bool:
    """Take the row of a batch from both; say whether it was left out."""
    wanted = arriving.take(4, 1.0)
    if not at_end.waiting:
        return True
    row = at_end.take(4, 1.0)
    assert not at_end.waiting  # asked again after the step of the optimizer
    if row.isnan().all():
        return True
    torch.testing.assert_close(row, wanted, atol=1e-6, rtol=1e-4)
    return False


def test_a_regular_loop_has_one_hook(sources):
    model, arriving, at_end = sources
    x = torch.randn(4, 3)
    for step in range(12):
        for _ in range(2 if step % 3 else 1):  # accumulates now and then
            model(x, "a").backward()
        assert not compare(arriving, at_end)
        assert hooks(model) == (7 if step < 1 else 1)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        model.zero_grad(set_to_none=step % 2 == 0)
        assert not at_end.waiting
    at_end.remove_hooks()
    assert not hooks(model)


@pytest.mark.parametrize("heads", ["b", "own"])
def test_another_part_of_the_model_is_noticed_from_the_second_batch_on(sources, heads):
    model, arriving, at_end = sources
    x = torch.randn(4, 3)
    for used in "aaaa":
        model(x, used).backward()
        assert not compare(arriving, at_end)
        model.zero_grad()
    assert hooks(model) == 1
    model(x, heads).backward()
    left_out = compare(arriving, at_end)
    assert left_out and hooks(model) == 7
    for accumulated in range(3):
        model(x, heads).backward()
        assert not compare(arriving, at_end), accumulated


def test_a_second_loss_that_was_not_noticed_leaves_the_batch_out(sources):
    model, arriving, at_end = sources
    x = torch.randn(4, 3)
    for _ in range(4):
        model(x, "a").backward()
        assert not compare(arriving, at_end)
        model.zero_grad()
    for expected in (True, False, False):
        model(x, "a").backward()
        model(x, "own").backward()
        assert compare(arriving, at_end) == expected
        model.zero_grad()


@pytest.mark.parametrize("seed", range(30))
def test_rows_of_any_loop_are_right_or_left_out(sources, seed):
    model, arriving, at_end = sources
    draw = torch.Generator().manual_seed(seed)

    def pick(count: int) -> int:
        return int(torch.randint(count, (), generator=draw))

    left_out = noticed = 0
    for step in range(30):
        usual = step < 6 or pick(4)  # at first, and mostly, the same
        for _ in range(1 if usual else 1 + pick(3)):
            heads = "a" if usual else ("a", "b", "ab", "ba", "own")[pick(5)]
            model(torch.randn(4, 3, generator=draw), heads).backward()
        wrong = compare(arriving, at_end)
        left_out, noticed = left_out + wrong, noticed + (not wrong)
        if pick(3) == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if not usual and pick(2) == 0 and model.body.weight.grad is not None:
            model.body.weight.grad.mul_(0.5)
        if pick(3):
            model.zero_grad(set_to_none=pick(2) == 0)
        if pick(2):
            assert not at_end.waiting
    assert left_out <= 1 and noticed > 25


def test_a_backward_inside_another_belongs_to_it(sources):
    model, arriving, at_end = sources
    x = torch.randn(4, 3, requires_grad=True)
    for _ in range(5):
        out = checkpoint(model.body, x, use_reentrant=True)
        out = checkpoint(model.b, model.a(out).repeat(1, 2), use_reentrant=True)
        (out.square().mean() + model.own.square().sum()).backward()
        assert not compare(arriving, at_end)


def test_gradients_that_are_stepped_away_are_read_as_they_arrive(sources):
    model, arriving, at_end = sources

    def step(parameter):
        at_end.stepped_in_backward()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    x, left_out = torch.randn(4, 3), []
    for _ in range(3):
        model(x, "ab").backward()
        left_out.append(compare(arriving, at_end))
    assert left_out == [True, False, False]


def test_sparse_gradients_keep_all_hooks(monkeypatch):
    monkeypatch.setattr(row_sources, "AT_END_DEVICES", {"cpu"})
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1))
    source = BatchGradientSource(model, SketchRows(size=16))
    for _ in range(12):
        model.zero_grad()
        model(torch.tensor([1, 2])).sum().backward()
        assert source.waiting and source.take(2, 1.0).isfinite().all()
    assert all(p._backward_hooks for p in model.parameters())


def test_one_hook_spares_autograd_the_others(monkeypatch):
    monkeypatch.setattr(row_sources, "AT_END_DEVICES", {"cpu"})
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    source = BatchGradientSource(model, None)
    for _ in range(9):
        model.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        source.take(2, 1.0)
    # Even an empty dict would make autograd call Python for every gradient.
    assert sum(p._backward_hooks is not None for p in model.parameters()) == 1
    source.remove_hooks()
    assert all(p._backward_hooks is None for p in model.parameters())
