"""`cifar10-lenet` and `fashion-lenet`: LeNet on small images, as in the CD-GraB paper."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradherd.lab.tasks.cifar10 import crop_and_flip, load_cifar10, normalize
from gradherd.lab.tasks.data_files import LocalDataSet, find_dataset
from gradherd.lab.tasks.metrics import accuracy
from gradherd.lab.tasks.safe_readers import DamagedData, parse_idx
from gradherd.lab.tasks.task import Defaults, Split


def lenet(channels: int, padding: int = 0) -> nn.Sequential:
    """Return LeNet with ReLU and max-pooling, from (B, channels, 32, 32) images to 10 classes.

    Args:
        channels: Channels of the images.
        padding: Zero padding of the first layer; 2 turns 28 x 28 images into 32 x 32.
    """
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5, padding=padding),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        # On 5 x 5 maps this is a full connection, as in the original.
        nn.Conv2d(16, 120, 5),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )


@dataclass(frozen=True)
class Cifar10LeNet:
    """LeNet on CIFAR-10: 62,006 parameters; channels normalised, augmented on request only."""

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
        """Load (n, 3, 32, 32) uint8 pixels and (n,) labels."""
        return load_cifar10(data_dir, limit)

    def model(self) -> nn.Module:
        """Return the network."""
        return lenet(3)

    def loss(self, model: nn.Module, *tensors: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        pixels, labels = tensors
        return F.cross_entropy(model(normalize(pixels)), labels)

    def augment(self, generator: torch.Generator, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the training examples cropped (after padding by 4) and flipped at random."""
        pixels, labels = tensors
        return crop_and_flip(pixels, generator), labels

    def metric(self, model: nn.Module, *tensors: Tensor) -> float:
        """Return the accuracy in percent."""
        # Normalised chunk by chunk: the whole test set as floats would be four times as large.
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
        """Load (n, 1, 28, 28) uint8 pixels and (n,) labels, 60,000 + 10,000 of them."""
        local = find_dataset("fashion-mnist", data_dir)
        return Split(_read_fashion(local, "train"), _read_fashion(local, "t10k")).first(limit)

    def model(self) -> nn.Module:
        """Return the network."""
        return lenet(1, padding=2)

    def loss(self, model: nn.Module, *tensors: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        pixels, labels = tensors
        return F.cross_entropy(model(_normalize_fashion(pixels)), labels)

    def metric(self, model: nn.Module, *tensors: Tensor) -> float:
        """Return the accuracy in percent."""
        return accuracy(model, *tensors, prepare=_normalize_fashion)


def _normalize_fashion(pixels: Tensor) -> Tensor:
    """Return float pixels with mean 0 and standard deviation 1 over the training set."""
    # Mean and standard deviation of the 60,000 training images.
    return (pixels.float() / 255 - 0.2860) / 0.3530


def _read_fashion(local: LocalDataSet, part: str) -> tuple[Tensor, Tensor]:
    image_file, label_file = f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"
    pixels = parse_idx(local.read(image_file), local.paths[image_file], 3)
    labels = parse_idx(local.read(label_file), local.paths[label_file], 1)
    if pixels.shape != (len(labels), 28, 28) or not len(labels):
        raise DamagedData(
            f"{local.paths[image_file]} holds {pixels.shape}, "
            f"expected ({len(labels)}, 28, 28) to match its labels"
        )
    if labels.max() > 9:
        raise DamagedData(f"{local.paths[label_file]} has label {labels.max()}, expected 0 to 9")
    # A copy, since the array shares read-only memory with the file's bytes.
    return torch.tensor(pixels).unsqueeze(1), torch.from_numpy(labels.astype(np.int64))
