"""Time per-example gradients of an MLP.

Cases: `plain` is forward and backward alone. `vmap` (torch.func) and `loop` (one example at a time)
form every gradient: what a user would do instead. `exact` computes what balancing needs (products
with a vector and of the gradients, a weighted sum) from layer inputs and output gradients without
forming them; `sketch` projects each of them to 256 elements. The ceiling is
`plain`: gradherd reads its rows off a backward pass that happens anyway.
"""

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from gradherd.lab.bench.timing import Rows, ceiling_keys, measure_cases
from gradherd.rows.capture import Capture
from gradherd.rows.factored_rows import FactoredRows
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

    def sketch(self, capture: Capture) -> None:
        """Read the rows of all examples off a backward pass."""
        self.plain()
        capture.pop_rows(len(self.x))

    def exact(self, capture: Capture) -> None:
        """Compute what balancing needs."""
        self.plain()
        rows = capture.pop(len(self.x))
        assert isinstance(rows, FactoredRows)
        rows.dot(self.running)
        rows.gram.sum()
        rows.combine(self.signs)


def bench_rows(params: int, batch: int, device: torch.device) -> Rows:
    """Measure every case on an MLP of about `params` parameters.

    `peak_bytes` of a row is memory on top of model and batch.
    """
    # Models of their own for the cases that read rows: hooks would slow down the others.
    plain, exact, sketch = (RowsBench(params, batch, device) for _ in range(3))
    exact_rows = Capture(exact.model, keeps_factors=True)
    sketches = Capture(sketch.model, SketchRows(size=_SKETCH), batch_size=batch)

    def reset() -> None:
        for bench in (plain, exact, sketch):
            bench.model.zero_grad()

    rows = measure_cases(
        {
            "plain": plain.plain,
            "vmap": plain.vmap,
            "loop": plain.loop,
            "exact": lambda: exact.exact(exact_rows),
            "sketch": lambda: sketch.sketch(sketches),
        },
        device,
        at_least=1.0,
        setup=reset,
        workers=1,
        dim=plain.size,
        batch=batch,
    )
    return [row | ceiling_keys(rows[0]["seconds"], row["seconds"]) for row in rows]
