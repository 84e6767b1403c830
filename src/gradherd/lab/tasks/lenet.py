"""`cifar10-lenet` and `fashion-lenet`: LeNet on small images, as in the CD-GraB paper."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradherd.lab.tasks.cifar10 import load_cifar10, normalize
from gradherd.lab.tasks.data_files import LocalDataSet, find_dataset
from gradherd.lab.tasks.metrics import accuracy
from gradherd.lab.tasks.safe_readers import DamagedData, parse_idx
from gradherd.lab.tasks.task import Defaults, Split


def lenet(channels: int, padding: int = 0) -> nn.Sequential:
    """Return the network from (B, channels, 32, 32) images to 10 scores.

    Args:
        channels: Channels of the images.
        padding: Zeros put around the images; 2 makes 28 x 28 ones as large as wanted.
    """
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5, padding=padding),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 120, 5),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )


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
        return F.cross_entropy(model(normalize(pixels)), kinds)

    def metric(self, model: nn.Module, *tensors: Tensor) -> float:
        """Return the share of right kinds in percent."""
        return accuracy(model, *tensors, prepare=normalize)


@dataclass(frozen=True)
class FashionLeNet:
    """LeNet on Fashion-MNIST: 61,706 parameters; no augmentation, pixels normalised."""

    name: ClassVar = "fashion-lenet"
    description: ClassVar = "LeNet on Fashion-MNIST images, 61,706 parameters"
    data: ClassVar = ("fashion-mnist",)
    metric_name: ClassVar = "test accuracy (%)"
    higher_is_better: ClassVar = True
    defaults: ClassVar = Defaults(
        workers=64,
        batch_size=1,
        lr=3e-3,
        momentum=0.9,
        epochs=22,
        seeds=3,
        source="Our own choice: the workers and batch of the CD-GraB paper's LeNet ablation "
        "(arXiv:2302.00845), with lr 3e-3 and no weight decay.",
    )

    def load(self, data_dir: Path | None = None, limit: int | None = None) -> Split:
        """Read (n, 1, 28, 28) pixels as bytes and (n,) kinds, 60,000 + 10,000 of them."""
        found = find_dataset("fashion-mnist", data_dir)
        return Split(_read_fashion(found, "train"), _read_fashion(found, "t10k")).first(limit)

    def model(self) -> nn.Module:
        """Return the network."""
        return lenet(1, padding=2)

    def loss(self, model: nn.Module, *tensors: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        pixels, kinds = tensors
        return F.cross_entropy(model(_normalize_fashion(pixels)), kinds)

    def metric(self, model: nn.Module, *tensors: Tensor) -> float:
        """Return the share of right kinds in percent."""
        return accuracy(model, *tensors, prepare=_normalize_fashion)


def _normalize_fashion(pixels: Tensor) -> Tensor:
    """Return pixels as numbers with mean 0 and deviation 1 over the set."""
    return (pixels.float() / 255 - 0.2860) / 0.3530


def _read_fashion(found: LocalDataSet, part: str) -> tuple[Tensor, Tensor]:
    images, labels = f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"
    pixels = parse_idx(found.read(images), found.paths[images], 3)
    kinds = parse_idx(found.read(labels), found.paths[labels], 1)
    if pixels.shape != (len(kinds), 28, 28) or not len(kinds):
        raise DamagedData(
            f"{found.paths[images]} holds {pixels.shape}, "
            f"expected ({len(kinds)}, 28, 28) for its labels"
        )
    if kinds.max() > 9:
        raise DamagedData(f"{found.paths[labels]} has label {kinds.max()}, expected 0 to 9")
    return torch.tensor(pixels).unsqueeze(1), torch.from_numpy(kinds.astype(np.int64))
