"""The slow, obvious reference: one example at a time through the model."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from gradherd.rows.capture import Capture


def loop_over_examples(
    model: nn.Module, losses: Callable[[slice], Tensor], examples: int
) -> Tensor:
    """Return (B, D) gradients of `losses(slice of one example)`."""
    trained = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for i in range(examples):
        grads = torch.autograd.grad(losses(slice(i, i + 1)).sum(), trained, allow_unused=True)
        dense = (g.to_dense() if g is not None and g.is_sparse else g for g in grads)
        rows.append(flattened(trained, dense))
    return torch.stack(rows)


def batch_gradient(model: nn.Module) -> Tensor:
    """Return the gradients that backward left in the model: (D,)."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return flattened(trained, [p.grad for p in trained])


def flattened(parameters: Iterable[Tensor], grads: Iterable[Tensor | None]) -> Tensor:
    """Return gradients of parameters as one vector (D,); missing ones are zero."""
    both = zip(parameters, grads, strict=True)
    parts = [torch.zeros_like(p) if grad is None else grad for p, grad in both]
    return torch.cat([part.reshape(-1) for part in parts])


def close(one: Tensor, two: Tensor) -> None:
    """Assert equality to 1e-10, absolute and relative."""
    torch.testing.assert_close(one, two, atol=1e-10, rtol=1e-10)


def mapped(capture: Capture, grads: Tensor) -> Tensor:
    """Apply the map of a capture's rows to gradients (B, D), parameter by parameter."""
    parts = {
        name: part if name not in capture.left_out else torch.zeros_like(part)
        for name, part in capture.spec.views(grads).items()
    }
    rows = grads.new_zeros(len(grads), capture._size)
    for name, part in parts.items():
        uses = capture._uses.get(name)
        if uses and uses[0].layer.is_whole:
            rows += capture._sketch(part.flatten(1), name)
        elif uses:
            rows += capture.project_rows(name, part)
    return rows
