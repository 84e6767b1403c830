"""Time per-example gradients of an MLP.

Cases: `plain` is forward and backward alone. `vmap` (torch.func) and `loop` (one example at a time)
form every gradient: what a user would do instead. `exact` forms them from layer inputs and output
gradients, and computes what balancing needs (products with a vector, a weighted sum); `sketch`
projects each of them to 256 elements without forming it. The ceiling is
`plain`: gradherd reads its rows off a backward pass that happens anyway.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from gradherd.lab.bench.timing import PeakMemory, ceiling_keys, make_rows, median_seconds
from gradherd.rows.capture import Capture
from gradherd.rows.settings import SketchRows

_SKETCH = 256
_INPUTS, _CLASSES = 784, 10


def mlp(params: int) -> nn.Sequential:
    """Return an MLP 784 - h - h - 10 with about `params` parameters."""
    hidden = 1
    while (hidden + 1) * (_INPUTS + hidden + _CLASSES + 3) <= params:
        hidden += 1
    return nn.Sequential(
        nn.Linear(_INPUTS, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, _CLASSES),
    )


class RowsBench:
    """One model and one batch, with a method for each way to its per-example gradients."""

    def __init__(self, params: int, batch: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        self.model = mlp(params).to(device)
        self.x = torch.randn(batch, _INPUTS, generator=generator).to(device)
        self.y = torch.randint(_CLASSES, (batch,), generator=generator).to(device)
        self.size = sum(p.numel() for p in self.model.parameters())
        self.running = torch.randn(1, self.size, generator=generator).to(device)
        self.signs = torch.ones(1, batch, device=device)

    def plain(self) -> None:
        """Run forward and backward."""
        self.model.zero_grad()
        nn.functional.cross_entropy(self.model(self.x), self.y).backward()

    def loop(self) -> None:
        """Run one backward per example."""
        for x, y in zip(self.x.split(1), self.y.split(1), strict=True):
            self.model.zero_grad()
            nn.functional.cross_entropy(self.model(x), y).backward()

    def vmap(self) -> None:
        """Form all gradients at once."""
        # Detached: autograd would otherwise record a second graph beside that of torch.func.
        weights = {name: p.detach() for name, p in self.model.named_parameters()}

        def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            out = functional_call(self.model, weights, (x.unsqueeze(0),))
            return nn.functional.cross_entropy(out, y.unsqueeze(0))

        vmap(grad(loss), in_dims=(None, 0, 0))(weights, self.x, self.y)

    def exact(self, capture: Capture) -> None:
        """Form the gradients, and compute what balancing needs."""
        self.plain()
        rows = capture.pop_rows(len(self.x))
        rows @ self.running[0]
        self.signs @ rows

    def sketch(self, capture: Capture) -> None:
        """Project every gradient to a few elements."""
        self.plain()
        capture.pop_rows(len(self.x))


def bench_rows(
    params: int,
    batch: int,
    device: torch.device,
    progress: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Measure every case.

    Args:
        params: Approximate number of parameters of the MLP.
        batch: Examples in the batch.
        device: Where to compute.
        progress: Called after each case.

    Returns:
        A row for each case; `peak_bytes` is memory on top of model and batch.
    """
    bench = RowsBench(params, batch, device)
    seconds: dict[str, float] = {}
    peaks: dict[str, int | None] = {}
    for case in ("plain", "vmap", "loop", "exact", "sketch"):
        # Hooks only for the cases that read them: they would slow down the others.
        capture: Capture | None = None
        if case == "exact":
            capture = Capture(bench.model)
        elif case == "sketch":
            capture = Capture(bench.model, SketchRows(size=_SKETCH), batch_size=batch)
        step = getattr(bench, case)
        # Bound as defaults: a lambda would otherwise see the last case of the loop.
        call = step if capture is None else lambda step=step, own=capture: step(own)
        with PeakMemory(device) as peak:
            call()
        peaks[case], seconds[case] = peak.bytes, median_seconds(call, device, at_least=1.0)
        if capture is not None:
            capture.remove_hooks()
        bench.model.zero_grad()
        progress()
    rows = make_rows(seconds, peaks, workers=1, dim=bench.size, batch=batch)
    return [row | ceiling_keys(seconds["plain"], row["seconds"]) for row in rows]
