"""Which backwards count while no parameter has a hook."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradherd.rows.capture import Capture
from gradherd.rows.row_check import FIRST_CHECKS
from gradherd.rows.settings import TwoSidedRows
from tests.rows.test_sink import small
from tests.rows.zoo import BATCH

SIZE = 96


def unhooked() -> tuple[nn.Sequential, Capture, Tensor]:
    """Return a model whose rows are no longer checked, and a batch."""
    model, x = small(), torch.randn(BATCH, 3, 6, requires_grad=True)
    capture = Capture(model, TwoSidedRows(size=SIZE, strict=True))
    for _ in range(FIRST_CHECKS):
        assert all(p._backward_hooks for p in model.parameters())
        model(x).square().mean().backward()
        capture.pop_rows(BATCH)
    assert not any(p._backward_hooks for p in model.parameters())
    return model, capture, x


def test_parameters_have_hooks_only_while_rows_are_checked() -> None:
    model, capture, x = unhooked()
    order = []
    model[0].weight.register_hook(lambda grad: order.append("user"))
    capture.restart_checks()
    # In front of the user's, which may change the gradient.
    capture._check._receive = lambda index, grad: order.append("check")
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
    capture.pop_rows(BATCH)
    assert all(p._backward_hooks for p in model.parameters())


def test_which_backwards_count_without_hooks() -> None:
    model, capture, x = unhooked()

    def loss() -> Tensor:
        return model(x).square().mean()

    loss().backward()
    assert capture.waiting
    once = capture.pop_rows(BATCH)
    assert not capture.waiting
    torch.autograd.grad(loss(), x)  # as a gradient penalty does
    loss().backward(inputs=[x])
    assert not capture.waiting
    loss().backward()
    torch.testing.assert_close(capture.pop_rows(BATCH), once)
    loss().backward()
    loss().backward()
    torch.testing.assert_close(capture.pop_rows(BATCH), 2 * once)
    torch.autograd.grad(loss(), list(model.parameters()))  # handed to the caller
    assert not capture.waiting
    loss().backward(inputs=list(model.parameters()))
    torch.testing.assert_close(capture.pop_rows(BATCH), once)
    for frozen, p in enumerate(model.parameters()):  # Frozen later, one after another.
        loss().backward()
        assert capture.waiting
        capture.pop_rows(BATCH)
        p.requires_grad_(False)
        if frozen == 3:
            loss().backward()
            assert not capture.waiting
    model.requires_grad_(True)
    loss().backward()
    torch.testing.assert_close(capture.pop_rows(BATCH), once)
    assert not capture.waiting


def test_parameters_that_are_left_out_keep_their_hooks() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(6, 5), nn.Parameter(torch.ones(5))
            self.head, self.tied = nn.Linear(5, 5), nn.Linear(5, 2, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.head(self.layer(x) * self.scale), self.tied.weight)

    model, x = Scaled(), torch.randn(BATCH, 3, 6)
    capture = Capture(model, TwoSidedRows(size=SIZE))
    for _ in range(FIRST_CHECKS + 1):
        model(x).square().mean().backward()
        capture.pop_rows(BATCH)
    assert list(capture.left_out) == ["scale", "tied.weight"]
    # No sink tells of a backward that reaches them alone.
    hooked = {name for name, p in model.named_parameters() if p._backward_hooks}
    assert hooked == {"scale", "tied.weight"}
    model(x).square().mean().backward(inputs=[model.tied.weight])
    assert capture.waiting
