"""`digits-mlp`: a network with two wide layers on the small digits."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from gradherd.lab.tasks.digits import load_digits
from gradherd.lab.tasks.evaluate import accuracy
from gradherd.lab.tasks.task import Defaults, Split


@dataclass(frozen=True)
class DigitsMLP:
    """Two hidden layers of 512, ReLU: 301,066 parameters, enough to sparsify."""

    name: ClassVar = "digits-mlp"
    description: ClassVar = "a 64-512-512-10 network on 8 x 8 digits, 301,066 parameters"
    data: ClassVar[tuple[str, ...]] = ()
    metric_name: ClassVar = "test accuracy (%)"
    higher_is_better: ClassVar = True
    defaults: ClassVar = Defaults(
        workers=4,
        batch_size=8,
        lr=0.05,
        momentum=0.9,
        weight_decay=1e-4,
        epochs=20,
        seeds=3,
        source="Our own choice: a task that sparsifiers can be compared on in seconds.",
    )

    def load(self, data_dir: Path | None = None, limit: int | None = None) -> Split:
        """Read (n, 64) pixels in [0, 1] and (n,) digits."""
        return load_digits().first(limit)

    def model(self) -> nn.Module:
        """Return the network."""
        return nn.Sequential(
            nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
        )

    def loss(self, model: nn.Module, *tensors: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        pixels, digits = tensors
        return F.cross_entropy(model(pixels), digits)

    def metric(self, model: nn.Module, *tensors: Tensor) -> float:
        """Return the share of right digits in percent."""
        return accuracy(model, *tensors)
