"""A complete task of your own: classify three noisy spirals. It generates its own data.

gradherd train examples/my_task.py:Spirals --order cd-grab
gradherd compare examples/my_task.py:Spirals --orders d-rr,cd-grab,always-plus --virtual
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradherd.lab.tasks import Defaults, Split
from gradherd.lab.tasks.metrics import accuracy


@dataclass(frozen=True)
class Spirals:
    """Classify points by the spiral arm they lie on, with a small network."""

    noise: float = 0.05

    name: ClassVar = "spirals"
    description: ClassVar = "three noisy spirals, a 2-32-32-3 network"
    data: ClassVar[tuple[str, ...]] = ()  # names from `gradherd data list`; this task needs none
    metric_name: ClassVar = "test accuracy (%)"
    higher_is_better: ClassVar = True
    defaults: ClassVar = Defaults(
        workers=2,
        batch_size=4,
        lr=0.05,
        momentum=0.9,
        epochs=10,
        seeds=3,
        source="Made up for this example.",
    )

    def load(self, data_dir: Path | None = None, limit: int | None = None) -> Split:
        """Generate 600 training and 300 test points, the same ones every time."""
        generator = torch.Generator().manual_seed(0)
        # Shuffled: example i goes to worker i mod W, so three workers would have one arm each.
        arm = torch.randperm(900, generator=generator) % 3
        along = torch.rand(900, generator=generator)
        angle = 4 * along + arm * (2 * torch.pi / 3)
        points = along.unsqueeze(1) * torch.stack([angle.cos(), angle.sin()], dim=1)
        points += self.noise * torch.randn(900, 2, generator=generator)
        return Split(train=(points[:600], arm[:600]), test=(points[600:], arm[600:])).first(limit)

    def model(self) -> nn.Module:
        """Return a new network; the caller seeds torch."""
        return nn.Sequential(
            nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3)
        )

    def loss(self, model: nn.Module, *tensors: Tensor) -> Tensor:
        """Return the mean loss of some examples, calling the model once."""
        points, arm = tensors
        return F.cross_entropy(model(points), arm)

    def metric(self, model: nn.Module, *tensors: Tensor) -> float:
        """Return the accuracy in percent, leaving the model unchanged."""
        return accuracy(model, *tensors)
