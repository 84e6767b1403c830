"""A task of one's own, whole: tell three noisy spirals apart. It makes its data itself.

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
    """Points of three spiral arms; a small network says which arm."""

    noise: float = 0.05

    name: ClassVar = "spirals"
    description: ClassVar = "three noisy spirals, a 2-32-32-3 network"
    data: ClassVar[tuple[str, ...]] = ()  # names from `gradherd data list`; none are needed here
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
        """Draw 600 points to learn from and 300 to test with, always the same ones."""
        chance = torch.Generator().manual_seed(0)
        arm = torch.arange(900) % 3
        along = torch.rand(900, generator=chance)
        angle = 4 * along + arm * (2 * torch.pi / 3)
        points = along.unsqueeze(1) * torch.stack([angle.cos(), angle.sin()], dim=1)
        points += self.noise * torch.randn(900, 2, generator=chance)
        return Split(train=(points[:600], arm[:600]), test=(points[600:], arm[600:])).first(limit)

    def model(self) -> nn.Module:
        """Return a fresh network; the caller has set torch's seed."""
        return nn.Sequential(
            nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3)
        )

    def loss(self, model: nn.Module, *tensors: Tensor) -> Tensor:
        """Return the mean loss of some examples; calls the model once."""
        points, arm = tensors
        return F.cross_entropy(model(points), arm)

    def metric(self, model: nn.Module, *tensors: Tensor) -> float:
        """Return the share of right answers in percent, and leave the model as it was."""
        return accuracy(model, *tensors)
