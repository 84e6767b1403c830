"""`cifar10-lenet`: a small convolutional network on CIFAR-10."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from gradherd.lab.tasks.cifar10 import load_cifar10, normalised
from gradherd.lab.tasks.evaluate import accuracy
from gradherd.lab.tasks.lenet import lenet
from gradherd.lab.tasks.task import Defaults, Split


@dataclass(frozen=True)
class Cifar10LeNet:
    """LeNet on CIFAR-10: 62,006 parameters; no augmentation, channels normalised."""

    name: ClassVar = "cifar10-lenet"
    description: ClassVar = "LeNet on CIFAR-10 images, 62,006 parameters"
    data: ClassVar = ("cifar10",)
    metric_name: ClassVar = "test accuracy (%)"
    higher_is_better: ClassVar = True
    defaults: ClassVar = Defaults(
        workers=64,
        batch_size=1,
        lr=1e-3,
        momentum=0.9,
        weight_decay=1e-2,
        epochs=100,
        seeds=3,
        source="CD-GraB paper (arXiv:2302.00845), its LeNet ablation: 64 workers, global batch "
        "64, lr 1e-3, momentum 0.9, weight decay 1e-2.",
    )

    def load(self, data_dir: Path | None = None, limit: int | None = None) -> Split:
        """Read (n, 3, 32, 32) pixels as bytes and (n,) kinds."""
        return load_cifar10(data_dir, limit)

    def model(self) -> nn.Module:
        """Return the network."""
        return lenet(3)

    def loss(self, model: nn.Module, *tensors: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        pixels, kinds = tensors
        return F.cross_entropy(model(normalised(pixels)), kinds)

    def metric(self, model: nn.Module, *tensors: Tensor) -> float:
        """Return the share of right kinds in percent."""
        return accuracy(model, *tensors, prepare=normalised)
