"""Gradients read when a backward is over are those that arrived in it."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradherd.hooks import row_sources
from gradherd.hooks.row_sources import BatchGradientSource
from gradherd.rows.sketch import CountSketch


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
    return model, arriving, BatchGradientSource(model, None)


def compare(arriving: BatchGradientSource, at_end: BatchGradientSource) -> bool:
    """Take the row of a batch from both; say whether it was left out."""
    wanted, row = arriving.take(4, 1.0), at_end.take(4, 1.0)
    assert not at_end.waiting  # asked again after the step of the optimizer
    if row.isnan().all():
        return True
    torch.testing.assert_close(row, wanted, atol=1e-6, rtol=1e-4)
    return False


@pytest.mark.parametrize("seed", range(30))
def test_rows_of_any_loop_are_right(sources, seed):
    model, arriving, at_end = sources
    draw = torch.Generator().manual_seed(seed)

    def pick(count: int) -> int:
        return int(torch.randint(count, (), generator=draw))

    for _ in range(30):
        usual = pick(4)  # mostly the same
        for _ in range(1 if usual else 1 + pick(3)):
            heads = "a" if usual else ("a", "b", "ab", "ba", "own")[pick(5)]
            model(torch.randn(4, 3, generator=draw), heads).backward()
        assert not compare(arriving, at_end)
        if pick(3) == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if not usual and pick(2) == 0 and model.body.weight.grad is not None:
            model.body.weight.grad.mul_(0.5)
        if pick(3):
            model.zero_grad(set_to_none=pick(2) == 0)
        if pick(2):
            assert not at_end.waiting


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


def test_sparse_gradients_are_read_at_the_end(monkeypatch):
    monkeypatch.setattr(row_sources, "AT_END_DEVICES", {"cpu"})
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1))
    source = BatchGradientSource(model, CountSketch(16, 0))
    for _ in range(12):
        model.zero_grad()
        model(torch.tensor([1, 2])).sum().backward()
        assert source.waiting and source.take(2, 1.0).isfinite().all()
    source.remove_hooks()
    # Even an empty dict would make autograd call Python for every gradient.
    assert all(p._backward_hooks is None for p in model.parameters())


def test_the_row_of_a_single_parameter_is_not_its_gradient(monkeypatch):
    monkeypatch.setattr(row_sources, "AT_END_DEVICES", {"cpu"})
    model = nn.Linear(3, 1, bias=False)
    source = BatchGradientSource(model, None)
    model(torch.ones(2, 3)).sum().backward()
    assert source.take(2, 2.0).tolist() == [[1.0, 1.0, 1.0]]
    assert model.weight.grad.tolist() == [[2.0, 2.0, 2.0]]
