"""Which backwards count while no parameter has a hook."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradherd.rows.row_check import FIRST_CHECKS
from gradherd.rows.settings import TwoSidedRows
from gradherd.rows.two_sided import TwoSidedCapture
from tests.rows.test_two_sided import small
from tests.rows.zoo import BATCH

SIZE = 96


def unhooked() -> tuple[nn.Sequential, TwoSidedCapture, Tensor]:
    """Return a model whose rows are no longer checked, and a batch."""
    model, x = small(), torch.randn(BATCH, 3, 6, requires_grad=True)
    capture = TwoSidedCapture(model, TwoSidedRows(size=SIZE, strict=True))
    for _ in range(FIRST_CHECKS):
        assert all(p._backward_hooks for p in model.parameters())
        model(x).square().mean().backward()
        capture.pop_sketch(BATCH)
    assert not any(p._backward_hooks for p in model.parameters())
    return model, capture, x


def test_parameters_have_hooks_only_while_rows_are_checked() -> None:
    model, capture, x = unhooked()
    order = []
    model[0].weight.register_hook(lambda grad: order.append("user"))
    capture.restart_checks()
    # In front of the user's, which may change the gradient.
    capture._check.sums.compare = lambda *args: order.append("check")  # type: ignore[method-assign]
    model(x).square().mean().backward()
    assert order.index("check") < order.index("user")
    assert order.count("check") == 4
    capture.remove_hooks()
    order.clear()
    model(x).square().mean().backward()
    assert order == ["user"]
    model, capture, x = unhooked()
    model.eval()  # seen with the next rows
    model(x).square().mean().backward()
    capture.pop_sketch(BATCH)
    assert all(p._backward_hooks for p in model.parameters())


def test_which_backwards_count_without_hooks() -> None:
    model, capture, x = unhooked()

    def loss() -> Tensor:
        return model(x).square().mean()

    loss().backward()
    assert capture.waiting
    once = capture.pop_sketch(BATCH)
    assert not capture.waiting
    torch.autograd.grad(loss(), x)  # as a gradient penalty does
    loss().backward(inputs=[x])
    assert not capture.waiting
    loss().backward()
    torch.testing.assert_close(capture.pop_sketch(BATCH), once)
    loss().backward()
    loss().backward()
    torch.testing.assert_close(capture.pop_sketch(BATCH), 2 * once)
    # Handed to the caller instead of p.grad.
    torch.autograd.grad(loss(), list(model.parameters()))
    torch.testing.assert_close(capture.pop_sketch(BATCH), once)
    for p in model.parameters():  # Some of them alone.
        loss().backward(inputs=[p])
        assert capture.waiting
        capture.pop_sketch(BATCH)
    for frozen, p in enumerate(model.parameters()):  # Frozen later, one after another.
        loss().backward()
        assert capture.waiting
        capture.pop_sketch(BATCH)
        p.requires_grad_(False)
        if frozen == 3:
            loss().backward()
            assert not capture.waiting
    model.requires_grad_(True)
    loss().backward()
    capture.pop_sketch(BATCH)
    assert not capture.waiting


def test_parameters_that_no_layer_tells_of_keep_their_hooks() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(6, 5), nn.Parameter(torch.ones(5))
            self.head, self.tied = nn.Linear(5, 5), nn.Linear(5, 2, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.head(self.layer(x) * self.scale), self.tied.weight)

    model, x = Scaled(), torch.randn(BATCH, 3, 6)
    capture = TwoSidedCapture(model, TwoSidedRows(size=SIZE))
    for _ in range(FIRST_CHECKS + 1):
        model(x).square().mean().backward()
        capture.pop_sketch(BATCH)
    assert list(capture.left_out) == ["tied.weight"]
    hooked = {name for name, p in model.named_parameters() if p._backward_hooks}
    assert hooked == {"scale", "tied.weight"}
    model(x).square().mean().backward(inputs=[model.tied.weight])
    assert capture.waiting


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_without_hooks(reentrant: bool) -> None:
    block = small()
    x = torch.randn(BATCH, 3, 6, requires_grad=True)
    model = nn.Sequential(block)
    model.forward = lambda y: checkpoint(block, y, use_reentrant=reentrant)  # type: ignore[method-assign]
    capture = TwoSidedCapture(model, TwoSidedRows(size=SIZE))
    for _ in range(FIRST_CHECKS + 1):
        model(x).square().mean().backward()
        rows = capture.pop_sketch(BATCH)
        assert not capture.waiting
        torch.testing.assert_close(rows.norm(dim=1) > 0, torch.ones(BATCH, dtype=torch.bool))
